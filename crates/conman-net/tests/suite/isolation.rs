//! What sessions reach: a node with an uplink, a network beyond it, and sessions of several classes.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use conman_net::{Addresses, Class, MAX_FLOWS, Plane, RuleSet, RulesKeeper};
use conman_observer::slowness;
use conman_proto::Bandwidth;

use super::connecting::{INSTANCE, plane};
use super::namespace::Host;

/// A refusal arrives at once; only packets that are dropped take this long.
const SILENCE: Duration = Duration::from_millis(500);

/// For what arrives, on however slow a machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The instance's rules must be back within this time on a usual machine.
const RESTORED_WITHIN: Duration = Duration::from_secs(1);

/// Beyond the node: a listed private address, one that the operator allows, a public one, a name server,
/// and metadata.
const LISTED: IpAddr = v4(10, 1, 0, 5);
const ALLOWED: IpAddr = v4(10, 3, 0, 6);
pub(super) const PUBLIC: IpAddr = v4(198, 41, 0, 10);
const NAME_SERVER: IpAddr = v4(10, 2, 0, 53);
pub(super) const METADATA: IpAddr = v4(169, 254, 169, 254);
/// The node's own.
pub(super) const NODE: IpAddr = v4(192, 0, 2, 1);

pub(super) const PORT: u16 = 5_432;

const fn v4(a: u8, b: u8, c: u8, d: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

pub(super) struct World {
    pub(super) node: Host,
    pub(super) beyond: Host,
    plane: Plane,
    _servers: Vec<TcpListener>,
}

impl World {
    pub(super) fn new() -> Self {
        let (node, beyond) = (Host::new(), Host::new());
        let there = beyond.path();
        node.shell(&format!(
            "ip link add uplink type veth peer name uplink netns {there}
             ip address add 192.0.2.1/24 dev uplink; ip link set uplink up
             ip route add default via 192.0.2.2"
        ));
        // It has no route to the sessions, as a real network has none.
        beyond.shell(
            "ip address add 192.0.2.2/24 dev uplink; ip link set uplink up
             for a in 10.1.0.5 10.3.0.6 198.41.0.10 10.2.0.53 169.254.169.254; do
                 ip address add $a/32 dev lo
             done",
        );
        let mut servers = Vec::new();
        for host in [&node, &beyond] {
            for port in [PORT, PORT + 1] {
                let server = host.run(move || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)));
                servers.push(server.expect("listening"));
            }
        }
        let plane = plane(&node, &["10.88.0.0/16", "fd00:88::/64"]);
        Self {
            node,
            beyond,
            plane,
            _servers: servers,
        }
    }

    pub(super) async fn session(&self, class: u16) -> Session {
        let host = Host::new();
        let addresses = self.plane.take("a session").expect("free");
        let connected = self.plane.connect(
            "a session",
            addresses,
            class,
            Bandwidth::default(),
            host.namespace(),
        );
        connected.await.expect("connected");
        let server = host.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)));
        Session {
            host,
            addresses,
            _server: server.expect("listening"),
        }
    }

    /// Applies the rules and keeps them until the sender is dropped.
    pub(super) fn keep(&self) -> tokio::sync::oneshot::Sender<()> {
        let (stop, stopped) = tokio::sync::oneshot::channel();
        self.node.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            let mut keeper = runtime.block_on(async {
                let mut keeper = RulesKeeper::check(INSTANCE, &rules())
                    .await
                    .expect("accepted");
                keeper.apply().await.expect("applied");
                keeper
            });
            // A new thread begins in the namespace of its creator, and so does its child `nft`.
            std::thread::spawn(move || {
                runtime.block_on(async {
                    tokio::select! {
                        () = keeper.keep() => {}
                        _ = stopped => {}
                    }
                });
            });
        });
        stop
    }
}

/// Class 1 lists a network, class 2 is allowed the internet, class 3 nothing.
fn rules() -> RuleSet {
    let networks = |texts: &[&str]| {
        let parsed = texts.iter().map(|text| text.parse().expect("a network"));
        parsed.collect::<Vec<_>>()
    };
    let class = |number, internet, networks| Class {
        number,
        internet,
        networks,
        groups: Vec::new(),
    };
    RuleSet {
        classes: vec![
            class(1, false, vec![(networks(&["10.1.0.0/16"])[0], PORT)]),
            class(2, true, vec![]),
            class(3, false, vec![]),
        ],
        dns: vec![NAME_SERVER],
        special: networks(&[
            "10.0.0.0/8",
            "10.88.0.0/16",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "fc00::/7",
        ]),
        // Around the node's address and around the other sessions: neither is opened by that.
        allowed: networks(&["10.3.0.6/32", "192.0.2.0/24", "10.80.0.0/12"]),
        fabric: None,
    }
}

pub(super) struct Session {
    pub(super) host: Host,
    pub(super) addresses: Addresses,
    _server: TcpListener,
}

impl Session {
    fn address(&self) -> IpAddr {
        IpAddr::V4(self.addresses.v4)
    }

    /// Whether it does; see [`Session::comes_to_reach`] for what must.
    pub(super) fn reaches(&self, address: IpAddr, port: u16) -> bool {
        self.reaches_within(SILENCE, address, port)
    }

    /// Also on a slow machine.
    pub(super) fn comes_to_reach(&self, address: IpAddr, port: u16) -> bool {
        self.reaches_within(PATIENCE, address, port)
    }

    fn reaches_within(&self, patience: Duration, address: IpAddr, port: u16) -> bool {
        let address = SocketAddr::new(address, port);
        self.host
            .run(move || TcpStream::connect_timeout(&address, patience).is_ok())
    }

