//! [`NativeRuntime`]: conman's own containers, made by the shim (`conman-shim`) from images of the
//! store (`conman-image`).
//!
//! Creating a container makes a directory with the start order for the shim ([`store`]); starting
//! it sends that order. So a new [`NativeRuntime`] over the same directory knows what the
//! previous one did. The shim and the kernel know what runs and how it ended. Removed containers
//! go into the trash, which is emptied in the background ([`trash`]).
//!
//! A container's root is an overlay, which the shim makes, or a snapshot, made here ([`snapshots`]).
//!
//! Tasks: one that reads the shim's messages ([`crate::shim_link`]), one for each running command
//! ([`exec`]), one for each attached client ([`attach`]), one that makes containers ahead ([`ahead`]). A thread while
//! the trash is not empty.

mod ahead;
mod attach;
mod base_layer;
mod create;
mod description;
mod disk;
mod ends;
mod exec;
mod failure;
mod gvisor;
mod images;
mod kept_commands;
mod link;
mod log;
mod oci;
mod oci_check;
mod oci_filter;
mod oci_spec;
mod oci_state;
mod options;
mod pausing;
mod program;
mod removal;
mod snapshots;
mod standing;
mod start;
mod store;
mod trash;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conman_core::naming::{self, CgroupDriver};
use conman_linux::{
    CpuLimit, DiskUsage, ExitScan, IoLimits, PidFd, ProjectQuotas, ResourceUsage, Signal,
    SignalNumber,
};
use conman_proto::RuntimeKind;
use conman_shim_protocol::{ContainerState, Reply, Request};

use crate::lifecycle::signal_process;
use crate::shared::blocking::on_blocking_thread;
use crate::shared::container_files::host_error;
use crate::shared::container_network::ContainerNetwork;
use crate::shared::kept_logs::KeptLogs;
use crate::shared::kernel_view::KernelView;
use crate::shared::removals::some_at_a_time;
use crate::shim_link::{Link, LinkError};
use crate::shim_lookups::Found;
use crate::{
    ContainerKey, ContainerPlan, DiskExcess, FoundContainer, Lifecycle, PausedBy, RunningContainer,
    RuntimeError, RuntimeInfo, Started,
};
use ahead::Pool;
use ends::{Ends, ProcessEnd, end};
use failure::call_failed;
use images::Images;
pub use oci::OciOptions;
use oci_check::FileIdentity;
pub use oci_check::OciFault;
pub use options::{NativeOptions, NativeTimeouts, RootStore};
pub use program::SESSION_OPEN_FILES;
pub use snapshots::SNAPSHOTS_FILE;
use snapshots::Snapshots;
use standing::Standing;
use store::Store;

/// Longest time for an idle shim to end; the daemon's stop waits for it.
const SHIM_END_PATIENCE: Duration = Duration::from_secs(2);

/// conman's own containers: those of one kind of session, `native` or with an OCI runtime.
#[derive(Debug)]
pub struct NativeRuntime {
    inner: Arc<Inner>,
    kind: RuntimeKind,
}

#[derive(Debug)]
struct Inner {
    kernel: KernelView,
    store: Store,
    pool: Arc<Pool>,
    images: Images,
    snapshots: Option<Snapshots>,
    kept_logs: KeptLogs,
    bind_first_id: u32,
    io: Option<IoLimits>,
    total_cpus: Option<f64>,
    /// Of the file system with the containers' directories.
    quotas: Option<ProjectQuotas>,
    ends: Arc<Ends>,
    link: Link,
    network: ContainerNetwork,
    oci: BTreeMap<RuntimeKind, OciOptions>,
    /// The versions that the OCI runtimes have, and of which files.
    versions: Mutex<HashMap<RuntimeKind, (FileIdentity, String)>>,
    /// The containers with an OCI runtime, and which one.
    with_runtime: Mutex<HashMap<ContainerKey, RuntimeKind>>,
    standing: Standing,
    timeouts: NativeTimeouts,
    /// The first number differs for each daemon, so that names of commands are unique.
    commands: (u64, AtomicU64),
}

