//! What the kernel says of an instance's containers, without asking any daemon.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{CgroupError, Cgroups, is_namespace_init};

use crate::container_files::host_error;
use crate::{ContainerKey, RuntimeError};

/// The processes of one instance's containers, told by their cgroups.
#[derive(Debug)]
pub(crate) struct KernelView {
    instance: Instance,
    cgroups: Cgroups,
    /// Whose cgroups count.
    drivers: &'static [CgroupDriver],
}

impl KernelView {
    /// `drivers`: which the runtime's containers may be placed by.
    pub(crate) fn new(
        instance: Instance,
        drivers: &'static [CgroupDriver],
    ) -> Result<Self, RuntimeError> {
        let cgroups = Cgroups::detect().map_err(|source| RuntimeError::Host {
            action: "read the cgroup mounts from",
            path: PathBuf::from("/proc/self/mountinfo"),
            source,
        })?;
        Ok(Self {
            instance,
            cgroups,
            drivers,
        })
    }

    pub(crate) fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The cgroups that the container's processes may be in.
    fn cgroup_paths(&self, key: &ContainerKey) -> impl Iterator<Item = String> {
        let drivers = self.drivers.iter();
        drivers.map(|driver| {
            naming::cgroup_parent(&self.instance, &key.session, key.generation, *driver).path
        })
    }

    pub(crate) fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.cgroup_paths(key)
            .any(|path| self.cgroups.contains(&path, pid))
    }

    pub(crate) fn pids(&self, key: &ContainerKey) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .cgroup_paths(key)
            .flat_map(|path| self.cgroups.pids_below(&path))
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

    /// The inits of many containers at once: one look at each process of the host, where
    /// [`Self::init_pid`] looks into every hierarchy's cgroups for each container.
    pub(crate) fn init_pids(&self, keys: &[ContainerKey]) -> HashMap<ContainerKey, i32> {
        let by_cgroup: HashMap<String, &ContainerKey> = keys
            .iter()
            .flat_map(|key| self.cgroup_paths(key).map(move |path| (path, key)))
            .collect();
        let mut inits = HashMap::new();
        for pid in host_pids() {
            let cgroups = Cgroups::of_pid(pid).unwrap_or_default();
            let owner = cgroups
                .iter()
                .find_map(|path| by_cgroup.get(cgroup_of_container(path)));
            if let Some(key) = owner
                && is_namespace_init(pid)
            {
                inits.insert((*key).clone(), pid);
            }
        }
        inits
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
        // All of them, before the first failure is told.
        let errors: Vec<_> = self
            .cgroup_paths(key)
            .flat_map(|path| self.cgroups.remove_tree(&path))
            .collect();
        match errors.into_iter().next() {
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

/// The first two parts of a path, which is as deep as a container's own cgroup lies: below its
/// instance's.
fn cgroup_of_container(path: &str) -> &str {
    let end = path.match_indices('/').nth(2).map(|(index, _)| index);
    &path[..end.unwrap_or(path.len())]
}

fn host_pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_to_the_container_whatever_the_depth_of_its_cgroup() {
        for (path, expected) in [
            ("/conman-1/alice.7", "/conman-1/alice.7"),
            ("/conman-1/alice.7/abc", "/conman-1/alice.7"),
            ("/conman-1/alice.7/abc/deeper", "/conman-1/alice.7"),
            ("/conman-1", "/conman-1"),
            ("/", "/"),
            ("", ""),
        ] {
            assert_eq!(cgroup_of_container(path), expected);
        }
    }
}
