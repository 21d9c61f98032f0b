//! Finds and removes everything of a cluster, whoever made it and however that ended.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_linux::{Cgroups, Freezer, PidFd, remove_tree};

use crate::layout::{Layout, PREFIX, places};
use crate::{docker, engine, network, people, process};

/// Bound on the end of what was killed, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Something of a cluster that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover(pub String);

/// What exists of a cluster: processes, namespaces, cgroups, mounts, directories. Links are in its
/// namespaces.
#[must_use]
pub fn leftovers(layout: &Layout) -> Vec<Leftover> {
    let mut found = Vec::new();
    for namespace in network::existing(layout) {
        let path = Path::new(crate::layout::NAMESPACES).join(&namespace);
        for one in process::residents(&path) {
            found.push(format!(
                "process {} in {namespace}: {:?}",
                one.pid, one.words
            ));
        }
        found.push(format!("namespace {namespace}"));
    }
    for instance in instances(layout) {
        let cgroup = cgroup(&instance);
        for one in conman_observer::alive_below(&cgroup) {
            found.push(format!("process {} in the cgroup {cgroup}", one.pid));
        }
        if let Ok(cgroups) = Cgroups::detect()
            && !cgroups.children(&cgroup).is_empty()
        {
            found.push(format!("cgroups below {cgroup}"));
        }
        let run = run_directory(&instance);
        if run.exists() {
            found.push(format!("directory {}", run.display()));
        }
    }
    for pid in docker::shims(layout) {
        found.push(format!("process {pid}, a shim of Docker's"));
    }
    let directory = layout.directory.to_string_lossy().into_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let ours = |line: &&str| line.contains(&directory) || line.contains(&layout.namespace(""));
    found.extend(
        mounts
            .lines()
            .filter(ours)
            .map(|line| format!("mount {line}")),
    );
    if layout.directory.exists() {
        found.push(format!("directory {directory}"));
    }
    found.into_iter().map(Leftover).collect()
}

/// Removes all of a cluster.
///
/// # Errors
/// What could not be removed; the rest is.
pub fn remove(layout: &Layout) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    people::remove_helpers(layout)?;
    let mut problems = Vec::new();
    let instances = loop {
        problems.clear();
        // Daemons and shims first, since they make what comes next: installations among that.
        for namespace in network::existing(layout) {
            let path = Path::new(crate::layout::NAMESPACES).join(&namespace);
            if let Err(error) = process::kill_residents(&path) {
                problems.push(format!("{error:#}"));
            }
        }
        let instances = instances(layout);
        for instance in &instances {
            end_sessions(instance, &mut problems);
        }
        if problems.is_empty() {
            break instances;
        }
        if Instant::now() > deadline {
            bail!("cannot end all of a cluster: {}", problems.join("; "));
        }
        // The kernel takes a moment to let go of processes that are dead.
        std::thread::park_timeout(POLL);
    };
    if layout.docker || layout.docker_too {
        docker::end(layout, &instances)?;
    }
    if layout.docker_each {
        for host in layout.node_hosts() {
            engine::end(layout, &host.name)?;
        }
    }
    for instance in &instances {
        let run = run_directory(instance);
        if run.exists() {
            remove_tree(&run).with_context(|| format!("cannot remove {}", run.display()))?;
        }
    }
    for namespace in network::existing(layout) {
        network::remove(&namespace)?;
    }
    remove_tree(&layout.directory)
        .with_context(|| format!("cannot remove {}", layout.directory.display()))
}

/// Removes the clusters of processes that are dead.
///
/// # Errors
/// When one cannot be removed.
pub fn sweep() -> Result<()> {
    // One at a time: what one has read another would remove beneath it, and whoever made a cluster
    // of the same name in between would lose that.
    let path = std::env::temp_dir();
    let lock = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    lock.lock()
        .with_context(|| format!("cannot lock {}", path.display()))?;
    for place in places() {
        let entries = fs::read_dir(&place)
            .with_context(|| format!("cannot look into {}", place.display()))?;
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                sweep_one(&entry.path())?;
            }
        }
    }
    Ok(())
}

fn sweep_one(directory: &Path) -> Result<()> {
    // One without a file is just being made or removed.
    let Ok(layout) = Layout::load(directory) else {
        return Ok(());
    };
    let Some(owner) = &layout.owner else {
        return Ok(());
    };
    // Whoever cannot be looked at, for want of a descriptor for example, may live.
    let is_dead = PidFd::open_verified(owner).is_err_and(|error| error.proves_death());
    if is_dead && layout.directory == directory {
        remove(&layout)?;
    }
    Ok(())
}

/// Kills a node's sessions, frozen ones included, and removes their cgroups.
pub(crate) fn end_sessions(instance: &str, problems: &mut Vec<String>) {
    let cgroup = cgroup(instance);
    let Ok(cgroups) = Cgroups::detect() else {
        return;
    };
    if let Ok(freezer) = Freezer::detect() {
        for name in cgroups.children(&cgroup) {
            // One that is gone meanwhile is what this is for.
            let _ = freezer.kill(&format!("{cgroup}/{name}"));
        }
    }
    if let Err(error) = process::kill(cgroups.pids_below(&cgroup)) {
        problems.push(format!("{error:#}"));
    }
    let errors = cgroups.remove_tree(&cgroup);
    problems.extend(errors.iter().map(ToString::to_string));
}

/// The ids of the cluster's conman installations that have one yet.
fn instances(layout: &Layout) -> Vec<String> {
    let nodes = layout.node_hosts().into_iter();
    nodes
        .filter_map(|host| instance(layout, &host.name))
        .collect()
}

/// The id of a node's installation.
pub(crate) fn instance(layout: &Layout, node: &str) -> Option<String> {
    let text = fs::read_to_string(layout.state_dir(node).join("instance")).ok()?;
    let stored: serde_json::Value = serde_json::from_str(&text).ok()?;
    let id = stored["instance"].as_str()?;
    let plain = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| id.to_owned())
}

pub(crate) fn cgroup(instance: &str) -> String {
    format!("/conman-{instance}")
}

pub(crate) fn run_directory(instance: &str) -> std::path::PathBuf {
    Path::new("/run").join(format!("conman-{instance}"))
}
