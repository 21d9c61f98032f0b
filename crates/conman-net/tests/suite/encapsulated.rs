//! What the host's rules drop of a VXLAN fabric: packets that sessions forge, and what is not between sessions.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use conman_net::{Class, FabricElements, FabricRules, RuleSet, RulesKeeper};
use tokio::sync::watch;

use super::fabric::{CLASS, GROUP, INSTANCE, Node, VXLAN, hosts, node, pool};

/// VXLAN's port and network identifier.
const PORT: u16 = 7_704;
/// A port that is another program's.
const OTHER_PORT: u16 = 7_705;
/// Where what was encapsulated is to arrive.
const INNER_PORT: u16 = 5_000;
/// Packets between namespaces that arrive take far less.
const PATIENCE: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 5;

const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
/// Another address of the second node. No record has it.
const UNPUBLISHED: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 22);

/// Two nodes that reach each other; the second one's session is the target.
struct World {
    nodes: [Node; 2],
    /// The target's, and its node's.
    session: UdpSocket,
    service: UdpSocket,
}

/// A UDP packet in a frame in a VXLAN packet's payload.
fn encapsulated(macs: [[u8; 6]; 2], from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x08, 0, 0, 0];
    packet.extend((u32::from(PORT) << 8).to_be_bytes());
    packet.extend([macs[1], macs[0]].concat());
    packet.extend([0x08, 0x00]);
    let mut header = vec![0x45, 0, 0, 29, 0, 1, 0, 0, 64, 17, 0, 0];
    header.extend([from.octets(), to.octets()].concat());
    let words = header
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    let folded = (0..2).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16));
    let checksum = !u16::try_from(folded).expect("folded");
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(header);
    packet.extend(INNER_PORT.to_be_bytes());
    packet.extend(INNER_PORT.to_be_bytes());
    packet.extend([0, 9, 0, 0, b'x']);
    packet
}

impl World {
    async fn new() -> Self {
        let [one, other] = hosts();
        let nodes = [node(one, VXLAN, 1).await, node(other, VXLAN, 2).await];
        for (here, there) in [(&nodes[0], &nodes[1]), (&nodes[1], &nodes[0])] {
            let applied = here.fabric.apply(std::slice::from_ref(&there.part)).await;
            assert!(applied.expect("applied").is_empty());
        }
        assert!(nodes[0].comes_to_reach(&nodes[1], 500));
        let add = format!("ip address add {UNPUBLISHED}/24 dev uplink");
        nodes[1].host.shell(&add);
        let any = (Ipv4Addr::UNSPECIFIED, INNER_PORT);
        let bind = move || UdpSocket::bind(any).expect("bound");
        let (session, service) = (nodes[1].session.run(bind), nodes[1].host.run(bind));
        Self {
            nodes,
            session,
            service,
        }
    }

    /// Applies the rules on a node, with the other one as its only node.
    fn apply_rules(&self, on: usize) {
        let other = &self.nodes[1 - on];
        let networks = || {
            self.nodes
                .iter()
                .flat_map(|node| node.part.networks.networks())
        };
        let elements = FabricElements {
            origins: other
                .part
                .networks
                .networks()
                .map(|network| (other.part.underlay.mac, network))
                .collect(),
            groups: [(GROUP.to_owned(), networks().collect())].into(),
            nodes: [HOSTS[1 - on].into()].into(),
        };
        let listed = [PORT, OTHER_PORT].map(|port| ("192.0.2.0/24".parse().expect("one"), port));
        let rules = RuleSet {
            classes: vec![Class {
                number: CLASS,
                internet: false,
                networks: listed.to_vec(),
                groups: vec![GROUP.to_owned()],
            }],
            fabric: Some(FabricRules {
                pool: pool().networks().collect(),
                vxlan: Some((HOSTS[on], PORT).into()),
            }),
            ..RuleSet::default()
        };
        self.nodes[on].host.wait(move || async move {
            let mut keeper = RulesKeeper::check(INSTANCE, &rules)
                .await
                .expect("accepted");
            keeper.fill_with(watch::Sender::new(Arc::new(elements)).subscribe());
            keeper.apply().await.expect("applied");
        });
    }

    /// Whether what the first node's host, or its session, sends inside a VXLAN packet to `address` arrives at `target`.
    fn arrives(
        &self,
        by_session: bool,
        address: Ipv4Addr,
        [from, to]: [Ipv4Addr; 2],
        target: &UdpSocket,
    ) -> bool {
        let macs = [0, 1].map(|node| self.nodes[node].part.underlay.mac);
        let packet = encapsulated(macs, from, to);
        self.sends(by_session, (address, PORT), &packet, target)
    }

    fn sends(
        &self,
        by_session: bool,
        to: (Ipv4Addr, u16),
        packet: &[u8],
        target: &UdpSocket,
    ) -> bool {
        let sender = match by_session {
            true => &self.nodes[0].session,
            false => &self.nodes[0].host,
        };
        let packet = packet.to_vec();
        sender.run(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("bound");
            // Whether it arrived is seen at the target.
            let _ = socket.send_to(&packet, to);
        });
        target.set_read_timeout(Some(PATIENCE)).expect("set");
        target.recv_from(&mut [0; 1_500]).is_ok()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_cannot_send_the_fabrics_own_packets() {
    let world = World::new().await;
    // As if it were another session of its node.
    let forged = Ipv4Addr::new(10, 96, 1, 77);
    let target = world.nodes[1].addresses.v4;
    let forges = |address| world.arrives(true, address, [forged, target], &world.session);
    let addresses = [HOSTS[1], UNPUBLISHED];
    for address in addresses {
        let arrives = (0..ATTEMPTS).any(|_| forges(address));
        assert!(arrives, "without rules it arrives by {address}");
    }
    world.apply_rules(0);
    for address in addresses {
        assert!(!forges(address), "by {address}");
    }
    let other = world.nodes[1]
        .host
        .run(|| UdpSocket::bind((HOSTS[1], OTHER_PORT)));
    let other = other.expect("bound");
    let sends = || world.sends(true, (HOSTS[1], OTHER_PORT), b"x", &other);
    assert!((0..ATTEMPTS).any(|_| sends()), "what its list allows");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_arrives_by_vxlan_is_between_sessions() {
    let world = World::new().await;
    let (session, other) = (world.nodes[1].addresses.v4, world.nodes[0].addresses.v4);
    let sends = |address, inner, target| world.arrives(false, address, inner, target);
    let to_session = || sends(HOSTS[1], [other, session], &world.session);
    let to_service = || sends(HOSTS[1], [other, HOSTS[1]], &world.service);
    assert!(
        (0..ATTEMPTS).any(|_| to_service()),
        "without rules it arrives"
    );
    world.apply_rules(1);
    assert!((0..ATTEMPTS).any(|_| to_session()), "between sessions");
    assert!(!to_service(), "a node's own address");
    let from_outside = Ipv4Addr::new(198, 51, 100, 7);
    assert!(!sends(HOSTS[1], [from_outside, session], &world.session));
    assert!(
        !sends(UNPUBLISHED, [other, session], &world.session),
        "to another address of the node"
    );
}
