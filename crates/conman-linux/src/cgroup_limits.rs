//! Sets the resource limits of a container's cgroups.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup_mounts::Hierarchy;
use crate::io_limits::{IoLimits, V1_CONTROLLER};
use crate::session_cgroup::{MakeCgroupError, write};

/// Period of the cpu limit, in microseconds; the kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;

/// Smallest time in a period that the kernel accepts, in microseconds.
const CPU_QUOTA_MIN_US: u64 = 1_000;

/// Resource limits of a container; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CgroupLimits {
    /// Memory, including the page cache of its files and kernel memory.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Processes and threads at a time.
    #[serde(default)]
    pub pids: Option<u64>,
    /// Thousandths of a processor.
    #[serde(default)]
    pub cpu_millis: Option<u64>,
    /// It shares processors with its neighbours by weight. This needs its own cgroup in the cpu hierarchy,
    /// even without a limit.
    #[serde(default)]
    pub cpu_weighted: bool,
    #[serde(default)]
    pub io: Option<IoLimits>,
}

impl CgroupLimits {
    /// Whether a limit is set that this v1 hierarchy enforces.
    pub(crate) fn need(&self, hierarchy: &Hierarchy) -> bool {
        let limited = [
            ("memory", self.memory_bytes.is_some()),
            ("pids", self.pids.is_some()),
            ("cpu", self.cpu_millis.is_some() || self.cpu_weighted),
            (V1_CONTROLLER, self.io.is_some()),
        ];
        limited
            .iter()
            .any(|(controller, limited)| *limited && hierarchy.controls(controller))
    }
}

/// Which limits have been set in some hierarchy.
#[derive(Debug, Default)]
pub(crate) struct Limited {
    memory: bool,
    pids: bool,
    cpu: bool,
    io: bool,
    /// The CPU limit, to be written later: file and content.
    pub(crate) quota: Option<(PathBuf, String)>,
}

impl Limited {
    pub(crate) fn set(
        &mut self,
        hierarchy: &Hierarchy,
        directory: &Path,
        limits: &CgroupLimits,
    ) -> Result<(), MakeCgroupError> {
        let has = |controller: &str, file: &str| {
            if hierarchy.unified {
                directory.join(file).exists()
            } else {
                hierarchy.controls(controller)
            }
        };
        if let Some(bytes) = limits.memory_bytes
            && has("memory", "memory.max")
        {
            self.memory = true;
            set_memory(hierarchy.unified, directory, bytes)?;
        }
        if let Some(pids) = limits.pids
            && has("pids", "pids.max")
        {
            self.pids = true;
            write(&directory.join("pids.max"), &pids.to_string())?;
        }
        if let Some(millis) = limits.cpu_millis
            && has("cpu", "cpu.max")
        {
            self.cpu = true;
            self.quota = Some(cpu_quota(hierarchy.unified, directory, millis));
        }
        if let Some(io) = limits.io {
            self.io |= io.set(hierarchy, directory)?;
        }
        Ok(())
    }

    pub(crate) fn check(&self, limits: &CgroupLimits) -> Result<(), MakeCgroupError> {
        let missing = [
            (limits.memory_bytes.is_some() && !self.memory, "memory"),
            (limits.pids.is_some() && !self.pids, "pids"),
            (limits.cpu_millis.is_some() && !self.cpu, "cpu"),
            (limits.io.is_some() && !self.io, "io"),
        ];
        match missing.iter().find(|(missing, _)| *missing) {
            Some((_, controller)) => Err(MakeCgroupError::NoController { controller }),
            None => Ok(()),
        }
    }
}

/// The file that sets the CPU limit, in thousandths of a processor, and its content.
pub(crate) fn cpu_quota(unified: bool, directory: &Path, millis: u64) -> (PathBuf, String) {
    let quota = (millis.saturating_mul(CPU_PERIOD_US) / 1_000).max(CPU_QUOTA_MIN_US);
    if unified {
        let text = format!("{quota} {CPU_PERIOD_US}");
        (directory.join("cpu.max"), text)
    } else {
        // The period is the kernel's default already.
        (directory.join("cpu.cfs_quota_us"), quota.to_string())
    }
}

fn set_memory(unified: bool, directory: &Path, bytes: u64) -> Result<(), MakeCgroupError> {
    let bytes = bytes.to_string();
    let (limit, swap, no_swap) = if unified {
        ("memory.max", "memory.swap.max", "0")
    } else {
        (
            "memory.limit_in_bytes",
            "memory.memsw.limit_in_bytes",
            bytes.as_str(),
        )
    };
    write(&directory.join(limit), &bytes)?;
    let sockets = directory.join("memory.kmem.tcp.limit_in_bytes");
    if !unified && sockets.exists() {
        // v1 charges socket buffers to a cgroup only where they have a separate limit.
        write(&sockets, &bytes)?;
    }
    let swap = directory.join(swap);
    if swap.exists() {
        write(&swap, no_swap)?;
    }
    if unified {
        // A program that has lost some of its processes does not work any more.
        write(&directory.join("memory.oom.group"), "1")?;
    }
    Ok(())
}
