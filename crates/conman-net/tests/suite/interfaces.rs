//! Links on interfaces of the host. A second namespace stands for the network behind `eth1` and `br0`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use conman_net::attached::{self, LinkError, NewLink};
use conman_net::{HostNetlink, InterfaceError, InterfaceNetwork, InterfacePools, PoolNetworks};
use conman_proto::{Bandwidth, LinkTarget};

use super::namespace::Host;

/// For what is reached, on however slow a machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// Long for namespaces of one machine.
const SILENCE: Duration = Duration::from_millis(300);

const PORT: u16 = 8_000;
const LAN: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 168, 7, 1));
const BEYOND: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 9, 9));

/// The node, and the network behind its interface, with a server at each address.
struct World {
    node: Host,
    /// The node's.
    netlink: HostNetlink,
    _lan: Host,
    _servers: Vec<TcpListener>,
}

impl World {
    fn new(interface: &str) -> Self {
        let (node, lan) = (Host::new(), Host::new());
        let namespace = lan.path();
        node.shell(&format!(
            "ip link add eth1 type veth peer name lan0 netns {namespace}; ip link set eth1 up; {interface}"
        ));
        lan.shell(
            "ip link set lan0 up; ip address add 192.168.7.1/24 dev lan0; \
             ip address add 10.9.9.9/32 dev lan0",
        );
        let servers = [LAN, BEYOND].map(|address| listen(&lan, address));
        Self {
            node,
            netlink: HostNetlink::default(),
            _lan: lan,
            _servers: servers.into(),
        }
    }

    fn make(&self, link: &NewLink, session: &Host) -> Result<(), LinkError> {
        let (link, namespace) = (link.clone(), session.namespace());
        let netlink = self.netlink.clone();
        self.node
            .run(move || attached::make(&netlink, &link, namespace).map(drop))
    }
}

fn listen(host: &Host, address: IpAddr) -> TcpListener {
    let bound = host.run(move || TcpListener::bind((address, PORT)));
    bound.expect("a free port")
}

fn reaches(session: &Host, address: IpAddr, patience: Duration) -> bool {
    let address = SocketAddr::new(address, PORT);
    session.run(move || TcpStream::connect_timeout(&address, patience).is_ok())
}

fn pools(range: &str) -> InterfacePools {
    let network = InterfaceNetwork {
        subnet: "192.168.7.0/24".parse().expect("a network"),
        range: PoolNetworks::parse(&[range]).expect("a range"),
        gateway: Some(Ipv4Addr::new(192, 168, 7, 1)),
    };
    let name = "eth1".parse().expect("a name");
    InterfacePools::new(HostNetlink::default(), BTreeMap::from([(name, network)]))
}

fn target(text: &str) -> LinkTarget {
    text.parse().expect("a link")
}

#[test]
fn a_session_on_an_interface_reaches_its_network_and_no_other_session() {
    let world = World::new("");
    let (to, pools) = (target("macvlan:eth1"), pools("192.168.7.64/29"));
    let connected = |owner: &'static str, pools: InterfacePools| {
        let target = to.clone();
        let (link, pools) = world.node.run(move || {
            let address = pools.take(&target, owner).expect("free");
            (pools.link(&target, address).expect("configured"), pools)
        });
        let session = Host::new();
        world.make(&link, &session).expect("made");
        (session, link, pools)
    };
    let (first, link, pools) = connected("a", pools);
    let (second, other, _pools) = connected("b", pools);
    assert_eq!(link.addresses, ["192.168.7.65/24".parse().expect("a net")]);
    let _server = listen(&second, other.addresses[0].addr());
    for session in [&first, &second] {
        assert!(reaches(session, LAN, PATIENCE) && reaches(session, BEYOND, PATIENCE));
    }
    assert!(!reaches(&first, other.addresses[0].addr(), SILENCE));
    // The link of a dead session may live on for a moment.
    let third = Host::new();
    let refused = world
        .make(&link, &third)
        .expect_err("the address is in use");
    assert!(matches!(refused, LinkError::AddressTaken(_)), "{refused:?}");
    assert_eq!(third.links(), [""; 0]);
    drop(first);
    while world.make(&link, &third).is_err() {}
    assert!(reaches(&third, LAN, PATIENCE));
    assert_eq!(world.node.links(), ["eth1"]);
}

#[test]
fn addresses_of_an_interface_are_given_once_and_run_out() {
    let world = World::new("");
    world.node.run(|| {
        let (to, pools) = (target("macvlan:eth1"), pools("192.168.7.0/30"));
        let address = pools.take(&to, "a").expect("the one beside the gateway's");
        let full = pools.take(&to, "b").expect_err("none is left");
        assert!(full.to_string().contains("larger `range`"), "{full}");
        pools.leave(&to, "b", address);
        pools.take(&to, "b").expect_err("b never had it");
        pools.leave(&to, "a", address);
        assert_eq!(pools.take(&to, "b").expect("free"), address);
        let unknown = pools
            .take(&target("macvlan:eth2"), "b")
            .expect_err("no network");
        assert!(matches!(unknown, InterfaceError::NotConfigured(_)));
    });
    world.node.shell("ip link delete eth1");
    let gone = world
        .node
        .run(|| pools("192.168.7.64/29").take(&target("macvlan:eth1"), "a"));
    let gone = gone.expect_err("no interface");
    assert!(gone.to_string().contains("no interface `eth1`"), "{gone}");
}

#[test]
fn a_link_to_a_bridge_is_attached_listed_and_detached() {
    let world =
        World::new("ip link add br0 type bridge; ip link set br0 up; ip link set eth1 master br0");
    let session = Host::new();
    let mut link = NewLink {
        to: target("bridge:br0"),
        name: Some("eth5".to_owned()),
        addresses: vec!["192.168.7.9/24".parse().expect("a net")],
        routes: vec![],
        sole: None,
        bandwidth: Bandwidth::default(),
    };
    world.make(&link, &session).expect("made");
    // The kernel lets a new port forward within a second.
    assert!((0..20).any(|_| reaches(&session, LAN, SILENCE)));
    assert!(!reaches(&session, BEYOND, SILENCE));
    let taken = world.make(&link, &session).expect_err("the name is taken");
    assert!(matches!(taken, LinkError::NameTaken(_)), "{taken:?}");
    let listed = attached::list(session.namespace()).expect("listed");
    assert_eq!((listed.len(), listed[0].name.as_str()), (1, "eth5"));
    assert_eq!(
        (&listed[0].to, &listed[0].addresses[..]),
        (&link.to, &["192.168.7.9/24".to_owned()][..])
    );
    for not_attached in ["lo", "eth6"] {
        attached::delete(not_attached, session.namespace()).expect_err("not attached");
    }
    attached::delete("eth5", session.namespace()).expect("deleted");
    assert_eq!((session.links().len(), world.node.links().len()), (0, 2));
    for (to, text) in [
        ("bridge:eth1", "no bridge"),
        ("bridge:br1", "no interface `br1`"),
        ("macvlan:br1", "no interface `br1`"),
        ("ipoib:eth1", "ib_ipoib"),
        ("macvlan:lo", "cannot create"),
    ] {
        link.to = target(to);
        let refused = world.make(&link, &session).expect_err(to).to_string();
        assert!(refused.contains(text), "{to}: {refused}");
        assert_eq!(session.links(), [""; 0], "{to}");
    }
}
