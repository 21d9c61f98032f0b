//! The part of the host's rules that is about a fabric.
//!
//! The rules are constant. Who is in a group follows from the addresses: a node takes those of sessions with other
//! groups from other parts of the pool. So the sets change when a node joins, leaves or needs another part, and both
//! ends of a connection check the same, without knowledge of the sessions of other nodes. A part's packets are
//! recognised by the hardware address of the node from which they arrive.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::link_identity::{LinkIdentity, mac_text};
use crate::rule_set::{FabricElements, FabricRules, RuleSet, joined};

/// The families of addresses, as sets and rules name them.
const FAMILIES: [(&str, &str, &str); 2] = [("4", "ip", "ipv4_addr"), ("6", "ip6", "ipv6_addr")];

/// Pieces of the script that creates the table.
#[derive(Debug, Default)]
pub(crate) struct FabricText {
    pub(crate) sets: String,
    pub(crate) chains: String,
    /// Accepts what sessions of one group send to each other.
    pub(crate) talk: &'static str,
    /// Drops what arrives from a node that does not hold the sender's part, or is not between sessions, and VXLAN
    /// packets that are not from another node to this one: sessions could forge any sender in them.
    pub(crate) origins: String,
    /// Keeps the senders' addresses.
    pub(crate) unmasked: String,
}

impl FabricText {
    /// `not_from_ours` matches packets of no session of this host.
    pub(crate) fn new(
        rules: &FabricRules,
        groups: &BTreeSet<&str>,
        not_from_ours: &str,
        identity: &LinkIdentity,
    ) -> Self {
        let device = identity.fabric_device();
        let mut text = Self {
            talk: "    jump talk\n",
            chains: "  chain talk {\n".to_owned(),
            ..Self::default()
        };
        for (family, ip, kind) in FAMILIES {
            let of_family = rules.pool.iter().filter(|net| name_of(net) == family);
            let pool = joined(of_family);
            let elements = match pool.is_empty() {
                true => String::new(),
                false => format!(" elements = {{ {pool} }};"),
            };
            let _ = write!(
                text.sets,
                "  set fabric{family} {{ type {kind}; flags interval;{elements} }}\n\
                 \x20 set origins{family} {{ type ether_addr . {kind}; flags interval; }}\n\
                 \x20 set nodes{family} {{ type {kind}; }}\n"
            );
            for (number, _) in groups.iter().enumerate() {
                let set = group_set(number, family);
                let _ = writeln!(text.sets, "  set {set} {{ type {kind}; flags interval; }}");
                let _ = writeln!(
                    text.chains,
                    "    {ip} saddr @{set} {ip} daddr @{set} accept"
                );
            }
            let _ = write!(
                text.origins,
                "    {not_from_ours} iiftype != ether {ip} saddr @fabric{family} drop\n\
                 \x20   {not_from_ours} {ip} saddr @fabric{family} ether saddr . {ip} saddr != @origins{family} drop\n"
            );
            if rules.vxlan.is_some() {
                // A node reports errors by its own address.
                let _ = write!(
                    text.origins,
                    "    iifname \"{device}\" {ip} daddr != @fabric{family} drop\n\
                     \x20   iifname \"{device}\" {ip} saddr != @fabric{family} {ip} saddr != @nodes{family} drop\n"
                );
            }
            let _ = writeln!(text.unmasked, "    {ip} daddr @fabric{family} accept");
        }
        text.chains.push_str("  }\n");
        if let Some(address) = rules.vxlan {
            text.origins.push_str(&vxlan_origins(address));
        }
        text
    }
}

/// The kernel decapsulates what arrives at any of the host's addresses, and masquerading hides that a session has sent a
/// packet. So neither may another address receive these packets, nor may this host forward any, whatever the
/// destination. To be the last rules, because the first one accepts.
fn vxlan_origins(own: SocketAddr) -> String {
    let (family, ip) = match own {
        SocketAddr::V4(_) => ("4", "ip"),
        SocketAddr::V6(_) => ("6", "ip6"),
    };
    let (address, port) = (own.ip(), own.port());
    format!(
        "    {ip} saddr @nodes{family} {ip} daddr {address} udp dport {port} accept\n\
         \x20   udp dport {port} drop\n"
    )
}

fn name_of(network: &IpNet) -> &'static str {
    match network {
        IpNet::V4(_) => "4",
        IpNet::V6(_) => "6",
    }
}

fn group_set(number: usize, family: &str) -> String {
    format!("group{number}_{family}")
}

impl RuleSet {
    /// A script that makes the fabric's sets have exactly these elements, as one transaction.
    pub(crate) fn fill(&self, instance: &str, elements: &FabricElements) -> String {
        if self.fabric.is_none() {
            return String::new();
        }
        let groups = self.groups(elements);
        let table = Self::table(instance);
        let mut text = String::new();
        let mut fill = |set: &str, elements: Vec<String>| {
            let _ = writeln!(text, "flush set inet {table} {set}");
            if !elements.is_empty() {
                let elements = elements.join(", ");
                let _ = writeln!(text, "add element inet {table} {set} {{ {elements} }}");
            }
        };
        for (family, ..) in FAMILIES {
            let origins = elements.origins.iter();
            let origins = origins.filter(|(_, network)| name_of(network) == family);
            let origins = origins.map(|(mac, network)| format!("{} . {network}", mac_text(*mac)));
            fill(&format!("origins{family}"), origins.collect());
            let nodes = elements.nodes.iter().copied();
            let nodes = nodes.filter(|node| name_of(&IpNet::from(*node)) == family);
            fill(
                &format!("nodes{family}"),
                nodes.map(|node: IpAddr| node.to_string()).collect(),
            );
            for (number, group) in groups.iter().enumerate() {
                let networks = elements.groups.get(*group).into_iter().flatten();
                let networks = networks.filter(|network| name_of(network) == family);
                let set = group_set(number, family);
                fill(&set, networks.map(IpNet::to_string).collect());
            }
        }
        text
    }
}
