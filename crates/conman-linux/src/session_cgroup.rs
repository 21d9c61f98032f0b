//! Creates the cgroups of a container.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::cgroup_limits::{CgroupLimits, Limited, cpu_quota};
use crate::cgroup_mounts::{CgroupLayout, Hierarchy};
use crate::cgroups::{is_plain, tree};
use crate::io_limits;

/// Prefix of every cgroup that is created here.
const PREFIX: &str = "/conman";

/// Mode of every new directory: only root creates cgroups there or moves processes.
const MODE: u32 = 0o755;

/// Controllers that limits need.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", io_limits::V1_CONTROLLER];

/// v1 controllers without which programs (OpenJDK) do not look at any limit.
const EXPECTED: [&str; 2] = ["cpuacct", CPUSET];

/// A cgroup of this controller takes no process before it has processors and memory.
const CPUSET: &str = "cpuset";
const CPUSET_FILES: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];

/// The v1 controller that freezes where there is no unified hierarchy.
const FREEZER: &str = "freezer";

/// Why a cgroup could not be created.
#[derive(Debug, thiserror::Error)]
pub enum MakeCgroupError {
    #[error("cannot create `{path}`: it must be a plain absolute path that begins with {PREFIX}")]
    Refused { path: String },
    /// It has processes. A start needs a fresh cgroup, since a killed one kills processes that enter.
    #[error("the cgroup {} exists already and has processes", directory.display())]
    Exists { directory: PathBuf },
    /// A limit was requested that no hierarchy of this host can enforce.
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

/// Creates cgroups with limits, on v1, v2 and a mixture.
///
/// A cgroup has the same path in every hierarchy that is used: the unified one, if there is one (it freezes,
/// kills, and holds processes from their creation), the v1 ones whose controllers limit something, and the
/// v1 freezer if there is no unified one. In the other v1 hierarchies a container stays in the launcher's
/// cgroup.
///
/// It is created in three steps, so that a start can do other work meanwhile: [`CgroupMaker::begin`] creates
/// the cgroup that a process is created in, [`CgroupMaker::limit`] creates the rest and sets the limits, and
/// [`SessionCgroup::cpu_quota`] is the limit that is set last.
#[derive(Debug)]
pub struct CgroupMaker {
    unified: Option<Hierarchy>,
    /// v1 hierarchies to join, each once.
    joined: Vec<Hierarchy>,
    /// v1 hierarchies that programs expect to see, and that no container joins.
    expected: Vec<Hierarchy>,
    /// Parents that are known to be ready.
    ready: RefCell<BTreeSet<PathBuf>>,
    /// The v2 `io` controller is enabled with the first limit of it: each cgroup with it costs memory.
    hands_on_io: Cell<bool>,
}

/// A cgroup that has had no process yet.
#[derive(Debug)]
pub struct SessionCgroup {
    path: String,
    unified: Option<File>,
    /// Files to which a process writes its id, one for each hierarchy to join.
    entrances: Vec<File>,
    /// The CPU limit to write: file and content.
    quota: Option<(File, String)>,
    /// The directories that were created; removed by [`Self::take_back`].
    made: Vec<PathBuf>,
    /// Where its programs look for it below `/sys/fs/cgroup`, and its directory, in each hierarchy.
    shown: Vec<(String, PathBuf)>,
}

impl CgroupMaker {
    /// Uses only these hierarchies.
    #[must_use]
    pub fn of(layout: &CgroupLayout) -> Self {
        let found = layout.hierarchies();
        let unified = found.iter().find(|hierarchy| hierarchy.unified).cloned();
        let freezes = unified.is_some();
        let wanted = |hierarchy: &&Hierarchy| {
            CONTROLLERS.iter().any(|name| hierarchy.controls(name))
                || (!freezes && hierarchy.controls(FREEZER))
        };
        Self {
            unified,
            joined: found.iter().filter(wanted).cloned().collect(),
            expected: found
                .iter()
                .filter(|hierarchy| EXPECTED.iter().any(|name| hierarchy.controls(name)))
                .filter(|hierarchy| !wanted(hierarchy))
                .cloned()
                .collect(),
            ready: RefCell::default(),
            hands_on_io: Cell::default(),
        }
    }

