//! Composes the runtimes that the node or its templates use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use conman_linux::{CgroupLayout, Disk, IoLimits};
use conman_node::SessionsHandle;
use conman_proto::RuntimeKind;
use conman_runtime::{
    ContainerNetwork, DockerFence, DockerOptions, DockerRuntime, FenceOpener, NativeOptions,
    NativeRuntime, NativeTimeouts, Recorded, RootStore, Runtime,
};

use conman_watchdog::{Watchdog, essential};
use tokio::task::JoinHandle;

use super::state::LockedState;
use crate::config::{Config, Io};
use crate::doctor::DOCKER_ROOT;
use crate::shim::{self, ShimPlace};

/// The native runtime's directory in the state directory.
pub(crate) const NATIVE: &str = "native";
/// Logs of removed containers of Docker, likewise.
const DOCKER_LOGS: &str = "docker-logs";

/// Which link each container of Docker has, likewise.
const DOCKER_LINKS: &str = "docker-links";

/// Name of the task that keeps a shim running.
const KEEPER: &str = "shim keeper";

/// The runtimes that the node or one of its templates uses.
pub(super) struct Runtimes {
    native: Option<Arc<NativeRuntime>>,
    docker: Option<Arc<DockerRuntime>>,
    /// The recorded sessions that a fleet's fence may hold, if the node was in a fleet.
    recorded: Option<Arc<Recorded>>,
    /// The task that keeps a shim running.
    keeper: Option<JoinHandle<()>>,
    kinds: BTreeSet<RuntimeKind>,
}

impl Runtimes {
    /// Calls none of them. Blocks on the disk.
    pub(super) fn open(
        config: &Config,
        state: &LockedState,
        network: &ContainerNetwork,
    ) -> Result<Self> {
        let opener = opener(config)?;
        let recorded = match &opener {
            FenceOpener::Records(recorded) => Some(Arc::clone(recorded)),
            FenceOpener::Registry | FenceOpener::AnyConnection => None,
        };
        let kinds = config.runtimes();
        let native = config
            .has_native_containers()
            .then(|| native(config, state, opener.clone(), network.clone()));
        let docker = kinds
            .contains(&RuntimeKind::Docker)
            .then(|| docker(config, state, opener.clone(), network.clone()));
        Ok(Self {
            native: native.transpose()?.map(Arc::new),
            docker: docker.transpose()?.map(Arc::new),
            recorded,
            keeper: None,
            kinds,
        })
    }

    pub(super) fn all(&self) -> Vec<Arc<dyn Runtime>> {
        let native = self.native.as_ref();
        let of = |kind: &RuntimeKind| match kind {
            RuntimeKind::Native => native.map(|native| Arc::clone(native) as Arc<dyn Runtime>),
            RuntimeKind::Gvisor | RuntimeKind::Oci(_) => {
                native.map(|native| Arc::new(native.with_runtime(*kind)) as _)
            }
            RuntimeKind::Docker => self.docker.clone().map(|docker| docker as _),
            RuntimeKind::Process => None,
        };
        self.kinds.iter().filter_map(of).collect()
    }

    /// If this node was in a fleet, the fence may be closed. Opens it for the sessions that this
    /// node has adopted, and for no others.
    pub(super) async fn open_fence(&self, sessions: &SessionsHandle) {
        let Some(recorded) = &self.recorded else {
            return;
        };
        recorded.are(sessions.containers());
        // Both of them use the same shim.
        let opened = match (&self.native, &self.docker) {
            (Some(native), _) => native.open_fence().await,
            (None, Some(docker)) => docker.open_fence().await,
            (None, None) => return,
        };
        if let Err(error) = opened {
            tracing::error!(%error, "cannot open the shim's fence yet");
        }
    }

    /// From here on a shim that dies is replaced at once. In a fleet the owner of the fence does
    /// that.
    pub(super) fn keep_shim(&mut self, config: &Config, watchdog: &Watchdog) {
        if let Some(native) = self.native.clone().filter(|_| config.shared.is_none()) {
            let progress = watchdog.task(KEEPER);
            let keeping = async move { progress.idle(native.keep_shim()).await };
            self.keeper = Some(tokio::spawn(essential(KEEPER, keeping)));
        }
    }

    /// Ends helpers that are no longer needed. Call it once nothing more is started.
    pub(super) async fn close(&mut self) {
        if let Some(keeper) = self.keeper.take() {
            keeper.abort();
            // It was aborted.
            let _ = keeper.await;
        }
        if let Some(native) = &self.native {
            native.end_idle_shim().await;
        }
    }
}

