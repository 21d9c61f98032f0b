//! The emergency thread: an OS thread with its own tokio runtime. It preempts, watches the metadata
//! server, and runs tasks of the binary that must work when everything else hangs.
//!
//! It shares with the rest of the daemon the kill table (a mutex held for map operations), the registry
//! (whose futures need no particular runtime), the journal (which never blocks) and the sessions' watch
//! channels. None of them is locked across an await, so a daemon whose other threads are all stuck still
//! kills, certifies and releases.
//!
//! [`EmergencyHandle`] ──commands, bounded──> the thread's loop ──oneshot──> reports.

mod claims;
mod gce;
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
use conman_proto::{EventKind, PreemptPlan, PreemptReport, PreemptRequest};
use conman_registry::{Journal, Registry};
use jiff::Timestamp;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use self::kill_priority::Weight;
use self::log::Log;
use self::preemption::Preemption;
use self::preemption_state::{OnNotice, OnReadmit, Origin, PreemptionState, run_time};
use crate::error::PreemptError;
use crate::events::node_event;
use crate::kill_table::KillTable;
use crate::plan;

pub(crate) use self::gce::watch as watch_gce;
pub(crate) use self::metadata::{BadEndpoint, Endpoint};
pub(crate) use self::remembered::{Memory, recall};

/// Commands that wait for the loop, which handles each in microseconds. They come from a person, a
/// signal handler and two watchers.
const COMMANDS: usize = 64;

/// Source of a notice that ends the daemon and says nothing about the machine.
pub const SIGNAL: &str = "signal";

/// Longest reason of a notice that is kept, in bytes.
const MAX_REASON_BYTES: usize = 500;

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

/// Sends commands to the emergency thread, from any thread and any runtime.
#[derive(Debug, Clone)]
pub struct EmergencyHandle {
    commands: mpsc::Sender<Command>,
    runtime: runtime::Handle,
    means: Means,
    log: Log,
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

/// The future report of a preemption. Dropping it does not affect the preemption.
#[derive(Debug)]
pub struct PendingReport {
    reply: oneshot::Receiver<PreemptReport>,
}

impl PendingReport {
    /// Waits for the end of the preemption, which its budget bounds.
    pub async fn wait(self) -> Result<PreemptReport, PreemptError> {
        self.reply.await.map_err(|_| PreemptError::ThreadEnded)
    }
}

impl EmergencyHandle {
    /// Gives notice that the machine is about to stop. Returns as soon as the notice is queued; later
    /// notices get the first one's report.
    ///
    /// `source` says who gave it: `api`, `admin`, `signal`, `gce`, or `restart` for an earlier daemon's.
    /// The next daemon acts on it too, except for a signal, which ends only this daemon, and the metadata
    /// server, which repeats its notice.
    pub fn preempt(
        &self,
        request: &PreemptRequest,
        source: &str,
    ) -> Result<PendingReport, PreemptError> {
        self.give(request, source, Origin::Operator)
    }

    /// Admits sessions again, at once or when the preemption under way is finished. Returns when that is
    /// done or scheduled.
    pub async fn readmit(&self) -> Result<(), PreemptError> {
        let (reply, done) = oneshot::channel();
        self.send(Command::Readmit(Origin::Operator, Some(reply)))?;
        done.await.map_err(|_| PreemptError::ThreadEnded)
    }

    /// Returns what a preemption would do now.
    #[must_use]
    pub fn plan(&self, budget_ms: Option<u32>) -> PreemptPlan {
        plan::of_table(&self.means.table, budget_ms.unwrap_or(self.means.budget_ms))
    }

    /// Whether a preemption is under way or over, and why.
    #[must_use]
    pub fn preempted(&self) -> Option<String> {
        self.means.table.closed().map(|closed| closed.reason)
    }

    /// Runs a task on the emergency thread that must work when the rest of the daemon hangs, such as a
    /// signal handler. It must never block: that thread is the one that preempts.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    pub(crate) fn stop(&self) {
        // A full queue has no reader: the thread has ended already.
        let _ = self.commands.try_send(Command::Stop);
    }

    fn give(
        &self,
        request: &PreemptRequest,
        source: &str,
        origin: Origin,
    ) -> Result<PendingReport, PreemptError> {
        let (reply, receiver) = oneshot::channel();
        let reason = request.reason.as_deref().unwrap_or("preemption notice");
        self.send(Command::Preempt(Notice {
            budget_ms: request.budget_ms.unwrap_or(self.means.budget_ms),
            reason: cut(reason).to_owned(),
            source: source.to_owned(),
            origin,
            at: Instant::now(),
            noticed_at: Timestamp::now(),
            reply,
        }))?;
        Ok(PendingReport { reply: receiver })
    }

    fn send(&self, command: Command) -> Result<(), PreemptError> {
        self.commands
            .try_send(command)
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => PreemptError::TooManyWaiting,
                mpsc::error::TrySendError::Closed(_) => PreemptError::ThreadEnded,
            })
    }
}

fn cut(reason: &str) -> &str {
    &reason[..reason.floor_char_boundary(MAX_REASON_BYTES)]
}

/// Starts the thread. It ends with [`EmergencyHandle::stop`].
pub(crate) fn start(means: Means) -> io::Result<EmergencyHandle> {
    let runtime = runtime::Builder::new_current_thread()
        .thread_name("conman-emergency-blocking")
        .enable_all()
        .build()?;
    let (commands, queue) = mpsc::channel(COMMANDS);
    let log = Log::start()?;
    let handle = EmergencyHandle {
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
