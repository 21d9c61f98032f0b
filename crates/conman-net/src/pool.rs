//! The pool of addresses that links get.
//!
//! No I/O and no clock. An address is free, taken, or *leaving*: its owner has ended, and its link may
//! still exist. Only [`AddressPool::link_is_gone`] makes a leaving address free.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use crate::link_identity::link_index;

/// The networks of a pool: one of IPv4, and optionally one of IPv6 with at least as many addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolNetworks {
    v4: Ipv4Net,
    v6: Option<Ipv6Net>,
}

/// Why a text is not a pool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error("`{text}` is not a network such as 10.88.0.0/16 or fd00:88::/64")]
    NotANetwork { text: String },
    #[error("`{network}` has bits set beyond its prefix; write {correct}")]
    HostBits { network: String, correct: String },
    #[error("a pool has one IPv4 network and at most one of IPv6")]
    Families,
    #[error("`{network}` has a prefix that is not within /8 to /30 (IPv4) or /16 to /112 (IPv6)")]
    Size { network: String },
    #[error("`{v6}` has fewer addresses than `{v4}`; its prefix must be /{most} or shorter")]
    FewerAddresses { v4: Ipv4Net, v6: Ipv6Net, most: u8 },
}

impl PoolNetworks {
    /// Parses networks such as `10.88.0.0/16` and `fd00:88::/64`.
    pub fn parse<T: AsRef<str>>(texts: &[T]) -> Result<Self, PoolError> {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for text in texts {
            let text: &str = text.as_ref();
            let network: IpNet = text.parse().map_err(|_| PoolError::NotANetwork {
                text: text.to_owned(),
            })?;
            if network != network.trunc() {
                return Err(PoolError::HostBits {
                    network: network.to_string(),
                    correct: network.trunc().to_string(),
                });
            }
            let sizes = match network {
                IpNet::V4(_) => 8..=30,
                IpNet::V6(_) => 16..=112,
            };
            if !sizes.contains(&network.prefix_len()) {
                return Err(PoolError::Size {
                    network: network.to_string(),
                });
            }
            match network {
                IpNet::V4(network) => v4.push(network),
                IpNet::V6(network) => v6.push(network),
            }
        }
        match (&v4[..], &v6[..]) {
            ([v4], []) => Ok(Self { v4: *v4, v6: None }),
            ([v4], [v6]) => {
                let most = 96 + v4.prefix_len();
                if v6.prefix_len() > most {
                    let (v4, v6) = (*v4, *v6);
                    return Err(PoolError::FewerAddresses { v4, v6, most });
                }
                Ok(Self {
                    v4: *v4,
                    v6: Some(*v6),
                })
            }
            _ => Err(PoolError::Families),
        }
    }

    /// The IPv4 network.
    pub fn v4(&self) -> Ipv4Net {
        self.v4
    }

    /// The IPv6 network, if the pool has one.
    pub fn v6(&self) -> Option<Ipv6Net> {
        self.v6
    }

    /// Number of parts whose IPv4 network has this prefix length.
    pub fn parts(&self, prefix: u8) -> u32 {
        let bits = u32::from(prefix.saturating_sub(self.v4.prefix_len()));
        1_u32.checked_shl(bits).unwrap_or(0)
    }

    /// The part with this number. Its networks have as many addresses of each family.
    pub fn part(&self, number: u32, prefix: u8) -> Self {
        let prefix = prefix.min(32);
        let first = number.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let first = self.nth(first);
        Self {
            v4: Ipv4Net::new_assert(first.v4, prefix),
            v6: first.v6.map(|v6| Ipv6Net::new_assert(v6, 96 + prefix)),
        }
    }

    /// Its networks.
    pub fn networks(&self) -> impl Iterator<Item = IpNet> + use<> {
        [Some(IpNet::V4(self.v4)), self.v6.map(IpNet::V6)]
            .into_iter()
            .flatten()
    }

