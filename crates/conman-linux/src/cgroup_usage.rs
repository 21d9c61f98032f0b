//! What the processes of a cgroup use, on v1, hybrid and v2 hosts.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use procfs::VmStat;
use procfs::net::InterfaceDeviceStatus;
use procfs::process::{Io, StatM};
use rustix::fs::{AtFlags, Mode, OFlags, open, openat, statat};

use crate::Cgroups;
use crate::cgroup_mounts::Hierarchy;
use crate::cgroups::{is_plain, tree};
use crate::proc_files::read_proc;

/// Bytes that suffice for nearly all files that are read here, and most that are read.
const USUAL_BYTES: usize = 4_096;
const MAX_BYTES: u64 = 1 << 20;

/// Bytes of a page in /proc/PID/statm.
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// What the processes of a cgroup use. `None` is what no hierarchy of this host counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResourceUsage {
    /// Processor time since the cgroup was made.
    pub cpu_us: Option<u64>,
    /// How long, and how often, a limit of processor time held it up; 0 without a limit.
    pub throttled_us: Option<u64>,
    pub throttled: Option<u64>,
    /// Without the page cache that can be dropped at once.
    pub memory_bytes: Option<u64>,
    /// Processes killed because memory ran out.
    pub oom_kills: Option<u64>,
    /// Processes and threads, or only processes where the kernel does not count threads.
    pub pids: Option<u64>,
    /// Read from and written to disks. Where the kernel does not count them for the cgroup: by the
    /// processes that are alive.
    pub read_bytes: Option<u64>,
    pub written_bytes: Option<u64>,
}

/// Reads what cgroups below one parent use. The parent is looked up once, because its path takes most of the
/// time otherwise.
#[derive(Debug)]
pub struct UsageReader {
    parents: Vec<Parent>,
}

/// The parent in one hierarchy.
#[derive(Debug)]
struct Parent {
    path: PathBuf,
    directory: OwnedFd,
    counted: Vec<Add>,
}

impl Cgroups {
    /// A reader for the cgroups directly below this one, in v1 hierarchies, the unified one, or both.
    #[must_use]
    pub fn usage_below(&self, parent: &str) -> UsageReader {
        let hierarchies = match is_plain(parent) {
            true => &self.hierarchies[..],
            false => &[],
        };
        let parents = hierarchies.iter().filter_map(|hierarchy| {
            let path = hierarchy.directory(parent)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let directory = open(&path, flags, Mode::empty()).ok()?;
            Some((hierarchy, path, directory))
        });
        let parents: Vec<_> = parents.collect();
        let in_v1 = |controller: &str| parents.iter().any(|(it, ..)| it.controls(controller));
        let counted = |hierarchy: &Hierarchy| match hierarchy.unified {
            true => added(&UNIFIED, |controller| !in_v1(controller)),
            false => added(&V1, |controller| hierarchy.controls(controller)),
        };
        let counted: Vec<_> = parents.iter().map(|(it, ..)| counted(it)).collect();
        let parents = parents.into_iter().zip(counted);
        let parents = parents.map(|((_, path, directory), counted)| Parent {
            path,
            directory,
            counted,
        });
        UsageReader {
            parents: parents.collect(),
        }
    }
}

impl UsageReader {
    /// What the cgroup of this name uses. `pid` is one of its processes: if it has one only, they are not
    /// listed. What is `known` of throttling and of kills for memory is not read.
    #[must_use]
    pub fn read(&self, name: &str, pid: i32, known: ResourceUsage) -> ResourceUsage {
        let mut usage = known;
        if !is_plain(&format!("/{name}")) {
            return usage;
        }
        for parent in &self.parents {
            let directory = parent.directory.as_fd();
            for add in &parent.counted {
                add(&mut usage, Files { directory, name });
            }
        }
        let uncounted = usage.memory_bytes.is_none() || usage.pids.is_none();
        if uncounted || usage.read_bytes.is_none() {
            match usage.pids {
                Some(1) => usage.add_processes(&[pid]),
                _ => usage.add_processes(&self.pids(name)),
            }
        }
        usage
    }