/// What `limits.io_*` mean for sessions whose files are in this directory, and the disk's node in `/dev`.
/// Neither runtime may ignore those of a session; the weight is that of all native sessions.
fn io_limits(config: &Config, directory: &Path) -> Result<Option<(PathBuf, IoLimits)>> {
    let io = config.limits.io;
    if io == Io::default() {
        return Ok(None);
    }
    let layout = CgroupLayout::detect().context("cannot read the cgroup mounts")?;
    if !layout.limits_io() {
        bail!(
            "limits.io_* cannot be enforced: this host has neither the io controller of cgroup v2 nor blkio of v1; \
             remove them, or enable the controller"
        );
    }
    let shown = directory.display();
    let disk = Disk::of(directory).with_context(|| format!("cannot find the disk of {shown}"))?;
    let Some(disk) = disk else {
        bail!(
            "limits.io_* cannot be enforced: the file system of {shown} is not on one disk; remove them, or use \
             ext4 or XFS"
        );
    };
    let limits = IoLimits {
        device: disk.device,
        read_bytes_per_s: io.read_bytes_per_s,
        write_bytes_per_s: io.write_bytes_per_s,
        total_weight: io.weight,
    };
    Ok(Some((disk.node, limits)))
}

fn native(
    config: &Config,
    state: &LockedState,
    fence: FenceOpener,
    network: ContainerNetwork,
) -> Result<NativeRuntime> {
    let io = io_limits(config, &config.state_dir)?.map(|(_, limits)| limits);
    if io.is_some() && config.images.roots != RootStore::Overlay {
        bail!(
            "limits.io_* cannot be enforced with `images.store = \"btrfs\"`: remove either of them"
        );
    }
    let options = NativeOptions {
        instance: state.instance.clone(),
        directory: config.state_dir.join(NATIVE),
        images: state.images.clone(),
        roots: config.images.roots,
        bind_first_id: config.bind_first_id,
        socket: ShimPlace::of(&state.instance).socket(),
        shim: Some(shim::command(config)?),
        fence,
        kept_logs: config.limits.kept_logs,
        io,
        total_cpus: Some(config.limits.total_cpus),
        network,
        oci: config.oci.clone(),
        timeouts: NativeTimeouts::default(),
    };
    NativeRuntime::open(options).context("cannot set up the native runtime")
}

fn docker(
    config: &Config,
    state: &LockedState,
    opener: FenceOpener,
    network: ContainerNetwork,
) -> Result<DockerRuntime> {
    let mut options = DockerOptions::new(config.docker_socket.clone(), state.instance.clone());
    options.network = network;
    options.links = Some(config.state_dir.join(DOCKER_LINKS));
    // A session's cgroup may be below that of all sessions, whose limit is `limits.total_cpus`.
    options.max_cpus = options.max_cpus.min(config.limits.total_cpus);
    let root = Path::new(DOCKER_ROOT);
    let root = if root.exists() {
        root
    } else {
        &*config.state_dir
    };
    options.io = io_limits(config, root)?;
    options.kept_logs = Some((config.state_dir.join(DOCKER_LOGS), config.limits.kept_logs));
    // Docker's sessions get a fence only if there is a shim anyway, or if other nodes take over
    // from this one. A node outside a fleet needs no fence, and a shim only for Docker would be one
    // more dependency.
    if config.shared.is_some() || config.has_native_containers() {
        options.fence = Some(DockerFence {
            socket: ShimPlace::of(&state.instance).socket(),
            shim: Some(shim::command(config)?),
            opener,
        });
    }
    DockerRuntime::connect(options).context("cannot set up the Docker runtime")
}

/// In a fleet, the registry knows what may run here. On a node that was in a fleet before, its
/// records do.
fn opener(config: &Config) -> Result<FenceOpener> {
    if config.shared.is_some() {
        return Ok(FenceOpener::Registry);
    }
    let was_in_fleet = conman_registry::fleet_mark::was_in_fleet(&config.state_dir)
        .context("cannot tell whether this node was of a fleet")?;
    Ok(match was_in_fleet {
        true => FenceOpener::Records(Arc::default()),
        false => FenceOpener::AnyConnection,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn limits_of_io_that_no_disk_can_keep_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
        let file = dir.path().join("conman.toml");
        let text = |limits: &str| {
            let state = memory.path().display();
            format!("[node]\nstate_dir = \"{state}\"\n[limits]\n{limits}\n")
        };
        let limits = |text: String| {
            std::fs::write(&file, text).expect("written");
            let config = config::load(Some(&file)).expect("a configuration");
            io_limits(&config, &config.state_dir)
        };
        assert!(matches!(limits(text("")), Ok(None)));
        let refused = limits(text("io_write_bytes_per_s = 1048576")).expect_err("no disk");
        let refused = refused.to_string();
        assert!(refused.contains("limits.io_*"), "{refused}");
    }

    #[test]
    fn what_a_fleet_closed_is_not_opened_by_a_node_of_its_own_without_its_records() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("conman.toml");
        let text = format!("[node]\nstate_dir = \"{}\"\n", dir.path().display());
        std::fs::write(&file, text).expect("written");
        let config = config::load(Some(&file)).expect("a configuration");
        let opens = || opener(&config).expect("told");
        assert!(matches!(opens(), FenceOpener::AnyConnection));
        // As a registry that a fleet shares leaves it.
        std::fs::write(dir.path().join("etcd-seen.json"), "{}").expect("written");
        assert!(matches!(opens(), FenceOpener::Records(_)));
    }
}
