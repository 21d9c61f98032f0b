//! The listeners for sessions: everything between a client's socket and a session's.
//!
//! This crate owns the routing of requests to sessions, the bounds on what a client may ask of
//! the node, forwarding, upgrades, tunnels, and how tunnels end. It does not know what a session
//! is: a [`Directory`] says where one is served, a [`Gate`] who may connect, a [`Backend`] opens
//! the connections.
//!
//! Of a fleet's nodes any takes a client's request. The [`Route`] to a session on another node
//! leads to that node's listener for nodes ([`Proxy::start_peers`]), which serves it or turns it
//! away ([`Turned`]) before it has taken anything of its body; then the first node looks the
//! session up anew, holds the request for as long as it must, and sends it again. A node never
//! sends on, nor holds, what another has brought.
//!
//! ```text
//!                    ┌─ Accepted ─> worker 0 ─┬─ task per client connection (hyper)
//! acceptor (thread) ─┤  (bounded)  (thread,   ├─ task per connection to a session (hyper)
//!                    └─ Accepted ─> worker N   └─ task per tunnel
//!                                    own runtime)
//! ```
//!
//! * The acceptor takes a place for each connection ([`conman_listen`]), and hands the connection to
//!   the worker with the fewest, over a bounded queue.
//! * A worker is a thread with a single-threaded runtime. A connection, the requests on it, its
//!   connections to sessions and its tunnel stay on that one thread, so no byte of a tunnel
//!   crosses threads. Workers share only counters and the bound on held requests.
//! * A watch channel from [`Proxy`] tells all of them to drain or to stop; a watch channel in
//!   each [`Route`] tells the tunnels of one session how to close.
//! * The acceptor and every worker have a pulse in [`ProxyOptions::vitals`]. A worker's is shown on its
//!   own thread, so that whatever blocks that is told of.
//!
//! What holds throughout:
//! * A request is forwarded at most once: no retry after its first byte could have been sent,
//!   unless another node says that it took nothing but the head, or breaks before it answers what
//!   changes nothing and has no body.
//! * A request whose head could be read in two ways is not forwarded at all.
//! * Nothing the client sends behind an upgrade reaches the session before its 101.
//! * A connection to one generation of a session never carries a request for another; between
//!   nodes every request says which one it is for.
//! * An answer that was cut never looks whole, as far as HTTP allows to tell: of one that ends
//!   with the connection, only a session known to have ended makes the difference.
//! * An idle tunnel owns no buffer. Everything that waits on a peer has a bound in time, but for
//!   an answer's next byte and an idle tunnel, which may take days.
//!
//! Interim answers other than `100 Continue` (`103 Early Hints`) are not passed on, and of those to
//! one request there is a bound.
#![forbid(unsafe_code)]

mod address;
mod answer;
mod answer_heads;
mod backend;
mod body;
mod buffers;
mod client_io;
mod confine;
mod forward;
mod frames;
mod framing;
mod headers;
mod hold;
mod hop;
mod listener;
mod loan;
mod meters;
mod options;
mod peers;
mod pool;
mod proxy;
mod pump;
mod refusals;
mod route;
mod stream;
mod tunnel;
mod upgrade;
mod watchdog;
mod worker;

pub use options::{HOP_HEAD_BYTES, HOP_HEADERS, InvalidOption, Keepalive, ProxyOptions};
pub use peers::{OwnSessions, PeerAccept, PeerFront, PeerVisitor, Turned};
pub use proxy::{Proxy, ProxyStats};
pub use route::{Backend, Directory, Gate, Refusal, Route, SubprotocolAnswer, Verdict, Way};
pub use stream::{Link, Seal, Stream, Transport};
