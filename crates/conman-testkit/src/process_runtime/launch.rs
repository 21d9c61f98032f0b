//! Starts a container: a supervisor in a new session, and below it the namespaces' init.

use std::path::PathBuf;
use std::process::Stdio;

use tokio::io::{AsyncReadExt, BufReader};
use tokio::process::Command;

use super::command_line;
use super::store::{ContainerDir, StoredPlan};
use conman_runtime::shared::container_files::{ContainerFiles, host_error};
use conman_runtime::{ContainerKey, RuntimeError};

const SUPERVISOR: &str = include_str!("supervisor.sh");
const INIT: &str = include_str!("init.sh");

/// What the init reports once the program was started.
const READY: &[u8] = b"ready\n";

/// Starts the container and returns once its program was started, or everything has ended
/// without. The supervisor is not awaited: tokio reaps it, or its new parent does after the
/// daemon's end.
pub(super) async fn launch(
    key: &ContainerKey,
    dir: &ContainerDir,
    plan: &StoredPlan,
    cgroup_procs: &[PathBuf],
) -> Result<(), RuntimeError> {
    for path in [dir.stdout(), dir.stderr()] {
        ContainerDir::append_to(&path)?;
    }
    let files = ContainerFiles::at(&plan.files_dir);
    let mut command = Command::new("setsid");
    command
        .args(["sh", "-c", SUPERVISOR, "supervisor"])
        .arg(dir.path())
        .arg(INIT)
        .arg(key.session.as_str())
        .arg(files.dir())
        .arg(plan.spec.network.to_string())
        .arg(cgroup_procs.len().to_string())
        .args(cgroup_procs)
        .arg(plan.binds.len().to_string());
    for bind in &plan.binds {
        command
            .arg(bind.source())
            .arg(&bind.target)
            .arg(if bind.read_only { "ro" } else { "rw" });
    }
    for (name, value) in command_line::environment(key, &plan.spec) {
        command.arg(format!("{name}={value}"));
    }
    command
        .args(command_line::program(&plan.spec))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut supervisor = command
        .spawn()
        .map_err(|source| host_error("run setsid for", dir.path(), source))?;
    let report = supervisor.stdout.take().expect("it was asked for above");
    let mut answer = Vec::new();
    BufReader::new(report)
        .take(READY.len() as u64)
        .read_to_end(&mut answer)
        .await
        .map_err(|source| host_error("read the supervisor's pipe for", dir.path(), source))?;
    Ok(())
}