    /// The addresses with this number in the networks.
    fn nth(&self, offset: u32) -> Addresses {
        let v6 = self.v6.map(|network| {
            let bits = network.network().to_bits() | u128::from(offset);
            Ipv6Addr::from_bits(bits)
        });
        Addresses {
            v4: Ipv4Addr::from_bits(self.v4.network().to_bits() | offset),
            v6,
        }
    }

    /// The numbers of usable addresses: neither the network's nor the broadcast address.
    fn offsets(&self) -> std::ops::RangeInclusive<u32> {
        1..=(u32::MAX >> self.v4.prefix_len()) - 1
    }
}

/// The addresses of one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Addresses {
    pub v4: Ipv4Addr,
    pub v6: Option<Ipv6Addr>,
}

impl fmt::Display for Addresses {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.v6 {
            Some(v6) => write!(formatter, "{} and {v6}", self.v4),
            None => write!(formatter, "{}", self.v4),
        }
    }
}

/// No address is free.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the address pool {network} is exhausted: {taken} addresses are in use and {leaving} wait for the \
     end of their links. Use a larger network for `net.pool`"
)]
pub struct PoolExhausted {
    pub network: Ipv4Net,
    pub taken: usize,
    pub leaving: usize,
}

/// Which addresses are in use.
#[derive(Debug)]
pub struct AddressPool {
    own: Range,
    /// Parts of the fabric's pool that this node holds, by number.
    parts: BTreeMap<u32, Part>,
    /// By address: the owner.
    taken: BTreeMap<Ipv4Addr, String>,
    /// By index of the link.
    leaving: BTreeMap<u32, Ipv4Addr>,
}

/// Addresses that owners may get.
#[derive(Debug)]
struct Range {
    networks: PoolNetworks,
    /// Where the next search begins: an address is reused as late as possible.
    next: u32,
}

#[derive(Debug)]
struct Part {
    range: Range,
    groups: Vec<String>,
}

impl Range {
    fn new(networks: PoolNetworks) -> Self {
        Self {
            networks,
            next: *networks.offsets().start(),
        }
    }

    /// The number of the next address that is not in use.
    fn find(&self, is_used: impl Fn(Ipv4Addr) -> bool) -> Option<u32> {
        let all = self.networks.offsets();
        let mut from_next = (self.next..=*all.end()).chain(*all.start()..self.next);
        // At most one step for each address in use, and one more.
        from_next.find(|offset| !is_used(self.networks.nth(*offset).v4))
    }

    fn take(&mut self, is_used: impl Fn(Ipv4Addr) -> bool) -> Option<Addresses> {
        let offset = self.find(is_used)?;
        let all = self.networks.offsets();
        self.next = if offset == *all.end() {
            *all.start()
        } else {
            offset + 1
        };
        Some(self.networks.nth(offset))
    }
}

impl AddressPool {
    /// A pool with every address free.
    pub fn new(networks: PoolNetworks) -> Self {
        Self {
            own: Range::new(networks),
            parts: BTreeMap::new(),
            taken: BTreeMap::new(),
            leaving: BTreeMap::new(),
        }
    }

    /// The pool's networks.
    pub fn networks(&self) -> PoolNetworks {
        self.own.networks
    }

    /// Takes free addresses for an owner.
    pub fn take(&mut self, owner: &str) -> Result<Addresses, PoolExhausted> {
        let (taken, leaving) = (&self.taken, &self.leaving);
        let found = self.own.take(|v4| is_used(taken, leaving, v4));
        let exhausted = PoolExhausted {
            network: self.own.networks.v4,
            taken: self.taken.len(),
            leaving: self.leaving.len(),
        };
        let addresses = found.ok_or(exhausted)?;
        self.taken.insert(addresses.v4, owner.to_owned());
        Ok(addresses)
    }

