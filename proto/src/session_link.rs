//! Links that connect a running session to interfaces of its node.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{InterfaceName, LinkTarget};

/// A link that is to be attached to a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkRequest {
    pub to: LinkTarget,
    /// Of the interface in the session; the first free one of `eth1`, `eth2`, … when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<InterfaceName>,
    /// Its addresses, such as `192.168.7.5/24`.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub addresses: Vec<String>,
    /// Routes through it, as `ip route` writes them: `10.0.0.0/8 via 192.168.7.1`, `10.0.0.0/8`,
    /// `default via 192.168.7.1`.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub routes: Vec<String>,
}

/// A link that is attached to a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionLink {
    /// Of the interface in the session.
    pub name: String,
    pub to: LinkTarget,
    pub addresses: Vec<String>,
}

/// The links that are attached to a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionLinkList {
    pub links: Vec<SessionLink>,
}
