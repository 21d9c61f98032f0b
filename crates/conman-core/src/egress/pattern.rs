//! The patterns of an egress list.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

use super::host::{HostError, TargetHost};

/// The pattern for every public address.
const INTERNET: &str = "internet";

/// One entry of `egress`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum EgressPattern {
    /// Every public address, with every port.
    Internet,
    /// A name; with `below`, every name below it instead (`*.NAME`).
    Name {
        below: bool,
        name: String,
        port: u16,
    },
    Network {
        network: IpNet,
        port: u16,
    },
}

/// Why a pattern cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressPatternError {
    #[error(
        "must be HOST:PORT, *.HOST:PORT, NETWORK:PORT or `internet`, without a scheme or a path"
    )]
    Shape,
    #[error("has no port from 1 to 65535; append one, for example `:443`")]
    NoPort,
    #[error("may have `*` only as its first label, for example `*.example.org:443`")]
    Wildcard,
    #[error("has an IPv6 address without brackets; write it like `[2001:db8::1]:443`")]
    NoBrackets,
    #[error("has bits set beyond its prefix; write it as `{0}`")]
    HostBits(IpNet),
    #[error("is not a network in the form 10.1.0.0/16:5432 or [fd00:1::/32]:5432")]
    Network,
    #[error("has a host that cannot be used: {0}")]
    Host(#[from] HostError),
}

impl EgressPattern {
    pub(super) fn has_name(&self, wanted: &str) -> bool {
        match self {
            Self::Internet => true,
            Self::Name {
                below: false, name, ..
            } => name == wanted,
            Self::Name {
                below: true, name, ..
            } => is_below(wanted, name),
            Self::Network { .. } => false,
        }
    }

    pub(super) fn has_port(&self, wanted: u16) -> bool {
        match self {
            Self::Internet => true,
            Self::Name { port, .. } | Self::Network { port, .. } => *port == wanted,
        }
    }

    /// Whether a spec may have `other` where its template has this. Networks must be equal: a part of one
    /// could reach special addresses that the whole does not.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Internet, Self::Name { .. }) => true,
            (Self::Name { below: true, .. }, Self::Name { name, port, .. }) => {
                self == other || (self.has_name(name) && self.has_port(*port))
            }
            _ => self == other,
        }
    }
}

/// Whether `name` is below `parent`: `a.b` is below `b`, `b` and `ab` are not.
fn is_below(name: &str, parent: &str) -> bool {
    name.strip_suffix(parent)
        .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

impl FromStr for EgressPattern {
    type Err = EgressPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == INTERNET {
            return Ok(Self::Internet);
        }
        if text.contains("://") || text.contains(['@', '?', '#', ' ']) || text.is_empty() {
            return Err(EgressPatternError::Shape);
        }
        let bracketed = text.starts_with('[');
        if !bracketed && text.matches(':').count() > 1 {
            return Err(EgressPatternError::NoBrackets);
        }
        let (host, port) = text.rsplit_once(':').ok_or(EgressPatternError::NoPort)?;
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = Some(port).filter(|_| digits);
        let port = port.and_then(|port| port.parse().ok());
        let port = port
            .filter(|port| *port > 0)
            .ok_or(EgressPatternError::NoPort)?;
        let inner = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        if bracketed && inner.is_none() {
            return Err(EgressPatternError::Network);
        }
        let inner = inner.unwrap_or(host);
        if bracketed || inner.contains('/') || inner.parse::<IpAddr>().is_ok() {
            let network = network(inner)?;
            return Ok(Self::Network { network, port });
        }
        let below = inner.strip_prefix("*.");
        let name = below.unwrap_or(inner);
        if name.contains('*') {
            return Err(EgressPatternError::Wildcard);
        }
        match TargetHost::parse(name)? {
            TargetHost::Name(name) => Ok(Self::Name {
                below: below.is_some(),
                name,
                port,
            }),
            TargetHost::Address(_) => Err(EgressPatternError::Wildcard),
        }
    }
}

/// A network, or one address.
fn network(text: &str) -> Result<IpNet, EgressPatternError> {
    let network = match text.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => text
            .parse::<IpNet>()
            .map_err(|_| EgressPatternError::Network)?,
    };
    // Addresses are compared in their canonical form, which none in this network has.
    if let IpNet::V6(mapped) = network
        && mapped.addr().to_ipv4_mapped().is_some()
    {
        return Err(EgressPatternError::Network);
    }
    if network != network.trunc() {
        return Err(EgressPatternError::HostBits(network.trunc()));
    }
    Ok(network)
}

impl fmt::Display for EgressPattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Internet => formatter.write_str(INTERNET),
            Self::Name { below, name, port } => {
                let star = if *below { "*." } else { "" };
                write!(formatter, "{star}{name}:{port}")
            }
            Self::Network {
                network: IpNet::V4(network),
                port,
            } => write!(formatter, "{network}:{port}"),
            Self::Network {
                network: IpNet::V6(network),
                port,
            } => write!(formatter, "[{network}]:{port}"),
        }
    }
}
