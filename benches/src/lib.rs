//! The end-to-end benchmarks behind `conman bench`.
//!
//! Each one runs a separate conman (temporary state, free ports), started from the same binary
//! and removed at the end, so that a benchmark never touches the sessions of a machine. Results
//! are data ([`Report`]); the command line prints them as a table or as JSON and writes the
//! chart.
//!
//! Compared variants are measured in one run and in alternation: figures of different runs or
//! machines are hardly comparable, ratios within one run are.
#![forbid(unsafe_code)]

mod chart;
mod daemon;
mod density;
mod docker;
mod echo;
mod forward;
mod hop;
mod http_client;
mod interruption;
mod kill;
mod load;
mod observer;
mod preempt;
mod proxy;
mod rivals;
mod start;
mod statistics;
mod tunnels;

pub use chart::Chart;
pub use density::{DensityOptions, density};
pub use echo::serve_echo;
pub use forward::{Fellows, ForwardTo, serve_forward};
pub use hop::{HopOptions, hop};
pub use kill::{KillOptions, kill};
pub use preempt::preempt;
pub use proxy::{ProxyOptions, proxy};
pub use start::{StartOptions, start};
pub use tunnels::{TunnelsOptions, tunnels};

/// Image that the kill and start benchmarks run.
pub const BUSYBOX_IMAGE: &str = "conman-test:busybox";
/// Image that the proxy and tunnel benchmarks run: one with a C library.
pub const PYTHON_IMAGE: &str = "conman-test:python";

/// A benchmark's result.
#[derive(Debug, Clone)]
pub struct Report {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: serde_json::Value,
    /// A picture.
    pub chart: Chart,
    /// The bound that is not met, as text.
    pub missed: Option<String>,
}
