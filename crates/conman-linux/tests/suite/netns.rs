//! Sockets inside other network namespaces.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use conman_linux::{NetnsSockets, PidFd};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;

use crate::support::{Namespace, SOON};

const LOOPBACK_UP: &str = "ip link set lo up && echo ready && exec cat";

fn serve(listener: TcpListener, greeting: &'static str) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            // A client that went away is no matter.
            let _ = stream.and_then(|mut stream| stream.write_all(greeting.as_bytes()));
        }
    });
}

/// Serves inside the namespace: a thread enters it, and its listener stays there.
fn serve_inside(process: Arc<PidFd>, port: u16, greeting: &'static str) {
    let listening = thread::spawn(move || {
        move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::NETWORK)?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port))
    });
    serve(
        listening
            .join()
            .expect("no panic")
            .expect("a listener inside"),
        greeting,
    );
}

async fn greeting(sockets: &NetnsSockets, process: &Arc<PidFd>, port: u16) -> String {
    let socket = sockets
        .tcp_socket(Arc::clone(process), false)
        .await
        .expect("a socket");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let connecting = TcpSocket::from_std_stream(socket).connect(address);
    let mut stream = tokio::time::timeout(SOON, connecting)
        .await
        .expect("in time")
        .expect("served");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("a greeting");
    text
}

#[tokio::test]
async fn a_socket_reaches_its_own_namespace_and_neither_the_hosts_nor_anothers() {
    let host = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = host.local_addr().expect("bound").port();
    serve(host, "host");
    let namespaces = ["one", "two", "three"].map(|name| (name, Namespace::with_init(LOOPBACK_UP)));
    let inside = namespaces.each_ref().map(|(name, space)| {
        let process = Arc::new(space.pidfd());
        serve_inside(Arc::clone(&process), port, name);
        (*name, process)
    });
    let sockets = Arc::new(NetnsSockets::start().expect("threads"));

    let asked: Vec<_> = (0..60)
        .map(|turn| {
            let (name, process) = inside[turn % inside.len()].clone();
            let sockets = Arc::clone(&sockets);
            tokio::spawn(async move { (greeting(&sockets, &process, port).await, name) })
        })
        .collect();
    for asked in asked {
        let (greeting, name) = asked.await.expect("no panic");
        assert_eq!(greeting, name);
    }

    // What is made here afterwards is the host's as ever.
    let mut own = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("served");
    let mut text = String::new();
    own.read_to_string(&mut text).expect("a greeting");
    assert_eq!(text, "host");
}

#[tokio::test]
async fn a_port_that_only_the_host_serves_is_refused_inside() {
    let host = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = host.local_addr().expect("bound");
    let namespace = Namespace::with_init(LOOPBACK_UP);
    let sockets = NetnsSockets::start().expect("threads");
    let socket = sockets
        .tcp_socket(Arc::new(namespace.pidfd()), false)
        .await
        .expect("a socket");
    let error = TcpSocket::from_std_stream(socket)
        .connect(address)
        .await
        .expect_err("not served");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn version_6_of_the_protocol_is_to_be_had() {
    let namespace = Namespace::with_init(LOOPBACK_UP);
    let sockets = NetnsSockets::start().expect("threads");
    let socket = sockets
        .tcp_socket(Arc::new(namespace.pidfd()), true)
        .await
        .expect("a socket");
    let socket = TcpSocket::from_std_stream(socket);
    assert!(
        socket
            .local_addr()
            .expect("an unbound socket has a family")
            .is_ipv6()
    );
}

#[tokio::test]
async fn trouble_with_one_process_does_not_touch_the_next_request() {
    let host = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = host.local_addr().expect("bound").port();
    let namespace = Namespace::with_init(LOOPBACK_UP);
    let living = Arc::new(namespace.pidfd());
    serve_inside(Arc::clone(&living), port, "inside");
    let sockets = NetnsSockets::start().expect("threads");

    let own = PidFd::open(i32::try_from(std::process::id()).expect("a pid")).expect("it lives");
    let own = Arc::new(own);
    let dead = Namespace::with_init(LOOPBACK_UP);
    let dead = {
        let pidfd = dead.pidfd();
        pidfd.kill().expect("signal");
        assert!(pidfd.wait_dead(SOON).expect("poll"));
        Arc::new(pidfd)
    };
    for _ in 0..4 {
        let error = sockets
            .tcp_socket(Arc::clone(&own), false)
            .await
            .expect_err("the host's");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        let error = sockets
            .tcp_socket(Arc::clone(&dead), false)
            .await
            .expect_err("dead");
        assert_eq!(
            error.raw_os_error(),
            Some(rustix::io::Errno::SRCH.raw_os_error()),
            "{error}"
        );
        // A caller that goes away while it waits.
        let gone = sockets.tcp_socket(Arc::clone(&living), false);
        let _ = tokio::time::timeout(std::time::Duration::ZERO, gone).await;
        assert_eq!(greeting(&sockets, &living, port).await, "inside");
    }
}