    /// Takes free addresses of a part whose sessions are in exactly these groups; `None` if no part has any.
    pub fn take_in(&mut self, owner: &str, groups: &[String]) -> Option<Addresses> {
        let (taken, leaving) = (&self.taken, &self.leaving);
        let mut parts = self.parts.values_mut().filter(|part| part.groups == groups);
        let addresses = parts.find_map(|part| part.range.take(|v4| is_used(taken, leaving, v4)))?;
        self.taken.insert(addresses.v4, owner.to_owned());
        Some(addresses)
    }

    /// Whether a part of these groups has a free address.
    pub fn has_room(&self, groups: &[String]) -> bool {
        let mut parts = self.parts.values().filter(|part| part.groups == groups);
        parts.any(|part| {
            part.range
                .find(|v4| is_used(&self.taken, &self.leaving, v4))
                .is_some()
        })
    }

    /// Sets the parts that this node holds, with their groups. Addresses that are in use stay.
    pub fn set_parts(&mut self, parts: impl Iterator<Item = (u32, PoolNetworks, Vec<String>)>) {
        let mut before = std::mem::take(&mut self.parts);
        for (number, networks, groups) in parts {
            let range = before.remove(&number).map(|part| part.range);
            let range = range.unwrap_or_else(|| Range::new(networks));
            self.parts.insert(number, Part { range, groups });
        }
    }

    /// Whether the addresses are not of this node's own pool.
    pub fn is_in_fabric(&self, v4: Ipv4Addr) -> bool {
        !self.own.networks.v4.contains(&v4)
    }

    /// The addresses of an owner that are of a part.
    pub fn in_part(&self, owner: &str) -> Option<Addresses> {
        let mut taken = self.taken.iter();
        let (v4, _) = taken.find(|(v4, of)| *of == owner && self.is_in_fabric(**v4))?;
        let mut parts = self.parts.values().map(|part| part.range.networks);
        let networks = parts.find(|networks| networks.v4.contains(v4))?;
        let offset = v4.to_bits()
            & u32::MAX
                .checked_shr(networks.v4.prefix_len().into())
                .unwrap_or(0);
        Some(networks.nth(offset))
    }

    /// Takes the addresses that an owner already had before this pool was made. They may lie outside the
    /// pool's networks.
    pub fn adopt(&mut self, owner: &str, v4: Ipv4Addr) {
        self.leaving.remove(&link_index(v4));
        self.taken.insert(v4, owner.to_owned());
    }

    /// The owner has ended: its address is free once its link is gone. Returns whether the owner had it.
    pub fn leave(&mut self, owner: &str, v4: Ipv4Addr) -> bool {
        let had = self.taken.get(&v4).is_some_and(|present| present == owner);
        if had {
            self.taken.remove(&v4);
            self.leaving.insert(link_index(v4), v4);
        }
        had
    }

    /// The link with this index does not exist any more.
    pub fn link_is_gone(&mut self, index: u32) {
        self.leaving.remove(&index);
    }

    /// Indexes of links that may exist although their owners have ended.
    pub fn leaving(&self) -> BTreeSet<u32> {
        self.leaving.keys().copied().collect()
    }

    /// Indexes of living owners' links.
    pub fn taken(&self) -> BTreeSet<u32> {
        self.taken.keys().map(|v4| link_index(*v4)).collect()
    }
}

