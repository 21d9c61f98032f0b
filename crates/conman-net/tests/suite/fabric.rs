//! Sessions of two hosts reach each other over a fabric, whatever somebody removes of it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Duration;

use conman_core::ownership::Underlay;
use conman_net::{
    Addresses, Fabric, FabricError, FabricKind, FabricOptions, HostNetlink, Plane, PlaneOptions,
    PlaneParts, PoolNetworks, RemotePart,
};
use conman_proto::Bandwidth;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::namespace::Host;

pub(super) const INSTANCE: &str = "0a1b2c3d";
/// Of the sessions.
pub(super) const GROUP: &str = "team";
pub(super) const CLASS: u16 = 7;
pub(super) const VXLAN: FabricKind = FabricKind::Vxlan {
    vni: 7_704,
    port: 7_704,
};
/// Long for namespaces of one machine.
const ATTEMPT: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 5;
/// Long for a notification of the kernel.
const PATIENCE: Duration = Duration::from_secs(20);

/// A host with a session, whose addresses are of the part with its number.
pub(super) struct Node {
    pub(super) fabric: Fabric,
    pub(super) host: Host,
    pub(super) session: Host,
    pub(super) addresses: Addresses,
    pub(super) part: RemotePart,
    _incarnation: watch::Sender<u64>,
}

pub(super) fn pool() -> PoolNetworks {
    PoolNetworks::parse(&["10.96.0.0/16", "fd00:96::/64"]).expect("a pool")
}

pub(super) fn options(kind: FabricKind, number: u32) -> FabricOptions {
    FabricOptions {
        instance: INSTANCE.to_owned(),
        kind,
        pool: pool(),
        part: 24,
        mtu: None,
        address: [192, 0, 2, u8::try_from(number).expect("small")].into(),
    }
}

pub(super) async fn open(host: &Host, options: FabricOptions) -> Result<Fabric, FabricError> {
    host.wait(move || Fabric::open(options, HostNetlink::default()))
}

pub(super) async fn node(host: Host, kind: FabricKind, number: u32) -> Node {
    let fabric = open(&host, options(kind, number)).await;
    let fabric = fabric.expect("a fabric");
    let networks = pool().part(number, 24);
    let (incarnation, known) = watch::channel(1);
    let parts = PlaneParts {
        mtu: fabric.underlay().mtu,
        incarnation: known,
        requests: mpsc::channel(1).0,
    };
    let plane = host.wait(move || async move {
        let own = PoolNetworks::parse(&["10.88.0.0/16"]).expect("a pool");
        let options = PlaneOptions {
            parts: Some(parts),
            ..PlaneOptions::new(INSTANCE, own)
        };
        let plane = Plane::open(&options, HostNetlink::default()).await;
        plane.expect("a plane")
    });
    let groups = vec![GROUP.to_owned()];
    plane.set_parts(1, [(number, networks, groups.clone())].into_iter());
    let addresses = plane.take_in("a", &groups).expect("free");
    let session = Host::new();
    let connected = plane.connect(
        "a",
        addresses,
        CLASS,
        Bandwidth::default(),
        session.namespace(),
    );
    connected.await.expect("connected");
    let part = RemotePart {
        networks,
        underlay: fabric.underlay(),
    };
    Node {
        fabric,
        host,
        session,
        addresses,
        part,
        _incarnation: incarnation,
    }
}

/// Two hosts, which are connected directly.
pub(super) fn hosts() -> [Host; 2] {
    let hosts = [Host::new(), Host::new()];
    hosts[0].shell(&format!(
        "ip link add uplink type veth peer name uplink netns {}",
        hosts[1].path()
    ));
    for (host, number) in hosts.iter().zip(1..) {
        host.shell(&format!(
            "ip link set uplink up
             ip address add 192.0.2.{number}/24 dev uplink
             ip address add 2001:db8::{number}/64 dev uplink nodad"
        ));
    }
    hosts
}

impl Node {
    /// The same, of interfaces that come up just now.
    pub(super) fn comes_to_reach(&self, other: &Self, packet_bytes: usize) -> bool {
        (0..ATTEMPTS).any(|_| self.reaches(other, packet_bytes))
    }

