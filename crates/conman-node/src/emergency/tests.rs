//! Which notices are saved for the next daemon, before anything else is done about them, and what passes through
//! the node meanwhile.

use std::time::Duration;

use conman_core::Departure;
use conman_proto::Generation;
use conman_registry::Phases;
use conman_testkit::ModelRegistry;
use tempfile::TempDir;
use tokio::sync::watch;

use super::log::Log;
use super::thread::EmergencyLoop;
use super::*;
use crate::kill_table::{KillEntry, StartStage};
use crate::state_writer::Wanted;

const GCE_PREEMPTED: Origin = Origin::Source {
    name: "gce",
    signal: "preempted",
};
const GCE_MAINTENANCE: Origin = Origin::Source {
    name: "gce",
    signal: "maintenance-event",
};

/// The emergency thread's work, a step at a time.
struct Thread {
    work: EmergencyLoop,
    saved: watch::Receiver<Wanted<String>>,
    _dir: TempDir,
}

impl Thread {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (file, saved) = PreemptionFile::unwritten();
        let journal = Journal::open(dir.path(), "test-node", 1_000).expect("a journal");
        let means = Means {
            table: Arc::default(),
            leave: Arc::new(Leave::new(Duration::ZERO)),
            registry: Arc::new(ModelRegistry::new()),
            journal: Arc::new(journal),
            budget_ms: 1_000,
            instance: Instance::new([0xfe; 4]),
            file,
            cordons: tokio::sync::mpsc::channel(1).0,
        };
        Self {
            work: EmergencyLoop::new(means, Log::start().expect("a thread"), Instant::now()),
            saved,
            _dir: dir,
        }
    }

    /// Gives a notice and returns what is to be saved, before anything waits.
    fn notice(&mut self, origin: Origin, source: &str) -> Option<Option<String>> {
        let reason = format!("told by {source}");
        let reply = oneshot::channel().0;
        let notice = Notice::now(source, origin, &reason, Some(1_000), reply);
        self.work.take(notice);
        self.last_change()
    }

    /// Gives a notice that leaves this much time, and returns what its source waits for.
    fn report_within(&mut self, budget_ms: u32) -> oneshot::Receiver<PreemptReport> {
        let (reply, report) = oneshot::channel();
        let notice = Notice::now("gce", GCE_PREEMPTED, "a test", Some(budget_ms), reply);
        self.work.take(notice);
        report
    }

    /// Adds a session whose start is never answered.
    fn add_unanswered_start(&self) {
        let entry = KillEntry {
            stage: StartStage::Sent(Generation::FIRST),
            runtime: None,
            warning: None,
            pausing: watch::channel(None).1,
            shares_files: false,
            closing: Arc::new(watch::Sender::new(None)),
            fate: Arc::new(watch::Sender::new(None)),
            stop: Arc::new(watch::Sender::new(None)),
            leaving: Arc::default(),
            started_at: None,
            phases: Phases::default(),
        };
        let id = "alice".parse().expect("an id");
        self.work.means.table.adopt(&id, entry);
    }

    fn readmit(&mut self, by: Origin) -> Option<Option<String>> {
        self.work.readmit(by);
        self.last_change()
    }

    /// Returns what is to be saved since the last call: a reason, or none.
    fn last_change(&mut self) -> Option<Option<String>> {
        let is_new = self.saved.has_changed().expect("the writer is there");
        is_new.then(|| self.saved.borrow_and_update().1.clone())
    }

    async fn finish(&mut self) -> Option<Option<String>> {
        while self.work.is_under_way() {
            let event = self.work.next().await;
            self.work.drive(event);
        }
        self.last_change()
    }
}

fn kept(source: &str) -> Option<Option<String>> {
    Some(Some(format!("told by {source}")))
}

