//! Commands inside a running container, through nsenter(1).
//!
//! One task for each command: it carries bytes both ways, reaps the command's nsenter at once (a
//! zombie that entered a PID namespace from outside keeps its init from exiting) and reports the
//! end.

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use conman_linux::{Lineage, PidFd};
use conman_proto::{ExecStatus, NotRun};
use rustix::fs::{FileType, fstat};
use tokio::process::{Child, Command};

use super::Inner;
use super::command_line::{self, Unrunnable};
use conman_runtime::shared::container_files::host_error;
use conman_runtime::shared::exec_channels::{ExecEnds, OUTPUT_CHUNK_BYTES, exec_channels, exited};
use conman_runtime::shared::exec_kill::{Killing, kill_command};
use conman_runtime::shared::exec_run::{self, WithoutReader};
use conman_runtime::shared::exec_streams::Streams;
use conman_runtime::{ContainerKey, ExecIo, ExecPlan, RuntimeError};

const ENTER: &str = include_str!("exec.sh");

/// Poll interval for a command that has not joined its container yet.
const KILL_INTERVAL: Duration = Duration::from_millis(5);

/// Where a command runs.
pub(super) struct Place {
    pub(super) container: Arc<Inner>,
    pub(super) key: ContainerKey,
    pub(super) init_pid: i32,
    pub(super) cgroup_procs: Vec<PathBuf>,
    /// The container's environment.
    pub(super) environment: Vec<(String, String)>,
}

pub(super) fn exec(place: Place, plan: &ExecPlan) -> Result<ExecIo, RuntimeError> {
    let (io, ends) = exec_channels();
    let key = place.key.clone();
    let mut environment = place.environment.clone();
    environment.extend(plan.env.iter().cloned());
    let program = plan.command.first().map_or("", String::as_str);
    if let Err(unrunnable) = command_line::check_runnable(program, &environment) {
        // The caller may have gone.
        let _ = ends.status.send(not_run(program, &unrunnable));
        return Ok(io);
    }
    let mut command = Command::new("nsenter");
    command
        .process_group(0)
        .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--target"])
        .arg(place.init_pid.to_string())
        .args(["--", "sh", "-c", ENTER, "exec"])
        .arg(place.cgroup_procs.len().to_string())
        .args(&place.cgroup_procs)
        .arg(plan.workdir.as_deref().unwrap_or("/"));
    // A session of the container, whose PID namespace knows its leader.
    command.arg("setsid");
    if plan.tty.is_some() {
        command.arg("--ctty");
    }
    if let Some(user) = &plan.user {
        let (user, group) = user.split_once(':').unwrap_or((user, user));
        command.args([
            "setpriv",
            "--clear-groups",
            "--reuid",
            user,
            "--regid",
            group,
        ]);
    }
    command.args(["env", "-i", "--default-signal=HUP,INT,QUIT"]);
    for (name, value) in &environment {
        command.arg(format!("{name}={value}"));
    }
    command.args(&plan.command);

    let spawn_error = |source| {
        host_error(
            "enter",
            format!("/proc/{}/ns", place.init_pid).as_ref(),
            source,
        )
    };
    let streams = match plan.tty {
        Some(size) => Streams::terminal(size),
        None => Streams::pipes(plan.stdin, OUTPUT_CHUNK_BYTES),
    };
    let (near, far) = streams.map_err(spawn_error)?;
    if let Some(user) = &plan.user {
        give_pipes(&far, user).map_err(spawn_error)?;
    }
    let child = spawn_on(&mut command, far).map_err(spawn_error)?;
    let without_reader = match plan.tty {
        Some(_) => WithoutReader::Continues,
        None => WithoutReader::Killed,
    };
    tokio::spawn(run(child, place, near, ends, without_reader));
    tracing::debug!(container = %key, program, "command started");
    Ok(io)
}

impl Place {
    /// Kills the command of the nsenter with this PID, which is not reaped yet.
    async fn kill(&self, nsenter: Option<u32>) -> Result<Killing, RuntimeError> {
        let Some(nsenter) = nsenter.and_then(|pid| i32::try_from(pid).ok()) else {
            return Ok(None);
        };
        let is_its_child =
            |pid: i32| Lineage::of(pid).is_ok_and(|lineage| lineage.parent == nsenter);
        loop {
            // Processes that were missed are found in the next round.
            let pids = self.container.kernel.pids(&self.key).unwrap_or_default();
            let first = pids.into_iter().find(|pid| is_its_child(*pid));
            // Checked again, since the pidfd keeps the PID from being reused.
            if let Some(pid) = first
                && let Ok(process) = PidFd::open(pid)
                && is_its_child(pid)
            {
                let (container, key) = (Arc::clone(&self.container), self.key.clone());
                let work = move || kill_command(&container.kernel, &key, &process);
                return Ok(Some(Box::new(work)));
            }
            tokio::time::sleep(KILL_INTERVAL).await;
        }
    }
}

/// A user that is given by numbers owns the pipes, so that programs can reopen /dev/stdout.
fn give_pipes(far: &[OwnedFd], user: &str) -> std::io::Result<()> {
    let (user, group) = user.split_once(':').unwrap_or((user, user));
    let (Ok(user), Ok(group)) = (user.parse(), group.parse()) else {
        return Ok(());
    };
    for stream in far {
        // Without input there is /dev/null, which every user may open.
        if FileType::from_raw_mode(fstat(stream)?.st_mode) == FileType::Fifo {
            std::os::unix::fs::fchown(stream, Some(user), Some(group))?;
        }
    }
    Ok(())
}

fn spawn_on(
    command: &mut Command,
    [stdin, stdout, stderr]: [OwnedFd; 3],
) -> std::io::Result<Child> {
    command.stdin(stdin).stdout(stdout).stderr(stderr);
    let child = command.spawn();
    // The command holds copies of the other ends. While one is open here, the reader never sees the
    // end.
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    child
}

async fn run(
    mut child: Child,
    place: Place,
    near: Streams,
    ends: ExecEnds,
    without_reader: WithoutReader,
) {
    let pid = child.id();
    let status = async { ended(child.wait().await) };
    exec_run::run(near, ends, status, || place.kill(pid), without_reader).await;
}

fn not_run(program: &str, unrunnable: &Unrunnable) -> ExecStatus {
    ExecStatus {
        exit_code: Some(unrunnable.exit_code),
        error: Some(format!("cannot run `{program}`: {}", unrunnable.reason)),
        not_run: Some(NotRun::NoSuchCommand),
        ..ExecStatus::default()
    }
}

fn ended(status: std::io::Result<ExitStatus>) -> ExecStatus {
    match status {
        Ok(status) => exited(
            status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or_default()),
        ),
        Err(error) => ExecStatus {
            exit_code: None,
            error: Some(format!("the command's end is unknown: {error}")),
            ..ExecStatus::default()
        },
    }
}
