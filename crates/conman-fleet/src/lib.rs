//! The other nodes of a fleet: locations of sessions, and connections to the nodes.
//!
//! [`Dialer`] opens connections and [`PeerAcceptor`] accepts them, both over TLS with the
//! certificates of `conman-auth`, which authenticate both ends. [`PeerClient`] sends a caller's requests to another node. [`FleetMap`]
//! chooses that node: the session's owner, or the one to start it.
//!
//! [`Pulse`] ends the wait for a node that no longer answers.
//!
//! The proxies of both nodes use [`ToNode`] and [`PeerAcceptor`].
//!
//! One task per connection with a request, which ends with the connection, and one that waits until
//! the answer was read. Idle connections are kept, within limits, for repeatable requests; the
//! proxies have separate ones. No channel.
//!
//! Invariant: a node with certificates never connects to another without TLS, whatever that other
//! node announces.
#![forbid(unsafe_code)]

mod accept;
mod address;
mod client;
mod dial;
mod gone;
pub mod holding;
mod idle;
mod map;
mod pulse;
mod stream;
mod way;

pub use accept::PeerAcceptor;
pub use address::{BadPeerUrl, PeerAddress};
pub use client::{AskError, PeerClient, RefusedBy};
pub use dial::{DialError, Dialer};
pub use map::{FleetMap, NoAddress, Node, Owner, PlacementRequest, SessionLocation, Waiting};
pub use pulse::{PULSE, Pulse, Silent};
pub use way::ToNode;
