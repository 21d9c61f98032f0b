//! The handle of a session's task for the rest of the program.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_core::EndCause;
use conman_core::restart::{Ownerless, lost_by, was_last};
use conman_core::{Activity, Closing};
use conman_linux::{SignalNumber, program_of_init};
use conman_proto::{Generation, OnNodeLoss, ResolvedSpec, SessionId, SessionState};
use conman_registry::Ending;
use conman_traffic::Traffic;
use tokio::sync::{Semaphore, watch};

use super::leaving::Leaving;
use super::live_spec::LiveSpec;
use super::view::View;
use crate::file_watch::MAX_WATCHES;
use crate::kill_table::Fate;
use crate::oom_kills::OomKills;
use crate::pause::Pausing;
use crate::start_waits::HeldCount;

/// Clients attached to one session at a time, over all its terminals, including those that follow the log
/// of a session with a terminal. Low enough that no session takes all of the shim's places.
pub(crate) const MAX_ATTACHED: usize = 32;

/// An order to stop, and why.
#[derive(Debug, Clone)]
pub(crate) struct StopOrder {
    pub(crate) cause: EndCause,
    pub(crate) why: String,
}

/// Whether a client ordered the session's deletion.
pub(crate) fn is_unwanted(order: Option<&StopOrder>) -> bool {
    order.is_some_and(|order| order.cause == EndCause::Deleted)
}

/// Attributes the end of a session that a client has deleted to the deletion.
pub(crate) fn attribute_to_deletion(order: Option<&StopOrder>, ending: &mut Ending) {
    if let Some(order) = order.filter(|order| is_unwanted(Some(order))) {
        let reason = std::mem::take(&mut ending.reason);
        ending.reason = reason_of_deleted(ending.cause(), reason, &order.why);
        ending.cause = Some(order.cause);
    }
}

/// Returns the reason to record for a deleted session: what its node did to it does not matter any more,
/// unlike what it did itself.
pub(crate) fn reason_of_deleted(cause: EndCause, reason: String, why: &str) -> String {
    match cause {
        EndCause::Preempted | EndCause::Drained | EndCause::NodeLost | EndCause::Unrecorded => {
            why.to_owned()
        }
        _ => reason,
    }
}

/// One life of a session: from its start to its end, in one generation.
///
/// Only the task writes the view; only the order to stop goes the other way. Both are watch channels, so
/// sending never waits.
#[derive(Debug)]
pub(crate) struct SessionHandle {
    pub(crate) id: SessionId,
    pub(crate) live_spec: LiveSpec,
    pub(crate) view: watch::Sender<View>,
    pub(crate) stop: Arc<watch::Sender<Option<StopOrder>>>,
    pub(crate) closing: Arc<watch::Sender<Option<Closing>>>,
    pub(crate) fate: Arc<watch::Sender<Option<Fate>>>,
    pub(crate) activity: Arc<Activity>,
    /// What conman's proxies carry for it.
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) held: HeldCount,
    pub(crate) pausing: Pausing,
    /// Whether kept commands may run in it.
    pub(crate) kept_commands: AtomicBool,
    pub(crate) leaving: Arc<Leaving>,
    /// Places for clients that are attached to its terminals, or follow the log of one.
    pub(crate) attached: Arc<Semaphore>,
    /// Places for watches of its files.
    pub(crate) watches: Arc<Semaphore>,
    /// Whether it may have network interfaces besides loopback.
    pub(crate) may_have_links: AtomicBool,
    pub(crate) oom_kills: OomKills,
    /// Processes killed because memory ran out that the journal knows, or [`Self::OOM_UNKNOWN`].
    pub(crate) oom_noted: AtomicU64,
    /// Its program's process below conman's init; 0 where there is none, or while it is not known.
    program_pid: AtomicI32,
    /// The latest signal that a client has sent to its program.
    pub(crate) signalled: Mutex<Option<SignalNumber>>,
    /// A later life is on another node, which counts it.
    pub(crate) is_elsewhere: AtomicBool,
}

impl SessionHandle {
    /// An earlier daemon may have noted some.
    pub(crate) const OOM_UNKNOWN: u64 = u64::MAX;

