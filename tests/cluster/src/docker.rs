//! What a cluster has in Docker, where sessions are Docker's: an image, containers, and a Docker
//! daemon of its own.
//!
//! Where all sessions are, the machine's daemon serves the first node and the cluster's all others, or
//! the other way round: machines share none, and one that is told of the deaths of two hundred
//! containers starts nothing for a while. Where only some are, the cluster's serves every node, so
//! that it may be killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use conman_linux::{PidFd, Signal};

use crate::command::run;
use crate::etcd::log_file;
use crate::layout::Layout;
use crate::{process, requirements};

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

/// Where it and the containerd that it starts leave their process ids, each with its program.
fn pid_files(layout: &Layout) -> [(PathBuf, &'static str); 2] {
    let folder = folder(layout);
    [
        (folder.join("docker.pid"), "dockerd"),
        (folder.join("exec/containerd/containerd.pid"), "containerd"),
    ]
}

/// The daemons that serve a cluster; `None` is the machine's.
fn sockets(layout: &Layout) -> Vec<Option<PathBuf>> {
    let machine = layout.docker.then_some(None);
    machine.into_iter().chain([Some(own(layout))]).collect()
}

/// The machine's daemon, or the cluster's own.
pub(crate) fn docker(socket: Option<&Path>) -> Command {
    let mut command = Command::new("docker");
    if let Some(socket) = socket {
        let mut host = std::ffi::OsString::from("unix://");
        host.push(socket);
        command.arg("--host").arg(host);
    }
    command
}

/// What the cluster's daemon answers to a command of `docker`.
pub(crate) fn ask(layout: &Layout, words: &[&str]) -> Result<String> {
    run(docker(Some(&own(layout))).args(words))
}

/// Starts the cluster's daemon and has each know the image of the sessions.
pub(crate) fn begin(layout: &Layout, archive: &Path) -> Result<()> {
    start(layout)?;
    let archive = self::archive(archive)?;
    for socket in sockets(layout) {
        import(socket.as_deref(), &archive)?;
    }
    Ok(())
}

/// Makes an archive that Docker takes of that of the sessions' image. Returns its path.
pub(crate) fn archive(archive: &Path) -> Result<PathBuf> {
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
    Ok(single)
}

/// Imports such an archive as the sessions' image.
pub(crate) fn import(socket: Option<&Path>, archive: &Path) -> Result<()> {
    let mut import = docker(socket);
    import.arg("import").arg(archive).arg(conman_e2e::ROOT);
    run(&mut import)
        .context("Docker does not take the sessions' image; is it running?")
        .map(drop)
}

/// Starts the cluster's daemon, anew with the containers that it had, and waits until it answers.
pub(crate) fn start(layout: &Layout) -> Result<()> {
    let folder = folder(layout);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = log_file(&layout.directory.join("dockerd.log"))?;
    // What the machine's own is told must not be told once more, and is none of this one's business.
    let told = folder.join("daemon.json");
    fs::write(&told, "{}").with_context(|| format!("cannot write {}", told.display()))?;
    let mut host = std::ffi::OsString::from("unix://");
    host.push(own(layout));
    // It makes no networks and touches none of the machine's rules; without a bridge of its own it
    // would remove the machine's `docker0`, if it saw that.
    let mut daemon = Command::new("unshare");
    daemon.args(["--net", "setsid", "dockerd"]);
    daemon.arg("--config-file").arg(told);
    daemon.args(["--bridge", "none", "--iptables=false"]);
    daemon.args(["--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]);
    daemon.args([
        "--exec-opt",
        "native.cgroupdriver=cgroupfs",
        "--live-restore",
    ]);
    for (option, name) in [("--data-root", "data"), ("--exec-root", "exec")] {
        daemon.arg(option).arg(folder.join(name));
    }
    daemon.arg("--pidfile").arg(&pid_files(layout)[0].0);
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
    Ok(())
}

/// Sends the cluster's daemon a signal; `false` when there is none.
pub(crate) fn signal(layout: &Layout, signal: Signal) -> Result<bool> {
    let [(file, program), _] = pid_files(layout);
    match alive(&file, program) {
        Some(daemon) => daemon
            .signal(signal)
            .context("cannot send a cluster's dockerd a signal"),
        None => Ok(false),
    }
}

/// SIGKILL to the cluster's daemon, with its containerd; containers live on.
pub(crate) fn kill(layout: &Layout) -> Result<()> {
    for (file, program) in pid_files(layout) {
        end_process(&file, program, Signal::SIGKILL)?;
        // Nobody may reap it for a while, and so it would seem to live to the next one.
        let _ = fs::remove_file(file);
    }
    Ok(())
}

/// Removes the containers of these installations, the image, and the cluster's daemon.
pub(crate) fn end(layout: &Layout, instances: &[String]) -> Result<()> {
    // What a test that failed has done to it. One that never was has left nothing.
    if !signal(layout, Signal::SIGCONT)? && own(layout).exists() {
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
    // It ends its containerd and takes its mounts away, but for those of one that was killed.
    let [(file, program), _] = pid_files(layout);
    end_process(&file, program, Signal::SIGTERM)?;
    // Of containers that it has lost sight of, having been killed while it made them.
    process::kill(shims(layout))?;
    let folder = folder(layout).to_string_lossy().into_owned();
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    // The latest first: earlier ones lie below them.
    let ours = points.filter(|point| point.starts_with(&folder)).rev();
    for point in ours.collect::<Vec<_>>() {
        run(Command::new("umount").arg(point))?;
    }
    Ok(())
}

/// What serves a container of the cluster's own daemon each, and outlives that. Others' are known by
/// whom they report to.
pub(crate) fn shims(layout: &Layout) -> Vec<i32> {
    let folder = folder(layout);
    let is_ours = |words: &[String]| {
        let program = words.first().map(Path::new).and_then(Path::file_name);
        let program = program.unwrap_or_default().to_string_lossy();
        let mut options = words.windows(2);
        program.starts_with("containerd-shim")
            && options.any(|pair| pair[0] == "-address" && Path::new(&pair[1]).starts_with(&folder))
    };
    let all = process::all().into_iter();
    let ours = all.filter(|one| is_ours(&one.words));
    ours.map(|one| one.pid).collect()
}

fn end_process(file: &Path, program: &str, signal: Signal) -> Result<()> {
    let Some(process) = alive(file, program) else {
        return Ok(());
    };
    process
        .signal(signal)
        .with_context(|| format!("cannot end a cluster's {program}"))?;
    let dead = process
        .wait_dead(PATIENCE)
        .with_context(|| format!("cannot wait for a cluster's {program}"))?;
    ensure!(
        dead,
        "a cluster's {program} does not end within {PATIENCE:?}"
    );
    Ok(())
}

/// Whom such a file names, if it lives.
fn alive(file: &Path, program: &str) -> Option<PidFd> {
    let text = fs::read_to_string(file).ok()?;
    let process = PidFd::open(text.trim().parse().ok()?).ok()?;
    // The number may be another process's by now.
    let words = fs::read(format!("/proc/{}/cmdline", process.pid())).ok()?;
    let first = words.split(|byte| *byte == 0).next()?;
    (first == program.as_bytes()).then_some(process)
}