    /// Whether a packet of this size gets to the other session, over both families. The kernel sends the first one of
    /// a socket whole, and marks it not to be fragmented.
    fn reaches(&self, other: &Self, packet_bytes: usize) -> bool {
        let v6 = other.addresses.v6.expect("both families");
        [(other.addresses.v4.into(), 28), (v6.into(), 48)]
            .into_iter()
            .all(|(address, headers): (IpAddr, usize)| {
                let server = other.session.run(move || UdpSocket::bind((address, 0)));
                let server = server.expect("bound");
                server.set_read_timeout(Some(ATTEMPT)).expect("set");
                let to = server.local_addr().expect("an address");
                let any: IpAddr = match address {
                    IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                    IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
                };
                self.session.run(move || {
                    let client = UdpSocket::bind((any, 0)).expect("bound");
                    // An unreachable address may be an error at once.
                    let _ = client.send_to(&vec![0; packet_bytes - headers], to);
                });
                let received = server.recv(&mut vec![0; packet_bytes]);
                received.is_ok_and(|length| length == packet_bytes - headers)
            })
    }
}

async fn reach_each_other(kind: FabricKind, mtu: usize, breaking: &[&str]) {
    let [one, other] = hosts();
    let one = node(one, kind, 1).await;
    let other = node(other, kind, 2).await;
    for (here, there) in [(&one, &other), (&other, &one)] {
        let applied = here.fabric.apply(std::slice::from_ref(&there.part)).await;
        assert!(applied.expect("applied").is_empty(), "all are routable");
    }
    assert!(one.comes_to_reach(&other, mtu) && other.comes_to_reach(&one, mtu));
    for script in breaking {
        one.host.shell(script);
        let noticed = timeout(PATIENCE, one.fabric.changed()).await;
        assert!(noticed.is_ok(), "{script} is noticed");
        let applied = one.fabric.apply(std::slice::from_ref(&other.part)).await;
        applied.expect("applied");
        assert!(one.comes_to_reach(&other, mtu), "{script}");
    }
    // The other node is lost. What is left says so, instead of sending packets elsewhere.
    one.fabric.apply(&[]).await.expect("applied");
    let routes = one
        .host
        .shell("ip route; ip -6 route; bridge fdb; ip neigh");
    assert!(!routes.contains("10.96.2.0"), "{routes}");
    assert!(routes.contains("unreachable 10.96.0.0/16"), "{routes}");
    assert!(!one.reaches(&other, 100));
    one.fabric.remove().await.expect("removed");
    let left = one
        .host
        .shell("ip route show proto 119; ip -6 route show proto 119; ip link");
    assert!(!left.contains("10.96") && !left.contains("vxlan"), "{left}");
}

