//! What a cluster has in Docker, where sessions are Docker's: an image, containers, and a Docker
//! daemon of its own.
//!
//! Where all sessions are, the machine's daemon serves the first node and the cluster's all others:
//! machines share none, and one that is told of the deaths of two hundred containers starts nothing
//! for a while. Where only some are, the cluster's serves every node, so that it may be killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_linux::{PidFd, Signal};

use crate::command::run;
use crate::etcd::log_file;
use crate::layout::Layout;
use crate::requirements;

/// Containers that are removed by one command.
const AT_A_TIME: usize = 50;
/// Bound on the daemon's start and on its end, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Whether this machine has what a cluster's own daemon takes.
#[must_use]
pub fn has_docker() -> bool {
    ["dockerd", "docker"].into_iter().all(|program| {
        let found = requirements::find(program).is_some();
        if !found {
            conman_e2e::lacks(&format!("sessions of Docker: {program} is missing"));
        }
        found
    })
}

/// Where the cluster's own daemon is asked.
pub(crate) fn own(layout: &Layout) -> PathBuf {
    folder(layout).join("docker.sock")
}

fn folder(layout: &Layout) -> PathBuf {
    layout.directory.join("docker")
}

fn pid_file(layout: &Layout) -> PathBuf {
    folder(layout).join("docker.pid")
}

/// The daemons that serve a cluster; `None` is the machine's.
fn sockets(layout: &Layout) -> Vec<Option<PathBuf>> {
    let machine = layout.docker.then_some(None);
    machine.into_iter().chain([Some(own(layout))]).collect()
}

/// The machine's daemon, or the cluster's own.
fn docker(socket: Option<&Path>) -> Command {
    let mut command = Command::new("docker");
    if let Some(socket) = socket {
        let mut host = std::ffi::OsString::from("unix://");
        host.push(socket);
        command.arg("--host").arg(host);
    }
    command
}

/// Starts the cluster's daemon and has each know the image of the sessions.
pub(crate) fn begin(layout: &Layout, archive: &Path) -> Result<()> {
    start(layout)?;
    // Directories are twice in an archive that was appended to, which Docker refuses.
    let (root, single) = (
        archive.with_extension("docker"),
        archive.with_extension("docker.tar"),
    );
    fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xf").arg(archive).arg("-C").arg(&root);
    run(&mut unpack)?;
    let mut pack = Command::new("tar");
    pack.args(["--numeric-owner", "--owner=0", "--group=0", "-cf"]);
    pack.arg(&single).arg("-C").arg(&root).arg(".");
    run(&mut pack)?;
    for socket in sockets(layout) {
        let mut import = docker(socket.as_deref());
        import.arg("import").arg(&single).arg(conman_e2e::ROOT);
        run(&mut import).context(
            "Docker does not take the sessions' image; `cargo xtask setup` starts Docker",
        )?;
    }
    Ok(())
}

/// Starts the cluster's daemon, anew with the containers that it had, and waits until it answers.
pub(crate) fn start(layout: &Layout) -> Result<()> {
    let folder = folder(layout);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = log_file(&layout.directory.join("dockerd.log"))?;
    let mut host = std::ffi::OsString::from("unix://");
    host.push(own(layout));
    // It makes no networks and touches none of the machine's rules.
    let mut daemon = Command::new("setsid");
    daemon.args(["dockerd", "--bridge", "none", "--iptables=false"]);
    daemon.args(["--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]);
    daemon.args([
        "--exec-opt",
        "native.cgroupdriver=cgroupfs",
        "--live-restore",
    ]);
    for (option, name) in [("--data-root", "data"), ("--exec-root", "exec")] {
        daemon.arg(option).arg(folder.join(name));
    }
    daemon.arg("--pidfile").arg(pid_file(layout));
    daemon.arg("--host").arg(host);
    let mut child = daemon
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot share a log")?)
        .stderr(log)
        .spawn()
        .context("cannot start a cluster's dockerd")?;
    let deadline = Instant::now() + PATIENCE;
    while run(docker(Some(&own(layout))).arg("version")).is_err() {
        let ended = child.try_wait().context("cannot look after dockerd")?;
        if ended.is_some() || Instant::now() > deadline {
            let log = fs::read_to_string(layout.directory.join("dockerd.log"));
            bail!(
                "a cluster's dockerd does not answer: {}",
                log.unwrap_or_default()
            );
        }
        std::thread::park_timeout(POLL);
    }
    // A dead one that nobody waits for would look alive to the next one.
    let reap = std::thread::Builder::new().spawn(move || child.wait());
    reap.map(drop).context("cannot start a thread")
}

/// Sends the cluster's daemon a signal; `false` when there is none.
pub(crate) fn signal(layout: &Layout, signal: Signal) -> Result<bool> {
    match daemon(layout) {
        Some(daemon) => daemon
            .signal(signal)
            .context("cannot send a cluster's dockerd a signal"),
        None => Ok(false),
    }
}

/// SIGKILL to the cluster's daemon, whose containers live on.
pub(crate) fn kill(layout: &Layout) -> Result<()> {
    end_daemon(layout, Signal::KILL)
}

/// Removes the containers of these installations, the image, and the cluster's daemon.
pub(crate) fn end(layout: &Layout, instances: &[String]) -> Result<()> {
    // What a test that failed has done to it. One that never was has left nothing.
    if !signal(layout, Signal::CONT)? && own(layout).exists() {
        start(layout)?;
    }
    let begun = sockets(layout).into_iter();
    let begun = begun.filter(|socket| socket.as_ref().is_none_or(|path| path.exists()));
    for socket in begun {
        for instance in instances {
            let filter = format!("label=dev.conman.instance={instance}");
            let mut list = docker(socket.as_deref());
            let listed = run(list.args(["ps", "--all", "--quiet", "--filter", &filter]))?;
            let ids: Vec<&str> = listed.split_whitespace().collect();
            for some in ids.chunks(AT_A_TIME) {
                let mut remove = docker(socket.as_deref());
                run(remove.args(["rm", "--force", "--volumes"]).args(some))?;
            }
        }
    }
    if layout.docker {
        // Another cluster may have replaced or removed it.
        let _ = run(docker(None).args(["rmi", conman_e2e::ROOT]));
    }
    // It ends its containerd and takes its mounts away.
    end_daemon(layout, Signal::TERM)
}

fn end_daemon(layout: &Layout, signal: Signal) -> Result<()> {
    let Some(daemon) = daemon(layout) else {
        return Ok(());
    };
    daemon
        .signal(signal)
        .context("cannot end a cluster's dockerd")?;
    let dead = daemon
        .wait_dead(PATIENCE)
        .context("cannot wait for a cluster's dockerd")?;
    anyhow::ensure!(dead, "a cluster's dockerd does not end within {PATIENCE:?}");
    Ok(())
}

/// The cluster's own, if it lives.
fn daemon(layout: &Layout) -> Option<PidFd> {
    let text = fs::read_to_string(pid_file(layout)).ok()?;
    let daemon = PidFd::open(text.trim().parse().ok()?).ok()?;
    // The number may be another process's by now.
    let words = fs::read(format!("/proc/{}/cmdline", daemon.pid())).ok()?;
    words.starts_with(b"dockerd\0").then_some(daemon)
}
