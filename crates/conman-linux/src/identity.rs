//! Identifies a process beyond the reuse of its PID.

use std::io;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::pidfd::{ProcessError, is_gone};
use crate::proc_files::{Stat, read_proc};

/// Distinguishes a process from every other that had or will have its PID.
///
/// The kernel reuses PIDs, so a PID alone does not identify a process. With the start time it is unique
/// within a boot (to a clock tick of 10 ms, and a PID is not reused in that time), and with the boot id
/// within the life of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// In the PID namespace of the `/proc` that this program sees.
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
}

impl ProcessIdentity {
    /// The process that has this PID now; it may be a zombie.
    ///
    /// A caller that acts on that same process must open a pidfd with it: [`crate::PidFd::open_identified`].
    pub fn of(pid: i32) -> Result<Self, ProcessError> {
        let stat = read_proc::<Stat>(format!("/proc/{pid}/stat")).map_err(|source| {
            if is_gone(&source) {
                ProcessError::Gone { pid }
            } else {
                ProcessError::Io {
                    action: "read the start time of",
                    pid,
                    source,
                }
            }
        })?;
        let boot_id = boot_id().map_err(|source| ProcessError::Io {
            action: "read the boot id for",
            pid,
            source,
        })?;
        Ok(Self {
            pid,
            start_time_ticks: stat.starttime,
            boot_id,
        })
    }
}

/// The random id of the present boot; read once.
pub fn boot_id() -> io::Result<String> {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = BOOT_ID.get() {
        return Ok(id.clone());
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT_ID.get_or_init(|| text.trim().to_owned()).clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_process_has_the_same_identity_twice() {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let first = ProcessIdentity::of(pid).expect("own identity");
        assert_eq!(first, ProcessIdentity::of(pid).expect("own identity"));
        assert_eq!(first.boot_id.len(), 36, "{}", first.boot_id);
    }

    #[test]
    fn a_pid_that_nobody_has_is_gone() {
        let error = ProcessIdentity::of(i32::MAX).expect_err("no such process");
        assert!(
            matches!(error, ProcessError::Gone { pid: i32::MAX }),
            "{error}"
        );
    }
}
