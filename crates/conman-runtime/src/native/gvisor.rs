//! What gVisor's `runsc` differs in from other OCI runtimes: the host does not see the processes of its sandbox, so
//! `runsc` sends signals to them; and it is the kernel of the session.

use std::path::Path;
use std::sync::Arc;

use conman_shim_protocol::SESSION_TMP;
use serde_json::{Value, json};

use super::Inner;
use super::exec::help;
use super::failure::refused;
use super::oci::{CONTAINER, runtime_program};
use super::oci_state::read_state;
use crate::{ContainerKey, RuntimeError};

/// What its `--version` begins with.
pub(super) const NAME: &str = "runsc";

/// Its option for the file with the pid that a command has in the sandbox.
pub(super) const PID_FILE: &str = "--internal-pid-file";

/// The exit code of `runsc` where it fails itself.
pub(super) const FAILED: i32 = 128;

/// What `runsc` prints of a process that has ended.
const NO_SUCH_PROCESS: &str = "no such process";

/// Its arguments in a session's container.
pub(super) const ARGUMENTS: [&str; 5] = [
    // The container has its own network namespace, where conman and the session meet.
    "--network=host",
    // The container's cgroups bound it.
    "--ignore-cgroups",
    // What the session writes is in the container's layer, where disk limits and `conman cp` look.
    "--overlay2=none",
    "--file-access=shared",
    "--host-settings=ignore",
];

/// Whether the session's program has begun.
pub(super) fn runs(root: &Path) -> bool {
    // It is absent, and then incomplete, before.
    let text = read_state(root, &format!("{CONTAINER}_sandbox:{CONTAINER}.state"));
    let state: Value = serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
    state["status"] == "running"
}

/// The file systems of the sandbox.
pub(super) fn mounts() -> Value {
    json!([
        { "destination": "/proc", "type": "proc", "source": "proc" },
        { "destination": "/dev", "type": "tmpfs", "source": "tmpfs" },
        { "destination": "/dev/pts", "type": "devpts", "source": "devpts" },
        { "destination": "/dev/shm", "type": "tmpfs", "source": "shm" },
        // Otherwise gVisor keeps it in memory. Binds of the session may be below it.
        { "destination": "/tmp", "type": "bind", "source": SESSION_TMP, "options": ["rbind", "rw"] },
        { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] },
    ])
}

impl Inner {
    /// Sends a signal to what `target` names, the session's program if it names nothing. `false` if that has ended.
    pub(super) async fn runsc_kill(
        self: &Arc<Self>,
        key: &ContainerKey,
        target: Option<String>,
        signal: i32,
    ) -> Result<bool, RuntimeError> {
        let oci = self.oci_of(key)?;
        let mut argv = oci.argv();
        argv.push("kill".to_owned());
        argv.extend(target);
        argv.extend([CONTAINER.to_owned(), signal.to_string()]);
        let program = runtime_program(argv, None);
        let (code, output) = help(Arc::clone(self), key.clone(), program, oci.hardening()).await?;
        match code {
            Some(0) => Ok(true),
            _ if output.contains(NO_SUCH_PROCESS) => Ok(false),
            _ => Err(refused(
                "signal",
                key,
                format!("`runsc kill` prints: {output}"),
            )),
        }
    }
}
