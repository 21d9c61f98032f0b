//! A disk that answers late, and the resulting file.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use conman_core::{Instance, SpecPolicy};
use conman_linux::NetnsSockets;
use conman_net::egress::{Egress, EgressOptions};
use conman_registry::Journal;
use conman_testkit::ModelRegistry;
use tokio::sync::Notify;

use super::*;
use crate::NodeOptions;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node without sessions or runtimes.
fn empty_node(state_dir: &Path) -> Arc<Context> {
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
        runtimes: BTreeMap::new(),
        table: Arc::default(),
        sockets,
        egress: egress.expect("threads"),
        sessions: crate::session_table::SessionTable::default(),
        starts: Arc::new(Semaphore::new(1)),
        host_limits: crate::host_limits::HostLimits::default(),
        held: Arc::default(),
        cleanup: crate::cleanup::CleanupQueue::default(),
        end_orders: crate::end_orders::EndOrders::default(),
        cordon: crate::cordon::Cordon::new(state_dir),
        drain: Drain::new(state_dir),
        leave: Arc::new(crate::leave::Leave::new(Duration::ZERO)),
        relocate: OnceLock::new(),
        stray_expected: Notify::new(),
        policy: crate::context::LivePolicy::new(SpecPolicy::default()),
    })
}

/// Blocks all changes of the file until the returned sender is used.
async fn hang(file: &OrderFile) -> Sender<()> {
    let (disk, answers) = channel::<()>();
    let held = file.queue.make(move || {
        // Fails when the test is over.
        let _ = answers.recv();
        Ok(())
    });
    assert!(held.await.is_err(), "it is held up");
    disk
}

/// Waits until all changes requested so far are made.
async fn settle(file: &OrderFile) {
    let began = Instant::now();
    while file.queue.make(|| Ok(())).await.is_err() {
        assert!(began.elapsed() < PATIENCE);
    }
}

#[tokio::test]
async fn a_drain_whose_file_is_removed_late_is_written_down_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let context = empty_node(dir.path());
    let written = dir.path().join("drain.json");
    let request = DrainRequest::default();
    drain(&context, &request).await.expect("it begins");
    assert!(written.exists());

    let disk = hang(&context.drain.file).await;
    let refused = undrain(&context).await.expect_err("it may be removed yet");
    let told = refused.to_string();
    assert!(
        told.ends_with("the node stays drained; try again"),
        "{told}"
    );
    let again = drain(&context, &request).await.expect("it continues");
    assert_eq!(again.reason, "the node is being drained");
    disk.send(()).expect("the disk hangs");
    settle(&context.drain.file).await;
    let began = Instant::now();
    while !written.exists() {
        assert!(began.elapsed() < PATIENCE, "the next daemon would admit");
        sleep(Duration::from_millis(5)).await;
    }

    undrain(&context).await.expect("it is taken back");
    settle(&context.drain.file).await;
    assert!(!written.exists());
    let disk = hang(&context.drain.file).await;
    let refused = undrain(&context).await.expect_err("the outcome is unknown");
    let told = refused.to_string();
    assert!(told.ends_with("nothing was changed"), "{told}");
    disk.send(()).expect("the disk hangs");
    settle(&context.drain.file).await;
    assert!(!written.exists());
}
