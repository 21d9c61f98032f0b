//! The sessions listener: everything between a client's socket and a session's.
//!
//! This crate owns the routing of requests to sessions, the bounds on what a client may ask of
//! the node, forwarding, upgrades, tunnels, and how tunnels end. It does not know what a session
//! is: a [`Directory`] says where one is served, a [`Gate`] who may connect, a [`Backend`] opens
//! the connections.
//!
//! ```text
//!                    ┌─ Accepted ─> worker 0 ─┬─ task per client connection (hyper)
//! acceptor (thread) ─┤  (bounded)  (thread,   ├─ task per connection to a session (hyper)
//!                    └─ Accepted ─> worker N   └─ task per tunnel
//!                                    own runtime)
//! ```
//!
//! * The acceptor hands each connection to the worker with the fewest, over a bounded queue.
//! * A worker is a thread with a single-threaded runtime. A connection, the requests on it, its
//!   connections to sessions and its tunnel stay on that one thread, so no byte of a tunnel
//!   crosses threads. Workers share only counters and the bound on held requests.
//! * A watch channel from [`Proxy`] tells all of them to drain or to stop; a watch channel in
//!   each [`Route`] tells the tunnels of one session how to close.
//!
//! What holds throughout:
//! * A request is forwarded at most once: no retry after its first byte could have been sent.
//! * A request whose head could be read in two ways is not forwarded at all.
//! * Nothing the client sends behind an upgrade reaches the session before its 101.
//! * A connection to one generation of a session never carries a request for another.
//! * An answer that was cut never looks whole, as far as HTTP allows to tell: of one that ends
//!   with the connection, only a session known to have ended makes the difference.
//! * An idle tunnel owns no buffer. Everything that waits on a peer has a bound in time, but for
//!   an answer's next byte and an idle tunnel, which may take days.
//!
//! Interim answers other than `100 Continue` (`103 Early Hints`) are not passed on.
#![forbid(unsafe_code)]

mod address;
mod answer;
mod backend;
mod body;
mod buffers;
mod client_io;
mod forward;
mod frames;
mod framing;
mod headers;
mod hold;
mod listener;
mod meters;
mod options;
mod pool;
mod proxy;
mod pump;
mod route;
mod tunnel;
mod upgrade;
mod watchdog;
mod worker;

pub use options::{InvalidOption, Keepalive, ProxyOptions};
pub use proxy::{Proxy, ProxyStats};
pub use route::{Backend, Directory, Gate, Refusal, Route, SubprotocolAnswer, Verdict};