impl NativeRuntime {
    /// Takes over what an earlier runtime left in the same directory. Blocks on the disk; does not
    /// call a shim.
    pub fn open(options: NativeOptions) -> Result<Self, RuntimeError> {
        let ends = Arc::new(Ends::new(options.network.plane.clone()));
        let logs = options.directory.join("logs");
        let kept_logs = KeptLogs::open(logs, options.kept_logs)
            .map_err(|source| host_error("make", &options.directory, source))?;
        let store = Store::open(&options.directory)?;
        let pool = Pool::open(options.directory.join("ahead"), |left| {
            store.trash.discard(left)
        })?;
        let snapshots = match options.roots {
            RootStore::Overlay => None,
            RootStore::Btrfs(bytes) => Some(Snapshots::open(&options.directory, bytes)?),
        };
        let inner = Inner {
            snapshots,
            kernel: KernelView::new(options.instance, &[CgroupDriver::Cgroupfs])?,
            store,
            pool: Arc::new(pool),
            images: Images::new(options.images),
            kept_logs,
            bind_first_id: options.bind_first_id,
            io: options.io,
            total_cpus: options.total_cpus,
            quotas: ProjectQuotas::of(&options.directory),
            link: Link::new(
                options.socket,
                options.shim,
                Some(Arc::clone(&ends) as _),
                options.fence,
            ),
            ends,
            network: options.network,
            oci: options.oci,
            versions: Mutex::default(),
            with_runtime: Mutex::default(),
            standing: Standing::default(),
            timeouts: options.timeouts,
            commands: (RandomState::new().hash_one(()), AtomicU64::new(0)),
        };
        inner.adopt()?;
        let inner = Arc::new(inner);
        let same = Arc::clone(&inner);
        // What an earlier runtime did not finish.
        std::thread::Builder::new()
            .name("conman-trash".to_owned())
            .spawn(move || same.clean_up())
            .map_err(|source| host_error("start a thread for", &options.directory, source))?;
        Ok(Self {
            inner,
            kind: RuntimeKind::Native,
        })
    }

    /// The sessions with an OCI runtime, in the same containers.
    #[must_use]
    pub fn with_runtime(&self, kind: RuntimeKind) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            kind,
        }
    }

    /// Keeps a shim running until the future is dropped: when one dies, another one takes over what
    /// runs. For a node outside a fleet; in a fleet, the owner of the fence does the same.
    pub async fn keep_shim(&self) {
        self.inner.link.keep().await;
    }

    /// Opens the shim's fence for the sessions recorded for this node ([`crate::Recorded`]).
    pub async fn open_fence(&self) -> Result<(), RuntimeError> {
        let opened = self.inner.link.open_fence().await;
        opened.map_err(|error| call_failed("open", "the fence", error))
    }

    /// Ends the shim if it runs nothing; otherwise, and when none is connected, does nothing. For
    /// the daemon's end: if containers run, the next daemon needs them and the shim.
    pub async fn end_idle_shim(&self) {
        let inner = &self.inner;
        inner.close_pool().await;
        let Some(connection) = inner.link.present().await else {
            return;
        };
        let Ok(shim) = PidFd::open(connection.shim_pid) else {
            return;
        };
        match inner.link.containers(inner.timeouts.call).await {
            // It answered after the pidfd was opened, so the pidfd is the shim's.
            Ok(views) if !views.iter().any(|view| view.state.is_alive()) => {
                let ended = tokio::task::spawn_blocking(move || {
                    shim.signal(Signal::SIGTERM)?;
                    Ok::<_, conman_linux::ProcessError>(shim.wait_dead(SHIM_END_PATIENCE))
                });
                match ended.await {
                    Ok(Ok(Ok(true))) => tracing::info!("idle shim stopped"),
                    other => tracing::warn!(?other, "cannot stop the idle shim"),
                }
            }
            Ok(_) => tracing::info!("the shim keeps running its containers"),
            Err(error) => tracing::warn!(%error, "cannot list the shim's containers"),
        }
    }
}

#[async_trait]
impl Lifecycle for NativeRuntime {
    fn kind(&self) -> RuntimeKind {
        self.kind
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        self.inner.describe(self.kind).await
    }

    fn is_starting(&self) -> bool {
        self.inner.link.is_starting()
    }

    fn drop_pool(&self) {
        self.inner.pool.drop_all();
    }

    fn made_ahead(&self) -> usize {
        self.inner.pool.waiting()
    }

