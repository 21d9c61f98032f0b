//! Which notices are saved for the next daemon, before anything else is done about them.

use conman_testkit::ModelRegistry;
use tempfile::TempDir;
use tokio::sync::watch;

use super::log::Log;
use super::thread::EmergencyLoop;
use super::*;
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
            leave: Arc::new(Leave::new(std::time::Duration::ZERO)),
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
