//! Moves a node's sessions to other nodes, one after the other.
//!
//! ```text
//!            drain                      only stuck sessions left
//!  (none) ───────────▶ Draining ─────────────────────────────────────▶ Drained
//!     ▲                    │                                               │
//!     └──────undrain───────┴───────────────────────────────────────────────┘
//! ```
//! One task drains. Before each turn it lists the sessions again, so that a session that became idle
//! since goes before a busy one, and a start that was admitted just before the drain is included. An
//! undrain does not cancel stops that were ordered already.
//!
//! A file in the state directory says that the node is draining, so that a restarted daemon continues
//! the drain; another file lists the sessions that the drain has signalled. A full or hanging disk is a
//! reason to drain, so a failed write does not stop the drain, and is retried.

mod handle;
mod order;
mod prediction;
mod rebalance;
pub(crate) mod signalled;

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::{DRAINED, EndCause};
use conman_linux::parse_signal;
use conman_proto::{
    DrainReport, DrainRequest, DrainState, EventKind, Generation, Moved, OnNodeLoss,
    RebalanceReport, SessionState, Unreleased,
};
use conman_registry::NewEvent;
use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

pub use self::handle::DrainHandle;
pub use self::order::MAX_PARALLEL;
use self::order::Order;
pub(crate) use self::prediction::plan_now;
use self::prediction::{Turns, candidates, plan_for};
use self::signalled::{DrainSignal, SignalledSessions, note_signalled};
use crate::context::Context;
use crate::error::DrainError;
use crate::gentle_stop;
use crate::leave::LeaveCause;
use crate::session::{SessionHandle, StopOrder, View};
use crate::state_writer::StateWriter;

/// Interval between checks whether the remaining sessions have ended. Stuck sessions end without
/// further action, if at all.
const STUCK_INTERVAL: Duration = Duration::from_secs(1);

/// How long a turn waits for another node to start its session.
const MOVE_PATIENCE: Duration = Duration::from_secs(30);

/// Sessions that are stopped and wait for their start on other nodes, in addition to those being
/// stopped. Slow nodes delay stops only once there are so many.
const MAX_MOVING: usize = 256;

/// How long a drain waits, after its last session, for clients that are connected through the node to
/// sessions elsewhere. The listener closes their connections by then.
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);

/// Most unreleased sessions, and most moved ones, that a report names.
const MAX_NAMED: usize = 1_000;

/// The node's drain, if it has one.
#[derive(Debug)]
pub(crate) struct Drain {
    current: Mutex<Option<Current>>,
    /// Makes the drain outlive its daemon.
    file: StateWriter<Order>,
    pub(crate) signalled: SignalledSessions,
    /// Locked while the file and `current` change together; only this module changes them.
    changing: tokio::sync::Mutex<()>,
    /// Locked while a rebalancing moves sessions.
    rebalancing: Arc<tokio::sync::Mutex<()>>,
    rebalanced: Mutex<Option<RebalanceReport>>,
}

#[derive(Debug)]
struct Current {
    order: Order,
    finished_at: Option<Timestamp>,
    released: u64,
    unreleased: Vec<Unreleased>,
    moved: Vec<Moved>,
    moved_count: u64,
    /// Dropped by an undrain, which stops the task.
    _ends: watch::Sender<()>,
}

impl Drain {
    pub(crate) fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            current: Mutex::default(),
            file: StateWriter::start(state_dir.join("drain.json"))?,
            signalled: SignalledSessions::new(state_dir),
            changing: tokio::sync::Mutex::default(),
            rebalancing: Arc::default(),
            rebalanced: Mutex::default(),
        })
    }

    /// No panic can happen while the lock is held with a partial change.
    fn lock(&self) -> MutexGuard<'_, Option<Current>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the node takes no sessions, if it is being drained.
    pub(crate) fn reason(&self) -> Option<String> {
        self.lock()
            .as_ref()
            .map(|current| current.order.reason.clone())
    }
}

/// Continues the drain of an earlier daemon, if there was one.
pub(crate) async fn resume(context: &Arc<Context>) {
    let read = context.drain.file.read().await;
    let read = read.unwrap_or_else(|error| {
        // Draining by mistake is safer than admitting sessions on a machine that is about to stop.
        tracing::warn!(%error, "cannot read whether the node is being drained; draining");
        Some(Order::of(&DrainRequest::default()))
    });
    let Some(order) = read else {
        return;
    };
    tracing::info!(
        reason = order.reason,
        "continuing an earlier daemon's drain"
    );
    begin(context, order, None);
}

/// Begins a drain, unless one has begun, and reports its state.
pub(crate) async fn drain(
    context: &Arc<Context>,
    request: &DrainRequest,
) -> Result<DrainReport, DrainError> {
    let _changing = context.drain.changing.lock().await;
    if let Some(report) = report(context) {
        return Ok(report);
    }
    let order = Order::of(request);
    let written = context.drain.file.set_and_wait(Some(order.clone())).await;
    begin(context, order, written.as_ref().err());
    report(context).ok_or(DrainError::NotDraining)
}

