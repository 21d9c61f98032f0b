//! The emergency thread: an OS thread with its own tokio runtime. It preempts, watches the metadata
//! server, and runs tasks of the binary that must work when everything else hangs.
//!
//! It shares with the rest of the daemon the kill table (a mutex held for map operations), the registry
//! (whose futures need no particular runtime), the journal (which never blocks) and the sessions' watch
//! channels. None of them is locked across an await, so a daemon whose other threads are all stuck still
//! kills, certifies and releases.
//!
//! [`PreemptionHandle`] ──commands, bounded──> the thread's loop ──oneshot──> reports.

mod claims;
mod gce;
mod handle;
mod kill_priority;
mod log;
mod metadata;
mod preemption;
mod preemption_state;
mod releases;
mod remembered;
mod target;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::thread;

use conman_core::naming::Instance;
use conman_proto::{EventKind, PreemptReport};
use conman_registry::{Journal, Registry};
use jiff::Timestamp;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use self::kill_priority::Weight;
use self::log::Log;
use self::preemption::Preemption;
use self::preemption_state::{OnNotice, OnReadmit, Origin, PreemptionState, run_time};
use crate::events::node_event;
use crate::kill_table::KillTable;

pub(crate) use self::gce::watch as watch_gce;
pub use self::handle::{PendingReport, PreemptionHandle};
pub(crate) use self::metadata::{BadEndpoint, Endpoint};
pub(crate) use self::remembered::{Memory, recall};

/// Commands that wait for the loop, which handles each in microseconds. They come from a person, a
/// signal handler and two watchers.
const COMMANDS: usize = 64;

/// Source of a notice that ends the daemon and says nothing about the machine.
pub const SIGNAL: &str = "signal";

/// The emergency thread's dependencies.
#[derive(Debug, Clone)]
pub(crate) struct Means {
    pub(crate) table: Arc<KillTable>,
    pub(crate) registry: Arc<dyn Registry>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) budget_ms: u32,
    pub(crate) instance: Instance,
    pub(crate) memory: Memory,
}

#[derive(Debug)]
enum Command {
    Preempt(Notice),
    /// The reply confirms that it was carried out.
    Readmit(Origin, Option<oneshot::Sender<()>>),
    Stop,
}

#[derive(Debug)]
struct Notice {
    budget_ms: u32,
    reason: String,
    source: String,
    origin: Origin,
    at: Instant,
    noticed_at: Timestamp,
    reply: oneshot::Sender<PreemptReport>,
}

impl Notice {
    /// Whether the next daemon must act on it too, whatever notices came before. A signal ends only this
    /// daemon, and the metadata server repeats its notice.
    fn outlives_daemon(&self) -> bool {
        self.origin == Origin::Operator && self.source != SIGNAL
    }
}

/// Starts the thread. It ends with [`PreemptionHandle::stop`].
pub(crate) fn start(means: Means) -> io::Result<PreemptionHandle> {
    let runtime = runtime::Builder::new_current_thread()
        .thread_name("conman-emergency-blocking")
        .enable_all()
        .build()?;
    let (commands, queue) = mpsc::channel(COMMANDS);
    let log = Log::start()?;
    let handle = PreemptionHandle {
        commands,
        runtime: runtime.handle().clone(),
        means: means.clone(),
        log: log.clone(),
    };
    thread::Builder::new()
        .name("conman-emergency".to_owned())
        .spawn(move || {
            kill_priority::be_quick();
            runtime.block_on(conman_vitals::essential(
                "emergency",
                run(means, log, queue),
            ));
            // No task that the thread runs may keep the daemon from ending.
            runtime.shutdown_background();
        })?;
    Ok(handle)
}

/// The preemption under way.
struct Running {
    work: std::pin::Pin<Box<dyn Future<Output = preemption::Outcome> + Send>>,
    waiting: Vec<oneshot::Sender<PreemptReport>>,
    deadline: watch::Sender<Instant>,
}

async fn run(means: Means, log: Log, mut queue: mpsc::Receiver<Command>) {
    let mut preemption_state = PreemptionState::default();
    let mut running: Option<Running> = None;
    let weight = Weight::of(&means.instance);
    loop {
        let finished = async {
            match &mut running {
                Some(running) => (&mut running.work).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Cancel safe: a command is taken or stays in the queue.
            command = queue.recv() => match command {
                Some(Command::Preempt(notice)) => take(&means, &weight, &mut preemption_state, &mut running, notice),
                Some(Command::Readmit(by, reply)) => {
                    readmit(&means, &log, &mut preemption_state, by);
                    // The sender of the order may have stopped waiting.
                    let _ = reply.map(|reply| reply.send(()));
                }
                Some(Command::Stop) | None => return,
            },
            // Cancel safe: the work is kept and polled again.
            outcome = finished => {
                let waiting = running.take().map(|running| running.waiting).unwrap_or_default();
                finish(&means, &log, &mut preemption_state, outcome, waiting);
            }
        }
    }
}

fn take(
    means: &Means,
    weight: &Weight,
    preemption_state: &mut PreemptionState,
    running: &mut Option<Running>,
    notice: Notice,
) {
    if notice.outlives_daemon() {
        means.memory.keep(notice.reason.clone());
    }
    let budget = std::time::Duration::from_millis(notice.budget_ms.into());
    let deadline = notice.at + run_time(budget);
    match preemption_state.on_notice(notice.origin) {
        OnNotice::Start => {
            means.table.close(notice.reason.clone());
            let (deadline, ends) = watch::channel(deadline);
            let work = Preemption::new(means, weight, &notice, ends);
            *running = Some(Running {
                work: Box::pin(work.run()),
                waiting: vec![notice.reply],
                deadline,
            });
        }
        OnNotice::Join => {
            if let Some(running) = running {
                running.waiting.push(notice.reply);
                running.deadline.send_if_modified(|present| {
                    let sooner = deadline < *present;
                    *present = deadline.min(*present);
                    sooner
                });
            }
        }
        OnNotice::Answer(report) => {
            // The sender of the notice may have stopped waiting.
            let _ = notice.reply.send(*report);
        }
    }
}

fn readmit(means: &Means, log: &Log, preemption_state: &mut PreemptionState, by: Origin) {
    match preemption_state.on_readmit(by) {
        OnReadmit::Reopen => {
            means.memory.forget();
            reopen(means, log);
        }
        // At once: this daemon may end before the preemption is finished.
        OnReadmit::Later => means.memory.forget(),
        OnReadmit::Ignore => {}
    }
}

fn reopen(means: &Means, log: &Log) {
    means.table.reopen();
    let message =
        "readmitted: unless the node is being drained, sessions are admitted again".to_owned();
    means
        .journal
        .append(vec![node_event(EventKind::NodeReadmitted, message.clone())]);
    log.info(message);
}

fn finish(
    means: &Means,
    log: &Log,
    preemption_state: &mut PreemptionState,
    outcome: preemption::Outcome,
    waiting: Vec<oneshot::Sender<PreemptReport>>,
) {
    let preemption::Outcome { report, events } = outcome;
    // Only now: the journal and the registry share a disk.
    means.journal.append(events);
    for reply in waiting {
        // The sender of the notice may have stopped waiting.
        let _ = reply.send(report.clone());
    }
    log.report(report.clone());
    if preemption_state.on_finished(report) {
        reopen(means, log);
    }
}

#[cfg(test)]
mod tests;