    /// Limits the CPU time of a cgroup and all below it together, in thousandths of a processor. Creates it if
    /// missing. A v1 hierarchy refuses a limit below that of an existing child, and later a child's above it.
    pub fn limit_total_cpu(&self, path: &str, millis: u64) -> Result<(), MakeCgroupError> {
        let v1 = self.joined.iter().find(|one| one.controls("cpu"));
        let hierarchy = v1.or(self.unified.as_ref());
        let Some((hierarchy, directory)) =
            hierarchy.and_then(|one| Some((one, one.directory(path)?)))
        else {
            return Err(MakeCgroupError::NoController { controller: "cpu" });
        };
        self.ready_parents(hierarchy, &directory.join("session"))?;
        let (file, quota) = cpu_quota(hierarchy.unified, &directory, millis);
        write(&file, &quota)
    }

    /// Creates a fresh cgroup, without limits yet, in the hierarchies that freeze and kill. After an error it
    /// is removed again.
    pub fn begin(&self, path: &str) -> Result<SessionCgroup, MakeCgroupError> {
        let mut cgroup = SessionCgroup::empty(path)?;
        let freezers = self.joined.iter().filter(|one| one.controls(FREEZER));
        for hierarchy in freezers.chain(&self.unified) {
            if let Err(error) = self.make_in(hierarchy, &mut cgroup) {
                cgroup.take_back();
                return Err(error);
            }
        }
        Ok(cgroup)
    }

    /// Creates it in the hierarchies that limit something, and sets all limits except the CPU limit. After an
    /// error the caller must remove it.
    pub fn limit(
        &self,
        cgroup: &mut SessionCgroup,
        limits: &CgroupLimits,
    ) -> Result<(), MakeCgroupError> {
        let mut limited = Limited::default();
        // Each cgroup costs time at a start, and memory of the host.
        let needed = self.joined.iter().filter(|one| limits.need(one));
        for hierarchy in needed.chain(&self.unified) {
            self.make_in(hierarchy, cgroup)?;
            if let Some(directory) = hierarchy.directory(&cgroup.path) {
                if limits.io.is_some() && hierarchy.unified && !self.hands_on_io.replace(true) {
                    io_limits::hand_on(&cgroups_above(hierarchy, &directory));
                }
                limited.set(hierarchy, &directory, limits)?;
            }
        }
        limited.check(limits)?;
        let quota = limited.quota;
        let quota = quota.map(|(file, text)| Ok((open(&file, true)?, text)));
        cgroup.quota = quota.transpose()?;
        Ok(())
    }

    /// Where programs look for hierarchies below `/sys/fs/cgroup`.
    pub fn places(&self) -> Vec<String> {
        let all = self
            .unified
            .iter()
            .chain(&self.joined)
            .chain(&self.expected);
        all.filter_map(Hierarchy::usual_place)
            .map(str::to_owned)
            .collect()
    }

