//! The kernel's view of an instance's containers, without calls to any daemon.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::naming::{self, CgroupDriver, Instance};
use conman_linux::{
    CgroupError, Cgroups, CpuLimit, ExitScan, ResourceUsage, try_is_namespace_init,
};

use crate::shared::container_files::host_error;
use crate::{ContainerKey, RunningContainer, RuntimeError};

/// The processes of one instance's containers, found by their cgroups.
#[derive(Debug)]
pub struct KernelView {
    instance: Instance,
    cgroups: Cgroups,
    /// The cgroup drivers whose placement is searched.
    drivers: &'static [CgroupDriver],
    /// Cgroups that were made before their containers, which may have taken them.
    ahead: Mutex<HashMap<ContainerKey, String>>,
}

impl KernelView {
    /// `drivers`: those that the runtime may place containers by.
    pub fn new(instance: Instance, drivers: &'static [CgroupDriver]) -> Result<Self, RuntimeError> {
        let cgroups = Cgroups::detect().map_err(|source| RuntimeError::Host {
            action: "read the cgroup mounts from",
            path: PathBuf::from("/proc/self/mountinfo"),
            source,
        })?;
        Ok(Self {
            instance,
            cgroups,
            drivers,
            ahead: Mutex::default(),
        })
    }

    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The cgroups that the container's processes may be in.
    fn cgroup_paths(&self, key: &ContainerKey) -> impl Iterator<Item = String> {
        let ahead = self.lock_ahead().get(key).cloned();
        // Until the container takes it, its label is empty, and nothing of the container is in it. Its label goes with
        // the first of its directories that is removed.
        let name = crate::shim_link::name(key);
        let taken = ahead.filter(|path| self.cgroups.label(path).is_none_or(|it| it == name));
        let drivers = self.drivers.iter();
        let usual = drivers.map(|driver| {
            naming::cgroup_parent(&self.instance, &key.session, key.generation, *driver).path
        });
        taken.into_iter().chain(usual)
    }

    /// The container may take this cgroup, which was made ahead.
    pub fn may_take(&self, key: &ContainerKey, cgroup: String) {
        self.lock_ahead().insert(key.clone(), cgroup);
    }

    /// The name of that cgroup.
    pub fn ahead_of(&self, key: &ContainerKey) -> Option<String> {
        let ahead = self.lock_ahead();
        let (_, name) = ahead.get(key)?.rsplit_once('/')?;
        Some(name.to_owned())
    }

