//! The host's rules for an instance's links, as text for `nft`.
//!
//! They are constant: nothing is written when a session starts or ends. A session's packets are known by
//! the group of its link, and the class in the group selects what they may reach.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::fabric_rules::FabricText;
use crate::link_identity::{GROUP_MASK, LinkIdentity};

/// What the rules say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RuleSet {
    pub classes: Vec<Class>,
    /// Name servers that every session may ask.
    pub dns: Vec<IpAddr>,
    /// Networks that are not public, such as cloud metadata: reached only if a class lists them, or a part
    /// of them.
    pub special: Vec<IpNet>,
    /// Treated as public although they are special or the host's.
    pub allowed: Vec<IpNet>,
    pub fabric: Option<FabricRules>,
}

/// What sessions may do in a fabric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FabricRules {
    pub pool: Vec<IpNet>,
    /// The address and the port to which other nodes send VXLAN packets.
    pub vxlan: Option<SocketAddr>,
}

/// The sets that change while nodes come and go.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricElements {
    /// From which hardware address packets of which part arrive.
    pub origins: BTreeSet<([u8; 6], IpNet)>,
    /// The parts of each group in which sessions of this node can be, on all nodes.
    pub groups: BTreeMap<String, BTreeSet<IpNet>>,
    /// The addresses of the other nodes.
    pub nodes: BTreeSet<IpAddr>,
}

/// What the sessions of one template may reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// Greater than 0, and different for each class.
    pub number: u16,
    /// Every public address.
    pub internet: bool,
    /// A network, with one port.
    pub networks: Vec<(IpNet, u16)>,
    /// Those in which its sessions are.
    pub groups: Vec<String>,
}

/// Connections and flows of datagrams of one link that the host tracks at a time. Its table for all, of 262,144
/// by default, would otherwise be filled by one session, and the packets of all others dropped.
pub const MAX_FLOWS: u32 = 4_096;

impl RuleSet {
    /// Name of the instance's table, in the family `inet`.
    pub fn table(instance: &str) -> String {
        format!("conman_{instance}")
    }

    /// A script that replaces the table as one transaction. There are sets for the groups of `elements`, and they are
    /// empty.
    pub fn script(&self, instance: &str, elements: &FabricElements) -> String {
        let identity = LinkIdentity::new(instance);
        let table = Self::table(instance);
        let ours = |direction: &str, operator: &str| {
            let group = identity.group(0);
            format!("meta {direction}group & {GROUP_MASK:#x} {operator} {group:#x}")
        };
        let groups = self.groups(elements);
        let fabric = self
            .fabric
            .as_ref()
            .map(|fabric| FabricText::new(fabric, &groups, &ours("iif", "!="), &identity));
        let fabric = fabric.unwrap_or_default();
        let mut text = format!("table inet {table}\ndelete table inet {table}\n");
        let _ = write!(
            text,
            "table inet {table} {{\n{sets}\
             \x20 set flows {{ type iface_index; size 65535; flags dynamic; }}\n{classes}\
             \x20 chain egress {{\n\
             \x20   ct state new add @flows {{ iif ct count over {MAX_FLOWS} }} reject with icmpx admin-prohibited\n\
             \x20   meta l4proto {{ tcp, udp }} th dport 53 ip daddr @dns4 accept\n\
             \x20   meta l4proto {{ tcp, udp }} th dport 53 ip6 daddr @dns6 accept\n\
             {talk}\
             \x20   meta iifgroup vmap {{ {jumps} }}\n\
             \x20   reject with icmpx admin-prohibited\n\
             \x20 }}\n\
             \x20 chain prerouting {{\n\
             \x20   type filter hook prerouting priority raw; policy accept;\n\
             \x20   {from_ours} fib saddr . iif oif missing drop\n{origins}\
             \x20 }}\n\
             \x20 chain input {{\n\
             \x20   type filter hook input priority filter - 10; policy accept;\n\
             \x20   {not_from_ours} accept\n\
             \x20   ct state established,related accept\n\
             \x20   goto egress\n\
             \x20 }}\n\
             \x20 chain forward {{\n\
             \x20   type filter hook forward priority filter - 10; policy accept;\n\
             \x20   {not_from_ours} {not_to_ours} accept\n\
             \x20   ct state established,related accept\n\
             \x20   {from_ours} goto egress\n\
             {talk}\
             \x20   drop\n\
             \x20 }}\n\
             \x20 chain postrouting {{\n\
             \x20   type nat hook postrouting priority srcnat; policy accept;\n{unmasked}\
             \x20   {from_ours} {not_to_ours} masquerade\n\
             \x20 }}\n}}\n",
            sets = self.sets() + &fabric.sets,
            classes = self.class_chains(&ours("oif", "==")) + &fabric.chains,
            talk = fabric.talk,
            origins = fabric.origins,
            unmasked = fabric.unmasked,
            jumps = self.jumps(&identity),
            from_ours = ours("iif", "=="),
            not_from_ours = ours("iif", "!="),
            not_to_ours = ours("oif", "!="),
        );
        text
    }

