//! The rules inside a session's namespace, without any on the host.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use conman_net::{HostNetlink, Refusals, SessionRules};

use super::namespace::Host;

const PORT: u16 = 5_432;

/// How long something may take to arrive, and how long nothing must.
const PATIENCE: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_millis(200);

/// A session on a network on which everything answers, metadata and other sessions included.
struct Attached {
    session: Host,
    _lan: Host,
    _servers: Vec<TcpListener>,
    datagrams: Vec<UdpSocket>,
}

const REFUSED: [&str; 7] = [
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "10.88.0.7",
    "192.0.2.1",
    "fd00:ec2::254",
    "fd20:ce::254",
];
const REACHED: [&str; 4] = ["198.41.0.10", "10.88.0.8", "192.0.2.3", "2a00::10"];

impl Attached {
    async fn new(rules: Option<&SessionRules>) -> Self {
        let (session, lan) = (Host::new(), Host::new());
        if let Some(rules) = rules {
            let namespace = session.namespace();
            let again = namespace.file.try_clone().expect("cloned");
            rules.apply(0, namespace.file).await.expect("applied");
            rules.apply(0, again).await.expect("left as they are");
        }
        let there = lan.path();
        session.shell(&format!(
            "ip link add eth0 type veth peer name eth0 netns {there}
             ip address add 192.0.2.9/24 dev eth0; ip link set eth0 up
             ip address add 2a00::9/64 dev eth0 nodad
             ip route add default via 192.0.2.3; ip route add default via 2a00::10"
        ));
        lan.shell(
            "ip address add 192.0.2.3/24 dev eth0; ip link set eth0 up
             ip address add 2a00::10/64 dev eth0 nodad
             for a in 169.254.169.254 100.100.100.200 168.63.129.16 10.88.0.7 10.88.0.8 192.0.2.1 198.41.0.10; do
                 ip address add $a/32 dev lo
             done
             ip address add fd00:ec2::254/128 dev lo nodad; ip address add fd20:ce::254/128 dev lo nodad",
        );
        let (mut servers, mut datagrams) = (Vec::new(), Vec::new());
        for address in REFUSED.iter().chain(&REACHED) {
            let address = SocketAddr::new(address.parse().expect("an address"), PORT);
            let server = lan.run(move || TcpListener::bind(address)).expect("bound");
            let datagram = lan.run(move || UdpSocket::bind(address)).expect("bound");
            servers.push(server);
            datagrams.push(datagram);
        }
        Self {
            session,
            _lan: lan,
            _servers: servers,
            datagrams,
        }
    }

    /// Checks that TCP and a datagram arrive, or that none does.
    fn assert_reaches(&self, address: &str, expected: bool) {
        let patience = if expected { PATIENCE } else { SILENCE };
        let ip: IpAddr = address.parse().expect("an address");
        let to = SocketAddr::new(ip, PORT);
        let connects = self
            .session
            .run(move || TcpStream::connect_timeout(&to, patience).is_ok());
        self.session.run(move || {
            let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
            let socket = UdpSocket::bind(any).expect("bound");
            // Whether it arrived is seen at the server.
            let _ = socket.send_to(b"x", to);
        });
        let real = SocketAddr::new(ip.to_canonical(), PORT);
        let server = self
            .datagrams
            .iter()
            .find(|server| server.local_addr().is_ok_and(|address| address == real));
        let server = server.expect("bound");
        server.set_read_timeout(Some(patience)).expect("set");
        let arrives = server.recv_from(&mut [0]).is_ok();
        assert_eq!((connects, arrives), (expected, expected), "{address}");
    }
}

fn refusals() -> Refusals {
    let nets = |texts: &[&str]| {
        let parsed = texts.iter().map(|text| text.parse().expect("a network"));
        parsed.collect()
    };
    Refusals {
        networks: nets(&["10.88.0.0/16"]),
        allowed: nets(&["10.88.0.8/32"]),
        dns: vec![],
    }
}

/// With the addresses of a node.
pub(super) fn rules(node: &Host, refusals: Refusals) -> SessionRules {
    node.wait(|| async {
        let rules = SessionRules::new(HostNetlink::default(), refusals, &[], &[]);
        rules.check().await.expect("nft accepts them");
        rules
    })
}

#[tokio::test]
async fn a_session_is_refused_metadata_the_host_and_other_sessions_on_any_interface() {
    let node = Host::new();
    node.shell("ip address add 192.0.2.1/32 dev lo");
    let open = Attached::new(None).await;
    let closed = Attached::new(Some(&rules(&node, refusals()))).await;
    for address in REFUSED.iter().chain(&["::ffff:169.254.169.254"]) {
        open.assert_reaches(address, true);
        closed.assert_reaches(address, false);
    }
    for address in REACHED {
        closed.assert_reaches(address, true);
    }
}

#[tokio::test]
async fn a_session_takes_only_its_part_of_the_neighbour_tables() {
    let node = Host::new();
    let entries = async |rules: Option<&SessionRules>| {
        let attached = Attached::new(rules).await;
        attached
            .session
            .shell("ip address add 10.99.0.1/16 dev eth0");
        attached.session.run(|| {
            for number in 0..300_u16 {
                let [high, low] = number.to_be_bytes();
                let targets = [
                    SocketAddr::from(([10, 99, 1 + high, low], PORT)),
                    SocketAddr::from(([0x2a00, 0, 0, 0, 0, 0, 1, number], PORT)),
                ];
                for target in targets {
                    let any = if target.is_ipv4() {
                        "0.0.0.0:0"
                    } else {
                        "[::]:0"
                    };
                    let socket = UdpSocket::bind(any).expect("bound");
                    // Refused ones are what is tested.
                    let _ = socket.send_to(b"x", target);
                }
            }
            let shown = |family| {
                let found = std::process::Command::new("ip")
                    .args([family, "neigh", "show", "nud", "all", "dev", "eth0"])
                    .output()
                    .expect("ip runs");
                String::from_utf8_lossy(&found.stdout).lines().count()
            };
            [shown("-4"), shown("-6")]
        })
    };
    let open = entries(None).await;
    assert!(open.iter().all(|count| *count >= 300), "{open:?}");
    let closed = entries(Some(&rules(&node, refusals()))).await;
    // The kernel adds some for groups that every host is in.
    let most = usize::try_from(conman_net::MAX_NEIGHBOURS).expect("small") + 20;
    assert!(
        closed.iter().all(|count| (100..most).contains(count)),
        "{closed:?}"
    );
    // What was reached before still is.
    let attached = Attached::new(Some(&rules(&node, refusals()))).await;
    attached.assert_reaches(REACHED[0], true);
}
