//! Sessions, their host and each other, connected by links.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use conman_net::{HostError, HostNetlink, NOTIFICATION_BYTES, Plane, PlaneOptions, PoolNetworks};
use conman_proto::Bandwidth;

use super::namespace::Host;

pub(super) const INSTANCE: &str = "0a1b2c3d";

pub(super) fn plane(host: &Host, pool: &'static [&'static str]) -> Plane {
    plane_with(host, pool, NOTIFICATION_BYTES)
}

pub(super) fn plane_with(
    host: &Host,
    pool: &'static [&'static str],
    notification_bytes: usize,
) -> Plane {
    host.wait(move || async move {
        let networks = PoolNetworks::parse(pool).expect("a pool");
        let options = PlaneOptions {
            notification_bytes,
            ..PlaneOptions::new(INSTANCE, networks)
        };
        let opened = Plane::open(&options, HostNetlink::default()).await;
        opened.expect("a plane")
    })
}

/// Connects from the host to an address of the session, and sends something.
fn send(host: &Host, session: &Host, address: SocketAddr) {
    let listener = session
        .run(move || TcpListener::bind(address))
        .expect("its address");
    let mut client = host
        .run(move || TcpStream::connect_timeout(&address, Duration::from_secs(5)))
        .expect("the route to it");
    let (mut server, from) = listener.accept().expect("connected");
    client.write_all(b"hello").expect("sent");
    let mut received = [0; 5];
    server.read_exact(&mut received).expect("received");
    assert_eq!(&received, b"hello", "from {from}");
}

#[tokio::test]
async fn a_session_and_its_host_reach_each_other_over_both_families() {
    let (host, session) = (Host::new(), Host::new());
    host.shell("ip address add 192.0.2.1/32 dev lo; ip address add 2001:db8::1/128 dev lo");
    let plane = plane(&host, &["10.88.0.0/16", "fd00:88::/64"]);
    let addresses = plane.take("a").expect("free");
    plane
        .connect("a", addresses, 7, Bandwidth::default(), session.namespace())
        .await
        .expect("connected");
    assert_eq!(session.links(), ["eth0"]);
    let v6 = addresses.v6.expect("the pool has IPv6");
    for address in [
        SocketAddr::new(addresses.v4.into(), 80),
        SocketAddr::new(v6.into(), 80),
    ] {
        send(&host, &session, address);
    }
    let ours = host.shell("ip -d -o link");
    let line = ours
        .lines()
        .find(|line| line.contains("c0a1b2c3d"))
        .expect("the host's end");
    for part in [
        "NOARP",
        "numtxqueues 1",
        "numrxqueues 1",
        "addrgenmode none",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    // Nothing but the route makes the address known.
    assert!(!host.shell("ip -o address").contains("fe80"));
    assert!(!session.shell("ip -o address").contains("fe80"));
}

#[tokio::test]
async fn a_session_without_ipv6_gives_its_host_no_ipv6_address_or_route() {
    let (host, session) = (Host::new(), Host::new());
    host.shell("ip address add 192.0.2.1/32 dev lo");
    let plane = plane(&host, &["10.88.0.0/16"]);
    let addresses = plane.take("a").expect("free");
    plane
        .connect("a", addresses, 7, Bandwidth::default(), session.namespace())
        .await
        .expect("connected");
    send(&host, &session, SocketAddr::new(addresses.v4.into(), 80));
    // The kernel would have configured IPv6 together with what lets the end send, under the lock that this takes.
    host.shell("ip link set lo up");
    for list in ["ip -6 -o address", "ip -6 -o route show table all"] {
        let listed = host.shell(list);
        // The host's end has the instance in its name.
        assert!(!listed.contains(INSTANCE), "{list}: {listed}");
    }
}

#[tokio::test]
async fn a_link_that_exists_already_is_refused_and_left_as_it_is() {
    let (host, first, second) = (Host::new(), Host::new(), Host::new());
    let plane = plane(&host, &["10.88.0.0/16"]);
    let addresses = plane.take("a").expect("free");
    plane
        .connect("a", addresses, 7, Bandwidth::default(), first.namespace())
        .await
        .expect("connected");
    let refused = plane
        .connect("a", addresses, 7, Bandwidth::default(), second.namespace())
        .await;
    refused.expect_err("the name and the index are in use");
    assert_eq!(
        (first.links(), second.links()),
        (vec!["eth0".to_owned()], vec![])
    );
}

#[tokio::test]
async fn a_link_whose_configuration_fails_is_removed() {
    let (host, session) = (Host::new(), Host::new());
    let plane = plane(&host, &["10.88.0.0/16"]);
    let addresses = plane.take("a").expect("free");
    let mut namespace = session.namespace();
    // A socket of another namespace: the session's end is not there.
    namespace.socket = Host::new().namespace().socket;
    plane
        .connect("a", addresses, 7, Bandwidth::default(), namespace)
        .await
        .expect_err("no such link there");
    assert_eq!((host.links(), session.links()), (vec![], vec![]));
    plane
        .connect("a", addresses, 7, Bandwidth::default(), session.namespace())
        .await
        .expect("as if nothing had happened");
}

#[tokio::test]
async fn a_pool_that_the_host_uses_and_a_host_that_does_not_forward_are_refused() {
    let open = |host: &Host, pool: &'static [&'static str]| {
        host.wait(move || async move {
            let networks = PoolNetworks::parse(pool).expect("a pool");
            let options = PlaneOptions::new(INSTANCE, networks);
            Plane::open(&options, HostNetlink::default()).await.err()
        })
    };
    let host = Host::new();
    host.shell("ip address add 10.88.3.1/24 dev lo; ip route add default dev lo");
    let refused = open(&host, &["10.88.0.0/16"]).expect("it overlaps");
    assert!(
        refused.to_string().contains("route to 10.88.3"),
        "{refused}"
    );
    assert!(open(&host, &["10.89.0.0/16"]).is_none());
    host.shell("echo 0 > /proc/sys/net/ipv4/ip_forward");
    let refused = open(&host, &["10.89.0.0/16"]).expect("it does not forward");
    assert!(
        matches!(refused, HostError::NotForwarding { .. }),
        "{refused}"
    );
}
