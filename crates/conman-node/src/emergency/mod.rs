//! The emergency thread: an OS thread with its own tokio runtime. It preempts, watches the sources of
//! preemption notices, and runs tasks of the binary that must work when everything else hangs.
//!
//! It shares with the rest of the daemon the kill table (a mutex held for map operations), the registry
//! (whose futures need no particular runtime), the journal (which never blocks) and the sessions' watch
//! channels. None of them is locked across an await, so a daemon whose other threads are all stuck still
//! kills, certifies and releases.
//!
//! ```text
//!  EmergencyThread::start ──> notice sources ──┐
//!        │ attach (the node is up)             ├──commands, bounded──> the loop ──oneshot──> reports
//!        └──> PreemptionHandle ────────────────┘
//! ```

mod claims;
mod handle;
mod kill_priority;
mod log;
mod preemption;
pub(crate) mod preemption_file;
mod releases;
mod sources;
mod thread;

use std::sync::Arc;

use conman_core::naming::Instance;
use conman_core::preemption::Origin;
use conman_proto::PreemptReport;
use conman_registry::{Journal, Registry};
use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use self::preemption_file::PreemptionFile;
use crate::kill_table::KillTable;
use crate::leave::Leave;

pub use self::handle::{PendingReport, PreemptionHandle};
pub use self::sources::{NOTICE_SOURCES, NoticeSourceKind, NoticeSourceOptions, Setting};
pub use self::thread::EmergencyThread;

/// Source of a notice that ends the daemon and says nothing about the machine.
pub const SIGNAL: &str = "signal";

/// Longest reason of a notice that is kept, in bytes.
const MAX_REASON_BYTES: usize = 500;

/// The emergency thread's dependencies.
#[derive(Debug, Clone)]
pub(crate) struct Means {
    pub(crate) table: Arc<KillTable>,
    pub(crate) leave: Arc<Leave>,
    pub(crate) registry: Arc<dyn Registry>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) budget_ms: u32,
    pub(crate) instance: Instance,
    pub(crate) file: PreemptionFile,
    /// Reasons to cordon the node, which does it.
    pub(crate) cordons: mpsc::Sender<String>,
}

#[derive(Debug)]
enum Command {
    Preempt(Notice),
    /// The reply confirms that it was carried out.
    Readmit(Origin, Option<oneshot::Sender<()>>),
    /// The machine may go soon, for this reason.
    Cordon(String),
    Stop,
}

#[derive(Debug)]
struct Notice {
    /// Time until the machine stops, if the notice says so.
    budget_ms: Option<u32>,
    reason: String,
    source: String,
    origin: Origin,
    at: Instant,
    noticed_at: Timestamp,
    reply: oneshot::Sender<PreemptReport>,
}

impl Notice {
    /// A notice that arrives now.
    fn now(
        source: &str,
        origin: Origin,
        reason: &str,
        budget_ms: Option<u32>,
        reply: oneshot::Sender<PreemptReport>,
    ) -> Self {
        Self {
            budget_ms,
            reason: reason[..reason.floor_char_boundary(MAX_REASON_BYTES)].to_owned(),
            source: source.to_owned(),
            origin,
            at: Instant::now(),
            noticed_at: Timestamp::now(),
            reply,
        }
    }

    /// Whether the next daemon must act on it too, whatever notices came before. A signal ends only this
    /// daemon, and a notice source repeats its notice.
    fn outlives_daemon(&self) -> bool {
        self.origin == Origin::Operator && self.source != SIGNAL
    }
}

#[cfg(test)]
mod tests;
