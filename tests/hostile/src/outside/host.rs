//! What conman leaves on the host: modes of directories, and what other users reach.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::world::{Verdict, World};

/// A user of the host with no rights.
const NOBODY: u32 = 65_534;

/// Directories below `top` that others than root could write to, down to this depth.
fn writable(top: &Path, depth: u32, skip: &[&str], found: &mut Vec<String>) {
    let Ok(data) = fs::symlink_metadata(top) else {
        return;
    };
    if !data.is_dir() {
        return;
    }
    if data.mode() & 0o022 != 0 || data.uid() != 0 {
        found.push(format!(
            "{} {:o} of {}",
            top.display(),
            data.mode() & 0o7777,
            data.uid()
        ));
    }
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(top).into_iter().flatten().flatten() {
        if !skip.contains(&&*entry.file_name().to_string_lossy()) {
            writable(&entry.path(), depth - 1, skip, found);
        }
    }
}

/// Everything that conman makes on the host is root's, and no other user may write there.
pub(crate) async fn modes_on_the_host(world: &World) -> Verdict {
    let id = world.id("modes");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let instance = world.conman.instance();
    let mut found = Vec::new();
    // What is below a container's own root is the container's.
    let own = [
        "upper", "work", "root", "merged", "fs", "layers", "rootfs", "images",
    ];
    writable(&world.conman.state_dir(), 4, &own, &mut found);
    writable(&world.conman.shim_directory(), 3, &own, &mut found);
    for entry in fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten()
    {
        let path: PathBuf = entry.path().join(format!("conman-{instance}"));
        writable(&path, 3, &[], &mut found);
    }
    world.stop(&id).await;
    found.truncate(4);
    Verdict::reached_if(!found.is_empty(), found.join(", "))
}

/// Containers' files are out of reach for other users of the host, who could run what has its
/// set-user-id bit there: also CVE-2021-41103 and CVE-2024-25621 of containerd.
pub(crate) async fn cve_2021_41091(world: &World) -> Verdict {
    let id = world.id("reach");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let directory = world.log_file(&id);
    let directory = directory.parent().expect("a parent").to_path_buf();
    let listed = Command::new("ls")
        .arg("-A")
        .arg(&directory)
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("ls runs");
    let sockets = Command::new("ls")
        .arg("-A")
        .arg(world.conman.shim_directory())
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("ls runs");
    world.stop(&id).await;
    let text = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let seen = format!("{}{}", text(&listed), text(&sockets));
    Verdict::reached_if(!seen.trim().is_empty(), seen)
}

/// The shim and the daemon are not the first to be killed when the host has no memory left.
pub(crate) async fn killed_before_sessions(world: &World) -> Verdict {
    let score = |pid: i32| -> i32 {
        let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    if !conman_linux::has_capability(conman_linux::Capabilities::SYS_RESOURCE) {
        return Verdict::Skipped("this host's root lacks CAP_SYS_RESOURCE");
    }
    let scores = [world.conman.pid(), world.conman.shim_pid()].map(score);
    let reached = scores.iter().any(|score| *score >= 0);
    Verdict::reached_if(reached, format!("daemon and shim: {scores:?}"))
}

/// Reads, writes and closes that one session can watch on inodes that another one uses.
pub(crate) async fn inotify_of_others(world: &World) -> Verdict {
    let (watcher, _) = world.helper("watcher", &["hold_traces"], "holding").await;
    let id = world.id("watched");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let before = world.log(&watcher).await;
    world
        .exec(&id, &["python3", "/inside.py", "touch_shared"])
        .await;
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let after = world.log(&watcher).await;
    world.stop(&id).await;
    world.stop(&watcher).await;
    let noticed = after.contains("noticed");
    let early = before.contains("noticed");
    Verdict::reached_if(
        noticed,
        format!("noticed: {noticed}, before the other one acted: {early}"),
    )
}
