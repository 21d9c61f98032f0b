//! Rules inside a session's network namespace: what it is refused through whichever interface it gets.
//!
//! The session cannot change them: it has no CAP_NET_ADMIN there. They are constant: compiled once, and put
//! into each namespace before it has an interface that leads outside. So they hold for interfaces that are
//! attached later and pass the host by, and while somebody has flushed the host's rules.
//!
//! They track no connections, since the kernel would walk all of them for each namespace that dies. Replies to TCP
//! connections that were begun outside pass. The one state is which neighbours were used lately, which bounds
//! their number.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use tokio::sync::Mutex;

use crate::host_netlink::HostNetlink;
use crate::namespace_thread::on_thread;
use crate::nft_batch::{self, NftBatch};
use crate::rule_set::{Class, joined};
use crate::rules_keeper::RulesError;

/// Link-local addresses, metadata services of clouds elsewhere, and the forms of these in IPv6.
const REFUSED: &[&str] = &[
    "169.254.0.0/16",
    "100.100.100.200/32",
    "168.63.129.16/32",
    "192.0.0.192/32",
    "::ffff:0:0/96",
    "64:ff9b::a9fe:0/112",
    "2002:a9fe::/32",
    "fd00:c1::a9fe:a9fe/128",
    "fd00:ec2::254/128",
    "fd20:ce::254/128",
    "fe80::/10",
];

/// Entries that a session's links may take of each neighbour table, which the host and all sessions share. Packets to
/// further neighbours are dropped until earlier ones were not used for `NEIGHBOUR_MINUTES`.
pub const MAX_NEIGHBOURS: u64 = 128;
/// Those of a session with the network `routed`: its gateway, and itself in the host's namespace.
pub const ROUTED_NEIGHBOURS: u64 = 4;
/// Longer than the kernel keeps an entry that is not used.
const NEIGHBOUR_MINUTES: u32 = 2;

/// What every session is refused, besides metadata and the host's addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Other sessions, etcd.
    pub networks: Vec<IpNet>,
    /// Exceptions, which an operator has listed: networks within one that is refused.
    pub allowed: Vec<IpNet>,
    /// Name servers, which answer even at a refused address.
    pub dns: Vec<IpAddr>,
}

/// The rules of all classes. They are compiled when the first session needs them, and refuse the addresses that
/// the host has then.
#[derive(Debug, Default)]
pub struct SessionRules {
    netlink: HostNetlink,
    refusals: Refusals,
    /// What a class lists is an exception for its sessions.
    listed: BTreeMap<u16, Vec<IpNet>>,
    /// By what they allow: most classes allow the same.
    compiled: Mutex<BTreeMap<Vec<IpNet>, Arc<NftBatch>>>,
}

impl SessionRules {
    /// Sessions of classes with groups may send to all of `fabric`; with which of it they may talk, the host's rules
    /// say.
    pub fn new(
        netlink: HostNetlink,
        refusals: Refusals,
        classes: &[Class],
        fabric: &[IpNet],
    ) -> Self {
        let listed = |class: &Class| {
            let networks = class.networks.iter().map(|(network, _)| *network);
            let fabric = fabric.iter().filter(|_| !class.groups.is_empty()).copied();
            (class.number, networks.chain(fabric).collect())
        };
        Self {
            netlink,
            refusals,
            listed: classes.iter().map(listed).collect(),
            compiled: Mutex::default(),
        }
    }

    /// Compiles the rules of all classes. Fails if this host cannot have them.
    pub async fn check(&self) -> Result<(), RulesError> {
        for class in self.listed.keys().chain([&0]) {
            self.batch(*class).await?;
        }
        Ok(())
    }

    /// Puts the rules of a class into a network namespace, completely or not at all. If it has rules of conman
    /// already, they stay. An unknown class lists nothing.
    pub async fn apply(&self, class: u16, namespace: OwnedFd) -> Result<(), RulesError> {
        let batch = self.batch(class).await?;
        let applied = on_thread(move || batch.apply(namespace.as_fd())).await;
        applied.flatten().map_err(RulesError::Namespace)
    }

    async fn batch(&self, class: u16) -> Result<Arc<NftBatch>, RulesError> {
        let listed = self.listed.get(&class).into_iter().flatten();
        let allowed: Vec<IpNet> = listed.chain(&self.refusals.allowed).copied().collect();
        let mut compiled = self.compiled.lock().await;
        if let Some(batch) = compiled.get(&allowed) {
            return Ok(Arc::clone(batch));
        }
        let host = host_addresses(&self.netlink)
            .await
            .map_err(RulesError::Namespace)?;
        let refused = refused(&self.refusals.networks, &host, &allowed);
        let script = script(&refused, &self.refusals.dns);
        let batch = on_thread(move || nft_batch::compile(&script)).await;
        let batch = Arc::new(batch.map_err(RulesError::Namespace)??);
        compiled.insert(allowed, Arc::clone(&batch));
        Ok(batch)
    }
}