#[tokio::test]
async fn every_word_of_an_operators_is_kept_at_once_whoever_gave_notice_before() {
    for first in [
        (GCE_PREEMPTED, "gce"),
        (GCE_MAINTENANCE, "gce"),
        (Origin::Operator, SIGNAL),
        (Origin::Operator, "api"),
    ] {
        let mut thread = Thread::new();
        thread.notice(first.0, first.1);
        let joined = thread.notice(Origin::Operator, "admin");
        assert_eq!(joined, kept("admin"), "after {first:?}");
        assert_eq!(thread.finish().await, None, "it is said already");
        let late = thread.notice(Origin::Operator, "api");
        assert_eq!(late, kept("api"), "long after {first:?}");
    }
    let mut thread = Thread::new();
    assert_eq!(thread.notice(Origin::Operator, "restart"), kept("restart"));
}

#[tokio::test]
async fn no_word_of_a_signals_or_the_metadata_servers_is_kept() {
    let passing = [
        (GCE_PREEMPTED, "gce"),
        (GCE_MAINTENANCE, "gce"),
        (Origin::Operator, SIGNAL),
    ];
    for first in passing {
        for second in passing {
            let mut thread = Thread::new();
            assert_eq!(thread.notice(first.0, first.1), None);
            assert_eq!(thread.notice(second.0, second.1), None);
            assert_eq!(thread.finish().await, None, "{first:?}, {second:?}");
            assert_eq!(thread.notice(first.0, first.1), None);
        }
    }
}

#[tokio::test]
async fn what_is_taken_back_in_the_middle_is_forgotten_before_it_is_finished() {
    let mut thread = Thread::new();
    assert_eq!(thread.notice(Origin::Operator, "api"), kept("api"));
    assert_eq!(thread.readmit(GCE_PREEMPTED), None, "not its word");
    assert_eq!(thread.readmit(Origin::Operator), Some(None));
    assert_eq!(thread.finish().await, None);
    assert_eq!(
        thread.work.means.table.closed().map(|closed| closed.reason),
        None
    );

    assert_eq!(thread.notice(Origin::Operator, "api"), kept("api"));
    assert_eq!(thread.readmit(Origin::Operator), Some(None));
    assert_eq!(thread.notice(Origin::Operator, "admin"), kept("admin"));
    assert_eq!(
        thread.finish().await,
        None,
        "the machine is going after all"
    );
    assert_eq!(thread.readmit(Origin::Operator), Some(None));
}

#[tokio::test(start_paused = true)]
async fn a_source_gets_the_report_once_nothing_passes_through_or_the_time_is_up() {
    let mut thread = Thread::new();
    let leave = Arc::clone(&thread.work.means.leave);
    let tunnel = leave.through().begin();
    let began = Instant::now();
    let mut early = thread.report_within(60_000);
    thread.finish().await;
    let mut late = thread.report_within(60_000);
    let last = thread.report_within(2_000).await.expect("a report");
    assert_eq!(last.through, 1);
    assert!(began.elapsed() < Duration::from_secs(3));
    assert_eq!(*leave.departure().borrow(), Departure::Closing);
    for report in [&mut early, &mut late] {
        report.try_recv().expect_err("a client is still connected");
    }
    drop(tunnel);
    for report in [early, late] {
        assert_eq!(report.await.expect("a report").through, 0);
    }
    assert!(began.elapsed() < Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn what_passes_through_is_closed_in_time_although_a_start_is_never_answered() {
    let mut thread = Thread::new();
    thread.add_unanswered_start();
    let leave = Arc::clone(&thread.work.means.leave);
    let _tunnel = leave.through().begin();
    let (mut departure, began) = (leave.departure(), Instant::now());
    let report = thread.report_within(10_000);
    let closes = async {
        let closes = departure.wait_for(|state| *state == Departure::Closing);
        closes.await.expect("it leaves");
        began.elapsed()
    };
    let (_, closed_after) = tokio::join!(thread.finish(), closes);
    let expected = Duration::from_millis(7_500)..Duration::from_secs(8);
    assert!(expected.contains(&closed_after), "{closed_after:?}");
    assert_eq!(report.await.expect("a report").unreleased.len(), 1);
}