/// Cancels a drain. Stops that were ordered are carried out; the other sessions stay, and new ones are
/// admitted.
pub(crate) async fn undrain(context: &Arc<Context>) -> Result<(), DrainError> {
    let _changing = context.drain.changing.lock().await;
    if let Err(source) = context.drain.file.set_and_wait(None).await {
        let order = context
            .drain
            .lock()
            .as_ref()
            .map(|current| current.order.clone());
        let stays = order.is_some();
        // The disk may still remove the file later, so the drain that stays is written after it.
        context.drain.file.set(order);
        return Err(DrainError::NotWritten {
            path: context.drain.file.path().to_owned(),
            outcome: match source.kind() {
                ErrorKind::TimedOut if stays => "the node stays drained; try again",
                _ => "nothing was changed",
            },
            source: Arc::new(source),
        });
    }
    if context.drain.lock().take().is_some() {
        context.leave.stay(LeaveCause::Drain);
        let now = match context.table.closed() {
            Some(_) => "the node is still preempted",
            None => "sessions are admitted again",
        };
        let message = format!("drain cancelled; {now}");
        tracing::info!("{message}");
        context.note(NewEvent::of_node(EventKind::NodeUndrained, message));
    }
    Ok(())
}

/// Returns the state of the drain; `None` without one.
pub(crate) fn report(context: &Context) -> Option<DrainReport> {
    let remaining = context.sessions.live().len() as u64;
    let current = context.drain.lock();
    let current = current.as_ref()?;
    Some(DrainReport {
        state: match current.finished_at {
            Some(_) => DrainState::Drained,
            None => DrainState::Draining,
        },
        reason: current.order.reason.clone(),
        started_at: current.order.started_at,
        finished_at: current.finished_at,
        released: current.released,
        remaining,
        moved: current.moved.clone(),
        moved_count: current.moved_count,
        unreleased: current.unreleased.clone(),
        through: context.leave.through().in_flight(),
    })
}

/// Begins to drain.
fn begin(context: &Arc<Context>, order: Order, unwritten: Option<&io::Error>) {
    let (ends, ended) = watch::channel(());
    let mut message = format!("draining: {}", order.reason);
    if let Some(error) = unwritten {
        let path = context.drain.file.path().display();
        message = format!(
            "{message}; a restarted daemon would not continue the drain until {path} can be \
             written, which is retried: {error}"
        );
    }
    *context.drain.lock() = Some(Current {
        order: order.clone(),
        finished_at: None,
        released: 0,
        unreleased: Vec::new(),
        moved: Vec::new(),
        moved_count: 0,
        _ends: ends,
    });
    context.leave.announce(LeaveCause::Drain);
    context.note(NewEvent::of_node(EventKind::DrainStarted, message));
    tokio::spawn(run(Arc::clone(context), order, ended));
}

async fn run(context: Arc<Context>, order: Order, mut ended: watch::Receiver<()>) {
    let began = Instant::now();
    let mut had = Turns::new();
    let parallel = order.parallel as usize;
    // A turn gives its place back once its session has ended, and then waits for the move.
    let places = Arc::new(Semaphore::new(parallel));
    let mut turns = JoinSet::new();
    while ended.has_changed().is_ok() {
        let has_room = turns.len() < parallel + MAX_MOVING;
        if has_room
            && let Ok(place) = Arc::clone(&places).try_acquire_owned()
            && let Some(handle) = next(&context, &order, &had)
        {
            had.insert(handle.id.clone(), Arc::clone(&handle));
            let turn = take_turn(Arc::clone(&context), handle, order.clone(), place);
            turns.spawn(turn);
            continue;
        }
        let is_full = places.available_permits() == 0;
        if turns.is_empty() && is_finished(&context) {
            let until = Instant::now() + context.leave.delay() + CLOSE_PATIENCE;
            context.leave.close(LeaveCause::Drain, began, until).await;
            // Otherwise it was cancelled meanwhile.
            if ended.has_changed().is_ok() {
                finish(&context, began);
            }
            return;
        }
        tokio::select! {
            // Cancel safe: an outcome is taken or stays in the set.
            Some(turn) = turns.join_next() => {
                if let Ok(outcome) = turn {
                    note_turn(&context, outcome);
                }
            }
            // Cancel safe: it only reports that the sender was dropped.
            _ = ended.changed() => {}
            // Cancel safe: a permit is given back at once, and taken above.
            _ = places.acquire(), if has_room && is_full => {}
            // Cancel safe: a timer has no state.
            () = sleep(STUCK_INTERVAL), if !is_full => {}
        }
    }
    // Sessions whose turn has begun are still stopped.
    turns.detach_all();
}

/// Returns the session whose turn is next.
fn next(context: &Context, order: &Order, had: &Turns) -> Option<Arc<SessionHandle>> {
    let planned = plan_for(candidates(context, order, had), order);
    let first = planned.sessions.into_iter().next()?;
    context.sessions.current(&first.id)
}

