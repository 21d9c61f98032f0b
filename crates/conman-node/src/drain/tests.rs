//! A disk that answers late, and the resulting file.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use conman_core::{Instance, SpecPolicy};
use conman_linux::{NetnsSockets, StateFile};
use conman_net::egress::{Egress, EgressOptions};
use conman_registry::Journal;
use conman_testkit::ModelRegistry;
use tokio::sync::Notify;

use super::*;
use crate::NodeOptions;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node without sessions or runtimes.
fn empty_node(state_dir: &Path, drain: Drain) -> Arc<Context> {
    let sockets = Arc::new(NetnsSockets::start().expect("threads"));
    let egress = Egress::start(EgressOptions::default());
    let journal = Journal::open(&state_dir.join("journal"), "test-node", 1_000);
    Arc::new(Context {
        options: NodeOptions::new(
            "test-node".to_owned(),
            Instance::new([0xfd; 4]),
            state_dir.to_owned(),
            SpecPolicy::default(),
        ),
        registry: Arc::new(ModelRegistry::new()),
        journal: Arc::new(journal.expect("a journal")),
        health: crate::runtime_health::RuntimeHealth::new(std::iter::empty()),
        runtimes: BTreeMap::new(),
        table: Arc::default(),
        sockets,
        egress: egress.expect("threads"),
        sessions: crate::session_table::SessionTable::default(),
        starts: Arc::new(Semaphore::new(1)),
        watches: Arc::new(Semaphore::new(1)),
        host_limits: crate::host_limits::HostLimits::default(),
        held: Arc::default(),
        cleanup: crate::cleanup::CleanupQueue::default(),
        end_orders: crate::end_orders::EndOrders::default(),
        cordon: crate::cordon::Cordon::new(state_dir).expect("a thread"),
        drain,
        leave: Arc::new(crate::leave::Leave::new(Duration::ZERO)),
        relocate: OnceLock::new(),
        stray_expected: Notify::new(),
        policy: crate::context::LivePolicy::new(SpecPolicy::default()),
    })
}

/// Changes of a disk that a test has not looked at: more than any test makes.
const UNREAD: usize = 64;

/// A disk on which one change can be held up.
#[derive(Default)]
struct Disk(Arc<Mutex<Option<Receiver<()>>>>);

impl Disk {
    /// Returns a drain with a file on the disk, and its changes once they are made: whether it is written or
    /// removed.
    fn drain(&self, state_dir: &Path) -> (Drain, Receiver<bool>) {
        let (made, changes) = sync_channel(UNREAD);
        let held = Arc::clone(&self.0);
        let write = move |file: &StateFile, order: Option<&Order>| -> io::Result<()> {
            let answers = held.lock().expect("no panic").take();
            if let Some(answers) = answers {
                // Fails when the test is over.
                let _ = answers.recv();
            }
            match order {
                Some(order) => file.write(order)?,
                None => file.remove()?,
            }
            made.send(order.is_some()).map_err(io::Error::other)
        };
        let path = state_dir.join("drain.json");
        let file = StateWriter::written_by(path, Duration::from_millis(1), write);
        let drain = Drain {
            file: file.expect("a thread"),
            ..Drain::new(state_dir).expect("a thread")
        };
        (drain, changes)
    }

    /// Holds up the next change of the file until the returned sender is used.
    fn hang(&self) -> SyncSender<()> {
        let (disk, answers) = sync_channel(1);
        *self.0.lock().expect("no panic") = Some(answers);
        disk
    }
}

#[tokio::test]
async fn a_drain_whose_file_is_removed_late_is_written_down_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let disk = Disk::default();
    let (on_disk, changes) = disk.drain(dir.path());
    let is_written = || changes.recv_timeout(PATIENCE).expect("a change");
    let context = empty_node(dir.path(), on_disk);
    let written = dir.path().join("drain.json");
    let request = DrainRequest::default();
    drain(&context, &request).await.expect("it begins");
    assert!(is_written() && written.exists());

    let held = disk.hang();
    let refused = undrain(&context).await.expect_err("it may be removed yet");
    let told = refused.to_string();
    assert!(
        told.ends_with("the node stays drained; try again"),
        "{told}"
    );
    let again = drain(&context, &request).await.expect("it continues");
    assert_eq!(again.reason, "the node is being drained");
    held.send(()).expect("the disk hangs");
    assert!(!is_written());
    assert!(is_written(), "the next daemon would admit");
    assert!(written.exists());

    undrain(&context).await.expect("it is taken back");
    assert!(!is_written() && !written.exists());
    let held = disk.hang();
    let refused = undrain(&context).await.expect_err("the outcome is unknown");
    let told = refused.to_string();
    assert!(told.ends_with("nothing was changed"), "{told}");
    held.send(()).expect("the disk hangs");
    // Removed again, after what was held up.
    assert!(!is_written() && !is_written());
    assert!(!written.exists());
}
