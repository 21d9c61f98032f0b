//! Reads what a machine reports about itself.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use conman_linux::{
    CGroupControllers, FromRead, LimitValue, Limits, LoadAverage, Meminfo, ProcessCGroups,
    read_proc,
};

/// Longest file that is read: a mount table of a host with a hundred thousand mounts.
const MAX_BYTES: u64 = 32 << 20;
/// Most processes that are read: the kernel's greatest `pid_max`.
const MAX_PROCESSES: usize = 4_194_304;

/// What a machine reports about itself, below a root directory.
///
/// What cannot be read is `None`: a limit that the kernel does not have never binds, and one that is hidden
/// is reported as unknown.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
    /// The program names of all processes, read once: a host has many thousands.
    programs: OnceLock<Vec<(u32, String)>>,
}

/// A limit of a cgroup, or of the nearest one above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CgroupLimit {
    /// The file that holds it, on this machine.
    pub(crate) file: String,
    pub(crate) limit: u64,
    pub(crate) used: Option<u64>,
}

/// Values from here on mean no limit in version 1 of memory cgroups.
const NO_LIMIT: u64 = 1 << 62;

impl Host {
    /// This machine.
    pub fn this() -> Self {
        Self::below("/")
    }

    /// The machine whose `/proc`, `/sys`, `/etc` lie below `root`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            programs: OnceLock::new(),
        }
    }

    pub(crate) fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    pub(crate) fn text(&self, absolute: &str) -> Option<String> {
        let mut text = String::new();
        let file = File::open(self.path(absolute)).ok()?;
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        Some(text)
    }

    fn parsed<T: FromRead>(&self, absolute: &str) -> Option<T> {
        read_proc(self.path(absolute)).ok()
    }

    /// A file that begins with a number.
    pub(crate) fn number(&self, absolute: &str) -> Option<u64> {
        self.text(absolute)?.split_whitespace().next()?.parse().ok()
    }

    /// The kernel setting `kernel.pid_max`, for example.
    pub(crate) fn sysctl(&self, key: &str) -> Option<u64> {
        self.number(&sysctl_path(key))
    }

    /// One of the numbers of a kernel setting that has several.
    pub(crate) fn sysctl_field(&self, key: &str, index: usize) -> Option<u64> {
        let text = self.text(&sysctl_path(key))?;
        text.split_whitespace().nth(index)?.parse().ok()
    }

    /// Pages that the buffers of all TCP connections hold, in all network namespaces.
    pub(crate) fn tcp_memory_pages(&self) -> Option<u64> {
        let table = self.text("/proc/net/sockstat")?;
        let row = table.lines().find_map(|row| row.strip_prefix("TCP:"))?;
        let mut fields = row.split_whitespace().skip_while(|field| *field != "mem");
        fields.nth(1)?.parse().ok()
    }

    /// Whether all controllers are in the unified hierarchy of cgroup v2.
    pub fn has_unified_cgroups(&self) -> bool {
        self.path("/sys/fs/cgroup/cgroup.controllers").exists()
    }

    /// Whether a cgroup hierarchy that is mounted limits I/O.
    pub(crate) fn limits_io(&self) -> bool {
        let unified = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let unified = unified.map(|top| self.text(&format!("{top}/cgroup.controllers")));
        let mut controllers = unified.iter().flatten();
        let mounts = self.text("/proc/self/mountinfo").unwrap_or_default();
        let mut v1 = mounts.lines().filter(|line| line.contains(" - cgroup "));
        controllers.any(|text| text.split_whitespace().any(|one| one == "io"))
            || v1.any(|line| line.rsplit([' ', ',']).any(|option| option == "blkio"))
    }

    /// Processes and threads.
    pub(crate) fn tasks(&self) -> Option<u64> {
        let load: LoadAverage = self.parsed("/proc/loadavg")?;
        Some(load.max.into())
    }

    /// Open files of the host.
    pub(crate) fn open_files(&self) -> Option<u64> {
        self.number("/proc/sys/fs/file-nr")
    }

    /// Mounts in the namespace of the host's init.
    pub(crate) fn mounts(&self) -> Option<u64> {
        let table = self
            .text("/proc/1/mountinfo")
            .or_else(|| self.text("/proc/self/mountinfo"))?;
        u64::try_from(table.lines().count()).ok()
    }

    /// Keys of root, and their bytes.
    pub(crate) fn root_keys(&self) -> Option<(u64, u64)> {
        let table = self.text("/proc/key-users")?;
        let row = table
            .lines()
            .find(|line| line.trim_start().starts_with("0:"))?;
        let fields: Vec<&str> = row.split_whitespace().collect();
        let used = |field: &str| field.split('/').next()?.parse().ok();
        Some((used(fields.get(3)?)?, used(fields.get(4)?)?))
    }

    /// Memory cgroups, dying ones included.
    pub(crate) fn memory_cgroups(&self) -> Option<u64> {
        let table: CGroupControllers = self.parsed("/proc/cgroups")?;
        let memory = table.0.iter().find(|one| one.name == "memory")?;
        Some(memory.num_cgroups.into())
    }

    /// Memory that is available to new processes, in bytes.
    pub(crate) fn available_memory(&self) -> Option<u64> {
        self.parsed::<Meminfo>("/proc/meminfo")?.mem_available
    }

    /// All memory, in bytes.
    pub(crate) fn total_memory(&self) -> Option<u64> {
        Some(self.parsed::<Meminfo>("/proc/meminfo")?.mem_total)
    }

    /// Processes whose program has this name, as of the first call.
    pub(crate) fn processes(&self, name: &str) -> Vec<u32> {
        let programs = self.programs.get_or_init(|| self.read_programs());
        let called = programs.iter().filter(|(_, program)| program == name);
        called.map(|(pid, _)| *pid).collect()
    }

    fn read_programs(&self) -> Vec<(u32, String)> {
        let Ok(entries) = std::fs::read_dir(self.path("/proc")) else {
            return Vec::new();
        };
        entries
            .flatten()
            .take(MAX_PROCESSES)
            .filter_map(|entry| {
                let pid = entry.file_name().to_str()?.parse().ok()?;
                let program = self.text(&format!("/proc/{pid}/comm"))?;
                Some((pid, program.trim_end().to_owned()))
            })
            .collect()
    }

    /// System call filters that programs have, those that are inherited counted once. `None`: the kernel does not say
    /// (before Linux 5.9).
    pub(crate) fn filters(&self) -> Option<u64> {
        let entries = std::fs::read_dir(self.path("/proc")).ok()?;
        let processes = entries.flatten().take(MAX_PROCESSES).filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let status = self.text(&format!("/proc/{pid}/status"))?;
            let field = |name: &str| -> Option<u64> {
                let mut fields = status.lines().filter_map(|line| line.split_once(':'));
                let (_, value) = fields.find(|(field, _)| *field == name)?;
                value.trim().parse().ok()
            };
            let parent = u32::try_from(field("PPid")?).ok()?;
            Some((pid, (parent, field("Seccomp_filters")?)))
        });
        let processes: HashMap<u32, (u32, u64)> = processes.collect();
        let own = processes.values().map(|(parent, filters)| {
            let inherited = processes.get(parent).map_or(0, |(_, filters)| *filters);
            filters.saturating_sub(inherited)
        });
        (!processes.is_empty()).then(|| own.sum())
    }

    /// The soft limit of a process's open files: `None` if there is no limit, `Some(None)` if it cannot
    /// be read.
    #[expect(
        clippy::option_option,
        reason = "an unreadable limit is reported as unknown"
    )]
    pub(crate) fn open_files_limit(&self, pid: &str) -> Option<Option<u64>> {
        let limits: Option<Limits> = self.parsed(&format!("/proc/{pid}/limits"));
        match limits.map(|limits| limits.max_open_files.soft_limit) {
            None => Some(None),
            Some(LimitValue::Unlimited) => None,
            Some(LimitValue::Value(limit)) => Some(Some(limit)),
        }
    }

    /// Number of entries of a directory.
    pub(crate) fn entries(&self, directory: &str) -> Option<u64> {
        let entries = std::fs::read_dir(self.path(directory)).ok()?;
        u64::try_from(entries.count()).ok()
    }

    /// Whether Docker's configuration lets containers survive its restart.
    pub(crate) fn docker_restores_containers(&self) -> bool {
        let config = self.text("/etc/docker/daemon.json");
        config
            .and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
            .is_some_and(|config| config["live-restore"] == true)
    }

    /// The `pids.max` with the least left among those of a process's cgroup and its ancestors.
    pub(crate) fn pids_limit_of(&self, pid: u32) -> Option<CgroupLimit> {
        let places: ProcessCGroups = self.parsed(&format!("/proc/{pid}/cgroup"))?;
        let has_pids = |controllers: &[String]| controllers.iter().any(|one| one == "pids");
        let mut places = places.0.iter();
        let place = places
            .clone()
            .find(|place| has_pids(&place.controllers))
            .or_else(|| places.find(|place| place.controllers.is_empty()))?;
        let cgroup = place.pathname.as_str();
        self.cgroup_limit("pids", cgroup, &[("pids.max", "pids.current")])
    }

    /// The limit with the least left among those of a cgroup and its ancestors. `names` are pairs of files
    /// with a limit and its usage, in the order in which they are tried.
    pub(crate) fn cgroup_limit(
        &self,
        controller: &str,
        cgroup: &str,
        names: &[(&str, &str)],
    ) -> Option<CgroupLimit> {
        let own = format!("/sys/fs/cgroup/{controller}");
        let trees = [own.as_str(), "/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        // The root of a hierarchy has no limits.
        let below = |cgroup: &&Path| cgroup.parent().is_some();
        trees
            .into_iter()
            .filter(|tree| *tree != "/sys/fs/cgroup/")
            .flat_map(|tree| {
                let cgroups = Path::new(cgroup).ancestors().take_while(below);
                cgroups.map(move |cgroup| format!("{tree}{}", cgroup.display()))
            })
            .filter_map(|folder| {
                names.iter().find_map(|(limit, used)| {
                    let file = format!("{folder}/{limit}");
                    // "max" is not a number, and means no limit.
                    let limit = self.number(&file).filter(|limit| *limit < NO_LIMIT)?;
                    let used = self.counted(&format!("{folder}/{used}"));
                    Some(CgroupLimit { file, limit, used })
                })
            })
            .min_by_key(|found| found.limit.saturating_sub(found.used.unwrap_or_default()))
    }

    /// The file's number, or the number of descendants in `cgroup.stat`.
    fn counted(&self, path: &str) -> Option<u64> {
        let text = self.text(path)?;
        let row = text
            .lines()
            .find_map(|line| line.strip_prefix("nr_descendants "))
            .unwrap_or(&text);
        row.trim().parse().ok()
    }

    /// Free bytes and inodes of the file system that holds `path`, or would hold it.
    pub(crate) fn space(&self, path: &str) -> Option<(u64, u64)> {
        let wanted = self.path(path);
        let there = wanted.ancestors().find(|folder| folder.exists())?;
        let space = rustix::fs::statvfs(there).ok()?;
        Some((space.f_bavail.checked_mul(space.f_frsize)?, space.f_favail))
    }
}

/// The path of a kernel setting.
pub(crate) fn sysctl_path(key: &str) -> String {
    format!("/proc/sys/{}", key.replace('.', "/"))
}
