//! The fleet's OS thread, and the tasks that it runs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::NodeName;
use conman_watchdog::{TaskProgress, essential};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::sleep;

use super::compaction;
use super::driver::{self, Driver};
use super::membership::{self, Membership, hints};
use super::shared::Shared;

/// How often the observed state of etcd is saved.
const KEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The task that reads the state of the other nodes.
pub(super) const MEMBERSHIP: &str = "membership";

pub(super) struct FleetThread {
    pub(super) shared: Arc<Shared>,
    pub(super) membership: Arc<Membership>,
    /// Receives the nodes that the driver has to watch.
    pub(super) watched: watch::Sender<Vec<NodeName>>,
    pub(super) driver: Driver,
    /// Of the task that reads the state of the other nodes.
    pub(super) progress: TaskProgress,
    pub(super) compact_every: Option<Duration>,
}

impl FleetThread {
    /// Starts the thread, which ends with the driver.
    pub(super) fn spawn(self, runtime: Runtime) -> io::Result<()> {
        std::thread::Builder::new()
            .name("fleet".to_owned())
            .spawn(move || {
                let shared = Arc::clone(&self.shared);
                runtime.block_on(self.run());
                if let Err(error) = shared.store.client.seen().keep() {
                    tracing::warn!(%error, "cannot save the state of etcd");
                }
            })
            .map(drop)
    }

    async fn run(self) {
        let Self {
            shared,
            membership,
            watched,
            driver,
            progress,
            compact_every,
        } = self;
        let members = Arc::clone(&membership);
        let looking = membership::run(Arc::clone(&shared), members, watched, progress);
        tokio::spawn(essential(MEMBERSHIP, looking));
        let nodes = shared.store.keys.nodes();
        let watching = hints::watch(Arc::clone(&shared), nodes, |_, _| true);
        tokio::spawn(essential("watch of nodes", watching));
        let parts = shared.store.keys.parts();
        let watching = hints::watch(Arc::clone(&shared), parts, |_, _| true);
        tokio::spawn(essential("watch of parts", watching));
        let peers = shared.store.keys.peers();
        let parent = peers.clone();
        let hears = Arc::clone(&membership);
        let news = move |key: &[u8], value: &[u8]| hears.is_news(&parent, key, value);
        let watching = hints::watch(Arc::clone(&shared), peers, news);
        tokio::spawn(essential("watch of announcements", watching));
        let keeping = keep_seen(Arc::clone(&shared));
        tokio::spawn(essential("memory of etcd", keeping));
        if let Some(every) = compact_every {
            let compacting = compaction::run(shared, membership, every);
            tokio::spawn(essential("compaction", compacting));
        }
        essential(driver::NAME, Box::pin(driver.run())).await;
    }
}

async fn keep_seen(shared: Arc<Shared>) {
    loop {
        sleep(KEEP_INTERVAL).await;
        let client = Arc::clone(&shared.store.client);
        let kept = tokio::task::spawn_blocking(move || client.seen().keep()).await;
        if let Ok(Err(error)) = kept {
            tracing::warn!(%error, "cannot save the state of etcd");
        }
    }
}