    /// The groups of this node's sessions: those with one in common may talk. A running session may have one that no
    /// class has any more.
    pub(crate) fn groups<'a>(&'a self, elements: &'a FabricElements) -> BTreeSet<&'a str> {
        let groups = self.classes.iter().flat_map(|class| &class.groups);
        groups
            .chain(elements.groups.keys())
            .map(String::as_str)
            .collect()
    }

    fn sets(&self) -> String {
        let dns: Vec<IpNet> = self
            .dns
            .iter()
            .map(|address| IpNet::from(*address))
            .collect();
        let mut text = String::new();
        for (name, networks) in [("dns", &dns), ("special", &self.special)] {
            for (family, kind, v4) in [("4", "ipv4_addr", true), ("6", "ipv6_addr", false)] {
                let of_family = networks
                    .iter()
                    .filter(|network| network.addr().is_ipv4() == v4);
                let elements = joined(of_family);
                let elements = match elements.is_empty() {
                    true => String::new(),
                    false => format!(" elements = {{ {elements} }};"),
                };
                let _ = writeln!(
                    text,
                    "  set {name}{family} {{ type {kind}; flags interval; auto-merge;{elements} }}"
                );
            }
        }
        text
    }

    fn class_chains(&self, to_ours: &str) -> String {
        let mut text = String::new();
        for class in &self.classes {
            let _ = writeln!(text, "  chain class_{} {{", class.number);
            for (network, port) in &class.networks {
                let _ = writeln!(text, "    {}", self.network_rule(network, Some(*port)));
            }
            if class.internet {
                for network in &self.allowed {
                    let _ = writeln!(text, "    {}", self.network_rule(network, None));
                }
                // Whatever is special, the host's or another session's is refused after the return.
                let _ = write!(
                    text,
                    "    ip daddr @special4 return\n    ip6 daddr @special6 return\n\
                     \x20   fib daddr type != unicast return\n    {to_ours} return\n    accept\n"
                );
            }
            text.push_str("  }\n");
        }
        text
    }

    /// Accepts a network, without what is special for itself inside, and without the host's addresses unless
    /// it is one of them.
    fn network_rule(&self, network: &IpNet, port: Option<u16>) -> String {
        let family = if network.addr().is_ipv4() {
            "ip"
        } else {
            "ip6"
        };
        let within = |special: &&IpNet| network.contains(*special) && network != *special;
        let special = joined(self.special.iter().filter(within));
        let mut rule = format!("{family} daddr {network}");
        if let Some(port) = port {
            let _ = write!(rule, " meta l4proto {{ tcp, udp }} th dport {port}");
        }
        if !special.is_empty() {
            let _ = write!(rule, " {family} daddr != {{ {special} }}");
        }
        if network.prefix_len() < network.max_prefix_len() {
            rule.push_str(" fib daddr type unicast");
        }
        rule + " accept"
    }

    fn jumps(&self, identity: &LinkIdentity) -> String {
        let jumps = self.classes.iter().map(|class| {
            let number = class.number;
            format!("{:#x} : jump class_{number}", identity.group(number))
        });
        // A map must not be empty; no link has this group.
        let nothing = format!("{:#x} : return", identity.sweep_group());
        jumps.chain([nothing]).collect::<Vec<_>>().join(", ")
    }
}

pub(crate) fn joined<'a>(networks: impl Iterator<Item = &'a IpNet>) -> String {
    networks
        .map(IpNet::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_no_class_has_any_more_is_one_of_the_sessions_that_run() {
        let rules = RuleSet {
            classes: vec![Class {
                number: 1,
                internet: false,
                networks: Vec::new(),
                groups: vec!["new".to_owned()],
            }],
            fabric: Some(FabricRules::default()),
            ..RuleSet::default()
        };
        let part: IpNet = "10.96.1.0/24".parse().expect("a network");
        let elements = FabricElements {
            groups: [("old".to_owned(), [part].into())].into(),
            ..FabricElements::default()
        };
        let script = rules.script("0a1b2c3d", &elements);
        for group in ["group0_4", "group1_4"] {
            let rule = format!("ip saddr @{group} ip daddr @{group} accept");
            assert!(script.contains(&rule), "{script}");
        }
        let filled = rules.fill("0a1b2c3d", &elements);
        let element = "add element inet conman_0a1b2c3d group1_4 { 10.96.1.0/24 }";
        assert!(filled.contains(element), "{filled}");
    }
}
