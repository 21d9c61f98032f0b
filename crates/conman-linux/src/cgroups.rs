//! Lists the processes of cgroups, and removes cgroups.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::cgroup_mounts::{CgroupLayout, Hierarchy};
use crate::pidfd::is_gone;

/// Prefix of every cgroup that may be removed.
const REMOVABLE_PREFIX: &str = "/conman";

/// Why a cgroup could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// Not conman's cgroup, or not a plain absolute path; nothing was changed.
    #[error(
        "`{path}` is not removed: only plain absolute paths that begin with {REMOVABLE_PREFIX} are"
    )]
    Refused { path: String },
    /// The cgroup still has processes, for example.
    #[error("cannot remove the cgroup {}", directory.display())]
    Remove {
        directory: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Maximum of memory that is reclaimed from a cgroup before it is removed.
const LAST_PAGES_BYTES: u64 = 1 << 20;

/// The cgroup hierarchies of this host: v1, v2 or both.
///
/// A `path` is what `/proc/PID/cgroup` shows: absolute within the hierarchy, for example
/// `/conman-1a2b3c4d/alice.7`, and the same in every hierarchy.
#[derive(Debug, Clone)]
pub struct Cgroups {
    pub(crate) hierarchies: Vec<Hierarchy>,
}

impl Cgroups {
    /// Finds what is mounted. Later mounts are not noticed.
    pub fn detect() -> io::Result<Self> {
        let layout = CgroupLayout::detect()?;
        if layout.hierarchies().is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "no cgroup hierarchy is mounted (looked in /proc/self/mountinfo)",
            ));
        }
        Ok(Self::of(&layout))
    }

    /// Uses only these hierarchies.
    #[must_use]
    pub fn of(layout: &CgroupLayout) -> Self {
        Self {
            hierarchies: layout.hierarchies().to_vec(),
        }
    }

    /// Whether there is a unified hierarchy (v2), alone or with v1 ones.
    #[must_use]
    pub fn has_unified(&self) -> bool {
        self.hierarchies.iter().any(|hierarchy| hierarchy.unified)
    }

    /// Every process in the cgroup and below, in any hierarchy, each once. What disappears meanwhile or cannot
    /// be read is left out ([`Self::try_pids_below`] reports it); a path that is not plain has no processes.
    #[must_use]
    pub fn pids_below(&self, path: &str) -> Vec<i32> {
        let mut pids = BTreeSet::new();
        for directory in self.directories(path) {
            for cgroup in tree(directory) {
                let Ok(text) = std::fs::read_to_string(cgroup.join("cgroup.procs")) else {
                    continue;
                };
                // A process in a PID namespace that this one cannot see shows as 0.
                let listed = text.lines().filter_map(|line| line.parse::<i32>().ok());
                pids.extend(listed.filter(|pid| *pid > 0));
            }
        }
        pids.into_iter().collect()
    }

    /// Names of the cgroups directly below, in any hierarchy, each once.
    #[must_use]
    pub fn children(&self, path: &str) -> Vec<String> {
        let mut names = BTreeSet::new();
        for directory in self.directories(path) {
            let Ok(entries) = std::fs::read_dir(directory) else {
                continue;
            };
            names.extend(
                entries
                    .filter_map(Result::ok)
                    .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                    .map(|entry| entry.file_name().to_string_lossy().into_owned()),
            );
        }
        names.into_iter().collect()
    }

    /// The cgroups of a process as `/proc/PID/cgroup` shows them, each path once.
    pub fn of_pid(pid: i32) -> io::Result<Vec<String>> {
        let text = std::fs::read(format!("/proc/{pid}/cgroup"))?;
        Ok(parse_proc_cgroup(&String::from_utf8_lossy(&text)))
    }

    /// Whether a process is in the cgroup or below it in any hierarchy. `false` for a process that is dead or
    /// cannot be read ([`Self::try_contains`] reports it).
    #[must_use]
    pub fn contains(&self, path: &str, pid: i32) -> bool {
        self.try_contains(path, pid).unwrap_or(false)
    }

    /// Removes the cgroup and everything below it, leaf first, in every hierarchy. Continues after an error
    /// and returns all of them; a missing cgroup is not an error.
    ///
    /// Only for paths that begin with `/conman`: all others are refused unchanged.
    ///
    /// The last file pages that are charged to it are dropped first, and dirty ones are written back: remove
    /// its files before, and do not call this where waiting for a disk is not acceptable.
    #[must_use = "a cgroup that still has processes stays"]
    pub fn remove_tree(&self, path: &str) -> Vec<CgroupError> {
        if !is_plain(path) || !path.starts_with(REMOVABLE_PREFIX) {
            return vec![CgroupError::Refused {
                path: path.to_owned(),
            }];
        }
        let mut errors = Vec::new();
        for (directory, accounts) in self.placed(path) {
            // A parent is before its children in the list.
            for cgroup in tree(directory).into_iter().rev() {
                if accounts {
                    drop_last_pages(&cgroup);
                }
                if let Err(source) = std::fs::remove_dir(&cgroup)
                    && !is_gone(&source)
                    && !is_no_device(&source)
                {
                    errors.push(CgroupError::Remove {
                        directory: cgroup,
                        source,
                    });
                }
            }
        }
        errors
    }

    pub(crate) fn directories(&self, path: &str) -> Vec<PathBuf> {
        if !is_plain(path) {
            return Vec::new();
        }
        let placed = self.placed(path);
        placed.map(|(directory, _)| directory).collect()
    }

    /// Reclaims what the kernel can of the memory that is charged to the cgroup: pages of files, and others if
    /// there is swap space. Blocks while it does. Failures are ignored: this only saves memory.
    pub fn reclaim_memory(&self, path: &str) {
        if !is_plain(path) {
            return;
        }
        let accounting = self.placed(path).filter(|(_, accounts)| *accounts);
        for (cgroup, _) in accounting {
            let usage = std::fs::read_to_string(cgroup.join("memory.current"));
            // Linux 5.19.
            let _ = usage.and_then(|bytes| std::fs::write(cgroup.join("memory.reclaim"), bytes));
            let _ = std::fs::write(cgroup.join("memory.force_empty"), "0");
        }
    }

    /// Its directories, and whether memory is charged there.
    fn placed(&self, path: &str) -> impl Iterator<Item = (PathBuf, bool)> {
        self.hierarchies.iter().filter_map(|hierarchy| {
            let accounts = hierarchy.unified || hierarchy.controls("memory");
            Some((hierarchy.directory(path)?, accounts))
        })
    }
}

