//! Connections between nodes, and the parts of them that connections to sessions share.
//!
//! - [`Dialer`] opens connections to nodes and [`PeerAcceptor`] accepts them, over TLS with the certificates of
//!   `conman-auth`, which authenticate both ends. [`Liveness`] finds nodes that no longer answer.
//! - [`Connection`] is HTTP/1.1 on one [`Stream`], with bounds on heads and writes. [`Pool`] keeps idle ones,
//!   sends requests on them, and knows which request was not sent at all.
//! - [`PeerClient`] sends the requests for other nodes' APIs; `conman-proxy` has a pool in each worker for those
//!   of sessions.
//! - [`headers`] has the rules for header fields between two connections; [`PeerRefusal`] says why a node
//!   does not serve a request.
//! - [`Tunnel`] copies bytes after an upgrade, and closes a WebSocket with a reason, between two frames.
//!
//! Tasks: one for each connection, which ends with it. The callers run the tunnels.
//!
//! Absent on purpose: where sessions are, what is sent again after a refusal (`conman-fleet`).
//!
//! Invariants: a node with certificates never connects to another without TLS, whatever that other
//! node announces. A connection carries one request at a time.
#![forbid(unsafe_code)]

mod accept;
mod address;
mod answer_heads;
mod buffers;
mod caller_header;
mod client;
mod connection;
mod dial;
mod frames;
pub mod headers;
mod liveness;
mod pool;
mod pump;
mod refusal;
mod stream;
mod tls_stream;
mod tunnel;
mod watchdog;

pub use accept::{PeerAccept, PeerAcceptor};
pub use address::{BadPeerUrl, PeerAddress};
pub use answer_heads::HeadFault;
pub use caller_header::{caller_header, remote_caller};
pub use client::{PeerBody, PeerClient, RefusedBy, RequestError, may_be_repeated};
pub use connection::{Connection, ConnectionIo, ConnectionLimits};
pub use dial::{DialError, Dialer};
pub use liveness::{LIVENESS, Liveness, Unresponsive};
pub use pool::{Destination, KeepLimits, Lease, Pool, SendError};
pub use refusal::{NO_ROOM, PeerRefusal};
pub use stream::{Stream, Transport};
pub use tunnel::{Protocol, Side, Tunnel, TunnelOptions};
pub use watchdog::Watchdog;
