//! Nothing that a session sends arrives at another one, whatever it sends: with all rules, with the host's
//! alone, and with those inside alone, as right after somebody has flushed the host's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use conman_net::Refusals;
use socket2::{Domain, Protocol, Socket, Type};

use super::inside::rules;
use super::isolation::{METADATA, NODE, PATIENCE, PORT, PUBLIC, Session, World};

/// Long for namespaces of one machine.
const ATTEMPT: Duration = Duration::from_millis(100);

/// In the pool, and no session's.
const SPOOFED: Ipv4Addr = Ipv4Addr::new(10, 88, 200, 200);

/// Counts what arrives from other sessions.
const WATCH: &str = "nft 'table inet watch {
    counter seen { }
    chain arriving {
        type filter hook prerouting priority raw;
        iif lo return
        ip saddr 10.88.0.0/16 counter name seen
        ip6 saddr fd00:88::/64 counter name seen
    }
}'";

/// Which rules there are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rules {
    None,
    Host,
    Inside,
    Both,
}

/// Sessions of several classes.
async fn sessions(world: &World, which: Rules) -> Vec<Session> {
    let refusals = Refusals {
        networks: ["10.88.0.0/16", "fd00:88::/64"]
            .map(|text| text.parse().expect("a network"))
            .to_vec(),
        ..Refusals::default()
    };
    let inside = rules(&world.node, refusals);
    let mut sessions = Vec::new();
    for class in [1, 2, 2, 3] {
        let session = world.session(class).await;
        if matches!(which, Rules::Inside | Rules::Both) {
            let namespace = session.host.namespace().file;
            inside.apply(class, namespace).await.expect("applied");
        }
        session.host.shell(WATCH);
        sessions.push(session);
    }
    sessions
}

fn addresses(session: &Session) -> [IpAddr; 2] {
    let v6 = session.addresses.v6.expect("the pool has IPv6");
    [session.addresses.v4.into(), v6.into()]
}

/// Packets of other sessions that have arrived.
fn received(session: &Session) -> u64 {
    let text = session.host.shell("nft list counter inet watch seen");
    let mut words = text
        .split_whitespace()
        .skip_while(|word| *word != "packets");
    let count = words.nth(1).expect("a counter");
    count.parse().expect("a number")
}

/// Sends what it can to an address: TCP, UDP, ICMP.
fn send_everything(from: &Session, to: IpAddr) {
    from.host.run(move || {
        let address = SocketAddr::new(to, PORT);
        let connected = TcpStream::connect_timeout(&address, ATTEMPT);
        let (any, domain, icmp, echo) = match to {
            IpAddr::V4(_) => ("0.0.0.0:0", Domain::IPV4, Protocol::ICMPV4, 8),
            IpAddr::V6(_) => ("[::]:0", Domain::IPV6, Protocol::ICMPV6, 128),
        };
        let udp = UdpSocket::bind(any).expect("bound");
        let raw = Socket::new(domain, Type::RAW, Some(icmp)).expect("a socket");
        // What is refused at once is an error here; whether something arrives is seen at the other end.
        let _ = udp.send_to(b"x", address);
        let _ = raw.send_to(&[echo, 0, 0, 0, 0, 1, 0, 1], &SocketAddr::new(to, 0).into());
        drop(connected);
    });
}

/// Looks for an address on the link, by ARP or neighbour discovery. Returns what the kernel knows then. A
/// session cannot do this, since it cannot change its link.
fn look_for(from: &Session, to: IpAddr) -> String {
    let length = if to.is_ipv4() { 32 } else { 128 };
    from.host.shell(&format!(
        "ip link set eth0 arp on; ip route replace {to}/{length} dev eth0"
    ));
    send_everything(from, to);
    from.host.shell(&format!(
        "ip neigh show dev eth0
         ip route del {to}/{length} dev eth0; ip link set eth0 arp off"
    ))
}

/// Sends a datagram with another source address.
fn send_spoofed(from: &Session, to: Ipv4Addr) {
    from.host.run(move || {
        let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(255)));
        let raw = raw.expect("a socket");
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(SPOOFED.octets());
        packet.extend(to.octets());
        for word in [4_000, PORT, 9, 0] {
            packet.extend(word.to_be_bytes());
        }
        packet.push(b'x');
        let _ = raw.send_to(&packet, &SocketAddr::new(to.into(), 0).into());
    });
}

/// Whether something of one session has arrived at another.
async fn any_arrives(world: &World, which: Rules) -> bool {
    let sessions = sessions(world, which).await;
    let before: Vec<u64> = sessions.iter().map(received).collect();
    for (index, from) in sessions.iter().enumerate() {
        for (_, to) in sessions.iter().enumerate().filter(|(to, _)| *to != index) {
            for address in addresses(to) {
                send_everything(from, address);
                let neighbours = look_for(from, address);
                assert!(!neighbours.contains("lladdr"), "{which:?}: {neighbours}");
            }
            send_spoofed(from, to.addresses.v4);
        }
    }
    let after: Vec<u64> = sessions.iter().map(received).collect();
    before != after
}

#[tokio::test]
async fn nothing_of_a_session_arrives_at_another_one() {
    // It would, but for the rules.
    assert!(any_arrives(&World::new(), Rules::None).await);
    for which in [Rules::Host, Rules::Inside, Rules::Both] {
        let world = World::new();
        let keeping = (which != Rules::Inside).then(|| world.keep());
        assert!(!any_arrives(&world, which).await, "{which:?}");
        drop(keeping);
    }
}

#[tokio::test]
async fn the_rules_inside_refuse_metadata_and_the_host_while_the_host_has_none() {
    let world = World::new();
    let open = &sessions(&world, Rules::None).await[1];
    let sessions = sessions(&world, Rules::Inside).await;
    for host in [&world.node, &world.beyond] {
        host.shell("for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done");
    }
    let server = world.beyond.run(|| UdpSocket::bind((PUBLIC, PORT)));
    let server = server.expect("bound");
    let arrives = |session: &Session, patience: Duration| {
        server.set_read_timeout(Some(patience)).expect("set");
        let IpAddr::V4(public) = PUBLIC else {
            panic!("IPv4");
        };
        send_spoofed(session, public);
        server.recv_from(&mut [0]).is_ok()
    };
    assert!(open.comes_to_reach(NODE, PORT) && arrives(open, PATIENCE));
    for session in &sessions {
        assert!(!session.reaches(NODE, PORT) && !session.reaches(METADATA, PORT));
        assert!(!arrives(session, ATTEMPT));
    }
}
