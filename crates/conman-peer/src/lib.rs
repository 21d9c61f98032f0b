//! The other nodes of a fleet: where sessions are, and connections to them.
//!
//! [`Dialer`] opens them and [`PeerAcceptor`] takes them, both over TLS where the fleet has
//! certificates; who is at the other end is judged by `conman-auth`, whose seals and verdicts
//! belong to one connection each. [`PeerClient`] asks another node on behalf of a caller.
//! [`FleetMap`] says which node that is: the session's owner, or the one that shall start it.
//!
//! [`Pulse`] ends the wait for a node that answers nothing any more.
//!
//! [`ToNode`] and [`PeerAcceptor`] are what the proxies of both nodes stand on.
//!
//! One task a connection that is asked on, which ends with it, and one that waits until its answer
//! was read. Idle connections are kept, within bounds, for what may be repeated; the proxies keep
//! their own. No channel.
//!
//! What holds throughout: a node that has certificates never speaks to another without TLS,
//! whatever that other one announces.
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
pub use dial::{DialError, Dialed, Dialer};
pub use map::{FleetMap, NoAddress, Node, Owner, Waiting, Whereabouts, Wish};
pub use pulse::{PULSE, Pulse, Silent};
pub use way::ToNode;
