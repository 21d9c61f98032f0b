//! What the kernel says of an instance's containers, without asking any daemon.

use std::io;
use std::path::{Path, PathBuf};

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{CgroupError, Cgroups};

use crate::container_files::host_error;
use crate::{ContainerKey, RuntimeError};

/// The processes of one instance's containers, told by their cgroups.
#[derive(Debug)]
pub(crate) struct KernelView {
    instance: Instance,
    cgroups: Cgroups,
}

impl KernelView {
    pub(crate) fn new(instance: Instance) -> Result<Self, RuntimeError> {
        let cgroups = Cgroups::detect().map_err(|source| RuntimeError::Host {
            action: "read the cgroup mounts from",
            path: PathBuf::from("/proc/self/mountinfo"),
            source,
        })?;
        Ok(Self { instance, cgroups })
    }

    pub(crate) fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The cgroups that the container's processes may be in. Which driver the runtime's daemon
    /// uses is its own affair and may be unknown while it does not answer, so both count.
    fn cgroup_paths(&self, key: &ContainerKey) -> [String; 2] {
        [CgroupDriver::Cgroupfs, CgroupDriver::Systemd].map(|driver| {
            naming::cgroup_parent(&self.instance, &key.session, key.generation, driver).path
        })
    }

    pub(crate) fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.cgroup_paths(key)
            .iter()
            .any(|path| self.cgroups.contains(path, pid))
    }

    pub(crate) fn pids(&self, key: &ContainerKey) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .cgroup_paths(key)
            .iter()
            .flat_map(|path| self.cgroups.pids_below(path))
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// The init of the container's PID namespace while it lives.
    pub(crate) fn init_pid(&self, key: &ContainerKey) -> Option<i32> {
        self.pids(key)
            .into_iter()
            .find(|pid| is_namespace_init(*pid))
    }

    /// Refuses a container that still has processes.
    pub(crate) fn check_dead(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let pids = self.pids(key);
        if pids.is_empty() {
            Ok(())
        } else {
            Err(RuntimeError::StillAlive {
                subject: key.to_string(),
                pids,
            })
        }
    }

    /// Removes the container's own cgroups, in every hierarchy.
    pub(crate) fn remove_cgroups(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let errors = self
            .cgroup_paths(key)
            .map(|path| self.cgroups.remove_tree(&path));
        match errors.into_iter().flatten().next() {
            None => Ok(()),
            Some(CgroupError::Remove { directory, source }) => {
                Err(host_error("remove the cgroup", &directory, source))
            }
            Some(refused @ CgroupError::Refused { .. }) => {
                let source = io::Error::new(io::ErrorKind::InvalidInput, refused);
                Err(host_error(
                    "remove the cgroups of",
                    Path::new(key.session.as_str()),
                    source,
                ))
            }
        }
    }
}

/// Whether `pid` is process 1 of a PID namespace directly below this one.
fn is_namespace_init(pid: i32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else {
        return false;
    };
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| {
        let mut ids = ids.split_ascii_whitespace().skip(1);
        ids.next() == Some("1") && ids.next().is_none()
    })
}
