//! Lists the processes of a cgroup as a proof: what cannot be read is an error, while [`Cgroups`]
//! otherwise treats it as absent.

use std::collections::BTreeSet;
use std::io;

use rustix::io::Errno;

use crate::Cgroups;
use crate::cgroups::{is_at_or_below, is_no_device, is_plain};
use crate::pidfd::is_gone;

impl Cgroups {
    /// Like [`Self::pids_below`], as a proof: what cannot be read, for example because no file descriptors are
    /// left, is an error instead of looking empty. So is a process that this PID namespace does not show, and
    /// a path that no hierarchy shows.
    pub fn try_pids_below(&self, path: &str) -> io::Result<Vec<i32>> {
        let directories = self.directories(path);
        if directories.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("no mounted hierarchy shows the cgroup `{path}`"),
            ));
        }
        let mut pids = BTreeSet::new();
        for top in directories {
            let mut next = vec![top.clone()];
            while let Some(cgroup) = next.pop() {
                let read = std::fs::read_to_string(cgroup.join("cgroup.procs"));
                match unless_vanished(read) {
                    Ok(text) => {
                        for pid in text.iter().flat_map(|text| text.lines()) {
                            pids.insert(shown_pid(pid)?);
                        }
                    }
                    // The processes of a threaded cgroup are listed by a cgroup above it.
                    Err(error) if is_not_supported(&error) && cgroup != top => {}
                    Err(error) => return Err(error),
                }
                let Some(entries) = unless_vanished(std::fs::read_dir(&cgroup))? else {
                    continue;
                };
                for entry in entries {
                    let entry = entry?;
                    if entry.file_type()?.is_dir() {
                        next.push(entry.path());
                    }
                }
            }
        }
        Ok(pids.into_iter().collect())
    }

    /// Like [`Self::contains`], as a proof: only a dead process is in none; if the process cannot be read for
    /// another reason, that is an error.
    pub fn try_contains(&self, path: &str, pid: i32) -> io::Result<bool> {
        if !is_plain(path) {
            return Ok(false);
        }
        let cgroups = Self::of_living(pid)?.unwrap_or_default();
        Ok(cgroups.iter().any(|cgroup| is_at_or_below(cgroup, path)))
    }

    /// Like [`Self::of_pid`]; `None` when the process is dead.
    pub fn of_living(pid: i32) -> io::Result<Option<Vec<String>>> {
        match Self::of_pid(pid) {
            Err(error) if is_gone(&error) => Ok(None),
            cgroups => cgroups.map(Some),
        }
    }
}

/// The cgroup of a process in one hierarchy, from the text of its `/proc/PID/cgroup`: in that of a v1
/// controller, or in the unified one when none is given.
pub(crate) fn place_in(text: &str, controller: Option<&str>) -> Option<String> {
    let mut rows = text.lines().map(|line| line.splitn(3, ':'));
    rows.find_map(|mut row| {
        let (number, controllers, path) = (row.next()?, row.next()?, row.next()?);
        let is_it = match controller {
            Some(controller) => controllers.split(',').any(|one| one == controller),
            None => number == "0" && controllers.is_empty(),
        };
        is_it.then(|| path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
    })
}

/// `None` for a cgroup that has been removed.
fn unless_vanished<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if is_gone(&error) || is_no_device(&error) => Ok(None),
        other => other.map(Some),
    }
}

/// A process in a PID namespace that this one cannot see shows as 0.
fn shown_pid(line: &str) -> io::Result<i32> {
    let pid = line.parse::<i32>().ok().filter(|pid| *pid > 0);
    pid.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the cgroup has a process of another PID namespace (`{line}`)"),
        )
    })
}

/// Listing the processes of a threaded cgroup.
fn is_not_supported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CgroupLayout;

    #[test]
    fn what_cannot_be_read_is_no_proof_that_nothing_is_there() {
        let mounted = tempfile::tempdir().expect("a directory");
        let point = mounted.path().display();
        let line = format!("41 31 0:38 / {point} rw - cgroup2 cgroup2 rw\n");
        let cgroups = Cgroups::of(&CgroupLayout::parse(line.as_bytes()));
        let below = mounted.path().join("conman-x/a.1/deeper");
        std::fs::create_dir_all(&below).expect("made");
        let none = Vec::<i32>::new();
        // It is being removed.
        assert_eq!(cgroups.try_pids_below("/conman-x").expect("read"), none);
        assert_eq!(cgroups.try_pids_below("/conman-y").expect("read"), none);
        let procs = below.join("cgroup.procs");
        std::fs::write(&procs, "17\n4\n").expect("written");
        assert_eq!(cgroups.try_pids_below("/conman-x").expect("read"), [4, 17]);
        std::fs::write(&procs, "17\n0\n").expect("written");
        assert!(cgroups.try_pids_below("/conman-x").is_err());
        // It opens, and cannot be read.
        std::fs::remove_file(&procs).expect("removed");
        std::fs::create_dir(&procs).expect("made");
        assert!(cgroups.try_pids_below("/conman-x").is_err());
        assert_eq!(cgroups.pids_below("/conman-x"), none);
        assert!(cgroups.try_pids_below("conman-x").is_err());
    }

    #[test]
    fn a_processs_place_is_that_of_the_hierarchy_that_is_asked_for() {
        let text = "9:name=systemd:/s\n6:cpu,freezer:/conman-x/a.1 (deleted)\n0::/u:v\n";
        let place = |controller| place_in(text, controller);
        assert_eq!(place(Some("freezer")).as_deref(), Some("/conman-x/a.1"));
        assert_eq!(place(None).as_deref(), Some("/u:v"));
        assert_eq!(place(Some("pids")), None);
        assert_eq!(place_in("9:name=systemd:/s\n", None), None);
    }
}
