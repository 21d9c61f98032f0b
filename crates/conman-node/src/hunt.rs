//! Finds and kills the processes of a container whose start was sent and not answered, by what
//! the kernel knows alone.

use std::sync::Arc;

use conman_linux::PidFd;
use conman_runtime::{ContainerKey, Runtime};

/// What one pass found.
#[derive(Debug, Default)]
pub(crate) struct Hunted {
    /// Processes to which SIGKILL was sent.
    pub(crate) killed: usize,
    /// The container's init, if it was among them. A container is started once and never again,
    /// so this init's death certificate is the container's.
    pub(crate) init: Option<Arc<PidFd>>,
}

/// Kills whatever is in the container's cgroups now. Each process is held before it is checked, so
/// that a PID given out anew cannot bring the signal to another.
pub(crate) fn hunt(runtime: &dyn Runtime, key: &ContainerKey) -> Hunted {
    let mut hunted = Hunted::default();
    // What is not seen this time is hunted the next.
    for pid in runtime.pids(key).unwrap_or_default() {
        let Ok(process) = PidFd::open(pid) else {
            continue;
        };
        if !runtime.owns_pid(key, pid) {
            continue;
        }
        let is_init = is_namespace_init(pid);
        if process.kill().is_ok_and(|sent| sent) {
            hunted.killed += 1;
        }
        if is_init {
            hunted.init = Some(Arc::new(process));
        }
    }
    hunted
}

/// Whether `pid` is process 1 of a PID namespace directly below this one.
fn is_namespace_init(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/status"))
        .is_ok_and(|status| names_namespace_init(&status))
}

fn names_namespace_init(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| {
        let mut below = ids.split_ascii_whitespace().skip(1);
        below.next() == Some("1") && below.next().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_process_1_of_a_namespace_directly_below_is_a_containers_init() {
        for (line, is_init) in [
            ("NSpid:\t4711\t1", true),
            ("NSpid:\t4711", false),
            ("NSpid:\t1", false),
            ("NSpid:\t4711\t2", false),
            ("NSpid:\t4711\t1\t1", false),
            ("NSpid:\t4711\t7\t1", false),
            ("", false),
        ] {
            let status = format!("Name:\tsh\n{line}\nThreads:\t1\n");
            assert_eq!(names_namespace_init(&status), is_init, "{line}");
        }
    }
}
