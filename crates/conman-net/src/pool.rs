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
            ([v4], [v6]) => Ok(Self {
                v4: *v4,
                v6: Some(*v6),
            }),
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
    networks: PoolNetworks,
    /// By address: the owner.
    taken: BTreeMap<Ipv4Addr, String>,
    /// By index of the link.
    leaving: BTreeMap<u32, Ipv4Addr>,
    /// Where the next search begins: an address is reused as late as possible.
    next: u32,
}

impl AddressPool {
    /// A pool with every address free.
    pub fn new(networks: PoolNetworks) -> Self {
        Self {
            networks,
            taken: BTreeMap::new(),
            leaving: BTreeMap::new(),
            next: *networks.offsets().start(),
        }
    }

    /// The pool's networks.
    pub fn networks(&self) -> PoolNetworks {
        self.networks
    }

    /// Takes free addresses for an owner.
    pub fn take(&mut self, owner: &str) -> Result<Addresses, PoolExhausted> {
        let all = self.networks.offsets();
        let from_next = (self.next..=*all.end()).chain(*all.start()..self.next);
        // At most one step for each address in use, and one more.
        for offset in from_next {
            let addresses = self.networks.nth(offset);
            if !self.taken.contains_key(&addresses.v4)
                && !self.leaving.contains_key(&link_index(addresses.v4))
            {
                self.next = if offset == *all.end() {
                    *all.start()
                } else {
                    offset + 1
                };
                self.taken.insert(addresses.v4, owner.to_owned());
                return Ok(addresses);
            }
        }
        Err(PoolExhausted {
            network: self.networks.v4,
            taken: self.taken.len(),
            leaving: self.leaving.len(),
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(texts: &[&str]) -> AddressPool {
        AddressPool::new(PoolNetworks::parse(texts).expect("a pool"))
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
