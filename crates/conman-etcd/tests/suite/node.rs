//! A node of the fleet, as far as its registry goes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{SlotView, Timing};
use conman_etcd::{EtcdAccess, EtcdOptions, EtcdRegistry, Order};
use conman_proto::{Generation, ResolvedSpec, RuntimeKind, SessionId};
use conman_registry::{Ending, Fleet, Registry, RegistryError, Release, Standing};
use conman_testkit::{MemoryFence, resolved_spec};
use jiff::Timestamp;
use tempfile::TempDir;

/// Longer than anything takes on a machine that does something at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// With a fence that a loaded machine does not meet.
pub(crate) fn patient() -> Timing {
    Timing {
        renew_ms: 300,
        fence_ms: 60_000,
        takeover_ms: 120_000,
        ..Timing::default()
    }
}

/// As short as is safe: a node that stands still for longer is fenced, which tests have to expect.
pub(crate) fn short() -> Timing {
    let timing = Timing {
        renew_ms: 200,
        fence_ms: 4_000,
        shim_restart_ms: 100,
        freeze_ms: 100,
        kill_ms: 100,
        takeover_ms: 5_000,
        retry_ms: 50,
        ..Timing::default()
    };
    timing.slack_ms().expect("it is safe");
    timing
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) registry: Arc<EtcdRegistry>,
    pub(crate) fence: Arc<MemoryFence>,
    pub(crate) dir: StateDir,
}

pub(crate) fn options(url: &str, name: &str, timing: Timing, dir: &Path) -> EtcdOptions {
    EtcdOptions {
        node: name.to_owned(),
        instance: dir.display().to_string(),
        boot_id: "00000000-0000-0000-0000-000000000000".to_owned(),
        state_dir: dir.to_owned(),
        access: EtcdAccess {
            endpoints: vec![url.to_owned()],
            credentials: None,
            tls: None,
        },
        prefix: "/conman/".to_owned(),
        timing,
        accept_above: None,
        compact_every: None,
        watchdog: Default::default(),
    }
}

/// A node's state directory. It is removed with a second try where a registry, whose handle was dropped before, has
/// written its last file in between.
#[derive(Debug)]
pub(crate) struct StateDir(TempDir);

impl StateDir {
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl From<TempDir> for StateDir {
    fn from(dir: TempDir) -> Self {
        Self(dir)
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        for _ in 0..1_000 {
            if std::fs::remove_dir_all(self.path()).is_ok() || !self.path().exists() {
                return;
            }
        }
    }
}

impl Node {
    /// One that has begun to join.
    pub(crate) fn begin(url: &str, name: &str, timing: Timing) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Self::in_dir(dir, Vec::new(), |dir| options(url, name, timing, dir))
    }

    pub(crate) fn in_dir(
        dir: impl Into<StateDir>,
        slots: Vec<SlotView>,
        options: impl FnOnce(&Path) -> EtcdOptions,
    ) -> Self {
        let dir = dir.into();
        let fence = Arc::new(MemoryFence::holding(slots));
        let link = Arc::clone(&fence) as Arc<dyn conman_registry::FenceLink>;
        let registry = EtcdRegistry::start(options(dir.path()), link).expect("it starts");
        Self {
            registry,
            fence,
            dir,
        }
    }

    /// One that has joined.
    pub(crate) async fn join(url: &str, name: &str, timing: Timing) -> Self {
        let node = Self::begin(url, name, timing);
        node.live().await;
        node
    }

    pub(crate) async fn live(&self) {
        self.stands("live", Standing::is_ready).await;
    }

    pub(crate) async fn stands(&self, what: &str, is: impl Fn(&Standing) -> bool) -> Standing {
        let mut standing = self.registry.standing();
        let waited = tokio::time::timeout(PATIENCE, standing.wait_for(|now| is(now))).await;
        match waited {
            Ok(now) => now.expect("the registry lives").clone(),
            Err(_) => panic!("never {what}: {:?}", *self.registry.standing().borrow()),
        }
    }

    /// Joining, for a reason that says this.
    pub(crate) async fn waits_since(&self, text: &str) -> String {
        let told = self
            .stands(text, |standing| {
                matches!(standing, Standing::Joining { reason } if reason.contains(text))
            })
            .await;
        match told {
            Standing::Joining { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn next_condemned(&self) -> (SessionId, Generation) {
        let orders = self.registry.orders();
        match tokio::time::timeout(PATIENCE, orders.next()).await {
            Ok(Order::Condemned { id, generation, .. }) => (id, generation),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn claim(&self, name: &str) -> Result<Generation, RegistryError> {
        let claimed = self.registry.claim(&id(name), &spec()).await;
        claimed.map(|record| record.generation)
    }

    /// Asks again while nobody can tell, or another one still owns it.
    pub(crate) async fn claim_at_last(&self, name: &str) -> Generation {
        let tries = async {
            loop {
                match self.claim(name).await {
                    Ok(generation) => return generation,
                    Err(RegistryError::Elsewhere { .. } | RegistryError::Unavailable { .. }) => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    Err(error) => panic!("{name} cannot be claimed: {error}"),
                }
            }
        };
        let tried = tokio::time::timeout(PATIENCE, tries).await;
        tried.unwrap_or_else(|_| panic!("{name} is never free"))
    }

    /// Asks again while nobody can tell.
    pub(crate) async fn release(
        &self,
        name: &str,
        generation: Generation,
    ) -> Result<(), RegistryError> {
        let release = Release {
            id: id(name),
            generation,
            ending: ending(),
        };
        let tries = async {
            loop {
                let mut released = self.registry.release(vec![release.clone()]).await;
                match released.remove(0) {
                    Err(RegistryError::Unavailable { .. }) => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    definite => return definite,
                }
            }
        };
        let tried = tokio::time::timeout(PATIENCE, tries).await;
        tried.unwrap_or_else(|_| panic!("{name} is never released"))
    }
}

pub(crate) fn id(name: &str) -> SessionId {
    name.parse().expect("a session id")
}

pub(crate) fn spec() -> ResolvedSpec {
    ResolvedSpec {
        command: vec!["sleep".to_owned()],
        ..resolved_spec(RuntimeKind::Native, "busybox:latest")
    }
}

pub(crate) fn ending() -> Ending {
    Ending {
        cause: None,
        failed_phase: None,
        failed: false,
        reason: "asked to stop".to_owned(),
        exit_code: None,
        ended_at: Timestamp::UNIX_EPOCH,
        started_at: None,
        phases: Default::default(),
    }
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    assert!(waited.is_ok(), "never: {what}");
}
