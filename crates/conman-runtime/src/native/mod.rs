//! [`NativeRuntime`]: conman's own containers, made by the shim (`conman-shim`) from images of the
//! store (`conman-image`).
//!
//! A container is created as a directory with the order that the shim will get ([`store`]), so that
//! a new [`NativeRuntime`] over the same directory knows all that the previous one did, and started
//! by sending that order. What runs and how it ended, the shim and the kernel know. A container
//! that is removed goes into the trash, which is emptied beside everything else ([`trash`]).
//!
//! Tasks: one that reads what the shim says ([`link`]), one for each running command ([`exec`]). A
//! thread while there is trash to empty.

mod ends;
mod exec;
mod failure;
mod images;
mod link;
mod program;
mod store;
mod trash;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use conman_core::naming::{self, CgroupDriver, Instance};
use conman_image::ImageStore;
use conman_linux::{Mount, PidFd, Signal};
use conman_proto::{Network, RuntimeKind};
use conman_shim::{
    BindSpec, CallError, ContainerState, ContainerView, Hardening, LaunchSpec, Reply, Request,
    RootSpec,
};
use futures_util::stream::{self, BoxStream, StreamExt};

pub use link::ShimCommand;

use crate::container_files::{ContainerFiles, OWN_FILES, host_error};
use crate::kernel_view::KernelView;
use crate::log_files;
use crate::{
    ContainerKey, ContainerPlan, ExecIo, ExecPlan, FoundContainer, LogChunk, LogOptions,
    OutputStream, Runtime, RuntimeError, RuntimeInfo, Started,
};
use ends::{End, Ends, end};
use failure::{call_failed, milliseconds, refused, start_failed};
use images::Images;
use link::{Link, LinkError};
use store::{Store, StoredPlan};

/// Removed cgroups take the kernel some milliseconds, most of which it waits.
const REMOVALS_AT_A_TIME: usize = 8;

/// Most bytes of a failed container's output that an error quotes.
const QUOTED_BYTES: u64 = 300;

/// How long the end of a container is waited for that was dead when its start was answered.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// How long an idle shim takes to end at the most; a daemon's stop waits for it.
const SHIM_END_PATIENCE: Duration = Duration::from_secs(2);

/// How often a followed log's container is looked for in the kernel, whatever the shim says.
const LIFE_INTERVAL: Duration = Duration::from_secs(1);

/// How a [`NativeRuntime`] is set up.
#[derive(Debug, Clone)]
pub struct NativeOptions {
    pub instance: Instance,
    /// Where the containers' directories are; this instance's alone.
    pub directory: PathBuf,
    pub images: ImageStore,
    /// Where this instance's shim listens.
    pub socket: PathBuf,
    /// Starts a shim where none answers; without it somebody else must.
    pub shim: Option<ShimCommand>,
    pub timeouts: NativeTimeouts,
}

/// Bounds on calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NativeTimeouts {
    /// What the shim answers at once.
    pub call: Duration,
    /// A start: it waits for those before it, and for a disk.
    pub start: Duration,
}

impl Default for NativeTimeouts {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(10),
            start: Duration::from_secs(30),
        }
    }
}

/// conman's own containers.
#[derive(Debug)]
pub struct NativeRuntime {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    kernel: KernelView,
    store: Store,
    images: Images,
    ends: Arc<Ends>,
    link: Link,
    timeouts: NativeTimeouts,
    /// Created and not started yet: their plans need not be read again.
    created: Mutex<HashMap<ContainerKey, StoredPlan>>,
    /// No command of an earlier daemon's has the same number.
    commands: (u64, AtomicU64),
}

impl NativeRuntime {
    /// Takes over what an earlier one left in the same directory. Blocks on the disk; asks no shim.
    pub fn open(options: NativeOptions) -> Result<Self, RuntimeError> {
        let ends = Arc::new(Ends::default());
        let inner = Inner {
            kernel: KernelView::new(options.instance)?,
            store: Store::open(&options.directory)?,
            images: Images::new(options.images),
            link: Link::new(options.socket, options.shim, Arc::clone(&ends)),
            ends,
            timeouts: options.timeouts,
            created: Mutex::default(),
            commands: (RandomState::new().hash_one(()), AtomicU64::new(0)),
        };
        inner.hold_images()?;
        let inner = Arc::new(inner);
        let same = Arc::clone(&inner);
        // What an earlier one did not come to.
        std::thread::Builder::new()
            .name("conman-trash".to_owned())
            .spawn(move || same.store.trash.empty())
            .map_err(|source| host_error("start a thread for", &options.directory, source))?;
        Ok(Self { inner })
    }

