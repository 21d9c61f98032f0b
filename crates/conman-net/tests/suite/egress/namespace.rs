//! A network namespace that is served, and its programs.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use conman_core::egress::{EGRESS_PROXY_PORT, EgressRules, SpecialAddresses};
use conman_linux::{NetnsSockets, PidFd, network_namespace};
use conman_net::egress::{Egress, EgressGuard, EgressOptions, EgressService};
use conman_proto::Bandwidth;
use conman_traffic::Traffic;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use super::name_server::NameServer;

/// Bound on whatever should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// What is served by the tests on this host. Not 127.0.0.1, which programs exempt from proxies.
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A conman that serves namespaces.
pub(crate) struct World {
    pub(crate) egress: Egress,
    pub(crate) sockets: Arc<NetnsSockets>,
    pub(crate) names: NameServer,
}

impl World {
    pub(crate) async fn new() -> Self {
        conman_linux::raise_nofile().expect("the hard limit is allowed");
        let names = NameServer::start().await;
        let sockets = Arc::new(NetnsSockets::start().expect("threads"));
        let options = EgressOptions {
            dns: vec![names.address],
            special: SpecialAddresses::default(),
            ..EgressOptions::default()
        };
        let egress = Egress::start(options).expect("threads");
        Self {
            egress,
            sockets,
            names,
        }
    }

    /// A namespace with these patterns, once it is served.
    pub(crate) async fn session(&self, patterns: &[&str]) -> Session {
        self.limited_session(patterns, Bandwidth::default()).await
    }

    pub(crate) async fn limited_session(&self, patterns: &[&str], bandwidth: Bandwidth) -> Session {
        let mut session = Session {
            namespace: Namespace::new(),
            sockets: Arc::clone(&self.sockets),
            refusals: Arc::default(),
            guard: None,
            traffic: Arc::new(Traffic::new(&bandwidth)),
        };
        self.serve(&mut session, patterns).await;
        session
    }

    pub(crate) async fn serve(&self, session: &mut Session, patterns: &[&str]) {
        let patterns: Vec<String> = patterns.iter().map(|&text| text.to_owned()).collect();
        let rules = EgressRules::parse(&patterns).expect("patterns");
        let refusals = Arc::clone(&session.refusals);
        let on_refusal = Box::new(move |sentence| refusals.lock().expect("whole").push(sentence));
        let process = session.namespace.process();
        let traffic = Arc::clone(&session.traffic);
        let service = EgressService::Proxy(rules);
        let guard = self
            .egress
            .serve(process, None, service, traffic, on_refusal);
        session.guard = Some(guard);
        let connected = async {
            while session.connect(EGRESS_PROXY_PORT).await.is_err() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, connected).await.expect("it is served");
    }
}

/// A namespace that is served until dropped.
pub(crate) struct Session {
    pub(crate) namespace: Namespace,
    sockets: Arc<NetnsSockets>,
    pub(crate) refusals: Arc<Mutex<Vec<String>>>,
    pub(crate) guard: Option<EgressGuard>,
    pub(crate) traffic: Arc<Traffic>,
}

impl Session {
    /// Connects inside.
    pub(crate) async fn connect(&self, port: u16) -> std::io::Result<TcpStream> {
        let process = self.namespace.process();
        let socket = self.sockets.tcp_socket(process, false).await?;
        let inside = (Ipv4Addr::LOCALHOST, port).into();
        TcpSocket::from_std_stream(socket).connect(inside).await
    }

    /// Sends bytes to the proxy, and returns the answer up to the end of its head and what follows in
    /// the same read.
    pub(crate) async fn ask(&self, request: &str) -> (String, TcpStream) {
        let mut stream = self.connect(EGRESS_PROXY_PORT).await.expect("served");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let head = read_head(&mut stream).await;
        (head, stream)
    }

    /// Returns the status and the connection after CONNECT.
    pub(crate) async fn tunnel(&self, target: &str) -> (u16, TcpStream) {
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        let (head, stream) = self.ask(&request).await;
        (status(&head), stream)
    }
}

pub(crate) fn status(head: &str) -> u16 {
    let code = head.split(' ').nth(1).unwrap_or_default();
    code.parse()
        .unwrap_or_else(|_| panic!("no answer: {head:?}"))
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let reading = async {
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            let mut bytes = [0; 4_096];
            match stream.read(&mut bytes).await {
                Ok(0) | Err(_) => break,
                Ok(read) => head.extend_from_slice(&bytes[..read]),
            }
        }
    };
    timeout(SOON, reading).await.expect("an answer");
    String::from_utf8_lossy(&head).into_owned()
}

/// A network namespace with a loopback interface that is up.
pub(crate) struct Namespace {
    child: Child,
}

impl Namespace {
    pub(crate) fn new() -> Self {
        let script = "ip link set lo up && echo ready && exec cat";
        let mut child = Command::new("unshare")
            .args(["--net", "--", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs, as root");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout)
            .read_line(&mut line)
            .expect("readable");
        assert_eq!(line, "ready\n", "the namespace is made");
        Self { child }
    }

    pub(crate) fn process(&self) -> Arc<PidFd> {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        Arc::new(PidFd::open(pid).expect("it lives"))
    }

    /// A UDP socket inside that does not block.
    pub(crate) fn udp_socket(&self) -> UdpSocket {
        let namespace = network_namespace(&self.process()).expect("it lives");
        let made = std::thread::spawn(move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("entered");
            UdpSocket::bind("127.0.0.1:0").expect("a socket")
        });
        let socket = made.join().expect("no panic");
        socket.set_nonblocking(true).expect("a socket");
        socket
    }

    /// A command that runs inside.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let net = format!("--net=/proc/{}/ns/net", self.child.id());
        command.args([net.as_str(), "--", program]);
        command
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Dead already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server on the host that sends back what it receives.
pub(crate) async fn echo() -> SocketAddr {
    serve(|mut stream| async move {
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    })
    .await
}

/// A server on the host for each connection.
pub(crate) async fn serve<F, S>(serve: S) -> SocketAddr
where
    S: Fn(TcpStream) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind((HOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    address
}