    /// Moves the calling thread, the only one of its process, into this cgroup of each v1 hierarchy that programs
    /// expect to see and in which containers have no cgroup of their own. Creates it if missing; it limits nothing.
    /// Returns its directories, with the places below `/sys/fs/cgroup` at which programs look for them.
    pub fn enter_stand_ins(&self, path: &str) -> Result<Vec<(String, PathBuf)>, MakeCgroupError> {
        SessionCgroup::empty(path)?;
        let mut entered = Vec::new();
        for hierarchy in &self.expected {
            // Below the cpuset of the calling thread, whose processors an operator may have restricted.
            let above = match hierarchy.controls(CPUSET) {
                true => present_cpuset(),
                false => String::new(),
            };
            let (Some(place), Some(directory)) = (
                hierarchy.usual_place(),
                hierarchy.directory(&format!("{above}{path}")),
            ) else {
                continue;
            };
            let mut builder = DirBuilder::new();
            let created = builder.recursive(true).mode(MODE).create(&directory);
            created.map_err(io_error("make", &directory))?;
            if hierarchy.controls(CPUSET) {
                let parent = hierarchy.directory(&above).unwrap_or_default();
                for file in CPUSET_FILES {
                    let of_parent = parent.join(file);
                    let all = std::fs::read_to_string(&of_parent);
                    let all = all.map_err(io_error("read", &of_parent))?;
                    write(&directory.join(file), all.trim())?;
                }
            }
            let tasks = directory.join("tasks");
            enter(&open(&tasks, true)?).map_err(io_error("enter", &tasks))?;
            entered.push((place.to_owned(), directory));
        }
        Ok(entered)
    }

    /// An existing cgroup, for one more process to join.
    pub fn existing(&self, path: &str) -> Result<SessionCgroup, MakeCgroupError> {
        let mut cgroup = SessionCgroup::empty(path)?;
        for hierarchy in self.joined.iter().chain(&self.unified) {
            if let Some(directory) = hierarchy.directory(path).filter(|path| path.is_dir()) {
                cgroup.open_in(hierarchy, &directory)?;
            }
        }
        Ok(cgroup)
    }

    /// Creates it in one hierarchy, unless it exists there.
    fn make_in(
        &self,
        hierarchy: &Hierarchy,
        cgroup: &mut SessionCgroup,
    ) -> Result<(), MakeCgroupError> {
        let Some(directory) = hierarchy.directory(&cgroup.path) else {
            return Ok(());
        };
        if cgroup.made.contains(&directory) {
            return Ok(());
        }
        self.ready_parents(hierarchy, &directory)?;
        make_directory(&directory)?;
        cgroup.made.push(directory.clone());
        cgroup.open_in(hierarchy, &directory)
    }

    /// Creates the cgroups above `directory`; in the unified hierarchy enables the controllers in them.
    fn ready_parents(
        &self,
        hierarchy: &Hierarchy,
        directory: &Path,
    ) -> Result<(), MakeCgroupError> {
        let parent = directory.parent().unwrap_or(directory);
        if self.ready.borrow().contains(parent) {
            return Ok(());
        }
        let mut builder = DirBuilder::new();
        let made = builder.recursive(true).mode(MODE).create(parent);
        made.map_err(io_error("make", parent))?;
        if hierarchy.unified {
            for ancestor in cgroups_above(hierarchy, directory) {
                hand_on_controllers(ancestor)?;
            }
        }
        self.ready.borrow_mut().insert(parent.to_owned());
        Ok(())
    }
}

/// The cgroups above this one, the topmost first.
fn cgroups_above<'a>(hierarchy: &Hierarchy, directory: &'a Path) -> Vec<&'a Path> {
    let top = hierarchy.directory("").unwrap_or_default();
    let ancestors = directory.ancestors().skip(1);
    let mut above: Vec<&Path> = ancestors
        .take_while(|ancestor| ancestor.starts_with(&top))
        .collect();
    above.reverse();
    above
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
    let control = cgroup.join("cgroup.subtree_control");
    if write(&control, &wanted.join(" ")).is_ok() {
        return Ok(());
    }
    // The kernel takes all or none. A limit whose controller stays out is refused when it is set.
    for one in wanted {
        if let Err(error) = write(&control, &one) {
            tracing::warn!(
                %error,
                controller = one,
                "cannot enable a cgroup controller for child cgroups"
            );
        }
    }
    Ok(())
}