    /// The processes of a cgroup and below, in the first hierarchy that has it.
    fn pids(&self, name: &str) -> Vec<i32> {
        let found = self.parents.iter().find_map(|parent| {
            let links = statat(&parent.directory, name, AtFlags::empty()).ok()?;
            Some((parent, links.st_nlink))
        });
        let listed = match found {
            None => return Vec::new(),
            // A directory counts a link for each one in it.
            Some((parent, 2)) => {
                let directory = parent.directory.as_fd();
                Files { directory, name }.read("cgroup.procs")
            }
            Some((parent, _)) => {
                let cgroups = tree(parent.path.join(name)).into_iter();
                let read = |cgroup: PathBuf| fs::read_to_string(cgroup.join("cgroup.procs"));
                cgroups.filter_map(|cgroup| read(cgroup).ok()).collect()
            }
        };
        let pids = listed.lines().filter_map(|line| line.parse().ok());
        pids.collect()
    }
}

/// The files of one directory.
#[derive(Clone, Copy)]
struct Files<'a> {
    directory: BorrowedFd<'a>,
    name: &'a str,
}

impl Files<'_> {
    fn read(self, file: &str) -> String {
        self.try_read(file).unwrap_or_default()
    }

    /// Reads a file of the kernel's, whose size is unknown before: in one call, as a rule.
    fn try_read(self, file: &str) -> io::Result<String> {
        let path = format!("{}/{file}", self.name);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let mut file = File::from(openat(self.directory, path, flags, Mode::empty())?);
        let mut bytes = vec![0; USUAL_BYTES];
        let read = file.read(&mut bytes)?;
        bytes.truncate(read);
        // The kernel fills the buffer with records, and none that is read here is half as long.
        if read > USUAL_BYTES / 2 {
            file.take(MAX_BYTES).read_to_end(&mut bytes)?;
        }
        String::from_utf8(bytes).map_err(io::Error::other)
    }

    fn number(self, file: &str) -> Option<u64> {
        self.read(file).trim().parse().ok()
    }

    fn field(self, file: &str, name: &str) -> Option<u64> {
        field(&self.read(file), name)
    }
}