    async fn lacks_image(&self, image: &str) -> Option<RuntimeError> {
        let (inner, image) = (Arc::clone(&self.inner), image.to_owned());
        let look = move || Ok(inner.images.lack(&image));
        // An error here also occurs in `create`, which reports it.
        away("create", look).await.ok().flatten()
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let (inner, plan) = (Arc::clone(&self.inner), plan.clone());
        away("create", move || inner.create(&plan)).await
    }

    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.inner.start(key).await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        let dir = self.inner.store.container(key);
        if self.inner.kind_of(key) != self.kind {
            return Ok(None);
        }
        if !away("find", move || Ok(dir.exists())).await? {
            return Ok(None);
        }
        let found = self.inner.look(key, "find").await?;
        let view = found.container.map(|view| (view.pid, view.state));
        let (inner, key) = (Arc::clone(&self.inner), key.clone());
        away("find", move || {
            let lost = match view {
                None => inner.kernel.init_pid(&key)?,
                Some(_) => None,
            };
            Ok(Some(inner.found(key, view, lost)))
        })
        .await
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        let failed = |error| call_failed("list", "containers", error);
        let (inner, kind) = (Arc::clone(&self.inner), self.kind);
        let views = inner.link.containers(inner.timeouts.call).await;
        let views = views.map_err(failed)?;
        away("list", move || {
            let mut views: HashMap<String, (i32, ContainerState)> = views
                .into_iter()
                .map(|view| (view.name, (view.pid, view.state)))
                .collect();
            let known: Vec<_> = inner
                .store
                .keys()?
                .into_iter()
                .filter(|key| inner.kind_of(key) == kind)
                .map(|key| (views.remove(&store::name(&key)), key))
                .collect();
            let strange = known.iter().filter(|(view, _)| view.is_none());
            let strange: Vec<_> = strange.map(|(_, key)| key.clone()).collect();
            let mut lost = match &strange[..] {
                [] => HashMap::new(),
                keys => inner.kernel.init_pids(keys)?,
            };
            Ok(known
                .into_iter()
                .map(|(view, key)| {
                    let lost = lost.remove(&key);
                    inner.found(key, view, lost)
                })
                .collect())
        })
        .await
    }

    fn fabric_addresses(&self, key: &ContainerKey) -> Vec<IpAddr> {
        self.inner.network.addresses(key)
    }

    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.inner.kernel.owns_pid(key, pid)
    }

    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>> {
        self.inner.kernel.pids(key)
    }

    fn usages(&self, containers: &[RunningContainer]) -> Vec<ResourceUsage> {
        self.inner.kernel.usages(containers)
    }

    fn cpu_us(&self, key: &ContainerKey) -> Option<u64> {
        self.inner.kernel.cpu_us(key)
    }

    fn cpu_limit(&self, key: &ContainerKey) -> Option<CpuLimit> {
        self.inner.kernel.cpu_limit(key)
    }

    fn exit_scan(&self, key: &ContainerKey) -> Option<ExitScan> {
        self.inner.kernel.exit_scan(key)
    }

    fn oom_kills(&self, key: &ContainerKey) -> Option<u64> {
        self.inner.kernel.oom_kills(key)
    }

    async fn signal(
        &self,
        key: &ContainerKey,
        process: &Arc<PidFd>,
        signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        match self.runs_programs_itself() {
            true => signal_process(process, signal),
            false => self.inner.signal_inside(key, None, signal).await,
        }
    }

    async fn stop_signal(&self, key: &ContainerKey) -> Option<String> {
        self.inner.images.stop_signal(key)
    }

    async fn pause(&self, key: &ContainerKey, by: PausedBy) -> Result<(), RuntimeError> {
        self.inner.pause(key, by).await
    }

    async fn resume(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        self.inner.resume(key).await
    }

    async fn paused_by(&self, key: &ContainerKey) -> Option<PausedBy> {
        self.inner.paused_by(key).await
    }

    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32> {
        let end = self.inner.ends.wait(&store::name(key));
        let told = async {
            // Earlier ends are reported to a new connection.
            self.inner.link.connection().await.ok()?;
            end.await.ok()?.0
        };
        tokio::time::timeout(patience, told).await.ok()?
    }

    async fn was_fenced(&self, key: &ContainerKey) -> bool {
        self.inner.link.was_fenced(key).await
    }

    async fn excess_disk_usage(
        &self,
        key: &ContainerKey,
        limits: DiskUsage,
        freeze: bool,
    ) -> Result<Option<DiskExcess>, RuntimeError> {
        match freeze {
            true => self.inner.excess_when_frozen(key, limits).await,
            false => self.inner.excess_disk_usage(key, limits).await,
        }
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        let mut removals = Vec::with_capacity(keys.len());
        for key in keys {
            removals.push(Arc::clone(&self.inner).remove(key.clone()));
        }
        let results = some_at_a_time(removals).await;
        let inner = Arc::clone(&self.inner);
        tokio::task::spawn_blocking(move || inner.clean_up());
        results
    }
}