    /// Whether a datagram from this source address arrives at `server` within this time.
    fn sends(&self, from: IpAddr, server: &UdpSocket, patience: Duration) -> bool {
        let to = server.local_addr().expect("bound");
        self.host.run(move || {
            let socket = UdpSocket::bind((from, 0)).expect("the session has the address");
            // Whether it arrived is seen at the server.
            let _ = socket.send_to(b"x", to);
        });
        server.set_read_timeout(Some(patience)).expect("set");
        match server.recv_from(&mut [0]) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => false,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn a_session_reaches_what_its_class_lists_and_nothing_else() {
    let world = World::new();
    let _keeping = world.keep();
    let listing = world.session(1).await;
    let internet = world.session(2).await;
    let nothing = world.session(3).await;
    let unknown = world.session(4).await;
    let peer = world.session(2).await;
    let reached_by_internet = [
        (PUBLIC, PORT),
        (PUBLIC, PORT + 1),
        (ALLOWED, PORT),
        (ALLOWED, PORT + 1),
    ];
    let table = [
        (&listing, "listing", &[(LISTED, PORT)][..]),
        (&internet, "internet", &reached_by_internet[..]),
        (&nothing, "nothing", &[]),
        (&unknown, "unknown", &[]),
    ];
    for (session, name, reached) in table {
        for address in [
            LISTED,
            ALLOWED,
            PUBLIC,
            METADATA,
            NODE,
            NAME_SERVER,
            peer.address(),
        ] {
            for port in [PORT, PORT + 1] {
                let expected = reached.contains(&(address, port));
                let reaches = match expected {
                    true => session.comes_to_reach(address, port),
                    false => session.reaches(address, port),
                };
                assert_eq!(reaches, expected, "{name} to {address}:{port}");
            }
        }
    }
}

#[tokio::test]
async fn a_session_uses_its_name_server_and_only_its_own_source_address() {
    let world = World::new();
    let _keeping = world.keep();
    let session = world.session(1).await;
    let own = session.address();
    let bind = |address: IpAddr, port: u16| {
        let bound = world.beyond.run(move || UdpSocket::bind((address, port)));
        bound.expect("bound")
    };
    let (names, listed) = (bind(NAME_SERVER, 53), bind(LISTED, PORT));
    assert!(session.sends(own, &names, PATIENCE), "the name server");
    assert!(session.sends(own, &listed, PATIENCE), "a listed network");
    assert!(
        !session.sends(own, &bind(LISTED, PORT + 1), SILENCE),
        "another port"
    );
    session.host.shell("ip address add 10.88.7.7/32 dev eth0");
    assert!(
        !session.sends(v4(10, 88, 7, 7), &listed, SILENCE),
        "a spoofed source"
    );
    let peer = world.session(2).await;
    let address = peer.address();
    let at_peer = peer.host.run(move || UdpSocket::bind((address, PORT)));
    assert!(
        !session.sends(own, &at_peer.expect("bound"), SILENCE),
        "another session"
    );
}

#[tokio::test]
async fn a_session_that_begins_endless_flows_meets_its_own_bound() {
    let world = World::new();
    let _keeping = world.keep();
    let (hostile, other) = (world.session(2).await, world.session(2).await);
    assert!((0..20).any(|_| hostile.reaches(PUBLIC, PORT)));
    // One for all rounds: a process that another test starts may hold a closed one for a moment.
    let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 5_000));
    let socket = hostile.host.run(bind).expect("bound");
    let begin_flows = || {
        // Each port is a flow.
        for port in 0..MAX_FLOWS {
            let port = u16::try_from(10_000 + port).expect("a port");
            let _ = socket.send_to(b"x", (PUBLIC, port));
        }
    };
    // Queues between the namespaces drop some packets; they are sent again.
    let met = (0..20).any(|_| {
        begin_flows();
        !hostile.reaches(PUBLIC, PORT)
    });
    assert!(met, "no bound");
    assert!(other.comes_to_reach(PUBLIC, PORT));
}

/// Returns how long after `begun` something was last seen to be so.
fn last_seen(begun: Instant, seen: impl Fn() -> bool) -> Duration {
    let mut last = Duration::ZERO;
    while seen() {
        last = begun.elapsed();
        assert!(last < PATIENCE * slowness(), "it stays so");
    }
    last
}

/// Row 32 of the fault matrix.
#[tokio::test]
async fn row_32_a_flushed_ruleset_is_back_within_a_second() {
    let world = World::new();
    let _keeping = world.keep();
    let session = world.session(1).await;
    let peer = world.session(1).await;
    // It is back each time; this soon unless a process stood still meanwhile.
    let flushed = [(); 3].map(|()| {
        world.node.shell("nft flush ruleset");
        let begun = Instant::now();
        let open = last_seen(begun, || {
            session.reaches(peer.address(), PORT) || session.reaches(NODE, PORT)
        });
        // It is masqueraded; nothing beyond would answer otherwise.
        open.max(last_seen(begun, || !session.reaches(LISTED, PORT)))
    });
    let deleted = [(); 3].map(|()| {
        // Other programs' tables stay as they are.
        world
            .node
            .shell("nft add table inet other; nft delete table inet conman_0a1b2c3d");
        let begun = Instant::now();
        let open = last_seen(begun, || session.reaches(peer.address(), PORT));
        open.max(last_seen(begun, || !session.reaches(LISTED, PORT)))
    });
    for rounds in [flushed, deleted] {
        let soonest = rounds.iter().min().expect("several");
        assert!(*soonest < RESTORED_WITHIN * slowness(), "{rounds:?}");
    }
    assert!(world.node.shell("nft list tables").contains("inet other"));
}