fn is_used(
    taken: &BTreeMap<Ipv4Addr, String>,
    leaving: &BTreeMap<u32, Ipv4Addr>,
    v4: Ipv4Addr,
) -> bool {
    taken.contains_key(&v4) || leaving.contains_key(&link_index(v4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(texts: &[&str]) -> AddressPool {
        AddressPool::new(PoolNetworks::parse(texts).expect("a pool"))
    }

    #[test]
    fn an_ipv6_network_has_an_address_for_each_ipv4_address() {
        let parse = |texts: &[&str]| PoolNetworks::parse(texts);
        assert!(parse(&["10.88.0.0/16", "fd00:88::/112"]).is_ok());
        let fewer = parse(&["10.96.0.0/12", "fd00:96::/112"]).expect_err("too few");
        let text = fewer.to_string();
        assert!(
            text.contains("fd00:96::/112") && text.contains("/108"),
            "{text}"
        );
    }

    #[test]
    fn an_address_is_free_only_once_its_link_is_gone() {
        let mut pool = pool(&["10.88.0.0/30", "fd00:88::/64"]);
        let first = pool.take("a").expect("free");
        assert_eq!(first.to_string(), "10.88.0.1 and fd00:88::1");
        let second = pool.take("b").expect("free");
        assert!(!pool.leave("b", first.v4), "it is another's");
        assert!(pool.leave("a", first.v4));
        let full = pool.take("c").expect_err("its link may exist");
        assert_eq!((full.taken, full.leaving), (1, 1));
        pool.link_is_gone(link_index(first.v4));
        assert_eq!(pool.take("c").expect("free"), first);
        // A link that disappears while its owner lives frees nothing.
        pool.link_is_gone(link_index(second.v4));
        pool.take("d").expect_err("taken");
    }

    #[test]
    fn an_address_is_reused_as_late_as_possible() {
        let mut pool = pool(&["10.88.0.0/29"]);
        let mut last = octet(pool.take("a").expect("free"));
        for _ in 0..10 {
            let v4 = Ipv4Addr::new(10, 88, 0, last);
            assert!(pool.leave("a", v4));
            pool.link_is_gone(link_index(v4));
            let next = octet(pool.take("a").expect("free"));
            assert_eq!(next, last % 6 + 1);
            last = next;
        }
    }

    #[test]
    fn addresses_of_a_part_are_given_to_sessions_of_its_groups_alone() {
        let fabric = PoolNetworks::parse(&["10.96.0.0/16", "fd00:96::/64"]).expect("a pool");
        assert_eq!(fabric.parts(24), 256);
        let networks = fabric.part(3, 24).networks();
        let networks: Vec<String> = networks.map(|network| network.to_string()).collect();
        assert_eq!(networks, ["10.96.3.0/24", "fd00:96::300/120"]);
        let mut pool = pool(&["10.88.0.0/30"]);
        let groups = |name: &str| vec![name.to_owned()];
        pool.set_parts([(3, fabric.part(3, 30), groups("team"))].into_iter());
        assert_eq!(pool.take_in("a", &groups("other")), None);
        let first = pool.take_in("a", &groups("team")).expect("free");
        assert_eq!(first.to_string(), "10.96.0.13 and fd00:96::d");
        pool.take_in("b", &groups("team")).expect("free");
        assert_eq!(pool.take_in("c", &groups("team")), None, "the part is full");
        // A part that is another node's now gives nothing; what is in use stays in use.
        pool.set_parts([].into_iter());
        assert!(pool.leave("a", first.v4) && pool.is_in_fabric(first.v4));
        assert_eq!(pool.take_in("c", &groups("team")), None);
    }

    fn octet(addresses: Addresses) -> u8 {
        addresses.v4.octets()[3]
    }

    #[test]
    fn an_adopted_address_is_not_given_again() {
        let mut pool = pool(&["10.88.0.0/30"]);
        pool.adopt("old", Ipv4Addr::new(10, 88, 0, 1));
        assert_eq!(octet(pool.take("a").expect("free")), 2);
        pool.take("b").expect_err("all taken");
    }

    #[test]
    fn a_text_that_is_no_pool_is_refused_with_its_mistake() {
        let refused = |texts: &[&str]| PoolNetworks::parse(texts).expect_err("refused").to_string();
        assert!(refused(&["10.88.0.1/16"]).contains("write 10.88.0.0/16"));
        assert!(refused(&["ten"]).contains("`ten` is not a network"));
        assert!(refused(&["10.88.0.0/32"]).contains("/8 to /30"));
        assert!(refused(&["fd00::/64"]).contains("one IPv4 network"));
        assert!(refused(&[]).contains("one IPv4 network"));
        assert!(refused(&["10.1.0.0/16", "10.2.0.0/16"]).contains("one IPv4 network"));
    }
}