    /// Ends the shim if it runs nothing; otherwise, and when none is connected, does nothing. For a
    /// daemon that ends: what still runs is its successor's, and so is the shim then.
    pub async fn end_idle_shim(&self) {
        let inner = &self.inner;
        let Some(connection) = inner.link.present().await else {
            return;
        };
        let Ok(shim) = PidFd::open(connection.shim_pid) else {
            return;
        };
        match inner.views().await {
            // It has answered after the pidfd was opened, so it is the shim that the pidfd holds.
            Ok(views) if !views.iter().any(|view| view.state.is_alive()) => {
                let ended = tokio::task::spawn_blocking(move || {
                    shim.signal(Signal::TERM)?;
                    Ok::<_, conman_linux::ProcessError>(shim.wait_dead(SHIM_END_PATIENCE))
                });
                match ended.await {
                    Ok(Ok(Ok(true))) => tracing::info!("the shim has ended, since nothing runs"),
                    other => tracing::warn!(?other, "the shim stays, though nothing runs"),
                }
            }
            Ok(_) => tracing::info!("the shim stays with what runs"),
            Err(error) => tracing::warn!(%error, "the shim cannot be asked what runs"),
        }
    }
}

#[async_trait]
impl Runtime for NativeRuntime {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Native
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        let failed = |error| call_failed("describe itself", "the shim", error);
        let connection = self.inner.link.connection().await.map_err(failed)?;
        self.inner.ask(&Request::Fence).await.map_err(failed)?;
        let mut warnings = Vec::new();
        if let Some(features) = &connection.features {
            if !features.mapped_layers {
                warnings.push(format!(
                    "Linux {} cannot map the owners of images' files, so no session can start; \
                     use Linux 5.19 or later",
                    features.release
                ));
            }
            if !features.user_namespaces {
                warnings.push(
                    "user namespaces are switched off, so no session can start; raise \
                     user.max_user_namespaces"
                        .to_owned(),
                );
            }
        }
        Ok(RuntimeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            warnings,
        })
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let (inner, plan) = (Arc::clone(&self.inner), plan.clone());
        on_blocking_thread(move || inner.create(&plan)).await
    }

    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.inner.start(key).await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        let dir = self.inner.store.container(key);
        if !on_blocking_thread(move || Ok(dir.exists())).await? {
            return Ok(None);
        }
        let (view, _) = self.inner.look(key, "find").await?;
        let view = view.map(|view| (view.pid, view.state));
        let (inner, key) = (Arc::clone(&self.inner), key.clone());
        on_blocking_thread(move || {
            let lost = match view {
                None => inner.kernel.init_pid(&key),
                Some(_) => None,
            };
            Ok(Some(inner.found(key, view, lost)))
        })
        .await
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        let failed = |error| call_failed("list", "containers", error);
        let views = self.inner.views().await.map_err(failed)?;
        let inner = Arc::clone(&self.inner);
        on_blocking_thread(move || {
            let mut views: HashMap<String, (i32, ContainerState)> = views
                .into_iter()
                .map(|view| (view.name, (view.pid, view.state)))
                .collect();
            let known: Vec<_> = inner
                .store
                .keys()?
                .into_iter()
                .map(|key| (views.remove(&store::name(&key)), key))
                .collect();
            let strange = known.iter().filter(|(view, _)| view.is_none());
            let strange: Vec<_> = strange.map(|(_, key)| key.clone()).collect();
            let mut lost = match &strange[..] {
                [] => HashMap::new(),
                keys => inner.kernel.init_pids(keys),
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

    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.inner.kernel.owns_pid(key, pid)
    }

    fn pids(&self, key: &ContainerKey) -> Vec<i32> {
        self.inner.kernel.pids(key)
    }

    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32> {
        let end = self.inner.ends.wait(&store::name(key));
        let told = async {
            // What ended before is told to a new connection.
            self.inner.link.connection().await.ok()?;
            end.await.ok()?.0
        };
        tokio::time::timeout(patience, told).await.ok()?
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        let mut removals = Vec::with_capacity(keys.len());
        for key in keys {
            removals.push(Arc::clone(&self.inner).remove(key.clone()));
        }
        let results: Vec<_> = stream::iter(removals)
            .buffered(REMOVALS_AT_A_TIME)
            .collect()
            .await;
        let inner = Arc::clone(&self.inner);
        tokio::task::spawn_blocking(move || inner.store.trash.empty());
        results
    }

    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        exec::exec(Arc::clone(&self.inner), key.clone(), plan).await
    }

    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let dir = self.inner.store.container(key);
        let (log, same) = (dir.log(), dir.clone());
        if !on_blocking_thread(move || Ok(same.exists())).await? {
            return Err(no_such_container(key));
        }
        let life = Life {
            inner: Arc::clone(&self.inner),
            key: key.clone(),
            name: store::name(key),
            looked: Instant::now(),
            empty_before: false,
        };
        read_log(log, options, life).await
    }
}

