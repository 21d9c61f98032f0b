//! Which targets a session may connect to: the patterns of `egress`, and the addresses that none of
//! them reaches unless the operator lists the address.
//!
//! A target is allowed by a name pattern, by `internet`, or by a network. A name pattern and `internet`
//! never reach a *special* address: private, link-local and loopback ranges, cloud metadata, translated
//! forms of IPv4, and the addresses of the host. A network reaches special addresses if the operator
//! evidently means them: a network that is wider than the special range around an address does not.
//! So `10.0.0.0/8` reaches private addresses, but not the host's own one among them, and `0.0.0.0/0`
//! reaches public addresses only.

mod host;
mod pattern;
mod special;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use ipnet::IpNet;

pub use host::{HostError, TargetHost};
pub use pattern::{EgressPattern, EgressPatternError};
pub use special::networks as special_networks;

/// TCP port of the proxy inside a session's network namespace.
pub const EGRESS_PROXY_PORT: u16 = 3128;
/// Port of the resolver inside a session's network namespace.
pub const EGRESS_DNS_PORT: u16 = 53;
/// Maximum number of patterns of a session.
pub const MAX_EGRESS_PATTERNS: usize = 128;

/// The environment variables by which programs find the proxy.
#[must_use]
pub fn egress_variables() -> Vec<(String, String)> {
    // An `http://` address for all of them: some clients know no other kind of proxy.
    let proxy = format!("http://127.0.0.1:{EGRESS_PROXY_PORT}");
    let variables = [
        ("http_proxy", proxy.as_str()),
        ("https_proxy", &proxy),
        ("all_proxy", &proxy),
        ("no_proxy", "localhost,127.0.0.1,::1"),
    ];
    let both_cases = |(name, value): (&str, &str)| {
        [name.to_owned(), name.to_uppercase()].map(|name| (name, value.to_owned()))
    };
    variables.into_iter().flat_map(both_cases).collect()
}

/// The patterns of one session.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EgressRules {
    patterns: Vec<EgressPattern>,
}

/// Addresses with a special meaning on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialAddresses {
    /// Special in addition to the constant ones: the node's etcd, the addresses of other sessions.
    pub more: Vec<IpNet>,
    /// `[net] allow_addresses`: treated like public ones.
    pub allowed: Vec<IpNet>,
}

/// How a client named a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// By a name that [`EgressRules::allow_name`] allowed with this port.
    Name,
    /// By the address itself.
    Address,
}

/// Why a target is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EgressRefusal {
    #[error("it is not in the session's egress list; add it to `egress` of the template")]
    NotListed,
    #[error(
        "{0} is a private or reserved address, or one of the node's own; list it as a network in \
         `egress` of the template, or in `allow_addresses` of `[net]`"
    )]
    Special(IpAddr),
}

impl EgressRefusal {
    /// Value of a metric's label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NotListed => "not_listed",
            Self::Special(_) => "special_address",
        }
    }
}

impl EgressRules {
    /// Parses the patterns of a resolved spec.
    pub fn parse(patterns: &[String]) -> Result<Self, EgressPatternError> {
        let patterns: Result<_, _> = patterns.iter().map(|text| text.parse()).collect();
        Ok(Self {
            patterns: patterns?,
        })
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Whether a client may look the name up: with some port it may connect to it.
    #[must_use]
    pub fn may_look_up(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.has_name(name))
    }

    /// Whether a client may connect to the name with this port, subject to its addresses.
    pub fn allow_name(&self, name: &str, port: u16) -> Result<(), EgressRefusal> {
        let allowed = |pattern: &EgressPattern| pattern.has_name(name) && pattern.has_port(port);
        if self.patterns.iter().any(allowed) {
            Ok(())
        } else {
            Err(EgressRefusal::NotListed)
        }
    }

    /// Whether a client may connect to an address. `is_hosts` tells whether it is one of the host's own.
    pub fn allow_address(
        &self,
        address: IpAddr,
        port: u16,
        named_by: NamedBy,
        special: &SpecialAddresses,
        is_hosts: bool,
    ) -> Result<(), EgressRefusal> {
        let address = address.to_canonical();
        let opens = |network: &IpNet| special.opens(network, address, is_hosts);
        if self.networks(|its| its == port).any(opens) {
            return Ok(());
        }
        if named_by == NamedBy::Address && !self.patterns.contains(&EgressPattern::Internet) {
            return Err(EgressRefusal::NotListed);
        }
        let is_special = is_hosts || special.around(address).next().is_some();
        if is_special && !special.allowed.iter().any(opens) {
            return Err(EgressRefusal::Special(address));
        }
        Ok(())
    }

    /// Whether the resolver may answer with an address. One of the host's own is left out, unless it is listed for
    /// some port: a session must not learn what the node is called.
    #[must_use]
    pub fn may_learn(&self, address: IpAddr, special: &SpecialAddresses, is_hosts: bool) -> bool {
        let address = address.to_canonical();
        let opens = |network: &IpNet| special.opens(network, address, is_hosts);
        !is_hosts || self.networks(|_| true).any(opens) || special.allowed.iter().any(opens)
    }

    /// The listed networks with these ports.
    fn networks(&self, wanted: impl Fn(u16) -> bool) -> impl Iterator<Item = &IpNet> {
        self.patterns
            .iter()
            .filter_map(move |pattern| match pattern {
                EgressPattern::Network { network, port } if wanted(*port) => Some(network),
                _ => None,
            })
    }
}

impl SpecialAddresses {
    /// The special networks that contain an address.
    fn around(&self, address: IpAddr) -> impl Iterator<Item = &IpNet> {
        let networks = special::networks().iter().chain(&self.more);
        networks.filter(move |network| network.contains(&address))
    }

    /// Whether the operator means the address by this network.
    fn opens(&self, network: &IpNet, address: IpAddr, is_hosts: bool) -> bool {
        network.contains(&address)
            && (!is_hosts || network.prefix_len() == network.max_prefix_len())
            && self.around(address).all(|around| around.contains(network))
    }
}