    /// The container is removed.
    pub fn forget(&self, key: &ContainerKey) {
        self.lock_ahead().remove(key);
    }

    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn lock_ahead(&self) -> MutexGuard<'_, HashMap<ContainerKey, String>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `false` also if the process cannot be read ([`Self::shows`]).
    pub fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.cgroup_paths(key)
            .any(|path| self.cgroups.contains(&path, pid))
    }

    /// Whether the process belongs to the container. An unreadable process is an error.
    pub fn shows(&self, key: &ContainerKey, pid: i32) -> io::Result<bool> {
        for path in self.cgroup_paths(key) {
            if self.cgroups.try_contains(&path, pid)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The container's processes. An unreadable cgroup is an error.
    pub fn pids(&self, key: &ContainerKey) -> io::Result<Vec<i32>> {
        let mut pids = BTreeSet::new();
        for path in self.cgroup_paths(key) {
            pids.extend(self.cgroups.try_pids_below(&path)?);
        }
        Ok(pids.into_iter().collect())
    }

    /// Blocks while the kernel reclaims.
    pub fn reclaim_memory(&self, key: &ContainerKey) {
        for path in self.cgroup_paths(key) {
            self.cgroups.reclaim_memory(&path);
        }
    }

    /// Its processes that the kernel has killed because memory ran out, if that is counted.
    pub fn oom_kills(&self, key: &ContainerKey) -> Option<u64> {
        self.cgroup_paths(key)
            .find_map(|path| self.cgroups.oom_kills(&path))
    }

    /// Processor time in microseconds that its processes have used, if that is counted.
    pub fn cpu_us(&self, key: &ContainerKey) -> Option<u64> {
        self.cgroup_paths(key)
            .find_map(|path| self.cgroups.cpu_us(&path))
    }

    pub fn cpu_limit(&self, key: &ContainerKey) -> Option<CpuLimit> {
        self.cgroup_paths(key)
            .find_map(|path| self.cgroups.cpu_limit(&path))
    }

    /// Limits the container's CPU time, in thousandths of a processor.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]: it has no cgroup.
    pub fn limit_cpu(&self, key: &ContainerKey, millis: u64) -> io::Result<()> {
        let limited = self
            .cgroup_paths(key)
            .map(|path| self.cgroups.limit_cpu(&path, millis));
        let is_other = |result: &io::Result<()>| match result {
            Ok(()) => true,
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        let mut of_drivers = limited.filter(is_other);
        of_drivers
            .next()
            .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
    }

    /// A scan of the container's cgroup; `None` if there is none, or it proves nothing on this host.
    pub fn exit_scan(&self, key: &ContainerKey) -> Option<ExitScan> {
        self.cgroup_paths(key)
            .find_map(|path| ExitScan::of(&path).ok())
    }

    /// What the processes of each container use.
    pub fn usages(&self, containers: &[RunningContainer]) -> Vec<ResourceUsage> {
        let mut readers = HashMap::new();
        let read = |one: &RunningContainer| {
            let mut usages = self.cgroup_paths(&one.key).filter_map(|path| {
                let (parent, name) = path.rsplit_once('/')?;
                let reader = readers
                    .entry(parent.to_owned())
                    .or_insert_with(|| self.cgroups.usage_below(parent));
                let unthrottled = (!one.has_cpu_limit).then_some(0);
                let known = ResourceUsage {
                    throttled_us: unthrottled,
                    throttled: unthrottled,
                    oom_kills: one.oom_kills,
                    ..ResourceUsage::default()
                };
                Some(reader.read(name, one.init, known))
            });
            // A container is placed by one driver only; elsewhere it has no processes.
            let placed = usages.find(|usage| usage.pids.is_some_and(|pids| pids > 0));
            placed.unwrap_or_default()
        };
        containers.iter().map(read).collect()
    }

    /// The init of the container's PID namespace while it lives.
    pub fn init_pid(&self, key: &ContainerKey) -> Result<Option<i32>, RuntimeError> {
        let pids = self.pids(key).map_err(|error| unseen(key, error))?;
        for pid in pids {
            if try_is_namespace_init(pid).map_err(|error| unseen(key, error))? {
                return Ok(Some(pid));
            }
        }
        Ok(None)
    }

    /// The inits of many containers at once. Reads each process of the host once, where
    /// [`Self::init_pid`] reads the cgroups of every hierarchy for each container.
    pub fn init_pids(
        &self,
        keys: &[ContainerKey],
    ) -> Result<HashMap<ContainerKey, i32>, RuntimeError> {
        let failed = |error| host_error("look for containers in", Path::new("/proc"), error);
        let by_cgroup: HashMap<String, &ContainerKey> = keys
            .iter()
            .flat_map(|key| self.cgroup_paths(key).map(move |path| (path, key)))
            .collect();
        let mut inits = HashMap::new();
        for pid in host_pids().map_err(failed)? {
            let Some(cgroups) = Cgroups::of_living(pid).map_err(failed)? else {
                continue;
            };
            let owner = cgroups
                .iter()
                .find_map(|path| by_cgroup.get(cgroup_of_container(path)));
            if let Some(key) = owner
                && try_is_namespace_init(pid).map_err(failed)?
            {
                inits.insert((*key).clone(), pid);
            }
        }
        Ok(inits)
    }

    /// Refuses a container that still has processes.
    pub fn check_dead(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let pids = self.pids(key).map_err(|error| unseen(key, error))?;
        if pids.is_empty() {
            Ok(())
        } else {
            Err(RuntimeError::StillAlive {
                subject: key.to_string(),
                pids,
            })
        }
    }

    /// Removes the container's cgroups in every hierarchy.
    pub fn remove_cgroups(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        // Remove all of them before the first failure is reported.
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

/// The first two components of a path: a container's cgroup lies directly below its instance's.
fn cgroup_of_container(path: &str) -> &str {
    let end = path.match_indices('/').nth(2).map(|(index, _)| index);
    &path[..end.unwrap_or(path.len())]
}

fn host_pids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        pids.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(pids)
}

fn unseen(key: &ContainerKey, error: io::Error) -> RuntimeError {
    let session = Path::new(key.session.as_str());
    host_error("look for the processes of", session, error)
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