/// The kernel keeps a removed memory cgroup with all its data (half a megabyte where there are ten thousand)
/// as long as one page is charged to it; a busy host accumulates thousands. Memory beyond
/// [`LAST_PAGES_BYTES`] is not reclaimed: it is files of an image that the next session needs again, and
/// the kernel reclaims it when memory is short.
///
/// Failures are ignored: this only saves memory.
fn drop_last_pages(cgroup: &Path) {
    let read = |file: &str| std::fs::read_to_string(cgroup.join(file)).ok();
    if read("cgroup.procs").is_none_or(|pids| !pids.is_empty()) {
        return;
    }
    let ways = [
        ("memory.usage_in_bytes", "memory.force_empty"),
        // Linux 5.19.
        ("memory.current", "memory.reclaim"),
    ];
    for (usage, order) in ways {
        let Some(bytes) = read(usage).and_then(|text| text.trim().parse::<u64>().ok()) else {
            continue;
        };
        let fixed = read("memory.stat").map_or(0, |stat| {
            let kernel = read("memory.kmem.usage_in_bytes");
            let kernel = kernel.and_then(|text| text.trim().parse().ok());
            undroppable(&stat, kernel)
        });
        if (1..=LAST_PAGES_BYTES).contains(&bytes)
            && bytes > fixed
            && let Ok(mut file) = File::options().write(true).open(cgroup.join(order))
        {
            let _ = file.write_all(bytes.to_string().as_bytes());
        }
    }
}