/// Whether only sessions that could not be killed are left.
fn is_finished(context: &Context) -> bool {
    let live = context.sessions.live();
    live.iter()
        .all(|handle| handle.is_ended() || handle.state() == SessionState::Stuck)
}

/// The outcome of one session's turn.
enum Outcome {
    Released,
    Moved(Moved),
    Unreleased(Unreleased),
}

/// Ends one session, then releases `place` for the next, and starts the session on another node if its
/// spec wants that.
async fn take_turn(
    context: Arc<Context>,
    handle: Arc<SessionHandle>,
    order: Order,
    place: OwnedSemaphorePermit,
) -> Outcome {
    let (signal, grace_ms) = order.warning(&handle);
    let view = handle.view();
    let why = format!("{DRAINED}: {}", order.reason);
    if let (Some(signal), Some(process)) = (signal.as_deref().and_then(parse_signal), view.process)
    {
        // A paused session would not run during its grace.
        if let Err(error) = crate::pause::resume(&context, &handle).await {
            let error = conman_core::error_chain(&error);
            tracing::warn!(session = %handle.id, error, "cannot resume a paused session to signal it");
        }
        let grace = Duration::from_millis(grace_ms.into());
        handle.leaving.order(StopOrder {
            cause: EndCause::Drained,
            why: why.clone(),
        });
        note_signalled(&context, &handle, DrainSignal::new(&why, grace_ms)).await;
        let until = Instant::now() + grace;
        match gentle_stop::send(&context, &handle, &process, signal).await {
            Ok(_) => {
                let gone = handle.wait_for(|view| view.process.is_none());
                // Cancel safe: it only waits.
                let _ = timeout(until.saturating_duration_since(Instant::now()), gone).await;
            }
            Err(error) => {
                let error = conman_core::error_chain(&error);
                tracing::warn!(
                    session = %handle.id,
                    error,
                    %signal,
                    "cannot send the signal; killing"
                );
            }
        }
    }
    handle.order_stop(EndCause::Drained, &why);
    let over = |view: &View| view.state.is_ended() || view.state == SessionState::Stuck;
    let view = handle.wait_for(over).await;
    drop(place);
    if view.state == SessionState::Stuck {
        return Outcome::Unreleased(Unreleased {
            id: handle.id.clone(),
            generation: view.generation.unwrap_or(Generation::FIRST),
            reason: view.reason.unwrap_or_default(),
        });
    }
    let went = view.cause() == Some(EndCause::Drained);
    match view.generation {
        Some(generation) if went && handle.spec().on_node_loss == OnNodeLoss::Restart => {
            let moved = relocate(&context, &handle, generation).await;
            moved.map_or(Outcome::Released, Outcome::Moved)
        }
        _ => Outcome::Released,
    }
}

/// Starts a session on another node. After a failure or a timeout the other nodes take care of it.
async fn relocate(
    context: &Context,
    handle: &SessionHandle,
    generation: Generation,
) -> Option<Moved> {
    let others = context.relocate.get()?;
    let moving = others.relocate(&handle.id, generation);
    // On a timeout only the wait is cancelled: a start that another node has begun continues.
    let why = match timeout(MOVE_PATIENCE, moving).await {
        Ok(Ok(node)) => {
            tracing::info!(session = %handle.id, node, "moved the session to another node");
            return Some(Moved {
                id: handle.id.clone(),
                node,
            });
        }
        Ok(Err(why)) => why,
        Err(_) => format!("it took longer than {} s", MOVE_PATIENCE.as_secs()),
    };
    tracing::warn!(session = %handle.id, why, "did not start the session on another node");
    None
}

fn note_turn(context: &Context, outcome: Outcome) {
    let mut current = context.drain.lock();
    let Some(current) = current.as_mut() else {
        return;
    };
    match outcome {
        Outcome::Released => current.released += 1,
        Outcome::Moved(one) => {
            current.released += 1;
            current.moved_count += 1;
            if current.moved.len() < MAX_NAMED {
                current.moved.push(one);
            }
        }
        Outcome::Unreleased(one) if current.unreleased.len() < MAX_NAMED => {
            current.unreleased.push(one);
        }
        Outcome::Unreleased(_) => {}
    }
}

fn finish(context: &Context, began: Instant) {
    let (released, moved, stuck) = {
        let mut current = context.drain.lock();
        let Some(current) = current.as_mut() else {
            return;
        };
        current.finished_at = Some(Timestamp::now());
        (
            current.released,
            current.moved_count,
            current.unreleased.len(),
        )
    };
    let took = began.elapsed().as_secs_f64();
    let rest = released - moved;
    let message = format!(
        "drained in {took:.1} s: {moved} sessions run on other nodes, {rest} start again when they are \
         needed, {stuck} stuck"
    );
    tracing::info!("{message}");
    context.note(NewEvent::of_node(EventKind::DrainFinished, message));
}

#[cfg(test)]
mod tests;
