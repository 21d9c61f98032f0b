//! The other nodes of a fleet: where sessions are, which node starts one, requests to nodes.
//!
//! - [`FleetMap`] knows the nodes, and where each session is. [`Locator`] returns the route to a
//!   session and waits while it starts or moves.
//! - [`FleetMap::forward`] is the loop that sends a request to the API to its session's node, and again when that
//!   node does not serve it; [`Policy`] is the table of kinds of requests.
//! - [`StartAttempts`] is the loop that requests nodes to start a session. PUT requests,
//!   connections, restarts and drains use it.
//! - [`require_acceptance`] finds out when this node joins whether the others accept it.
//! - [`run_reach`] probes the other nodes; [`FleetMap::cut_off`] has the nodes that are cut off.
//! - [`run_restarter`] restarts sessions of lost nodes and removes their old records.
//! - [`FleetMap::call`] sends a caller's request to another node's API; a [`CallError`] says whether
//!   it may be sent again. [`node_api`] has the paths that only nodes request, and `conman-peer`
//!   has the connections.
//!
//! Tasks: the restarter; the prober; a check for lost nodes, which ends the streams with them through a watch
//! channel for each node; one task for each session that requests wait for, which a watch channel
//! joins to them; one for each tunnel to another node's API.
//!
//! Absent on purpose: ownership (a start is a claim in the registry, whichever node requests it),
//! storage, bytes of sessions, and problems: `conman-api` maps [`LocateError`] to them. The crate
//! implements traits of `conman-proxy` and does not know the API.
//!
//! Invariant: a request that came from another node is never sent to a third one.
#![forbid(unsafe_code)]

mod acceptance;
mod forwarding;
mod hold_metrics;
mod locate_error;
mod locator;
mod lost_nodes;
mod map;
pub mod node_api;
mod node_waits;
mod own_route;
mod passage;
mod peer_backend;
mod reach;
mod remote_body;
mod remote_call;
mod restarter;
mod start_attempts;

pub use acceptance::require_acceptance;
pub use forwarding::{
    EarlierAttempts, ForwardAttempt, ForwardStep, NotForwarded, Policy, UnreachableNode,
};
pub use locate_error::LocateError;
pub use locator::Locator;
pub use map::{FleetMap, NoAddress, Node, Owner, PlacementRequest, SessionLocation};
pub use own_route::{NodeSessions, own_route};
pub use passage::Passage;
pub use peer_backend::PeerBackend;
pub use reach::run_reach;
pub use remote_body::{RemoteBody, read_json};
pub use remote_call::{BufferedRequest, CallError, ExpectedGeneration, X_CONMAN_ENDED};
pub use restarter::run_restarter;
pub use start_attempts::{Attempt, FailedStart, Missing, StartAttempts, StartOn};
