use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_node::Node;
use conman_proto::RuntimeKind;
use conman_runtime::{
    DockerFence, DockerOptions, DockerRuntime, FenceOpener, NativeOptions, NativeRuntime,
    NativeTimeouts, ProcessOptions, ProcessRuntime, Recorded, Runtime,
};

use conman_vitals::{Vitals, essential};
use tokio::task::JoinHandle;

use super::state::State;
use crate::config::Config;
use crate::shim::{self, ShimPlace};

/// Bound on the process runtime's calls.
const PROCESS_PATIENCE: Duration = Duration::from_secs(30);
/// Directories in the state directory, each one runtime's.
const NATIVE: &str = "native";
const PROCESS: &str = "process";

/// What the task is called that sees to it that there is a shim.
const KEEPER: &str = "shim keeper";

/// The runtimes that the node or one of its templates names.
pub(super) struct Runtimes {
    all: Vec<Arc<dyn Runtime>>,
    native: Option<Arc<NativeRuntime>>,
    docker: Option<Arc<DockerRuntime>>,
    /// What is this node's of that which a fleet's fence holds, where it was of one.
    recorded: Option<Arc<Recorded>>,
    /// Sees to it that there is a shim.
    keeper: Option<JoinHandle<()>>,
}

impl Runtimes {
    /// Asks none of them anything yet. Blocks on the disk.
    pub(super) fn open(config: &Config, state: &State) -> Result<Self> {
        let mut runtimes = Self {
            all: Vec::new(),
            native: None,
            docker: None,
            recorded: None,
            keeper: None,
        };
        let opener = opener(config)?;
        if let FenceOpener::Records(recorded) = &opener {
            runtimes.recorded = Some(Arc::clone(recorded));
        }
        for kind in config.runtimes() {
            match kind {
                RuntimeKind::Native => {
                    let native = Arc::new(native(config, state, opener.clone())?);
                    runtimes.native = Some(Arc::clone(&native));
                    runtimes.all.push(native);
                }
                RuntimeKind::Docker => {
                    let docker = Arc::new(docker(config, state, opener.clone())?);
                    runtimes.docker = Some(Arc::clone(&docker));
                    runtimes.all.push(docker);
                }
                RuntimeKind::Process => runtimes.all.push(Arc::new(process(config, state)?)),
            }
        }
        Ok(runtimes)
    }

    pub(super) fn all(&self) -> Vec<Arc<dyn Runtime>> {
        self.all.clone()
    }

    /// Where this node was of a fleet, the fence may be closed: now that it is known what is this
    /// node's, that goes on, and nothing else.
    pub(super) async fn open_fence(&self, node: &Node) {
        let Some(recorded) = &self.recorded else {
            return;
        };
        recorded.are(node.containers());
        // Both of them mean the same shim.
        let opened = match (&self.native, &self.docker) {
            (Some(native), _) => native.open_fence().await,
            (None, Some(docker)) => docker.open_fence().await,
            (None, None) => return,
        };
        if let Err(error) = opened {
            tracing::error!(%error, "the shim's fence may hold everything until it is connected to");
        }
    }

    /// From now on a shim that dies is succeeded at once. In a fleet whoever drives the fence sees to
    /// that.
    pub(super) fn keep_shim(&mut self, config: &Config, vitals: &Vitals) {
        if let Some(native) = self.native.clone().filter(|_| config.shared.is_none()) {
            let pulse = vitals.task(KEEPER);
            let keeping = async move { pulse.idle(native.keep_shim()).await };
            self.keeper = Some(tokio::spawn(essential(KEEPER, keeping)));
        }
    }

    /// Lets go of what serves nobody any more, once nothing more is started.
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

fn native(config: &Config, state: &State, fence: FenceOpener) -> Result<NativeRuntime> {
    let options = NativeOptions {
        instance: state.instance.clone(),
        directory: config.state_dir.join(NATIVE),
        images: state.images.clone(),
        bind_first_id: config.bind_first_id,
        socket: ShimPlace::of(&state.instance).socket(),
        shim: Some(shim::command(config)?),
        fence,
        timeouts: NativeTimeouts::default(),
    };
    NativeRuntime::open(options).context("cannot set up the native runtime")
}

fn docker(config: &Config, state: &State, opener: FenceOpener) -> Result<DockerRuntime> {
    let mut options = DockerOptions::new(config.docker_socket.clone(), state.instance.clone());
    // A session's cgroup may be below that of all sessions, whose limit is `limits.total_cpus`.
    options.max_cpus = options.max_cpus.min(config.limits.total_cpus);
    // Only where there is a shim anyway, since a node alone needs no fence, or where others take
    // over what this node loses: one that Docker's sessions alone need would be one more thing that
    // they depend on.
    if config.shared.is_some() || config.runtimes().contains(&RuntimeKind::Native) {
        options.fence = Some(DockerFence {
            socket: ShimPlace::of(&state.instance).socket(),
            shim: Some(shim::command(config)?),
            opener,
        });
    }
    DockerRuntime::connect(options).context("cannot set up the Docker runtime")
}

/// Where others may have taken over what was this node's, the registry knows what may run; where
/// they may have done so once, this node's own records do.
fn opener(config: &Config) -> Result<FenceOpener> {
    if config.shared.is_some() {
        return Ok(FenceOpener::Registry);
    }
    let was_in_fleet = conman_registry::was_in_fleet(&config.state_dir)
        .context("cannot tell whether this node was of a fleet")?;
    Ok(match was_in_fleet {
        true => FenceOpener::Records(Arc::default()),
        false => FenceOpener::Anybody,
    })
}

fn process(config: &Config, state: &State) -> Result<ProcessRuntime> {
    let options = ProcessOptions {
        state_dir: config.state_dir.join(PROCESS),
        instance: state.instance.clone(),
        call_timeout: PROCESS_PATIENCE,
    };
    ProcessRuntime::open(options).context("cannot set up the process runtime")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn what_a_fleet_closed_is_not_opened_by_a_node_of_its_own_without_its_records() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("conman.toml");
        let text = format!("[node]\nstate_dir = \"{}\"\n", dir.path().display());
        std::fs::write(&file, text).expect("written");
        let config = config::load(Some(&file)).expect("a configuration");
        let opens = || opener(&config).expect("told");
        assert!(matches!(opens(), FenceOpener::Anybody));
        // As a registry that a fleet shares leaves it.
        std::fs::write(dir.path().join("etcd-seen.json"), "{}").expect("written");
        assert!(matches!(opens(), FenceOpener::Records(_)));
    }
}
