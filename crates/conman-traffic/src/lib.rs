//! What conman carries for a session: counted, and no faster than its spec allows.
//!
//! ```text
//!  clients ── proxy ───────┐                      ┌─ counters, limit: to the session
//!                          ├─ [`MeteredStream`] ──┤                              = [`Traffic`], one for a session
//!  targets ── egress proxy ┘   a connection       └─ counters, limit: from the session
//! ```
//!
//! All connections of a session share one limit in each direction, and take turns. A connection whose bytes wait
//! reads no others, so that its peer is slowed down by TCP. No task runs here.
#![forbid(unsafe_code)]

mod metered_stream;
mod token_bucket;
mod traffic;

pub use metered_stream::MeteredStream;
pub use traffic::{Traffic, burst_bytes};
