//! How a session's container is connected.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Longest name of an interface in bytes (`IFNAMSIZ`, without the final zero).
const MAX_INTERFACE_BYTES: usize = 15;

/// How a session's container is connected: `loopback`, `bridge`, `routed`, `host`, `macvlan:INTERFACE` or
/// `ipoib:INTERFACE`. Only a template can give any other than `loopback`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    /// A network namespace with only `lo`; reachable through conman alone. What it may reach, `egress`
    /// lists.
    #[default]
    Loopback,
    /// Docker's own default bridge, with egress as Docker gives it.
    Bridge,
    /// A network namespace with a link to the node, which routes and masquerades what the template's
    /// `egress` allows.
    Routed,
    /// The node's own network namespace.
    Host,
    /// A network namespace with a macvlan link on an interface of the node.
    Macvlan(InterfaceName),
    /// A network namespace with an IPoIB link on an interface of the node.
    Ipoib(InterfaceName),
}

/// What follows from a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetworkTraits {
    /// It has interfaces besides loopback, so that only a template can give it.
    pub leads_out: bool,
    /// Its network namespace is the node's.
    pub shares_host: bool,
    /// The node routes and masquerades what its template's `egress` allows.
    pub routed: bool,
    /// It begins with a link on an interface of the node.
    pub on_interface: bool,
    /// dockerd connects it.
    pub by_docker: bool,
}

impl Network {
    /// The values, for messages.
    pub const ALLOWED: &str = "\"loopback\", \"routed\", \"bridge\", \"host\", \"macvlan:INTERFACE\" or \
                               \"ipoib:INTERFACE\"";

    /// What follows from it for everything that depends on the network.
    #[must_use]
    pub fn traits(&self) -> NetworkTraits {
        let none = NetworkTraits::default();
        match self {
            Self::Loopback => none,
            Self::Bridge => NetworkTraits {
                leads_out: true,
                by_docker: true,
                ..none
            },
            Self::Routed => NetworkTraits {
                leads_out: true,
                routed: true,
                ..none
            },
            Self::Host => NetworkTraits {
                leads_out: true,
                shares_host: true,
                ..none
            },
            Self::Macvlan(_) | Self::Ipoib(_) => NetworkTraits {
                leads_out: true,
                on_interface: true,
                ..none
            },
        }
    }

    /// The link on an interface of the node that a container with this network begins with.
    #[must_use]
    pub fn link(&self) -> Option<LinkTarget> {
        match self {
            Self::Macvlan(parent) => Some(LinkTarget::Macvlan(parent.clone())),
            Self::Ipoib(parent) => Some(LinkTarget::Ipoib(parent.clone())),
            Self::Loopback | Self::Bridge | Self::Routed | Self::Host => None,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback => formatter.write_str("loopback"),
            Self::Bridge => formatter.write_str("bridge"),
            Self::Routed => formatter.write_str("routed"),
            Self::Host => formatter.write_str("host"),
            Self::Macvlan(parent) => write!(formatter, "macvlan:{parent}"),
            Self::Ipoib(parent) => write!(formatter, "ipoib:{parent}"),
        }
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.split_once(':')) {
            ("loopback", _) => Ok(Self::Loopback),
            ("bridge", _) => Ok(Self::Bridge),
            ("routed", _) => Ok(Self::Routed),
            ("host", _) => Ok(Self::Host),
            (_, Some(("macvlan", parent))) => Ok(Self::Macvlan(parent.parse()?)),
            (_, Some(("ipoib", parent))) => Ok(Self::Ipoib(parent.parse()?)),
            _ => Err(NetworkError::new(text, Self::ALLOWED)),
        }
    }
}

impl TryFrom<String> for Network {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

/// What a link connects a session to: `macvlan:INTERFACE`, `ipoib:INTERFACE` or `bridge:BRIDGE` of the node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LinkTarget {
    Macvlan(InterfaceName),
    Ipoib(InterfaceName),
    Bridge(InterfaceName),
}

