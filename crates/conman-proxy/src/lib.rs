//! The sessions listener: routes requests and tunnels to sessions.
#![forbid(unsafe_code)]

mod options;
mod proxy;
mod route;

pub use options::{InvalidOption, Keepalive, ProxyOptions};
pub use proxy::{Proxy, ProxyStats};
pub use route::{Backend, Directory, Gate, Refusal, Route, Verdict};