/// One file holds both outputs, in the order in which they were written.
async fn read_log(
    log: PathBuf,
    options: LogOptions,
    mut life: Life,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let files = vec![(OutputStream::Stdout, log)];
    log_files::read(files, options, move || life.has_ended()).await
}

/// Whether a followed container still writes.
struct Life {
    inner: Arc<Inner>,
    key: ContainerKey,
    name: String,
    looked: Instant,
    /// At the last look the kernel knew no process of it, though it had begun.
    empty_before: bool,
}

impl Life {
    fn has_ended(&mut self) -> bool {
        if self.inner.ends.of(&self.name).is_some() {
            return true;
        }
        if self.looked.elapsed() < LIFE_INTERVAL {
            return false;
        }
        self.looked = Instant::now();
        let dir = self.inner.store.container(&self.key);
        if !dir.exists() {
            return true;
        }
        // Twice, because a start has its log before its first process.
        let empty = dir.log().exists() && self.inner.kernel.pids(&self.key).is_empty();
        std::mem::replace(&mut self.empty_before, empty) && empty
    }
}

impl Inner {
    fn lock_created(&self) -> MutexGuard<'_, HashMap<ContainerKey, StoredPlan>> {
        // A panic while the lock is held cannot leave half a change: each is one map operation.
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn container_id(&self, key: &ContainerKey) -> String {
        naming::container_name(self.kernel.instance(), &key.session, key.generation)
    }

    fn next_command(&self) -> String {
        let (daemon, next) = &self.commands;
        let number = next.fetch_add(1, Ordering::Relaxed);
        format!("exec.{daemon:016x}.{number}")
    }

