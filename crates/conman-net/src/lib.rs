//! The network plane: addresses, links and rules of sessions.
//!
//! It knows nothing of sessions but an opaque *owner*. It owns:
//! - the [`AddressPool`], which gives addresses to owners;
//! - the connection over which the host's links and routes are changed ([`HostNetlink`]), with its thread;
//! - one task that learns which links disappear (`link_watch`): only then is an address free again;
//! - the links' namespaces (`namespaces`), so that the kernel takes down only so many links at once;
//! - the names and interface groups by which an instance's links are told from all others
//!   ([`LinkIdentity`]);
//! - the host's rules for these links ([`RuleSet`]), and a task that restores them ([`RulesKeeper`]);
//! - the routes, and the VXLAN device, by which sessions reach those of other nodes ([`Fabric`]);
//! - the rules inside sessions' namespaces ([`SessionRules`]);
//! - links on the host's interfaces, inside sessions' namespaces ([`attached`]), and the addresses of those that
//!   sessions begin with ([`InterfacePools`]);
//! - the proxy and the resolver inside the namespaces of sessions without a link ([`egress`]).
#![forbid(unsafe_code)]

pub mod attached;
mod bandwidth;
pub mod egress;
mod fabric;
mod fabric_routes;
mod fabric_rules;
mod fabric_watch;
mod fabric_way;
mod host_check;
mod host_netlink;
mod interface_pools;
mod link_identity;
mod link_messages;
mod link_watch;
mod namespace_thread;
mod namespaces;
mod netlink;
mod netlink_codec;
mod nft_batch;
mod plane;
mod pool;
mod rule_set;
mod rules_keeper;
mod session_rules;
mod vxlan;

pub use fabric::{Fabric, FabricError, FabricKind, FabricOptions, RemotePart, Unroutable};
pub use host_check::HostError;
pub use host_netlink::{HostNetlink, Namespace};
pub use interface_pools::{InterfaceError, InterfaceNetwork, InterfacePools};
pub use link_identity::{GROUP_MASK, LinkIdentity, class_of};
pub use link_messages::SESSION_LINK;
pub use namespaces::LINK_DESCRIPTORS;
pub use plane::{NOTIFICATION_BYTES, PartRequest, Plane, PlaneOptions, PlaneParts};
pub use pool::{AddressPool, Addresses, PoolError, PoolExhausted, PoolNetworks};
pub use rule_set::{Class, FabricElements, FabricRules, MAX_FLOWS, RuleSet};
pub use rules_keeper::{RulesError, RulesKeeper};
pub use session_rules::{MAX_NEIGHBOURS, ROUTED_NEIGHBOURS, Refusals, SessionRules};
pub use vxlan::{Entry, RecordFault};
