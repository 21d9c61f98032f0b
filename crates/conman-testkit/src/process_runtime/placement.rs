//! Makes a container's cgroups: the fake runtime has no daemon that does.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use conman_proto::ResolvedSpec;

use conman_runtime::RuntimeError;
use conman_runtime::shared::container_files::host_error;

/// The hierarchies that containers are placed in: the unified one, and the v1 hierarchies whose
/// limits the fake sets. CPU shares are not limited.
#[derive(Debug)]
pub(super) struct Placement {
    hierarchies: Vec<Hierarchy>,
}

#[derive(Debug)]
struct Hierarchy {
    mount: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    Unified,
    V1Memory,
    V1Pids,
}

impl Placement {
    pub(super) fn detect() -> Result<Self, RuntimeError> {
        let path = Path::new("/proc/self/mountinfo");
        let mounts = fs::read_to_string(path).map_err(|source| host_error("read", path, source))?;
        let hierarchies: Vec<_> = mounts.lines().filter_map(Hierarchy::parse).collect();
        if hierarchies.is_empty() {
            let source = io::Error::new(ErrorKind::NotFound, "no cgroup hierarchy is mounted");
            return Err(host_error("find cgroups in", path, source));
        }
        Ok(Self { hierarchies })
    }

    /// Makes the cgroup in every hierarchy, sets the limits and returns the `cgroup.procs` files
    /// that a process joins through.
    pub(super) fn make(
        &self,
        cgroup: &str,
        spec: &ResolvedSpec,
    ) -> Result<Vec<PathBuf>, RuntimeError> {
        let procs = self.procs_files(cgroup);
        for hierarchy in &self.hierarchies {
            let dir = hierarchy.dir(cgroup);
            fs::create_dir_all(&dir).map_err(|source| host_error("make", &dir, source))?;
            if hierarchy.version == Version::Unified
                && let Some(parent) = dir.parent()
            {
                // Fails where the controllers belong to v1 hierarchies or are not delegated; the
                // limits are then set through those, or not at all.
                let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory +pids");
            }
            hierarchy.limit(&dir, spec)?;
        }
        Ok(procs)
    }

    pub(super) fn procs_files(&self, cgroup: &str) -> Vec<PathBuf> {
        self.hierarchies
            .iter()
            .map(|each| each.dir(cgroup).join("cgroup.procs"))
            .collect()
    }
}

impl Hierarchy {
    /// From a line of mountinfo (proc(5)): the mount point is the fifth field; the file system's
    /// type and options follow a lone hyphen.
    fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.split_once(" - ")?;
        let mut tail = tail.split(' ');
        let version = match (tail.next()?, tail.nth(1)?) {
            ("cgroup2", _) => Version::Unified,
            ("cgroup", options) if options.split(',').any(|each| each == "memory") => {
                Version::V1Memory
            }
            ("cgroup", options) if options.split(',').any(|each| each == "pids") => Version::V1Pids,
            _ => return None,
        };
        Some(Self {
            mount: PathBuf::from(head.split(' ').nth(4)?),
            version,
        })
    }

    fn dir(&self, cgroup: &str) -> PathBuf {
        self.mount.join(cgroup.trim_start_matches('/'))
    }

    fn limit(&self, dir: &Path, spec: &ResolvedSpec) -> Result<(), RuntimeError> {
        let memory = spec.memory_bytes.map(|bytes| bytes.to_string());
        let pids = Some(spec.pids.to_string());
        let limits = match self.version {
            Version::Unified => vec![("memory.max", memory), ("pids.max", pids)],
            Version::V1Memory => vec![("memory.limit_in_bytes", memory)],
            Version::V1Pids => vec![("pids.max", pids)],
        };
        for (file, value) in limits {
            let path = dir.join(file);
            if let Some(value) = value
                && path.exists()
            {
                fs::write(&path, value).map_err(|source| host_error("write", &path, source))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<(PathBuf, Version)> {
        Hierarchy::parse(line).map(|each| (each.mount, each.version))
    }

    #[test]
    fn hierarchies_are_read_from_mountinfo() {
        let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";
        assert_eq!(
            parsed(unified),
            Some(("/sys/fs/cgroup/unified".into(), Version::Unified))
        );
        let pids = "39 31 0:36 / /sys/fs/cgroup/pids rw shared:9 - cgroup cgroup rw,pids";
        assert_eq!(
            parsed(pids),
            Some(("/sys/fs/cgroup/pids".into(), Version::V1Pids))
        );
        for other in [
            "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd",
            "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
            "",
        ] {
            assert_eq!(parsed(other), None, "{other}");
        }
    }
}