impl SessionCgroup {
    fn empty(path: &str) -> Result<Self, MakeCgroupError> {
        if !is_plain(path) || !path.starts_with(PREFIX) {
            return Err(MakeCgroupError::Refused {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            path: path.to_owned(),
            unified: None,
            entrances: Vec::new(),
            quota: None,
            made: Vec::new(),
            shown: Vec::new(),
        })
    }

    fn open_in(&mut self, hierarchy: &Hierarchy, directory: &Path) -> Result<(), MakeCgroupError> {
        if hierarchy.unified {
            self.unified = Some(open(directory, false)?);
        } else {
            let entrance = open(&directory.join("tasks"), true)?;
            self.entrances.push(entrance);
        }
        if let Some(place) = hierarchy.usual_place() {
            self.shown.push((place.to_owned(), directory.to_owned()));
        }
        Ok(())
    }

    /// Its directory in each hierarchy, and the place below `/sys/fs/cgroup` at which programs look for it.
    pub fn shown(&self) -> impl Iterator<Item = (&str, &Path)> {
        let shown = self.shown.iter();
        shown.map(|(place, directory)| (place.as_str(), directory.as_path()))
    }

    /// Its directory in the unified hierarchy, to create a process in.
    #[must_use]
    pub fn unified(&self) -> Option<BorrowedFd<'_>> {
        self.unified.as_ref().map(AsFd::as_fd)
    }

    /// The files for [`join_cgroups`], to be sent to another process.
    pub fn entrances(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.entrances.iter().map(AsFd::as_fd)
    }

    /// Moves the calling thread, the only one of its process, into it, except where it was created in it.
    pub fn join(&self) -> io::Result<()> {
        self.entrances.iter().try_for_each(enter)
    }

    /// The CPU limit, if there is one: the file that sets it, open for writing, and its content. The kernel visits
    /// every cgroup of the host for it, so a container's own process writes it, while the launcher does other work.
    #[must_use]
    pub fn cpu_quota(&self) -> Option<(BorrowedFd<'_>, &str)> {
        let (file, text) = self.quota.as_ref()?;
        Some((file.as_fd(), text))
    }

    /// Sets the CPU limit now, so that [`Self::cpu_quota`] is none. The process in it needs processor time from then on.
    pub fn set_cpu_quota(&mut self) -> io::Result<()> {
        match self.quota.take() {
            Some((mut file, text)) => file.write_all(text.as_bytes()),
            None => Ok(()),
        }
    }

    /// Its directory in the hierarchy that freezes it, which is made first.
    pub(crate) fn first_made(&self) -> Option<&Path> {
        self.made.first().map(PathBuf::as_path)
    }

    /// Removes it again; it must be empty. Failures are left to a later sweep.
    pub fn take_back(&self) {
        for directory in &self.made {
            // A dying process may keep it a moment longer.
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Moves the calling thread, the only one of its process, into a cgroup by the files from
/// [`SessionCgroup::entrances`].
pub fn join_cgroups(entrances: Vec<OwnedFd>) -> io::Result<()> {
    entrances
        .into_iter()
        .try_for_each(|entrance| enter(&File::from(entrance)))
}

/// A thread that moves itself does not take the host-wide lock for moving processes.
fn enter(mut entrance: &File) -> io::Result<()> {
    entrance.write_all(b"0")
}

/// The cgroup of the calling process in the `cpuset` hierarchy; empty for the root, and on kernels without this file.
fn present_cpuset() -> String {
    let present = std::fs::read_to_string("/proc/self/cpuset").unwrap_or_default();
    present.trim_end().trim_end_matches('/').to_owned()
}

fn make_directory(directory: &Path) -> Result<(), MakeCgroupError> {
    let make = || DirBuilder::new().mode(MODE).create(directory);
    let exists = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
    let mut made = make();
    if made.as_ref().is_err_and(exists) {
        // Only one without processes can be removed. An empty one is not reused: processes that enter
        // a v2 cgroup while its `cgroup.kill` is written die.
        for cgroup in tree(directory.to_owned()).into_iter().rev() {
            let _ = std::fs::remove_dir(cgroup);
        }
        made = make();
    }
    made.map_err(|source| match source.kind() {
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

pub(crate) fn write(path: &Path, text: &str) -> Result<(), MakeCgroupError> {
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
