//! The listeners for sessions: everything between a client's socket and a session's.
//!
//! This crate owns the routing of requests to sessions, the limits for clients, forwarding,
//! upgrades, tunnels, and how tunnels end. It does not know sessions themselves: a [`Directory`]
//! finds a session's route, a [`Gate`] decides who may connect, a [`Backend`] opens the
//! connections.
//!
//! Any node of a fleet accepts a client's request. The [`Route`] to a session on another node
//! leads to that node's listener for nodes ([`Proxy::start_peers`]). It serves the request or
//! refuses it ([`conman_peer::PeerRefusal`]) before it has taken anything of the body. After a refusal the first
//! node looks the session up again, holds the request as long as necessary, and sends it again. A
//! node never forwards or holds a request from another node.
//!
//! ```text
//!                    ┌─ Accepted ─> worker 0 ─┬─ task per client connection (hyper)
//! acceptor (thread) ─┤  (bounded)  (thread,   ├─ task per connection to a session (hyper)
//!                    └─ Accepted ─> worker N   └─ task per tunnel
//!                                    own runtime)
//! ```
//!
//! * The acceptor takes a place for each connection ([`conman_listen`]), and passes the
//!   connection to the worker with the fewest, over a bounded queue.
//! * A worker is a thread with a single-threaded runtime. A connection, the requests on it, its
//!   connections to sessions and its tunnel stay on that one thread, so no byte of a tunnel
//!   crosses threads. Workers share only counters and the bound on held requests.
//! * A watch channel from [`Proxy`] tells all of them to close connections, to drain or to stop; a
//!   watch channel in
//!   each [`Route`] tells the tunnels of one session how to close.
//! * The acceptor and every worker have a heartbeat in [`ProxyOptions::watchdog`]. A worker's is
//!   sent on its thread, so that a blocked thread is detected.
//!
//! Invariants:
//! * A request is forwarded at most once: there is no retry after its first byte could have been
//!   sent. Exceptions: another node reports that it took only the head; or it breaks before it
//!   answers an idempotent request without a body.
//! * A request whose head could be read in two ways is not forwarded.
//! * Nothing that the client sends after an upgrade reaches the session before its 101.
//! * A connection to one generation of a session never carries a request for another; between
//!   nodes every request names its generation.
//! * An answer that was cut never looks whole, as far as HTTP can express it: if an answer ends
//!   with the connection, only a session known to have ended makes the difference.
//! * An idle tunnel owns no buffer. Every wait for a peer is bounded in time, except for an
//!   answer's next byte and an idle tunnel, which may take days.
//!
//! Interim answers other than `100 Continue` (`103 Early Hints`) are not passed on, and their
//! number for one request is bounded.
#![forbid(unsafe_code)]

mod address;
mod agent_check;
mod answer;
mod backend;
mod body;
mod client_io;
mod confine;
mod deferred_body;
mod destination;
mod error_page;
mod exchange;
mod forward;
mod headers;
mod hold;
mod listener;
mod meters;
mod options;
mod outgoing;
mod peer_request;
mod peers;
mod proxy;
mod route;
mod upgrade;
mod worker;

pub use agent_check::{AgentSource, BalancedLoad, Share, answer_agent_checks};
pub use confine::is_server_order;
pub use options::{ADDED_HEAD_BYTES, ADDED_HEADERS, ProxyOptions, is_domain};
pub use peers::{OwnSessions, PeerFront};
pub use proxy::{Proxy, ProxyStats};
pub use route::{
    Backend, Directory, Gate, PortRequest, Readiness, Refusal, Route, SubprotocolAnswer, Verdict,
    Way,
};