#[tokio::test(flavor = "multi_thread")]
async fn by_routes_sessions_of_two_hosts_reach_each_other() {
    let breaking = [
        "ip route flush proto 119",
        "ip -6 route flush proto 119",
        "ip link set uplink down; ip link set uplink up; ip address add 2001:db8::1/64 dev uplink nodad",
    ];
    reach_each_other(FabricKind::HostGateway, 1_500, &breaking).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_vxlan_sessions_of_two_hosts_reach_each_other() {
    let breaking = [
        "ip link delete c0a1b2c3df",
        "ip link set c0a1b2c3df down",
        "ip neigh flush dev c0a1b2c3df nud permanent",
        "bridge fdb del 02:63:c0:00:02:02 dev c0a1b2c3df dst 192.0.2.2 self",
    ];
    reach_each_other(VXLAN, 1_450, &breaking).await;
}

async fn reached_in_another_way(kind: FabricKind, mtu: usize) {
    let [one, other] = hosts();
    let mut one = node(one, kind, 1).await;
    let other = node(other, kind, 2).await;
    assert!(!one.fabric.refresh().await.expect("found"), "as it was");
    one.host
        .shell("ip link set uplink address 02:00:00:00:00:07; ip link set uplink mtu 1400");
    let noticed = timeout(PATIENCE, one.fabric.changed()).await;
    noticed.expect("it is noticed");
    assert!(one.fabric.refresh().await.expect("found"));
    one.part.underlay = one.fabric.underlay();
    assert_eq!(usize::try_from(one.part.underlay.mtu), Ok(mtu));
    other.host.shell("ip neigh flush dev uplink");
    for (here, there) in [(&one, &other), (&other, &one)] {
        let applied = here.fabric.apply(std::slice::from_ref(&there.part)).await;
        assert!(applied.expect("applied").is_empty());
    }
    assert!(other.comes_to_reach(&one, mtu) && one.comes_to_reach(&other, mtu));
    one.host.shell("ip address delete 192.0.2.1/24 dev uplink");
    let lost = one
        .fabric
        .refresh()
        .await
        .expect_err("no address")
        .to_string();
    assert!(
        lost.contains("no interface has the address 192.0.2.1"),
        "{lost}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn by_routes_a_node_whose_interface_changes_is_reached_in_the_new_way() {
    reached_in_another_way(FabricKind::HostGateway, 1_400).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_vxlan_a_node_whose_interface_changes_is_reached_in_the_new_way() {
    reached_in_another_way(VXLAN, 1_350).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_host_lacks_for_a_fabric_is_named() {
    let [one, _other] = hosts();
    let problems = |kind| {
        let found = one.wait(move || Fabric::problems(options(kind, 1)));
        found.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for kind in [FabricKind::HostGateway, VXLAN] {
        assert_eq!(problems(kind), [""; 0]);
    }
    let any = (Ipv4Addr::UNSPECIFIED, 7_704);
    let program = one.run(move || UdpSocket::bind(any)).expect("bound");
    let [port] = &problems(VXLAN)[..] else {
        panic!("{:?}", problems(VXLAN));
    };
    assert!(
        port.contains("another program uses the UDP port 7704"),
        "{port}"
    );
    drop(program);
    // A device of its own is no problem.
    let fabric = open(&one, options(VXLAN, 1)).await.expect("a fabric");
    fabric.apply(&[]).await.expect("applied");
    assert_eq!(problems(VXLAN), [""; 0]);
    one.shell("echo 0 > /proc/sys/net/ipv4/ip_forward");
    let found = problems(VXLAN);
    assert!(
        found[0].contains("net.ipv4.ip_forward is not 1"),
        "{found:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_record_of_a_node_leaves_the_ways_to_others() {
    let [one, other] = hosts();
    let one = node(one, VXLAN, 1).await;
    let other = node(other, VXLAN, 2).await;
    let wrong = |number: u32, change: &dyn Fn(&mut Underlay)| {
        let mut underlay = other.part.underlay.clone();
        change(&mut underlay);
        let networks = pool().part(number, 24);
        RemotePart { networks, underlay }
    };
    let of_another_family = wrong(3, &|underlay| {
        (underlay.v4, underlay.v6) = (None, Some(Ipv6Addr::LOCALHOST));
    });
    let multicast = wrong(4, &|underlay| underlay.mac = [0x01, 0, 0x5e, 0, 0, 1]);
    let parts = [of_another_family, multicast, other.part.clone()];
    let unroutable = one.fabric.apply(&parts).await.expect("the rest is applied");
    let texts: Vec<String> = unroutable.iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 4, "two networks of each: {texts:?}");
    assert!(
        texts[0].contains("no address of the same family"),
        "{texts:?}"
    );
    let applied = other.fabric.apply(std::slice::from_ref(&one.part)).await;
    applied.expect("applied");
    assert!(one.comes_to_reach(&other, 1_450));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_beyond_a_router_and_too_large_packets_are_named() {
    let [one, _other] = hosts();
    let fabric = open(&one, options(FabricKind::HostGateway, 1)).await;
    let fabric = fabric.expect("a fabric");
    let mut underlay = fabric.underlay();
    (underlay.v4, underlay.v6) = (Some([198, 51, 100, 7].into()), None);
    let beyond = RemotePart {
        networks: pool().part(2, 24),
        underlay,
    };
    let unroutable = fabric.apply(&[beyond]).await.expect("the rest is applied");
    let [unroutable] = &unroutable[..] else {
        panic!("{unroutable:?}");
    };
    let text = unroutable.to_string();
    assert!(text.contains("10.96.2.0/24 by 198.51.100.7"), "{text}");
    let large = FabricOptions {
        mtu: Some(1_451),
        ..options(VXLAN, 1)
    };
    let error = open(&one, large).await.expect_err("too large").to_string();
    assert!(error.contains("set at most 1450"), "{error}");
    let elsewhere = FabricOptions {
        address: [192, 0, 2, 9].into(),
        ..options(VXLAN, 1)
    };
    let error = open(&one, elsewhere).await.expect_err("no interface");
    assert!(matches!(error, FabricError::NoInterface { .. }), "{error}");
}
