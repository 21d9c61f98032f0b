//! [`DockerRuntime`]: containers of a Docker daemon, through its HTTP API on a Unix socket.
//!
//! The daemon creates, starts, describes and removes containers; it never kills. Where the kernel
//! has the answer, the daemon's is not trusted: which container a process belongs to, and whether
//! a container still has processes.
//!
//! Tasks: one for each running command ([`exec`]), one for each attached client ([`terminals`]), and
//! one for each connection that the client library does not make ([`hijack`]). Every call to the
//! daemon is bounded in time and number ([`daemon`]); polling a log's stream reads the log.

mod container_body;
mod daemon;
mod descriptions;
mod exec;
mod failure;
mod fence;
mod frames;
mod hijack;
mod inspection;
mod links;
mod logs;
mod options;
mod program_start;
mod removal;
mod terminals;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bollard::query_parameters::{
    CreateContainerOptionsBuilder, ListContainersOptionsBuilder, ResizeContainerTTYOptionsBuilder,
};
use conman_core::naming::{self, CgroupDriver, LABEL_INSTANCE};
use conman_linux::IoLimits;
use conman_proto::RuntimeKind;
use tokio::sync::OwnedSemaphorePermit;

pub use fence::DockerFence;
pub use options::{DockerOptions, DockerTimeouts};

use crate::shared::blocking::on_blocking_thread;
use crate::shared::container_files::{ContainerFiles, host_error};
use crate::shared::kept_logs::KeptLogs;
use crate::shared::kernel_view::KernelView;
use crate::{
    ContainerKey, ContainerPlan, FoundContainer, Lifecycle, RunningContainer, RuntimeError,
    RuntimeInfo, Started, TERMINAL_SIZE,
};
use container_body::{container_body, limit_io};
use daemon::{Daemon, Lane};
use descriptions::Listed;
use failure::{Failure, no_image};
use fence::Fence;
use links::Links;
use program_start::ProgramStart;

/// dockerd may use either one, which is unknown while it does not answer. So both places are
/// searched for containers.
const DRIVERS: [CgroupDriver; 2] = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];

/// First and later interval at which dockerd is polled for a container's end.
const FIRST_EXIT_INTERVAL: Duration = Duration::from_millis(10);
const LAST_EXIT_INTERVAL: Duration = Duration::from_millis(320);

/// Longest wait for the answer about an image. The caller continues without it.
const IMAGE_PATIENCE: Duration = Duration::from_secs(2);

/// Containers of a Docker daemon.
#[derive(Debug)]
pub struct DockerRuntime {
    shared: Arc<Shared>,
}

/// State shared by calls and running commands.
#[derive(Debug)]
struct Shared {
    daemon: Daemon,
    kernel: KernelView,
    timeouts: DockerTimeouts,
    max_cpus: f64,
    io: Option<(PathBuf, IoLimits)>,
    max_removals: usize,
    fence: Option<Fence>,
    kept_logs: Option<Arc<KeptLogs>>,
    followers: logs::Followers,
    links: Arc<Links>,
    /// Where the files are of containers that this daemon created and has not removed. dockerd has
    /// the path in a label as well.
    files: Mutex<HashMap<ContainerKey, PathBuf>>,
}

