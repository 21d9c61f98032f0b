use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup_mounts::{Hierarchy, parse_mountinfo};
use crate::cgroups::is_plain;

/// First characters of every cgroup that is made here.
const PREFIX: &str = "/conman";

/// Period of the cpu limit, in microseconds; the kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;

/// Smallest time in a period that the kernel accepts, in microseconds.
const CPU_QUOTA_MIN_US: u64 = 1_000;

/// Controllers that limits need.
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// What a container may use; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CgroupLimits {
    /// Memory with the page cache of its files and what the kernel holds for it.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Processes and threads at a time.
    #[serde(default)]
    pub pids: Option<u64>,
    /// Thousandths of a processor.
    #[serde(default)]
    pub cpu_millis: Option<u64>,
}

impl CgroupLimits {
    /// Whether a limit is set that this v1 hierarchy enforces.
    fn need(&self, hierarchy: &Hierarchy) -> bool {
        let limited = [
            ("memory", self.memory_bytes.is_some()),
            ("pids", self.pids.is_some()),
            ("cpu", self.cpu_millis.is_some()),
        ];
        limited
            .iter()
            .any(|(controller, limited)| *limited && hierarchy.controls(controller))
    }
}

/// Why a cgroup could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MakeCgroupError {
    #[error("`{path}` is not made: only plain absolute paths that begin with {PREFIX} are")]
    Refused { path: String },
    /// It exists already; a start takes a fresh one, since one that was killed kills what enters.
    #[error("the cgroup {} exists already", directory.display())]
    Exists { directory: PathBuf },
    /// A limit was asked for that no hierarchy of this host can enforce.
    #[error("no cgroup hierarchy of this host has the {controller} controller")]
    NoController { controller: &'static str },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Makes cgroups with limits, on v1, v2 and a mixture.
///
/// A cgroup has the same path in every hierarchy that is used: the unified one, where there is one
/// (it freezes, kills, and holds processes from birth), the v1 ones whose controllers are to limit
/// something, and the v1 freezer where there is no unified one. In the other v1 hierarchies a
/// container stays where the launcher is.
#[derive(Debug)]
pub struct CgroupMaker {
    unified: Option<Hierarchy>,
    /// v1 hierarchies to join, each once.
    joined: Vec<Hierarchy>,
    /// Parents that are known to be ready.
    ready: RefCell<BTreeSet<PathBuf>>,
}

/// A cgroup that no process has been in yet.
#[derive(Debug)]
pub struct SessionCgroup {
    path: String,
    unified: Option<File>,
    /// The v1 hierarchies' `tasks`.
    tasks: Vec<File>,
    /// What was made, to be taken back.
    made: Vec<PathBuf>,
}

impl CgroupMaker {
    /// Finds what is mounted. Later mounts are not noticed.
    pub fn detect() -> io::Result<Self> {
        let found = parse_mountinfo(&std::fs::read("/proc/self/mountinfo")?);
        let unified = found.iter().find(|hierarchy| hierarchy.unified).cloned();
        let freezes = unified.is_some();
        let joined = found
            .into_iter()
            .filter(|hierarchy| {
                CONTROLLERS.iter().any(|name| hierarchy.controls(name))
                    || (!freezes && hierarchy.controls("freezer"))
            })
            .collect();
        Ok(Self {
            unified,
            joined,
            ready: RefCell::default(),
        })
    }

    /// Makes a fresh cgroup with its limits, and its parents where they are missing. On an error
    /// what was made of it is taken back.
    pub fn make(
        &self,
        path: &str,
        limits: &CgroupLimits,
    ) -> Result<SessionCgroup, MakeCgroupError> {
        if !is_plain(path) || !path.starts_with(PREFIX) {
            return Err(MakeCgroupError::Refused {
                path: path.to_owned(),
            });
        }
        let mut cgroup = SessionCgroup {
            path: path.to_owned(),
            unified: None,
            tasks: Vec::new(),
            made: Vec::new(),
        };
        match self.fill(&mut cgroup, limits) {
            Ok(()) => Ok(cgroup),
            Err(error) => {
                cgroup.take_back();
                Err(error)
            }
        }
    }

    /// A cgroup that was made before, to be entered by one more process.
    pub fn existing(&self, path: &str) -> Result<SessionCgroup, MakeCgroupError> {
        if !is_plain(path) || !path.starts_with(PREFIX) {
            return Err(MakeCgroupError::Refused {
                path: path.to_owned(),
            });
        }
        let mut cgroup = SessionCgroup {
            path: path.to_owned(),
            unified: None,
            tasks: Vec::new(),
            made: Vec::new(),
        };
        for hierarchy in self.joined.iter().chain(&self.unified) {
            let Some(directory) = hierarchy.directory(path).filter(|path| path.is_dir()) else {
                continue;
            };
            if hierarchy.unified {
                cgroup.unified = Some(open(&directory, false)?);
            } else {
                cgroup.tasks.push(open(&directory.join("tasks"), true)?);
            }
        }
        Ok(cgroup)
    }

    fn fill(
        &self,
        cgroup: &mut SessionCgroup,
        limits: &CgroupLimits,
    ) -> Result<(), MakeCgroupError> {
        let mut limited = Limited::default();
        let needed = self.joined.iter().filter(|hierarchy| {
            // Each cgroup costs a start time and the host memory.
            hierarchy.controls("freezer") || limits.need(hierarchy)
        });
        for hierarchy in needed.chain(&self.unified) {
            let Some(directory) = hierarchy.directory(&cgroup.path) else {
                continue;
            };
            self.ready_parents(hierarchy, &directory)?;
            make_directory(&directory)?;
            cgroup.made.push(directory.clone());
            limited.set(hierarchy, &directory, limits)?;
            if hierarchy.unified {
                cgroup.unified = Some(open(&directory, false)?);
            } else {
                cgroup.tasks.push(open(&directory.join("tasks"), true)?);
            }
        }
        limited.check(limits)
    }

    /// Makes the cgroups above `directory`; in the unified hierarchy they hand the controllers on.
    fn ready_parents(
        &self,
        hierarchy: &Hierarchy,
        directory: &Path,
    ) -> Result<(), MakeCgroupError> {
        let parent = directory.parent().unwrap_or(directory);
        if self.ready.borrow().contains(parent) {
            return Ok(());
        }
        std::fs::create_dir_all(parent).map_err(io_error("make", parent))?;
        if hierarchy.unified {
            let top = hierarchy.directory("").unwrap_or_default();
            let mut above: Vec<&Path> = parent
                .ancestors()
                .take_while(|ancestor| ancestor.starts_with(&top))
                .collect();
            above.reverse();
            for ancestor in above {
                hand_on_controllers(ancestor)?;
            }
        }
        self.ready.borrow_mut().insert(parent.to_owned());
        Ok(())
    }
}

/// Enables those of [`CONTROLLERS`] that the cgroup has for its children.
fn hand_on_controllers(cgroup: &Path) -> Result<(), MakeCgroupError> {
    let available = cgroup.join("cgroup.controllers");
    let text = std::fs::read_to_string(&available).map_err(io_error("read", &available))?;
    let wanted: Vec<String> = CONTROLLERS
        .iter()
        .filter(|name| text.split_ascii_whitespace().any(|have| have == **name))
        .map(|name| format!("+{name}"))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    write(&cgroup.join("cgroup.subtree_control"), &wanted.join(" "))
}

/// Which limits have been set in some hierarchy.
#[derive(Debug, Default)]
struct Limited {
    memory: bool,
    pids: bool,
    cpu: bool,
}

impl Limited {
    fn set(
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
            let quota = (millis.saturating_mul(CPU_PERIOD_US) / 1_000).max(CPU_QUOTA_MIN_US);
            if hierarchy.unified {
                write(
                    &directory.join("cpu.max"),
                    &format!("{quota} {CPU_PERIOD_US}"),
                )?;
            } else {
                // The period is the kernel's default already.
                write(&directory.join("cpu.cfs_quota_us"), &quota.to_string())?;
            }
        }
        Ok(())
    }

    fn check(&self, limits: &CgroupLimits) -> Result<(), MakeCgroupError> {
        let missing = [
            (limits.memory_bytes.is_some() && !self.memory, "memory"),
            (limits.pids.is_some() && !self.pids, "pids"),
            (limits.cpu_millis.is_some() && !self.cpu, "cpu"),
        ];
        match missing.iter().find(|(missing, _)| *missing) {
            Some((_, controller)) => Err(MakeCgroupError::NoController { controller }),
            None => Ok(()),
        }
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
    let swap = directory.join(swap);
    if swap.exists() {
        write(&swap, no_swap)?;
    }
    if unified {
        // A program half of whose processes are gone serves nobody.
        write(&directory.join("memory.oom.group"), "1")?;
    }
    Ok(())
}

impl SessionCgroup {
    /// Its path, the same in every hierarchy.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its directory in the unified hierarchy, to be born in.
    #[must_use]
    pub fn unified(&self) -> Option<BorrowedFd<'_>> {
        self.unified.as_ref().map(AsFd::as_fd)
    }

    /// Moves the calling thread, the only one of its process, into the v1 hierarchies.
    ///
    /// A thread that moves itself takes no lock that all processes of the host contend for.
    pub fn join_v1(&self) -> io::Result<()> {
        self.tasks
            .iter()
            .try_for_each(|mut tasks| tasks.write_all(b"0"))
    }

    /// Removes it again; it must be empty. What cannot be removed is left to whoever sweeps.
    pub fn take_back(&self) {
        for directory in &self.made {
            // A process that is dying keeps it a moment longer.
            let _ = std::fs::remove_dir(directory);
        }
    }
}

fn make_directory(directory: &Path) -> Result<(), MakeCgroupError> {
    std::fs::create_dir(directory).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => MakeCgroupError::Exists {
            directory: directory.to_owned(),
        },
        _ => io_error("make", directory)(source),
    })
}

fn open(path: &Path, write: bool) -> Result<File, MakeCgroupError> {
    File::options()
        .read(!write)
        .write(write)
        .open(path)
        .map_err(io_error("open", path))
}

fn write(path: &Path, text: &str) -> Result<(), MakeCgroupError> {
    std::fs::write(path, text).map_err(io_error("write", path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MakeCgroupError {
    let path = path.to_owned();
    move |source| MakeCgroupError::Io {
        action,
        path,
        source,
    }
}