impl Inner {
    fn container_id(&self, key: &ContainerKey) -> String {
        naming::container_name(self.kernel.instance(), &key.session, key.generation)
    }

    fn kind_of(&self, key: &ContainerKey) -> RuntimeKind {
        let found = self.lock_with_runtime().get(key).copied();
        found.unwrap_or(RuntimeKind::Native)
    }

    fn lock_with_runtime(&self) -> MutexGuard<'_, HashMap<ContainerKey, RuntimeKind>> {
        self.with_runtime
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn next_command(&self) -> String {
        let (daemon, next) = &self.commands;
        let number = next.fetch_add(1, Ordering::Relaxed);
        format!("exec.{daemon:016x}.{number}")
    }

    /// Keeps the images and addresses of an earlier daemon's containers.
    fn adopt(&self) -> Result<(), RuntimeError> {
        let keys = self.store.keys()?;
        if let Some(snapshots) = &self.snapshots {
            snapshots.remove_orphans(&keys.iter().map(store::name).collect())?;
        }
        for key in keys {
            match self.store.container(&key).plan() {
                Ok(Some(plan)) => {
                    let layers = &plan.launch.root.layers;
                    self.images.hold_again(&key, &plan.image, layers);
                    if let Some((kind, _)) = plan.session_program {
                        self.lock_with_runtime().insert(key.clone(), kind);
                    }
                    if let Some(cgroup) = plan.launch.cgroup_of_taken() {
                        self.kernel.may_take(&key, cgroup);
                    }
                    if let Some(millis) = plan.late_cpu_millis {
                        self.limit_cpu_of_started_again(&key, millis);
                    }
                    if let Some(link) = &plan.link {
                        self.network.adopt(&key, link);
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(container = %key, %error, "its image may be collected");
                }
            }
        }
        Ok(())
    }

    /// Removes what nothing uses any more. Blocks until it is done.
    fn clean_up(&self) {
        self.store.trash.empty();
        if let Some(snapshots) = &self.snapshots {
            snapshots.collect_images(|id| self.images.store().has(id));
        }
    }

    async fn ask(&self, request: &Request) -> Result<Reply, LinkError> {
        self.link.ask(request, self.timeouts.call).await
    }

    /// What the shim knows of a container.
    async fn look(&self, key: &ContainerKey, action: &'static str) -> Result<Found, RuntimeError> {
        self.look_up(key, store::name(key), action).await
    }

    /// What the shim knows of a container or a command in it.
    async fn look_up(
        &self,
        key: &ContainerKey,
        name: String,
        action: &'static str,
    ) -> Result<Found, RuntimeError> {
        let found = self.link.find(name, self.timeouts.call).await;
        found.map_err(|error| call_failed(action, key, error))
    }

    fn found(
        &self,
        key: ContainerKey,
        view: Option<(i32, ContainerState)>,
        lost: Option<i32>,
    ) -> FoundContainer {
        let alive = view.filter(|(_, state)| state.is_alive());
        let alive = alive.map(|(pid, _)| pid);
        let ended = view.and_then(|(_, state)| end(state));
        FoundContainer {
            container_id: self.container_id(&key),
            key,
            pid: alive.or(lost),
            exit_code: ended.and_then(|ProcessEnd(code)| code),
        }
    }
}

fn no_such_container(key: &ContainerKey) -> RuntimeError {
    RuntimeError::NoSuchContainer {
        subject: key.to_string(),
    }
}

async fn away<T: Send + 'static>(
    action: &'static str,
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    on_blocking_thread(RuntimeKind::Native, action, work).await
}