    /// Keeps the images of what an earlier daemon created.
    fn hold_images(&self) -> Result<(), RuntimeError> {
        for key in self.store.keys()? {
            let held = match self.store.container(&key).plan() {
                Ok(Some(plan)) => self.images.hold_again(&key, &plan.image),
                Ok(None) => Ok(()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(why) = held {
                tracing::warn!(container = %key, why, "its image may be collected");
            }
        }
        Ok(())
    }

    async fn ask(&self, request: &Request) -> Result<Reply, LinkError> {
        self.link.ask(request, self.timeouts.call).await
    }

    /// What the shim knows of a container, and whether it is about to start.
    async fn look(
        &self,
        key: &ContainerKey,
        action: &'static str,
    ) -> Result<(Option<ContainerView>, bool), RuntimeError> {
        let request = Request::Find {
            name: store::name(key),
        };
        match self.ask(&request).await {
            Ok(Reply::Found {
                container,
                starting,
            }) => Ok((container, starting)),
            Ok(_) => Err(call_failed(action, key, LinkError::Unexpected)),
            Err(error) => Err(call_failed(action, key, error)),
        }
    }

    /// All containers of the shim, commands in them as well.
    async fn views(&self) -> Result<Vec<ContainerView>, LinkError> {
        let mut all: Vec<ContainerView> = Vec::new();
        loop {
            let after = all.last().map(|view| view.name.clone());
            match self.ask(&Request::List { after }).await? {
                Reply::Containers { containers, more } => {
                    all.extend(containers);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(LinkError::Unexpected),
            }
        }
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
            exit_code: ended.and_then(|End(code)| code),
        }
    }

    fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let key = &plan.key;
        if plan.spec.network != Network::Loopback {
            let network = plan.spec.network;
            let reason = format!("it has only the `loopback` network, not `{network}`");
            return Err(refused("create", key, reason));
        }
        let image = self.images.pin(&key.to_string(), &plan.spec.image)?;
        let dir = self.store.container(key);
        let stored = self.order(plan, image.image(), &dir)?;
        if !dir.make()? {
            return Err(RuntimeError::Exists {
                subject: key.to_string(),
            });
        }
        let files = ContainerFiles::at(&plan.files_dir);
        if let Err(error) = files.write(key).and_then(|()| dir.write(&stored)) {
            for taken_back in [files.remove(), self.store.discard(&dir)] {
                if let Err(error) = taken_back {
                    tracing::warn!(container = %key, %error, "a failed create leaves something");
                }
            }
            return Err(error);
        }
        self.images.hold(key, image);
        self.lock_created().insert(key.clone(), stored);
        Ok(self.container_id(key))
    }

    /// What the shim will be asked to start.
    fn order(
        &self,
        plan: &ContainerPlan,
        image: &conman_image::Image,
        dir: &store::ContainerDir,
    ) -> Result<StoredPlan, RuntimeError> {
        let key = &plan.key;
        let layers = image.lower_directories();
        let store = self.images.store().directory();
        let below = |layer: &&Path| layer.strip_prefix(store).map(Path::to_owned);
        let below: Result<Vec<_>, _> = layers.iter().map(below).collect();
        let below = below.map_err(|error| refused("create", key, error.to_string()))?;
        let own = OWN_FILES.map(|(source, target)| {
            let target = target.to_owned();
            let read_only = true;
            (
                (plan.files_dir.clone(), PathBuf::from(source)),
                BindSpec { target, read_only },
            )
        });
        let asked = plan.binds.iter().map(|bind| {
            let target = bind.target.clone();
            let read_only = bind.read_only;
            (
                (bind.root.clone(), bind.below.clone()),
                BindSpec { target, read_only },
            )
        });
        let (sources, binds) = own.into_iter().chain(asked).unzip();
        let program = program::first_program(key, &plan.spec, &image.config, &layers)?;
        let driver = CgroupDriver::Cgroupfs;
        let instance = self.kernel.instance();
        let launch = LaunchSpec {
            terminal: None,
            log_bytes: None,
            name: store::name(key),
            cgroup: naming::cgroup_parent(instance, &key.session, key.generation, driver).path,
            limits: program::limits(&plan.spec),
            root: RootSpec {
                store: store.to_owned(),
                layers: below,
                scratch: dir.root(),
                read_only: false,
            },
            hostname: key.session.to_string(),
            program,
            log: dir.log(),
            files: Vec::new(),
            binds,
            hardening: Hardening::default(),
        };
        Ok(StoredPlan {
            launch,
            sources,
            files_dir: plan.files_dir.clone(),
            image: image.id,
        })
    }

    async fn start(self: &Arc<Self>, key: &ContainerKey) -> Result<Started, RuntimeError> {
        let (inner, owned) = (Arc::clone(self), key.clone());
        let (launch, mounts) = on_blocking_thread(move || inner.prepare(&owned)).await?;
        let fds: Vec<_> = mounts.iter().map(AsFd::as_fd).collect();
        let request = Request::Launch(Box::new(launch));
        let started = |pid| Started {
            container_id: self.container_id(key),
            pid,
        };
        match self.link.call(&request, &fds, self.timeouts.start).await {
            Ok((Reply::Launched { pid, .. }, fds)) => {
                let name = store::name(key);
                match self.ends.of(&name) {
                    None if !fds.is_empty() => Ok(started(pid)),
                    // It ended before anybody could take hold of it; its end is being told.
                    None => {
                        let end = tokio::time::timeout(END_PATIENCE, self.ends.wait(&name));
                        let end = end.await.ok().and_then(Result::ok);
                        Err(self.ended_at_once(key, end.unwrap_or(End(None))).await)
                    }
                    Some(end) => Err(self.ended_at_once(key, end).await),
                }
            }
            Ok(_) => Err(call_failed("start", key, LinkError::Unexpected)),
            Err(LinkError::Refused(CallError::Exists { .. })) => {
                let (view, _) = self.look(key, "start").await?;
                match view.map(|view| (view.pid, end(view.state))) {
                    Some((pid, None)) => Ok(started(pid)),
                    Some((_, Some(end))) => Err(self.ended_at_once(key, end).await),
                    None => Err(RuntimeError::TimedOut {
                        runtime: RuntimeKind::Native,
                        action: "start",
                        subject: key.to_string(),
                        after_ms: milliseconds(Duration::ZERO),
                    }),
                }
            }
            Err(error) => Err(start_failed(key, error)),
        }
    }

    /// What to send, with a mount for each bind.
    fn prepare(&self, key: &ContainerKey) -> Result<(LaunchSpec, Vec<Mount>), RuntimeError> {
        let created = self.lock_created().remove(key);
        let stored = match created {
            Some(stored) => Some(stored),
            None => self.store.container(key).plan()?,
        };
        let stored = stored.ok_or_else(|| no_such_container(key))?;
        let mounts: Result<Vec<_>, _> = stored.sources.iter().map(mount).collect();
        Ok((stored.launch, mounts?))
    }

    async fn ended_at_once(&self, key: &ContainerKey, End(code): End) -> RuntimeError {
        let ending = match code {
            Some(code) => format!("ended at once with exit code {code}"),
            None => "ended at once".to_owned(),
        };
        let log = self.store.container(key).log();
        let quoted = on_blocking_thread(move || Ok(last_of(&log))).await;
        let quoted = quoted.unwrap_or_default();
        RuntimeError::EndedAtOnce {
            subject: key.to_string(),
            reason: format!("{ending}: {}", quoted.trim()),
        }
    }

    async fn remove(self: Arc<Self>, key: ContainerKey) -> Result<(), RuntimeError> {
        let (inner, owned) = (Arc::clone(&self), key.clone());
        let leaving = on_blocking_thread(move || {
            inner.kernel.check_dead(&owned)?;
            inner.store.leave(&owned)
        })
        .await?;
        let removed = self.remove_rest(&key, leaving.clone()).await;
        if removed.is_err()
            && let Some(leaving) = leaving
        {
            let inner = Arc::clone(&self);
            if let Err(error) = on_blocking_thread(move || inner.store.stay(&leaving)).await {
                tracing::error!(container = %key, %error, "a container lost its directory");
            }
        }
        removed
    }

    /// The container's directory is where no start finds it any more.
    async fn remove_rest(
        self: &Arc<Self>,
        key: &ContainerKey,
        leaving: Option<store::ContainerDir>,
    ) -> Result<(), RuntimeError> {
        // A start that is further already is not held up by that.
        let (view, starting) = self.look(key, "remove").await?;
        if starting || view.is_some_and(|view| view.state.is_alive()) {
            return Err(RuntimeError::StillAlive {
                subject: key.to_string(),
                pids: self.kernel.pids(key),
            });
        }
        let (inner, owned, dir) = (Arc::clone(self), key.clone(), leaving.clone());
        on_blocking_thread(move || {
            inner.kernel.check_dead(&owned)?;
            inner.kernel.remove_cgroups(&owned)?;
            match dir.map(|dir| dir.plan()) {
                Some(Ok(Some(plan))) => ContainerFiles::at(&plan.files_dir).remove(),
                Some(Err(error)) => {
                    tracing::warn!(container = %owned, %error, "its small files may stay");
                    Ok(())
                }
                Some(Ok(None)) | None => Ok(()),
            }
        })
        .await?;
        let name = store::name(key);
        let names = vec![name.clone()];
        // Only now: its ids may be another container's from here on.
        match self.ask(&Request::Acknowledge { names }).await {
            Ok(_) => {}
            // Its start has not been answered yet.
            Err(LinkError::Refused(CallError::StillAlive { .. })) => {
                return Err(RuntimeError::StillAlive {
                    subject: key.to_string(),
                    pids: Vec::new(),
                });
            }
            Err(error) => return Err(call_failed("remove", key, error)),
        }
        if let Some(leaving) = leaving {
            let inner = Arc::clone(self);
            on_blocking_thread(move || inner.store.discard(&leaving)).await?;
        }
        self.lock_created().remove(key);
        self.images.release(key);
        self.ends.forget(&name);
        Ok(())
    }
}

/// A mount of what is at `path` below `trusted` now, which cannot become another one's afterwards.
/// Binds have been checked before, and their sources may have been changed since.
fn mount((trusted, path): &(PathBuf, PathBuf)) -> Result<Mount, RuntimeError> {
    let place = conman_linux::open_beneath(trusted, path);
    place
        .and_then(|place| Mount::copy_of(&place, Path::new("")))
        .map_err(|source| host_error("bind", &trusted.join(path), source))
}

/// The end of a log, for an error.
fn last_of(log: &Path) -> String {
    use std::os::unix::fs::FileExt;
    let Ok(file) = std::fs::File::open(log) else {
        return String::new();
    };
    let length = file.metadata().map_or(0, |data| data.len());
    let mut bytes = vec![0; usize::try_from(length.min(QUOTED_BYTES)).unwrap_or(0)];
    let from = length.saturating_sub(QUOTED_BYTES);
    let read = file.read_at(&mut bytes, from).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}

fn no_such_container(key: &ContainerKey) -> RuntimeError {
    RuntimeError::NoSuchContainer {
        subject: key.to_string(),
    }
}

/// Files and cgroups, away from the threads that carry tunnels.
async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(RuntimeError::Unavailable {
            runtime: RuntimeKind::Native,
            action: "look at files",
            reason: "the daemon is shutting down".to_owned(),
        }),
    }
}