impl DockerRuntime {
    /// Does not connect. If the daemon does not answer, every call reports that; once it answers,
    /// calls succeed.
    pub fn connect(options: DockerOptions) -> Result<Self, RuntimeError> {
        let kept_logs = options.kept_logs.map(|(directory, limits)| {
            let opened = KeptLogs::open(directory.clone(), limits);
            opened.map_err(|source| host_error("make", &directory, source))
        });
        let shared = Shared {
            daemon: Daemon::new(
                options.socket,
                options.max_calls,
                options.max_removals,
                options.max_streams,
            ),
            kernel: KernelView::new(options.instance, &DRIVERS)?,
            timeouts: options.timeouts,
            max_cpus: options.max_cpus,
            io: options.io,
            max_removals: options.max_removals,
            fence: options.fence.map(Fence::new),
            kept_logs: kept_logs.transpose()?.map(Arc::new),
            followers: logs::Followers::default(),
            links: Arc::new(Links::open(options.network, options.links)?),
            files: Mutex::default(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Opens the shim's fence for the sessions recorded for this node ([`crate::Recorded`]).
    pub async fn open_fence(&self) -> Result<(), RuntimeError> {
        match &self.shared.fence {
            Some(fence) => fence.open().await,
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Lifecycle for DockerRuntime {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Docker
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        let described =
            self.shared
                .daemon
                .call(Lane::Calls, self.shared.timeouts.info, |facts| async move {
                    facts.client.info().await
                });
        let info = described
            .await
            .map_err(|failure| failure.about("describe itself", "the host"))?;
        let mut warnings = descriptions::warnings(&info);
        if let Err(why) = self.shared.guard_running_soon().await {
            warnings.push(format!("sessions may not be under the fence: {why}"));
        }
        Ok(RuntimeInfo {
            warnings,
            version: info.server_version.unwrap_or_else(|| "unknown".to_owned()),
        })
    }

    async fn ping(&self) -> Result<(), RuntimeError> {
        let answered = self.shared.daemon.ping().await;
        answered.map_err(|failure| failure.about("answer", "a ping"))
    }

    async fn lacks_image(&self, image: &str) -> Option<RuntimeError> {
        let limit = self.shared.timeouts.inspect.min(IMAGE_PATIENCE);
        let inspected = self
            .shared
            .daemon
            .call(Lane::Calls, limit, |facts| async move {
                facts.client.inspect_image(image).await
            });
        match inspected.await {
            Ok(_) => None,
            // It pulls none when a container is created, so a missing image stays missing.
            Err(failure) if failure.is_no_such_image() => Some(no_image(image)),
            Err(failure) => {
                tracing::debug!(image, ?failure, "cannot look up the image");
                None
            }
        }
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        self.shared.create(plan).await
    }

    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.shared.start(key).await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        let found = self.shared.look(key).await;
        let found = found.map_err(|failure| failure.about("find", &key.to_string()))?;
        let Some(container) = found else {
            return Ok(None);
        };
        let shared = Arc::clone(&self.shared);
        let found = move || {
            let pid = shared.kernel.init_pid(&container.key)?;
            Ok(Some(container.found(pid)))
        };
        self.shared.on_blocking_thread("find", found).await
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        let listed = self.shared.list().await;
        let listed = listed.map_err(|failure| failure.about("list", "the containers"))?;
        let shared = Arc::clone(&self.shared);
        let found = move || {
            let keys: Vec<_> = listed.iter().map(|each| each.key.clone()).collect();
            let inits = shared.kernel.init_pids(&keys)?;
            let found = listed.into_iter().map(|each| {
                let pid = inits.get(&each.key).copied();
                each.found(pid)
            });
            Ok(found.collect())
        };
        self.shared.on_blocking_thread("list", found).await
    }

    fn usages(&self, containers: &[RunningContainer]) -> Vec<conman_linux::ResourceUsage> {
        self.shared.kernel.usages(containers)
    }

    fn fabric_addresses(&self, key: &ContainerKey) -> Vec<IpAddr> {
        self.shared.links.network.addresses(key)
    }

    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.shared.kernel.owns_pid(key, pid)
    }

    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>> {
        self.shared.kernel.pids(key)
    }

    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32> {
        tokio::time::timeout(patience, self.shared.noticed_exit_code(key))
            .await
            .ok()?
    }

    fn oom_kills(&self, key: &ContainerKey) -> Option<u64> {
        self.shared.kernel.oom_kills(key)
    }

    async fn out_of_memory(&self, key: &ContainerKey) -> bool {
        self.shared.ran_out_of_memory(key).await
    }

    async fn stop_signal(&self, key: &ContainerKey) -> Option<String> {
        self.shared.stop_signal(key).await
    }

    async fn was_fenced(&self, key: &ContainerKey) -> bool {
        match &self.shared.fence {
            Some(fence) => fence.was_fenced(key).await,
            None => false,
        }
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        removal::remove(&self.shared, keys).await
    }
}

impl Shared {
    fn container_name(&self, key: &ContainerKey) -> String {
        naming::container_name(self.kernel.instance(), &key.session, key.generation)
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let (links, key, spec) = (Arc::clone(&self.links), plan.key.clone(), plan.spec.clone());
        self.on_blocking_thread("create", move || links.take(&key, &spec))
            .await?;
        let created = self.create_with_link(plan).await;
        if created.as_ref().is_err_and(|(_, exists)| !exists) {
            let (links, key) = (Arc::clone(&self.links), plan.key.clone());
            self.on_blocking_thread("create", move || links.give_back(&key))
                .await?;
        }
        created.map_err(|(error, _)| error)
    }

    /// The error comes with whether the container may exist.
    async fn create_with_link(&self, plan: &ContainerPlan) -> Result<String, (RuntimeError, bool)> {
        let files = ContainerFiles::at(&plan.files_dir);
        let (written, key) = (files.clone(), plan.key.clone());
        let name_servers = self.links.network.name_servers(&plan.spec);
        self.on_blocking_thread("create", move || written.write(&key, &name_servers))
            .await
            .map_err(|error| (error, false))?;
        locked(&self.files).insert(plan.key.clone(), plan.files_dir.clone());

        let name = self.container_name(&plan.key);
        let created = self
            .daemon
            .call(Lane::Calls, self.timeouts.create, |facts| async move {
                let instance = self.kernel.instance();
                let mut body = container_body(plan, instance, facts.cgroup_driver, self.max_cpus);
                if let Some((disk, limits)) = &self.io {
                    limit_io(&mut body, disk, limits);
                }
                let options = CreateContainerOptionsBuilder::default().name(&name).build();
                facts.client.create_container(Some(options), body).await
            });
        match created.await {
            Ok(created) => {
                for warning in &created.warnings {
                    tracing::debug!(container = %plan.key, warning, "Docker warns");
                }
                Ok(created.id)
            }
            Err(failure) => {
                let never_asked = matches!(failure, Failure::Unreachable { .. });
                let error = failure.of_create(&plan.key, &plan.spec.image);
                let refused =
                    !error.is_ambiguous() && !matches!(error, RuntimeError::Exists { .. });
                // The files of a container that exists, or that may still be created, are in use.
                if never_asked || refused {
                    self.forget_files_dir(&plan.key);
                    self.on_blocking_thread("create", move || files.remove())
                        .await
                        .map_err(|error| (error, false))?;
                }
                Err((error, !(never_asked || refused)))
            }
        }
    }

    async fn start(self: &Arc<Self>, key: &ContainerKey) -> Result<Started, RuntimeError> {
        let started = self.ask_to_start(key).await?;
        match program_start::watch(self, key, started.pid).await? {
            ProgramStart::Runs => Ok(started),
            ProgramStart::Ended => match self.explained_end(key).await {
                Ok(error) => Err(error),
                // The caller's check of the process shows that it is dead.
                Err(failure) => {
                    tracing::debug!(container = %key, ?failure, "cannot explain the end");
                    Ok(started)
                }
            },
        }
    }

    /// Why a container ended at once, although dockerd may still report it as running.
    async fn explained_end(&self, key: &ContainerKey) -> Result<RuntimeError, Failure> {
        let name = self.container_name(key);
        let noticed = self
            .daemon
            .call(Lane::Calls, self.timeouts.start, |facts| async move {
                loop {
                    let container = facts.client.inspect_container(&name, None).await?;
                    if descriptions::running_pid(&container).is_none() {
                        let client = &facts.client;
                        return Ok(descriptions::ended_at_once(client, key, container).await);
                    }
                    tokio::time::sleep(FIRST_EXIT_INTERVAL).await;
                }
            });
        noticed.await
    }

    /// Starts it under the fence, if there is one.
    async fn ask_to_start(self: &Arc<Self>, key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.guard(key).await?;
        let started = self.order_start(key).await;
        self.tell_start(key, &started, |started| started.pid)
            .await?;
        started
    }

    async fn order_start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        let name = self.container_name(key);
        let started = self
            .daemon
            .call(Lane::Calls, self.timeouts.start, |facts| async move {
                facts.client.start_container(&name, None).await?;
                let container = facts.client.inspect_container(&name, None).await?;
                let config = container.config.as_ref();
                if config.is_some_and(|config| config.tty == Some(true)) {
                    // A terminal has no size until it is set; a program that has ended needs none.
                    let size = ResizeContainerTTYOptionsBuilder::new()
                        .h(TERMINAL_SIZE.rows.into())
                        .w(TERMINAL_SIZE.columns.into());
                    let _ = facts.client.resize_container_tty(&name, size.build()).await;
                }
                let is_bridged = config.is_some_and(|config| config.network_disabled != Some(true));
                match descriptions::running_pid(&container) {
                    Some(pid) => Ok(Ok((
                        Started {
                            container_id: container.id.unwrap_or_default(),
                            pid,
                            steps: Vec::new(),
                            egress: None,
                        },
                        is_bridged,
                    ))),
                    None => Ok(Err(descriptions::ended_at_once(
                        &facts.client,
                        key,
                        container,
                    )
                    .await)),
                }
            });
        let started = started.await.map_err(|failure| failure.of_start(key))?;
        let (started, is_bridged) = started?;
        if is_bridged || self.links.has(key) {
            self.connect_started(key, started.pid, is_bridged).await?;
        }
        Ok(started)
    }

    /// Finds this instance's container of `key` in dockerd's list. Inspecting it would wait for
    /// whatever dockerd is doing with it, such as ending it.
    async fn look(&self, key: &ContainerKey) -> Result<Option<Listed>, Failure> {
        let name = format!("^/{}$", self.container_name(key));
        let listed = self
            .list_filtered(vec![("name".to_owned(), vec![name])])
            .await?;
        Ok(listed.into_iter().find(|each| each.key == *key))
    }

    /// Likewise; an error if there is none.
    async fn existing(
        &self,
        key: &ContainerKey,
        action: &'static str,
    ) -> Result<Listed, RuntimeError> {
        let subject = key.to_string();
        let found = self.look(key).await;
        let found = found.map_err(|failure| failure.about(action, &subject))?;
        found.ok_or(RuntimeError::NoSuchContainer { subject })
    }

    /// Takes a place for a command or a log, held as long as it lasts.
    fn stream_place(
        &self,
        key: &ContainerKey,
        action: &'static str,
    ) -> Result<OwnedSemaphorePermit, RuntimeError> {
        let place = self.daemon.stream_place();
        place.ok_or_else(|| RuntimeError::Refused {
            runtime: RuntimeKind::Docker,
            action,
            subject: key.to_string(),
            reason: "too many commands and logs are open at a time; close some".to_owned(),
        })
    }

    /// Lists all containers with this instance's label.
    async fn list(&self) -> Result<Vec<Listed>, Failure> {
        self.list_filtered(Vec::new()).await
    }

    async fn list_filtered(
        &self,
        filters: Vec<(String, Vec<String>)>,
    ) -> Result<Vec<Listed>, Failure> {
        let label = format!("{LABEL_INSTANCE}={}", self.kernel.instance());
        let own = [("label".to_owned(), vec![label])];
        let filters: HashMap<_, _> = filters.into_iter().chain(own).collect();
        let listed = self
            .daemon
            .call(Lane::Calls, self.timeouts.list, |facts| async move {
                let options = ListContainersOptionsBuilder::default()
                    .all(true)
                    .filters(&filters);
                facts.client.list_containers(Some(options.build())).await
            });
        Ok(listed.await?.into_iter().filter_map(Listed::of).collect())
    }

    fn files_dir(&self, key: &ContainerKey) -> Option<PathBuf> {
        locked(&self.files).get(key).cloned()
    }

    fn forget_files_dir(&self, key: &ContainerKey) {
        locked(&self.files).remove(key);
    }

    /// Runs work on files and cgroups outside the threads that carry tunnels.
    async fn on_blocking_thread<T: Send + 'static>(
        &self,
        action: &'static str,
        work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        on_blocking_thread(RuntimeKind::Docker, action, work).await
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
