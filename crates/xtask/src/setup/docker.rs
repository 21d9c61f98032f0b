//! Docker Engine: installed from the distribution's packages and started if necessary.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::packages;
use crate::process::{Daemon, installed, output, target_dir, wait_until};
use crate::progress::Step;

/// Bound on a Docker daemon's start, including a slow disk.
const START_PATIENCE: Duration = Duration::from_secs(60);
const STOP_PATIENCE: Duration = Duration::from_secs(30);
const DAEMON_CONFIG: &str = "/etc/docker/daemon.json";

/// A Docker daemon that answers.
#[derive(Debug)]
pub(crate) struct Docker {
    /// Set when this command started it.
    started: Option<Daemon>,
}

impl Docker {
    pub(crate) fn leave_running(self) {
        if let Some(daemon) = self.started {
            daemon.keep();
        }
    }
}

/// Returns a Docker daemon that answers; installs and starts one if necessary.
pub(crate) fn ready() -> Result<Docker> {
    if answers() {
        return Ok(Docker { started: None });
    }
    if !installed("dockerd") {
        keep_containers_over_restarts()?;
        packages::install(&["docker.io"])?;
    }
    if answers() {
        return Ok(Docker { started: None });
    }
    let step = Step::start("starting the Docker daemon");
    let started = if Path::new("/run/systemd/system").exists() {
        step.run(Command::new("systemctl").args(["start", "docker"]))?;
        None
    } else {
        Some(start_by_hand()?)
    };
    if !wait_until(START_PATIENCE, || Ok(answers()))? {
        bail!(
            "the Docker daemon did not answer within {} s; see {} or `journalctl -u docker`",
            START_PATIENCE.as_secs(),
            log_file().display()
        );
    }
    step.done();
    Ok(Docker { started })
}

/// Without live-restore a restarted Docker daemon stops its containers. Written only if this
/// command installed Docker, and never over an existing file.
fn keep_containers_over_restarts() -> Result<()> {
    if Path::new(DAEMON_CONFIG).exists() {
        return Ok(());
    }
    std::fs::create_dir_all("/etc/docker").context("making /etc/docker")?;
    std::fs::write(DAEMON_CONFIG, "{ \"live-restore\": true }\n")
        .with_context(|| format!("writing {DAEMON_CONFIG}"))
}

/// Where dockerd and its containerd record their process ids.
const PID_FILES: [(&str, &str); 2] = [
    ("/var/run/docker.pid", "dockerd"),
    ("/var/run/docker/containerd/containerd.pid", "containerd"),
];

/// A killed daemon leaves its process id behind. Once another process has that id, dockerd takes
/// it for the former daemon and does not start.
fn remove_stale_pid_files() -> Result<()> {
    for (path, program) in PID_FILES {
        let Ok(pid) = std::fs::read_to_string(path) else {
            continue;
        };
        let running = std::fs::read_to_string(format!("/proc/{}/comm", pid.trim()));
        if !running.is_ok_and(|name| name.trim() == program) {
            std::fs::remove_file(path).with_context(|| format!("removing the stale {path}"))?;
        }
    }
    Ok(())
}

fn start_by_hand() -> Result<Daemon> {
    remove_stale_pid_files()?;
    let path = log_file();
    std::fs::create_dir_all(target_dir()).context("making cargo's target folder")?;
    let log = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    let mut command = Command::new("dockerd");
    // A separate process group: Ctrl-C at the terminal stops this command, which stops it in order.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.stdin(std::process::Stdio::null());
    command
        .stdout(log.try_clone().context("sharing the log file")?)
        .stderr(log);
    Daemon::start("dockerd", &mut command, STOP_PATIENCE)
}

fn answers() -> bool {
    output(Command::new("docker").args(["version", "--format", "{{.Server.Version}}"])).is_ok()
}

fn log_file() -> std::path::PathBuf {
    target_dir().join("dockerd.log")
}
