//! What links carry, in both directions, takes at least the time that their limits demand.

use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use conman_net::HostNetlink;
use conman_net::attached::{self, LimitError, LinkError, NewLink, NewRoute};
use conman_proto::Bandwidth;

use super::connecting::plane;
use super::namespace::Host;

const BYTES: usize = 3_600_000;
/// 2 MB a second: `BYTES` take 0.76 s even after a burst of a second's amount and 64 KiB.
const RATE: &str = "16mbit";
const LEAST: Duration = Duration::from_millis(700);

fn limited() -> Bandwidth {
    Bandwidth {
        inward: RATE.parse().ok(),
        outward: RATE.parse().ok(),
    }
}

/// The time until what one host sends has arrived at another one.
fn transfer(from: &Host, to: &Host, address: SocketAddr) -> Duration {
    let listener = to.run(move || TcpListener::bind(address));
    let listener = listener.expect("its address");
    let begun = Instant::now();
    let receiving = thread::spawn(move || {
        let (mut connection, _) = listener.accept()?;
        io::copy(&mut connection, &mut io::sink())
    });
    from.run(move || {
        let mut connection = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        connection.write_all(&vec![7; BYTES])
    })
    .expect("sent");
    let received = receiving.join().expect("no panic").expect("received");
    assert_eq!(received, BYTES as u64);
    begun.elapsed()
}

#[tokio::test]
async fn a_routed_session_sends_and_receives_at_its_rates() {
    let (host, session) = (Host::new(), Host::new());
    host.shell("ip address add 192.0.2.1/32 dev lo");
    let plane = plane(&host, &["10.88.0.0/16"]);
    let addresses = plane.take("a").expect("free");
    let connected = plane.connect("a", addresses, 7, limited(), session.namespace());
    connected.await.expect("connected");
    let own = SocketAddr::new(addresses.v4.into(), 80);
    let hosts = SocketAddr::from(([192, 0, 2, 1], 80));
    for (direction, took) in [
        ("in", transfer(&host, &session, own)),
        ("out", transfer(&session, &host, hosts)),
    ] {
        assert!(took >= LEAST, "{direction}: {took:?}");
    }
}

#[test]
fn links_on_interfaces_and_bridges_send_and_receive_at_their_rates() {
    let (node, lan) = (Host::new(), Host::new());
    let namespace = lan.path();
    node.shell(&format!(
        "ip link add eth1 type veth peer name lan0 netns {namespace}; ip link set eth1 up
         ip link add eth2 type veth peer name lan1 netns {namespace}; ip link set eth2 up
         ip link add br0 type bridge; ip link set br0 up; ip link set eth2 master br0"
    ));
    lan.shell(
        "ip link set lan0 up; ip address add 192.168.7.1/24 dev lan0
         ip link set lan1 up; ip address add 192.168.8.1/24 dev lan1",
    );
    for (to, net) in [("macvlan:eth1", 7), ("bridge:br0", 8)] {
        let session = Host::new();
        let link = NewLink {
            to: to.parse().expect("a link"),
            name: None,
            addresses: vec![format!("192.168.{net}.9/24").parse().expect("a net")],
            routes: vec![],
            sole: None,
            bandwidth: limited(),
        };
        let namespace = session.namespace();
        let made = node.run(move || attached::make(&HostNetlink::default(), &link, namespace));
        made.expect("made");
        let (own, lans) = ([192, 168, net, 9], [192, 168, net, 1]);
        for (direction, took) in [
            ("in", transfer(&lan, &session, SocketAddr::from((own, 80)))),
            (
                "out",
                transfer(&session, &lan, SocketAddr::from((lans, 80))),
            ),
        ] {
            assert!(took >= LEAST, "{to}, {direction}: {took:?}");
        }
    }
}

#[test]
fn the_limit_of_what_arrives_is_refused_by_its_name_and_ends_with_its_link() {
    let (node, session) = (Host::new(), Host::new());
    node.shell("ip link add br0 type bridge; ip link set br0 up");
    let mut link = NewLink {
        to: "bridge:br0".parse().expect("a link"),
        name: Some("eth1".to_owned()),
        addresses: vec!["192.168.8.9/24".parse().expect("a net")],
        routes: vec![],
        sole: None,
        bandwidth: limited(),
    };
    let make = |link: &NewLink| {
        let (link, namespace) = (link.clone(), session.namespace());
        node.run(move || attached::make(&HostNetlink::default(), &link, namespace))
    };
    let tables = || session.shell("nft list tables");

    // The most that the kernel can count, with its burst.
    link.bandwidth.inward = "147gbit".parse().ok();
    make(&link).expect("made");
    assert!(tables().contains("conman_in_"), "{}", tables());
    attached::delete("eth1", session.namespace()).expect("deleted");
    assert_eq!(tables(), "");

    link.routes = vec![NewRoute {
        destination: "10.9.0.0/16".parse().expect("a network"),
        gateway: "192.168.99.1".parse().ok(),
    }];
    let refused = make(&link).expect_err("no link leads to the gateway");
    assert!(matches!(refused, LinkError::Netlink { .. }), "{refused:?}");
    assert_eq!((tables().as_str(), session.links().len()), ("", 0));

    link.bandwidth.inward = "148gbit".parse().ok();
    let refused = make(&link).expect_err("the kernel cannot count it");
    let LinkError::Limit(why @ LimitError::TooFast(_)) = refused else {
        panic!("{refused:?}");
    };
    let text = why.to_string();
    assert!(
        text.contains("148gbit") && text.contains("147gbit"),
        "{text}"
    );
    assert_eq!(session.links(), [""; 0]);
}