fn refused(more: &[IpNet], host: &[IpNet], allowed: &[IpNet]) -> Vec<IpNet> {
    let always = REFUSED.iter().filter_map(|text| text.parse().ok());
    let mut refused = Vec::new();
    for network in always.chain(more.iter().chain(host).copied()) {
        without(network, allowed, &mut refused);
    }
    IpNet::aggregate(&refused)
}

/// Adds the parts of a network that are in no network of `allowed` within it. A wider one allows nothing: it
/// was not listed for this network's sake.
fn without(network: IpNet, allowed: &[IpNet], parts: &mut Vec<IpNet>) {
    if allowed.contains(&network) {
        return;
    }
    if !allowed.iter().any(|within| network.contains(within)) {
        return parts.push(network);
    }
    let halves = network.subnets(network.prefix_len() + 1);
    for half in halves.into_iter().flatten() {
        without(half, allowed, parts);
    }
}

/// Named sets only: those without a name cannot be created from a list.
fn script(refused: &[IpNet], dns: &[IpAddr]) -> String {
    let mut text = format!("table inet {} {{\n", nft_batch::TABLE);
    for (name, kind, v4) in [
        ("refused4", "ipv4_addr", true),
        ("refused6", "ipv6_addr", false),
    ] {
        let networks = joined(refused.iter().filter(|net| net.addr().is_ipv4() == v4));
        let _ = writeln!(
            text,
            "  set {name} {{ type {kind}; flags interval; elements = {{ {networks} }}; }}"
        );
    }
    // The next hop of a packet is what the kernel makes an entry of its neighbour table for.
    // Of IPv6 it makes a second one for the multicast group by which it looks for the neighbour.
    for (name, kind, size) in [
        ("hops4", "ipv4_addr", MAX_NEIGHBOURS),
        ("hops6", "ipv6_addr", MAX_NEIGHBOURS / 2),
    ] {
        let _ = writeln!(
            text,
            "  set {name} {{ type {kind}; size {size}; flags dynamic,timeout; \
             timeout {NEIGHBOUR_MINUTES}m; gc-interval {NEIGHBOUR_MINUTES}m; }}"
        );
    }
    // Neighbour discovery and memberships of multicast groups. Advertisements of routers are not among them.
    text.push_str(
        "  set neighbours { type icmpv6_type; elements = { 131, 132, 133, 135, 136, 143 }; }
  chain output {
    type filter hook output priority filter; policy accept;
    oif lo accept
    icmpv6 type @neighbours accept
    fib saddr type != local drop
    fib daddr type broadcast drop
    fib daddr type multicast drop
    meta nfproto ipv4 update @hops4 { rt ip nexthop } goto to_neighbour
    meta nfproto ipv6 update @hops6 { rt ip6 nexthop } goto to_neighbour
    drop
  }
  chain to_neighbour {
    tcp flags & (syn | ack) != syn accept
",
    );
    for server in dns {
        let family = if server.is_ipv4() { "ip" } else { "ip6" };
        let within = |network: &IpNet| network.contains(server);
        if refused.iter().any(within) {
            let _ = writeln!(
                text,
                "    {family} daddr {server} meta l4proto udp th dport 53 accept\n\
                 \x20   {family} daddr {server} meta l4proto tcp th dport 53 accept"
            );
        }
    }
    text + "    ip daddr @refused4 reject with icmpx admin-prohibited
    ip6 daddr @refused6 reject with icmpx admin-prohibited
  }
  chain forward {
    type filter hook forward priority filter; policy drop;
  }
}
"
}

/// The addresses of all interfaces of the host.
async fn host_addresses(netlink: &HostNetlink) -> io::Result<Vec<IpNet>> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let found = netlink.dump(request).await?;
    let attributes = found.into_iter().flat_map(|message| match message {
        RouteNetlinkMessage::NewAddress(address) => address.attributes,
        _ => Vec::new(),
    });
    // With a peer, the other one is the peer's.
    let addresses = attributes.filter_map(|attribute| match attribute {
        AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(address),
        _ => None,
    });
    let addresses = addresses.filter(|address| !address.is_loopback());
    Ok(addresses.map(IpNet::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        let parsed = texts.iter().map(|text| text.parse().expect("a network"));
        parsed.collect()
    }

    #[test]
    fn only_what_is_listed_within_a_refused_network_is_allowed() {
        let allowed = nets(&["10.88.0.1/32", "10.0.0.0/8", "fd00:ec2::254/128"]);
        let refused = refused(&nets(&["10.88.0.0/30"]), &nets(&["10.2.0.1/32"]), &allowed);
        for network in nets(&["10.88.0.0/32", "10.88.0.2/31", "10.2.0.1/32", "fe80::/10"]) {
            assert!(refused.contains(&network), "{network}: {refused:?}");
        }
        for address in nets(&["10.88.0.1/32", "10.1.0.1/32", "fd00:ec2::254/128"]) {
            let refuses = |network: &IpNet| network.contains(&address);
            assert!(!refused.iter().any(refuses), "{address}: {refused:?}");
        }
    }
}
