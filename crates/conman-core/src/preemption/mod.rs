//! A node's preemptions: kill, certify, release, as pure decisions.
//!
//! ```text
//!  Claiming ──its record is found──┐
//!  Reserved ───────────────────────┤ (it never ran)
//!  Sent ──its init is found──┐     │
//!  Running ─> Warned ─┐      │     v
//!     └───────────────┴──> Killed ─certificate─> Dead ─recorded─> Released
//! ```
//!
//! The driver calls [`Preemption::on`] with the time and an event, executes the actions in their order,
//! and reports their results as events. The daemon's emergency thread is one driver; the simulation is
//! another. Late, duplicate and unexpected events change nothing.
//!
//! Absent: a clock, pids, the registry, text for people. Times are a [`Duration`] since any fixed
//! instant of one monotonic clock.
//!
//! Invariants, for every order of events:
//! - a session is released only after a certificate of that very generation, or if its start was not
//!   sent when the table was closed;
//! - the table is closed from the notice to the end of the preemption, so that no start is sent that
//!   the preemption does not know;
//! - every session is sent SIGKILL before anything waits, unless its grace is running;
//! - a certified session's release is repeated until it is answered for good or the time is up;
//! - what passes through the node is closed before the time is up, whatever is not released.

use std::time::Duration;

use crate::ownership::{SessionName, Slot};

mod exiting;
mod notices;
mod run;
mod target;

use notices::{Notices, OnNotice, OnReadmit};
use run::Run;

pub use exiting::{ExitProof, ThreadSeen};
pub use notices::Origin;
pub use run::EXIT_PROOF_AFTER;

/// How long to wait for certificates and releases when the notice leaves less time: they take
/// milliseconds, and a machine rarely stops exactly on time.
const SHORTEST_RUN: Duration = Duration::from_secs(2);

/// Most time that is kept for closing what passes through a node. The proxy spreads that over two seconds.
const CLOSING: Duration = Duration::from_millis(2_500);

/// When a preemption gives up, counted from its notice.
#[must_use]
pub fn run_time(budget: Duration) -> Duration {
    budget.max(SHORTEST_RUN)
}

/// Returns how much of the time that is `left` is kept for closing what passes through a node, however long its
/// sessions or load balancers need; of a short time, half.
#[must_use]
pub fn closing_time(left: Duration) -> Duration {
    CLOSING.min(left / 2)
}

/// How far the start of a session has come, in the driver's table of what must be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableStage {
    /// The registry was asked for a generation.
    Claiming,
    /// Recorded; no start was sent.
    Reserved { generation: u64 },
    /// A start was sent: it may run now or later.
    Sent { generation: u64 },
    /// It runs, or ran. It is sent its own signal first if there is a grace.
    Running {
        generation: u64,
        grace: Duration,
        /// Whether it has files that another node may use next. Then only an empty PID namespace is
        /// proof: the kernel flushes and unlocks them before.
        shares_files: bool,
    },
}