impl LinkTarget {
    /// The interface of the node.
    #[must_use]
    pub fn interface(&self) -> &InterfaceName {
        match self {
            Self::Macvlan(name) | Self::Ipoib(name) | Self::Bridge(name) => name,
        }
    }
}

impl fmt::Display for LinkTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Macvlan(_) => "macvlan",
            Self::Ipoib(_) => "ipoib",
            Self::Bridge(_) => "bridge",
        };
        write!(formatter, "{kind}:{}", self.interface())
    }
}

impl FromStr for LinkTarget {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            Some(("macvlan", name)) => Ok(Self::Macvlan(name.parse()?)),
            Some(("ipoib", name)) => Ok(Self::Ipoib(name.parse()?)),
            Some(("bridge", name)) => Ok(Self::Bridge(name.parse()?)),
            _ => Err(NetworkError::new(
                text,
                "\"macvlan:INTERFACE\", \"ipoib:INTERFACE\" or \"bridge:BRIDGE\"",
            )),
        }
    }
}

impl TryFrom<String> for LinkTarget {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<LinkTarget> for String {
    fn from(target: LinkTarget) -> Self {
        target.to_string()
    }
}

impl PartialSchema for Network {
    fn schema() -> RefOr<Schema> {
        text_schema(
            "How a session's container is connected. Only a template can give any other value than \
             `loopback`, the default.",
            r"^(loopback|bridge|routed|host|(macvlan|ipoib):[^/:\s]{1,15})$",
            "loopback",
        )
    }
}

impl ToSchema for Network {}

impl PartialSchema for LinkTarget {
    fn schema() -> RefOr<Schema> {
        text_schema(
            "What a link connects a session to: an interface or a bridge of its node.",
            r"^(macvlan|ipoib|bridge):[^/:\s]{1,15}$",
            "macvlan:eth1",
        )
    }
}

impl ToSchema for LinkTarget {}

pub(crate) fn text_schema(description: &str, pattern: &str, example: &str) -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some(description))
        .pattern(Some(pattern))
        .examples([example])
        .into()
}

/// Name of a network interface, as the kernel allows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[^/:\\s]{1,15}$", example = "eth1")]
pub struct InterfaceName(Box<str>);

impl InterfaceName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl FromStr for InterfaceName {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // The kernel replaces `%d` by a number.
        let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/:%".contains(&byte);
        let valid = (1..=MAX_INTERFACE_BYTES).contains(&text.len())
            && text.bytes().all(allowed)
            && ![".", ".."].contains(&text);
        if valid {
            return Ok(Self(text.into()));
        }
        Err(NetworkError::new(
            text,
            "the name of an interface: 1 to 15 characters without spaces, `/`, `:` and `%`",
        ))
    }
}

impl TryFrom<String> for InterfaceName {
    type Error = NetworkError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<InterfaceName> for String {
    fn from(name: InterfaceName) -> Self {
        name.0.into()
    }
}

/// Why a text names no network, link or interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not {expected}")]
pub struct NetworkError {
    /// The refused text, cut to a length that is safe to print.
    given: String,
    expected: &'static str,
}

impl NetworkError {
    fn new(text: &str, expected: &'static str) -> Self {
        let shown = text.chars().take(64).flat_map(char::escape_default);
        Self {
            given: shown.collect(),
            expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_written_as_it_is_read() {
        for text in [
            "loopback",
            "bridge",
            "routed",
            "host",
            "macvlan:eth1.7",
            "ipoib:ib0",
        ] {
            let network: Network = text.parse().expect("a network");
            assert_eq!(network.to_string(), text);
        }
        for text in [
            "",
            "Host",
            "macvlan",
            "macvlan:",
            "macvlan:a/b",
            "macvlan:eth%d",
            "bridge:br0",
        ] {
            text.parse::<Network>().expect_err(text);
        }
        let link: LinkTarget = "bridge:br0".parse().expect("a link");
        assert_eq!(
            (link.to_string().as_str(), link.interface().as_str()),
            ("bridge:br0", "br0")
        );
        "macvlan:0123456789abcdef"
            .parse::<LinkTarget>()
            .expect_err("too long");
    }
}