    pub(crate) fn new(id: SessionId, spec: ResolvedSpec, view: View) -> Arc<Self> {
        let may_have_links = AtomicBool::new(spec.network.traits().leads_out);
        let traffic = Arc::new(Traffic::new(&spec.bandwidth));
        Arc::new(Self {
            id,
            live_spec: LiveSpec::new(spec),
            view: watch::Sender::new(view),
            stop: Arc::default(),
            closing: Arc::new(watch::Sender::new(None)),
            fate: Arc::new(watch::Sender::new(None)),
            activity: Arc::new(Activity::default()),
            traffic,
            held: HeldCount::default(),
            pausing: Pausing::default(),
            kept_commands: AtomicBool::new(false),
            leaving: Arc::default(),
            attached: Arc::new(Semaphore::new(MAX_ATTACHED)),
            watches: Arc::new(Semaphore::new(MAX_WATCHES)),
            may_have_links,
            oom_kills: OomKills::default(),
            oom_noted: AtomicU64::new(0),
            program_pid: AtomicI32::new(0),
            signalled: Mutex::default(),
            is_elsewhere: AtomicBool::new(false),
        })
    }

    pub(crate) fn spec(&self) -> Arc<ResolvedSpec> {
        self.live_spec.get()
    }

    pub(crate) fn view(&self) -> View {
        self.view.borrow().clone()
    }

    pub(crate) fn state(&self) -> SessionState {
        self.view.borrow().state
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        self.view.borrow().generation
    }

    /// Learns which process is its program's: `first`, the first of its PID namespace, unless that is conman's init.
    /// Reads procfs.
    pub(crate) fn learn_program(&self, first: i32) {
        if self.spec().has_own_init() {
            let program = program_of_init(first).unwrap_or(0);
            self.program_pid.store(program, Ordering::Relaxed);
        }
    }

    /// The process of its program.
    pub(crate) fn program_pid(&self, first: i32) -> i32 {
        match self.program_pid.load(Ordering::Relaxed) {
            0 => first,
            program => program,
        }
    }

    /// Processes killed in this life because memory ran out, as far as that was noticed.
    pub(crate) fn oom_kills_noted(&self) -> u64 {
        match self.oom_noted.load(Ordering::Relaxed) {
            Self::OOM_UNKNOWN => 0,
            kills => kills,
        }
    }

    /// No panic can happen while the lock is held.
    pub(crate) fn signalled(&self) -> MutexGuard<'_, Option<SignalNumber>> {
        self.signalled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.state().is_ended()
    }

    /// Whether it was killed, even if its task does not show that yet.
    pub(crate) fn is_ending(&self) -> bool {
        self.closing.borrow().is_some()
    }

    /// Whether it has ended because it lost its node, and is restarted automatically on another.
    pub(crate) fn is_to_be_restarted(&self) -> bool {
        self.spec().on_node_loss == OnNodeLoss::Restart && self.is_lost() && !was_last(&self.spec())
    }

    /// Whether it has ended because of its node: it can be started again by its record, automatically or by
    /// a connection.
    pub(crate) fn is_lost(&self) -> bool {
        let view = self.view.borrow();
        let end = Ownerless::Ended {
            cause: view.cause().unwrap_or(EndCause::Unknown),
            ran: view.started_at.is_some(),
            exit_code: view.exit_code,
        };
        view.state.is_ended() && lost_by(&self.spec(), end).is_some()
    }

    /// Orders it to stop. A later order changes nothing, unless it deletes the session.
    pub(crate) fn order_stop(&self, cause: EndCause, why: &str) {
        self.stop.send_if_modified(|order| {
            if order.is_some() && (cause != EndCause::Deleted || is_unwanted(order.as_ref())) {
                return false;
            }
            let why = why.to_owned();
            *order = Some(StopOrder { cause, why });
            true
        });
    }

    /// The order to stop, for the emergency thread.
    pub(crate) fn stop_orders(&self) -> Arc<watch::Sender<Option<StopOrder>>> {
        Arc::clone(&self.stop)
    }

    /// Returns the cause to report: a client's deletion takes precedence over what ended the session.
    pub(crate) fn caused_by(&self, cause: EndCause) -> EndCause {
        match is_unwanted(self.stop.borrow().as_ref()) {
            true => EndCause::Deleted,
            false => cause,
        }
    }

    /// Like [`Self::caused_by`], for the reason.
    pub(crate) fn reason_of_end(&self, cause: EndCause, reason: String) -> String {
        match self.stop.borrow().as_ref() {
            Some(order) if is_unwanted(Some(order)) => reason_of_deleted(cause, reason, &order.why),
            _ => reason,
        }
    }

    /// Returns the first view that satisfies `wanted`, at once if the present one does. Cancel safe.
    pub(crate) async fn wait_for(&self, mut wanted: impl FnMut(&View) -> bool) -> View {
        let mut views = self.view.subscribe();
        loop {
            {
                let view = views.borrow_and_update();
                if wanted(&view) {
                    return view.clone();
                }
            }
            // The sender lives in `self`, so this cannot fail.
            let _ = views.changed().await;
        }
    }
}