/// Memory that no write can drop, so that trying would waste tens of milliseconds: kernel objects, which a
/// removed cgroup leaves to its parent, and dirty pages, of file system blocks or of files that are about
/// to be removed. `kernel` is v1's separate file for it.
fn undroppable(stat: &str, kernel: Option<u64>) -> u64 {
    let field = |name: &str| {
        let mut rows = stat.lines().filter_map(|line| line.split_once(' '));
        rows.find(|(key, _)| *key == name)?.1.parse::<u64>().ok()
    };
    let kernel = kernel.or_else(|| field("kernel")).unwrap_or(0);
    let dirty = field("dirty").or_else(|| field("file_dirty"));
    kernel.saturating_add(dirty.unwrap_or(0))
}

/// Whether `cgroup` is `ancestor` or below it.
pub(crate) fn is_at_or_below(cgroup: &str, ancestor: &str) -> bool {
    cgroup
        .strip_prefix(ancestor.trim_end_matches('/'))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Lines are `id:controllers:path`; the path of a removed v2 cgroup has a suffix.
fn parse_proc_cgroup(text: &str) -> Vec<String> {
    let mut paths: Vec<String> = Vec::new();
    for path in text.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        if !paths.iter().any(|known| known == path) {
            paths.push(path.to_owned());
        }
    }
    paths
}

/// Absolute, longer than `/`, and only plain names: no `.`, no `..`, no empty part.
pub(crate) fn is_plain(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|rest| {
        rest.split('/').all(|part| !matches!(part, "" | "." | "..")) && !rest.contains('\0')
    })
}

/// The error of reading a cgroup that is being removed.
pub(crate) fn is_no_device(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

/// The directory and all directories below it, parents first. Cgroup filesystems have no symbolic links,
/// and the entries' own types are used, so nothing outside is reached.
pub(crate) fn tree(top: PathBuf) -> Vec<PathBuf> {
    let mut found = vec![top];
    let mut next = 0;
    while let Some(directory) = found.get(next) {
        let children = child_directories(directory);
        found.extend(children);
        next += 1;
    }
    found
}

fn child_directories(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).expect("written");
        }
        directory
    }

    #[test]
    fn what_cannot_be_dropped_is_not_tried() {
        let cases = [
            // All of it is dirty or the kernel's.
            ("8192", "cache 4096\ndirty 4096\n", Some("4096"), ""),
            ("4096", "cache 0\ndirty 0\n", Some("4096"), ""),
            (
                "8192",
                "file 4096\nkernel 4096\nfile_dirty 4096\n",
                None,
                "",
            ),
            // Something is not.
            ("12288", "cache 8192\ndirty 4096\n", Some("4096"), "12288"),
            ("4096", "file 4096\nkernel 0\nfile_dirty 0\n", None, "4096"),
            ("4096", "not understood", None, "4096"),
        ];
        for (bytes, stat, kernel, expected) in cases {
            let mut files = vec![
                ("cgroup.procs", ""),
                ("memory.current", bytes),
                ("memory.reclaim", ""),
                ("memory.stat", stat),
            ];
            files.extend(kernel.map(|kernel| ("memory.kmem.usage_in_bytes", kernel)));
            let cgroup = cgroup_with(&files);
            drop_last_pages(cgroup.path());
            let ordered = std::fs::read_to_string(cgroup.path().join("memory.reclaim"));
            assert_eq!(ordered.expect("readable"), expected, "{stat}");
        }
    }

    #[test]
    fn the_last_pages_of_an_empty_cgroup_are_dropped_and_those_of_an_image_kept() {
        let cases = [
            (
                "memory.usage_in_bytes",
                "memory.force_empty",
                "",
                "4096\n",
                "4096",
            ),
            ("memory.current", "memory.reclaim", "", "4096\n", "4096"),
            // A process is in it.
            (
                "memory.usage_in_bytes",
                "memory.force_empty",
                "17\n",
                "4096\n",
                "",
            ),
            ("memory.current", "memory.reclaim", "", "200000000\n", ""),
            ("memory.current", "memory.reclaim", "", "0\n", ""),
        ];
        for (usage, order, pids, bytes, expected) in cases {
            let cgroup = cgroup_with(&[("cgroup.procs", pids), (usage, bytes), (order, "")]);
            drop_last_pages(cgroup.path());
            let ordered = std::fs::read_to_string(cgroup.path().join(order)).expect("readable");
            assert_eq!(ordered, expected, "{usage} {bytes} {pids}");
        }
    }
}
