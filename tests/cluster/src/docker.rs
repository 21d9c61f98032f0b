//! What a cluster has in Docker, where its sessions are Docker's: an image, containers, and a second
//! Docker daemon.
//!
//! The machine's own serves the first node, the second one all others: machines share none, and one
//! that is told of the deaths of two hundred containers starts nothing for a while.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_linux::{PidFd, Signal};

use crate::command::run;
use crate::etcd::log_file;
use crate::layout::Layout;

/// Containers that are removed by one command.
const AT_A_TIME: usize = 50;
/// Bound on the daemon's start and on its end, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Where the second daemon is asked.
pub(crate) fn second(layout: &Layout) -> PathBuf {
    folder(layout).join("docker.sock")
}

fn folder(layout: &Layout) -> PathBuf {
    layout.directory.join("docker")
}

fn pid_file(layout: &Layout) -> PathBuf {
    folder(layout).join("docker.pid")
}

/// The machine's daemon, or the second one.
fn docker(socket: Option<&Path>) -> Command {
    let mut command = Command::new("docker");
    if let Some(socket) = socket {
        let mut host = std::ffi::OsString::from("unix://");
        host.push(socket);
        command.arg("--host").arg(host);
    }
    command
}

/// Starts the second daemon and has both know the image of the sessions.
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
    for socket in [None, Some(second(layout))] {
        let mut import = docker(socket.as_deref());
        import.arg("import").arg(&single).arg(conman_e2e::ROOT);
        run(&mut import).context(
            "Docker does not take the sessions' image; `cargo xtask setup` starts Docker",
        )?;
    }
    Ok(())
}

fn start(layout: &Layout) -> Result<()> {
    let folder = folder(layout);
    fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = log_file(&layout.directory.join("dockerd.log"))?;
    let mut host = std::ffi::OsString::from("unix://");
    host.push(second(layout));
    // It makes no networks and touches none of the machine's rules.
    let mut daemon = Command::new("setsid");
    daemon.args(["dockerd", "--bridge", "none", "--iptables=false"]);
    daemon.args(["--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]);
    daemon.args(["--exec-opt", "native.cgroupdriver=cgroupfs"]);
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
        .context("cannot start a second dockerd")?;
    let deadline = Instant::now() + PATIENCE;
    while run(docker(Some(&second(layout))).arg("version")).is_err() {
        let ended = child.try_wait().context("cannot look after dockerd")?;
        if ended.is_some() || Instant::now() > deadline {
            let log = fs::read_to_string(layout.directory.join("dockerd.log"));
            bail!(
                "a second dockerd does not answer: {}",
                log.unwrap_or_default()
            );
        }
        std::thread::park_timeout(POLL);
    }
    Ok(())
}

/// Removes the containers of these installations, the image, and the second daemon.
pub(crate) fn end(layout: &Layout, instances: &[String]) -> Result<()> {
    let own = second(layout);
    for socket in [None, own.exists().then_some(own.as_path())] {
        for instance in instances {
            let filter = format!("label=dev.conman.instance={instance}");
            let mut list = docker(socket);
            let listed = run(list.args(["ps", "--all", "--quiet", "--filter", &filter]))?;
            let ids: Vec<&str> = listed.split_whitespace().collect();
            for some in ids.chunks(AT_A_TIME) {
                let mut remove = docker(socket);
                run(remove.args(["rm", "--force", "--volumes"]).args(some))?;
            }
        }
    }
    // Another cluster may have replaced or removed it.
    let _ = run(docker(None).args(["rmi", conman_e2e::ROOT]));
    stop(layout)
}

fn stop(layout: &Layout) -> Result<()> {
    let text = fs::read_to_string(pid_file(layout)).unwrap_or_default();
    let Ok(pid) = text.trim().parse::<i32>() else {
        return Ok(());
    };
    // The number may be another process's by now.
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if !words.starts_with(b"dockerd\0") {
        return Ok(());
    }
    let Ok(daemon) = PidFd::open(pid) else {
        return Ok(());
    };
    // It ends its containerd and takes its mounts away.
    daemon
        .signal(Signal::TERM)
        .context("cannot end a second dockerd")?;
    let dead = daemon
        .wait_dead(PATIENCE)
        .context("cannot wait for a second dockerd")?;
    anyhow::ensure!(dead, "a second dockerd does not end within {PATIENCE:?}");
    Ok(())
}
