//! A Docker Engine for each node, as on machines of their own: in the node's network namespace, with a bridge
//! there.
//!
//! Its daemons and the shims of its containers are processes of the namespace, and die with the node. It makes no
//! rules for packets: sessions are reached by their addresses on the bridge.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_linux::{Cgroups, remove_tree};

use crate::command::run;
use crate::docker::{self, docker};
use crate::etcd::{detached, log_file};
use crate::layout::{Host, Layout};
use crate::process;

/// Bound on its start, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Mounts that one command removes.
const AT_A_TIME: usize = 50;

/// The Docker Engine of a node.
#[derive(Debug, Clone)]
pub struct Engine {
    layout: Arc<Layout>,
    host: Host,
}

impl Engine {
    pub(crate) fn new(layout: &Arc<Layout>, host: Host) -> Self {
        Self {
            layout: Arc::clone(layout),
            host,
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket(&self.layout, &self.host.name)
    }

    /// The cgroup for containers that are not conman's.
    #[must_use]
    pub fn cgroup(&self) -> String {
        cgroup(&self.layout, &self.host.name)
    }

    /// Starts it, with the images that it had, and waits until it answers.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn start(&self) -> Result<()> {
        start(&self.layout, &self.host.name)
    }

    /// The machine is gone: kills the node's processes and all containers of the engine. Images stay.
    ///
    /// # Errors
    /// When something does not die, or cannot be removed.
    pub fn lose(&self) -> Result<()> {
        let name = &self.host.name;
        process::kill_residents(&self.layout.namespace_path(name))?;
        end(&self.layout, name)?;
        // Otherwise its next start would take care of each container that it has lost.
        for lost in ["data/containers", "exec"] {
            let path = folder(&self.layout, name).join(lost);
            if path.exists() {
                remove_tree(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }
}

/// Starts one for each node, with the image of the sessions.
pub(crate) fn begin(layout: &Layout, archive: &std::path::Path) -> Result<()> {
    let archive = docker::archive(archive)?;
    for host in layout.node_hosts() {
        start(layout, &host.name)?;
        docker::import(Some(&socket(layout, &host.name)), &archive)?;
    }
    Ok(())
}

fn start(layout: &Layout, node: &str) -> Result<()> {
    let folder = folder(layout, node);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = folder.join("dockerd.log");
    let output = log_file(&log)?;
    let config = folder.join("daemon.json");
    fs::write(&config, "{}").with_context(|| format!("cannot write {}", config.display()))?;
    let mut daemon = detached(&layout.namespace_path(node), "dockerd".as_ref());
    daemon.arg("--config-file").arg(config);
    daemon.args(["--iptables=false", "--ip6tables=false", "--ip-masq=false"]);
    daemon.args(["--exec-opt", "native.cgroupdriver=cgroupfs"]);
    for (option, name) in [
        ("--data-root", "data"),
        ("--exec-root", "exec"),
        ("--pidfile", "docker.pid"),
    ] {
        daemon.arg(option).arg(folder.join(name));
    }
    // A killed one leaves its file.
    let _ = fs::remove_file(folder.join("docker.pid"));
    let mut host = std::ffi::OsString::from("unix://");
    host.push(socket(layout, node));
    let mut child = daemon
        .arg("--host")
        .arg(host)
        .stdout(output.try_clone().context("cannot share a log")?)
        .stderr(output)
        .spawn()
        .context("cannot start a node's dockerd")?;
    let deadline = Instant::now() + PATIENCE;
    while run(docker(Some(&socket(layout, node))).arg("version")).is_err() {
        let ended = child.try_wait().context("cannot look after dockerd")?;
        if ended.is_some() || Instant::now() > deadline {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let last = text.lines().last().unwrap_or_default();
            bail!("the dockerd of {node} does not answer: {last}");
        }
        std::thread::park_timeout(POLL);
    }
    Ok(())
}

/// Kills what is left of a node's containers, and removes their cgroups and all mounts.
pub(crate) fn end(layout: &Layout, node: &str) -> Result<()> {
    let cgroup = cgroup(layout, node);
    let cgroups = Cgroups::detect().context("cannot find the cgroups")?;
    process::kill(cgroups.pids_below(&cgroup))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let errors = cgroups.remove_tree(&cgroup);
        let Some(error) = errors.first() else { break };
        // The kernel takes a moment to let go of processes that are dead.
        if Instant::now() > deadline {
            bail!("cannot remove the cgroup {cgroup}: {error}");
        }
        std::thread::park_timeout(POLL);
    }
    let folder = folder(layout, node).to_string_lossy().into_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    // The latest first: earlier ones lie below them.
    let ours: Vec<_> = points
        .filter(|point| point.starts_with(&folder))
        .rev()
        .collect();
    for some in ours.chunks(AT_A_TIME) {
        run(Command::new("umount").args(some))?;
    }
    Ok(())
}

fn folder(layout: &Layout, node: &str) -> PathBuf {
    layout.directory.join("docker").join(node)
}

pub(crate) fn socket(layout: &Layout, node: &str) -> PathBuf {
    folder(layout, node).join("docker.sock")
}

fn cgroup(layout: &Layout, node: &str) -> String {
    format!("/{}", layout.namespace(node))
}
