//! The CPU limit of a cgroup.

use std::fs;
use std::io;
use std::path::PathBuf;

use crate::Cgroups;
use crate::cgroup_limits::cpu_quota;
use crate::cgroups::is_plain;

/// The CPU limit of a cgroup.
#[derive(Debug)]
pub struct CpuLimit {
    file: PathBuf,
    unlimited: &'static str,
    statistics: PathBuf,
}

impl Cgroups {
    /// Returns the cgroup's own limit; `None` if it has none, or does not exist.
    #[must_use]
    pub fn cpu_limit(&self, path: &str) -> Option<CpuLimit> {
        if !is_plain(path) {
            return None;
        }
        self.hierarchies.iter().find_map(|hierarchy| {
            let (file, unlimited) = match hierarchy.unified {
                true => ("cpu.max", "max"),
                false if hierarchy.controls("cpu") => ("cpu.cfs_quota_us", "-1"),
                false => return None,
            };
            let directory = hierarchy.directory(path)?;
            let text = fs::read_to_string(directory.join(file)).ok()?;
            let limit = CpuLimit {
                file: directory.join(file),
                unlimited,
                statistics: directory.join("cpu.stat"),
            };
            (text.split_ascii_whitespace().next() != Some(unlimited)).then_some(limit)
        })
    }
}

impl Cgroups {
    /// Returns the processor time in microseconds that the processes of a cgroup and of those below it have used; `None`
    /// if no hierarchy counts it.
    #[must_use]
    pub fn cpu_us(&self, path: &str) -> Option<u64> {
        if !is_plain(path) {
            return None;
        }
        self.hierarchies.iter().find_map(|hierarchy| {
            let (file, line, parts) = match hierarchy.unified {
                true => ("cpu.stat", "usage_usec ", 1),
                false if hierarchy.controls("cpuacct") => ("cpuacct.usage", "", 1_000),
                false => return None,
            };
            let text = fs::read_to_string(hierarchy.directory(path)?.join(file)).ok()?;
            let used = text.lines().find_map(|one| one.strip_prefix(line));
            Some(used?.parse::<u64>().ok()? / parts)
        })
    }

    /// Limits the CPU time of an existing cgroup, in thousandths of a processor. The kernel visits every cgroup of the
    /// host for it. A v1 hierarchy refuses a limit above that of a cgroup above.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]: there is no such cgroup with the cpu controller.
    pub fn limit_cpu(&self, path: &str, millis: u64) -> io::Result<()> {
        let hierarchies = self.hierarchies.iter().filter(|_| is_plain(path));
        let places = hierarchies.filter_map(|one| Some((one.unified, one.directory(path)?)));
        let quotas = places.map(|(unified, directory)| cpu_quota(unified, &directory, millis));
        // Where both kinds are mounted, the controller is in one of them.
        let mut quotas = quotas.filter(|(file, _)| file.exists());
        let (file, text) = quotas.next().ok_or(io::ErrorKind::NotFound)?;
        fs::write(file, text)
    }
}

impl CpuLimit {
    /// How often the limit has throttled the cgroup; 0 if that cannot be read.
    #[must_use]
    pub fn throttled(&self) -> u64 {
        let text = fs::read_to_string(&self.statistics).unwrap_or_default();
        let count = text
            .lines()
            .find_map(|line| line.strip_prefix("nr_throttled "));
        count
            .and_then(|count| count.trim().parse().ok())
            .unwrap_or(0)
    }

    /// Removes the limit permanently. The kernel visits every cgroup of the host for it.
    pub fn lift(&self) -> io::Result<()> {
        match fs::OpenOptions::new().write(true).open(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            file => io::Write::write_all(&mut file?, self.unlimited.as_bytes()),
        }
    }
}