/// Adds what a controller counts in its directory.
type Add = fn(&mut ResourceUsage, Files<'_>);

/// Controllers with what they count.
type Counted = [(&'static str, Add)];

fn added(counted: &Counted, is_here: impl Fn(&str) -> bool) -> Vec<Add> {
    let here = counted.iter().filter(|(controller, _)| is_here(controller));
    here.map(|(_, add)| *add).collect()
}

/// In a v1 hierarchy.
const V1: [(&str, Add); 5] = [
    ("cpu", |usage, files| {
        if usage.throttled.is_none() {
            let stat = files.read("cpu.stat");
            usage.throttled = field(&stat, "nr_throttled");
            usage.throttled_us = field(&stat, "throttled_time").map(|ns| ns / 1_000);
        }
    }),
    ("cpuacct", |usage, files| {
        usage.cpu_us = files.number("cpuacct.usage").map(|ns| ns / 1_000);
    }),
    ("memory", |usage, files| {
        let cache = field(&files.read("memory.stat"), "total_inactive_file");
        usage.add_memory(files.number("memory.usage_in_bytes"), cache);
        usage.oom_kills = usage
            .oom_kills
            .or_else(|| files.field("memory.oom_control", "oom_kill"));
    }),
    ("pids", |usage, files| {
        usage.pids = files.number("pids.current");
    }),
    ("blkio", |usage, files| {
        let file = "blkio.throttle.io_service_bytes_recursive";
        let text = files.read(file);
        let sum = |kind: &str| {
            let lines = text.lines().filter_map(|line| {
                let mut words = line.split_whitespace().skip(1);
                (words.next() == Some(kind)).then(|| words.next()?.parse::<u64>().ok())?
            });
            (!text.is_empty()).then(|| lines.sum())
        };
        usage.read_bytes = sum("Read");
        usage.written_bytes = sum("Write");
    }),
];

/// In the unified hierarchy, by the v1 controller that counts the same.
const UNIFIED: [(&str, Add); 4] = [
    ("cpuacct", |usage, files| {
        // The kernel first adds up what every processor has counted; for v1's files it does not.
        let stat = files.read("cpu.stat");
        usage.cpu_us = field(&stat, "usage_usec");
        // A v1 hierarchy with the `cpu` controller counts these instead.
        usage.throttled = usage.throttled.or(field(&stat, "nr_throttled"));
        usage.throttled_us = usage.throttled_us.or(field(&stat, "throttled_usec"));
    }),
    ("memory", |usage, files| {
        if let Some(current) = files.number("memory.current") {
            let cache = field(&files.read("memory.stat"), "inactive_file");
            usage.add_memory(Some(current), cache);
            usage.oom_kills = usage
                .oom_kills
                .or_else(|| files.field("memory.events", "oom_kill"));
        }
    }),
    ("pids", |usage, files| {
        usage.pids = files.number("pids.current");
    }),
    ("blkio", |usage, files| {
        if let Ok(text) = files.try_read("io.stat") {
            let sum = |key: &str| {
                let words = text.split_whitespace();
                let values = words.filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok());
                values.sum()
            };
            usage.read_bytes = Some(sum("rbytes="));
            usage.written_bytes = Some(sum("wbytes="));
        }
    }),
];

impl ResourceUsage {
    fn add_memory(&mut self, current: Option<u64>, cache: Option<u64>) {
        let used = current.map(|current| current.saturating_sub(cache.unwrap_or(0)));
        self.memory_bytes = used;
    }

    /// What is not counted for the cgroup, of its living processes.
    fn add_processes(&mut self, pids: &[i32]) {
        let (mut resident, mut read_bytes, mut written) = (0, 0, 0);
        for pid in pids {
            if self.memory_bytes.is_none()
                && let Ok(memory) = read_proc::<StatM>(format!("/proc/{pid}/statm"))
            {
                resident += memory.resident * page_bytes();
            }
            if self.read_bytes.is_none()
                && let Ok(io) = read_proc::<Io>(format!("/proc/{pid}/io"))
            {
                read_bytes += io.read_bytes;
                written += io.write_bytes;
            }
        }
        self.memory_bytes = self.memory_bytes.or(Some(resident));
        self.pids = self.pids.or(Some(pids.len() as u64));
        if self.read_bytes.is_none() {
            self.read_bytes = Some(read_bytes);
            self.written_bytes = Some(written);
        }
    }
}

impl Cgroups {
    /// Processes of the cgroup and those below that the kernel has killed because memory ran out; `None` if that is
    /// not counted.
    #[must_use]
    pub fn oom_kills(&self, path: &str) -> Option<u64> {
        if !is_plain(path) {
            return None;
        }
        self.hierarchies.iter().find_map(|hierarchy| {
            let directory = hierarchy.directory(path)?;
            let count = |directory: &Path, file| {
                let text = fs::read_to_string(directory.join(file)).ok()?;
                field(&text, "oom_kill")
            };
            if hierarchy.unified {
                // Counts those below, too.
                return count(&directory, "memory.events");
            }
            let own =
                count(&directory, "memory.oom_control").filter(|_| hierarchy.controls("memory"))?;
            let below = fs::read_dir(&directory).into_iter().flatten().flatten();
            let below = below.filter_map(|entry| count(&entry.path(), "memory.oom_control"));
            Some(own + below.sum::<u64>())
        })
    }
}

/// Processes that the kernel has killed since the host booted because memory ran out; `None` if it does not
/// count them.
#[must_use]
pub fn host_oom_kills() -> Option<u64> {
    let counted: VmStat = read_proc("/proc/vmstat").ok()?;
    u64::try_from(*counted.0.get("oom_kill")?).ok()
}

/// Bytes that the network interfaces of a process's network namespace have received and sent, without
/// its loopback interface; `None` if it cannot be read.
#[must_use]
pub fn network_bytes(pid: i32) -> Option<(u64, u64)> {
    let interfaces: InterfaceDeviceStatus = read_proc(format!("/proc/{pid}/net/dev")).ok()?;
    let outside = interfaces.0.values().filter(|one| one.name != "lo");
    Some(outside.fold((0, 0), |sum, one| {
        (sum.0 + one.recv_bytes, sum.1 + one.sent_bytes)
    }))
}

/// The value of a line `NAME VALUE`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(' ')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;

    fn files(directory: &Path) -> Files<'_> {
        Files {
            directory: CWD,
            name: directory.to_str().expect("text"),
        }
    }

    fn write(directory: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(directory).expect("made");
        for (name, text) in files {
            fs::write(directory.join(name), text).expect("written");
        }
    }

    #[test]
    fn v2_is_read_in_bytes_and_microseconds() {
        let root = tempfile::tempdir().expect("a directory");
        let cgroup = root.path().join("conman-1/s.1");
        write(
            &cgroup,
            &[
                (
                    "cpu.stat",
                    "usage_usec 1500000\nnr_throttled 3\nthrottled_usec 250\n",
                ),
                ("memory.current", "5000\n"),
                ("memory.stat", "anon 10\ninactive_file 1000\n"),
                ("memory.events", "oom 2\noom_kill 1\n"),
                ("pids.current", "7\n"),
                (
                    "io.stat",
                    "8:0 rbytes=10 wbytes=20 rios=1\n8:16 rbytes=1 wbytes=2\n",
                ),
                ("cgroup.procs", ""),
            ],
        );
        let mut usage = ResourceUsage::default();
        for (_, add) in UNIFIED {
            add(&mut usage, files(&cgroup));
        }
        let expected = ResourceUsage {
            cpu_us: Some(1_500_000),
            throttled_us: Some(250),
            throttled: Some(3),
            memory_bytes: Some(4_000),
            oom_kills: Some(1),
            pids: Some(7),
            read_bytes: Some(11),
            written_bytes: Some(22),
        };
        assert_eq!(usage, expected);
    }

    #[test]
    fn v1_is_read_in_the_same_units() {
        let root = tempfile::tempdir().expect("a directory");
        let cgroup = root.path();
        write(
            cgroup,
            &[
                (
                    "cpu.stat",
                    "nr_periods 9\nnr_throttled 3\nthrottled_time 250000\n",
                ),
                ("cpuacct.usage", "1500000000\n"),
                ("memory.usage_in_bytes", "5000\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 1000\n"),
                (
                    "memory.oom_control",
                    "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
                ),
                ("pids.current", "7\n"),
                (
                    "blkio.throttle.io_service_bytes_recursive",
                    "8:0 Read 10\n8:0 Write 22\n8:16 Read 1\nTotal 33\n",
                ),
            ],
        );
        let mut usage = ResourceUsage::default();
        for (_, add) in V1 {
            add(&mut usage, files(cgroup));
        }
        let expected = ResourceUsage {
            cpu_us: Some(1_500_000),
            throttled_us: Some(250),
            throttled: Some(3),
            memory_bytes: Some(4_000),
            oom_kills: Some(1),
            pids: Some(7),
            read_bytes: Some(11),
            written_bytes: Some(22),
        };
        assert_eq!(usage, expected);
    }

    #[test]
    fn what_is_known_is_not_read() {
        let root = tempfile::tempdir().expect("a directory");
        let cgroup = root.path();
        let cpu = "nr_throttled 3\nthrottled_time 250000\nthrottled_usec 250\n";
        write(
            cgroup,
            &[
                ("cpu.stat", cpu),
                ("memory.current", "5000\n"),
                ("memory.oom_control", "oom_kill 1\n"),
                ("memory.events", "oom_kill 1\n"),
            ],
        );
        let mut usage = ResourceUsage {
            throttled_us: Some(0),
            throttled: Some(0),
            oom_kills: Some(0),
            ..ResourceUsage::default()
        };
        for (_, add) in V1.iter().chain(&UNIFIED) {
            add(&mut usage, files(cgroup));
        }
        let read = (usage.throttled_us, usage.throttled, usage.oom_kills);
        assert_eq!(read, (Some(0), Some(0), Some(0)));
    }

    #[test]
    fn what_no_hierarchy_counts_comes_from_the_processes() {
        let mut usage = ResourceUsage::default();
        let own = i32::try_from(std::process::id()).expect("fits");
        usage.add_processes(&[own]);
        assert!(
            usage.memory_bytes.is_some_and(|bytes| bytes > 100_000),
            "{usage:?}"
        );
        assert_eq!(usage.pids, Some(1));
        assert_eq!(usage.cpu_us, None);
        assert!(host_oom_kills().is_some());
        assert!(network_bytes(own).is_some() && network_bytes(-1).is_none());
    }
}