/// What proves that nothing of a session runs any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certificate {
    /// Its PID namespace is empty.
    Empty,
    /// Every thread has begun to exit ([`ExitProof`]). The kernel still takes down what they had.
    Exiting,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KillResult {
    Sent,
    /// Its certificate comes at once.
    DeadAlready,
    Failed(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReleaseResult {
    /// Recorded, or its record is deleted or of a newer generation: it was released before.
    Recorded,
    /// It is tried again.
    Unavailable,
    Refused(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The machine is about to stop. Both times may lie before now.
    Notice {
        origin: Origin,
        noticed_at: Duration,
        /// When to give up.
        deadline: Duration,
    },
    /// The notice is withdrawn.
    Readmit(Origin),
    /// Due at [`Preemption::next_wake`]; extra ticks do no harm.
    Tick,
    /// The table has a new entry or stage. May be lost: the table is polled as well.
    TableChanged,
    /// Answer to [`Action::ReadTable`]: every entry.
    Table(Vec<(SessionName, TableStage)>),
    /// Everything that the last table led to was done, and took so long.
    TableHandled { took: Duration },
    /// Answer to [`Action::Warn`], if the signal could not be sent.
    NotWarned(Slot),
    /// Answer to [`Action::Kill`], for each.
    KillSent { slot: Slot, result: KillResult },
    /// Answer to [`Action::Search`]: whether a process was found and killed, and whether the init was
    /// among them.
    Searched {
        slot: Slot,
        killed: bool,
        init: bool,
    },
    /// Answers to [`Action::AwaitDeath`].
    Certificates(Vec<(Slot, Certificate)>),
    /// Answer to [`Action::Release`].
    ReleasesAnswered(Vec<(Slot, ReleaseResult)>),
    /// Answer to [`Action::LookUpClaims`]: those that the registry has.
    ClaimsFound(Vec<Slot>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send no start from here on.
    Close,
    /// The preemption is over and the machine stays: send starts again.
    Reopen,
    /// The notice is withdrawn: the next daemon does not act on it.
    ForgetNotice,
    /// The preemption has ended; [`Preemption::outcome`] has its result. Everybody who gave notice gets
    /// it.
    Finish,
    /// Another notice of a preemption that has ended: it gets the same result.
    Answer,
    /// Begin now to close what passes through the node to sessions on other nodes: only the time until this
    /// deadline is left for it. A preemption that ends sooner leaves it to the driver.
    CloseThrough(Duration),
    ReadTable,
    /// Send the session's own signal.
    Warn(Slot),
    /// Send SIGKILL to all of them before anything else: dying processes compete for the processors
    /// with the thread that kills.
    Kill(Vec<Slot>),
    /// Kill what there is of a session whose start was not answered.
    Search(Slot),
    /// Report its certificates from here on.
    AwaitDeath(Slot),
    /// Find out whether every thread of it has begun to exit, until its PID namespace is empty, and report
    /// the certificate.
    ProveExit(Slot),
    /// No session runs a program any more: give dying processes priority.
    RaisePriority,
    /// Release these, in one batch. There is no other until it is answered.
    Release(Vec<Slot>),
    /// Read the generations of these from the registry.
    LookUpClaims(Vec<SessionName>),
    /// For the record: SIGKILL was sent to it.
    NoteKilled(Slot),
    /// For the record: its certificate has come.
    NoteDead(Slot, Certificate),
    /// It is released; the driver forgets it.
    NoteReleased(Slot),
}

/// Why a session is not released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unreleased {
    Claiming,
    StartUnanswered,
    InGrace,
    /// SIGKILL was sent.
    NotDead,
    NotRecorded,
    Failed(String),
}

/// What a preemption has done. The `last_` times count from its notice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub sessions: usize,
    pub killed: u64,
    pub certified: u64,
    pub released: u64,
    pub last_kill: Option<Duration>,
    pub last_certificate: Option<Duration>,
    pub last_release: Option<Duration>,
    /// Ordered by name. A claim that was never answered has no generation.
    pub unreleased: Vec<(SessionName, Option<u64>, Unreleased)>,
}

/// The preemptions of one daemon.
#[derive(Debug, Default)]
pub struct Preemption {
    notices: Notices,
    /// The preemption under way, or the last one.
    run: Run,
    actions: Vec<Action>,
}

impl Preemption {
    /// Handles an event. The actions must be executed in their order.
    #[must_use = "the actions must be executed"]
    pub fn on(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Notice {
                origin,
                noticed_at,
                deadline,
            } => self.notice(now, origin, noticed_at, deadline),
            Event::Readmit(by) => match self.notices.on_readmit(by) {
                OnReadmit::Reopen => {
                    self.actions.extend([Action::ForgetNotice, Action::Reopen]);
                }
                // At once: this daemon may end before the preemption is finished.
                OnReadmit::Later => self.actions.push(Action::ForgetNotice),
                OnReadmit::Ignore => {}
            },
            event if self.is_under_way() => {
                let is_tick = event == Event::Tick;
                self.run.on(now, event, &mut self.actions);
                self.run.proceed(now, &mut self.actions);
                // Only a tick ends it before: every other event may have led to actions whose results
                // still count.
                if self.run.is_settled() || (is_tick && self.run.is_over(now)) {
                    self.finish();
                }
            }
            _ => {}
        }
        std::mem::take(&mut self.actions)
    }

    /// Whether a preemption is under way.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        matches!(self.notices, Notices::Preempting { .. })
    }

    /// When a [`Event::Tick`] is due.
    #[must_use]
    pub fn next_wake(&self) -> Option<Duration> {
        self.is_under_way().then(|| self.run.next_wake())
    }

    /// What the preemption under way, or the last one, has done.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.run.outcome()
    }

    fn notice(&mut self, now: Duration, origin: Origin, noticed_at: Duration, deadline: Duration) {
        match self.notices.on_notice(origin) {
            OnNotice::Start => {
                self.run = Run::new(now, noticed_at, deadline);
                self.actions.push(Action::Close);
            }
            OnNotice::Join => self.run.hurry(now, deadline),
            OnNotice::Answer => self.actions.push(Action::Answer),
        }
    }

    fn finish(&mut self) {
        let reopens = self.notices.on_finished();
        self.actions.push(Action::Finish);
        if reopens {
            self.actions.push(Action::Reopen);
        }
    }
}

#[cfg(test)]
mod tests;
