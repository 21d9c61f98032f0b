//! Fleets of up to ten thousand nodes on one etcd, through the preemption of a third of them.
//!
//! Each node is the real `NodeProtocol`, and each session that has lost its node is placed by the real
//! `placement::place`. The rest of a node is reduced to what it asks of etcd, at the intervals that the daemon
//! has: it reads all nodes once in an interval and after each change of one, announces itself, and reads all records
//! when a node leaves. etcd is one processor that all requests share; what a request costs is [measured](EtcdCosts).
//!
//! | module | owns |
//! |---|---|
//! | `fleet` | the nodes, and what happens to them |
//! | `daemon` | what a node does besides the protocol |
//! | `requests` | what nodes ask of etcd, and what it does |
//! | `sharing` | the processor of etcd |
//! | `load` | what was asked of etcd |
//! | [`etcd`] | the real one, measured |
//!
//! Which three others observe a node, and which node restarts a session, is drawn at random instead of by a hash of
//! the names: both are as uniform, and only the hash would take the square of the number of nodes.

#![forbid(unsafe_code)]

mod daemon;
pub mod etcd;
mod fleet;
mod load;
mod requests;
mod sharing;
mod wire;

use conman_core::ownership::Timing;
use serde::Serialize;

pub use load::Load;

/// What a request costs etcd, in microseconds of processor time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EtcdCosts {
    /// A transaction that writes one or two keys.
    pub transaction_us: f64,
    /// A read, whatever it returns.
    pub read_us: f64,
    /// Each record of a read of all, with what etcd counts behind the pages.
    pub record_us: f64,
    /// Each record of a read of the nodes: one of four is an announcement, the others are short.
    pub state_us: f64,
    /// Each change that one watch is sent.
    pub delivery_us: f64,
}

/// A fleet, and what happens to it.
#[derive(Debug, Clone, Copy)]
pub struct ScaleOptions {
    pub nodes: usize,
    pub sessions_each: usize,
    /// Percent of the nodes that are preempted …
    pub lost_percent: usize,
    /// … within this time.
    pub within_ms: u64,
    /// What the daemon's intervals are multiplied by: those of reading the nodes, of announcing itself and of reading
    /// the records after a loss. Renewals keep theirs.
    pub intervals: u64,
    /// Observers of a node.
    pub observers: usize,
    pub timing: Timing,
    pub costs: EtcdCosts,
    /// Processors of etcd.
    pub processors: usize,
    pub seed: u64,
}

/// What a fleet came to.
#[derive(Debug, Clone, Serialize)]
pub struct ScaleReport {
    pub nodes: usize,
    pub intervals: u64,
    pub observers: usize,
    /// In the seconds before the first notice.
    pub quiet: Load,
    /// From the first notice until everything is served again, or the simulation ends.
    pub storm: Load,
    /// From the first notice until the last session runs elsewhere; `None`: it did not happen.
    pub served_after_ms: Option<u64>,
    pub lost_sessions: usize,
    pub served_sessions: usize,
    /// Nodes that etcd answered too late for their fences.
    pub frozen_nodes: usize,
    /// The longest time from sending a renewal to its answer, in milliseconds.
    pub slowest_renewal_ms: u64,
    /// One placement, on the machine that simulates.
    pub placement_us: f64,
}

/// Runs one fleet.
#[must_use]
pub fn simulate_scale(options: &ScaleOptions) -> ScaleReport {
    fleet::Fleet::new(*options).run()
}
