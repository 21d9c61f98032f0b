//! Limits of the bandwidth that cgroups have of a disk, and the weight of all containers together.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cgroup_mounts::{CgroupLayout, Hierarchy};
use crate::session_cgroup::{MakeCgroupError, write};

/// The controller in v1. The v2 one is `io`.
pub(crate) const V1_CONTROLLER: &str = "blkio";
const CONTROLLER: &str = "io";

/// Files with a cgroup's weight: of the scheduler BFQ in both versions, and of `io.cost`. Each exists where
/// the kernel has what enforces it.
const V1_WEIGHTS: &[&str] = &["blkio.bfq.weight"];
const WEIGHTS: &[&str] = &["io.weight", "io.bfq.weight"];

/// A disk, never one of its partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Major and minor number.
    pub device: (u32, u32),
    /// Its node in `/dev`.
    pub node: PathBuf,
}

impl Disk {
    /// The disk with the file system of this file; `None` if it is not on a single disk, as with btrfs, ZFS
    /// and network file systems.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let device = fs::metadata(path)?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let Ok(mut entry) = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")) else {
            return Ok(None);
        };
        if entry.join("partition").exists() {
            entry.pop();
        }
        let numbers = fs::read_to_string(entry.join("dev"))?;
        let parsed = numbers.trim().split_once(':').and_then(|(major, minor)| {
            let device = (major.parse().ok()?, minor.parse().ok()?);
            let node = Path::new("/dev").join(entry.file_name()?);
            Some(Self { device, node })
        });
        Ok(parsed)
    }
}

/// Limits of a container's I/O; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoLimits {
    /// Major and minor number of the disk ([`Disk::device`]).
    pub device: (u32, u32),
    #[serde(default)]
    pub read_bytes_per_s: Option<u64>,
    #[serde(default)]
    pub write_bytes_per_s: Option<u64>,
    /// Weight of the cgroup above, which holds all containers, next to the host's other ones: 1 to 1,000; the
    /// kernel's default is 100.
    #[serde(default)]
    pub total_weight: Option<u16>,
}

impl IoLimits {
    /// Sets them for the cgroup in `directory`. Returns `false` if the hierarchy lacks the controller.
    pub(crate) fn set(
        &self,
        hierarchy: &Hierarchy,
        directory: &Path,
    ) -> Result<bool, MakeCgroupError> {
        let (major, minor) = self.device;
        let device = format!("{major}:{minor}");
        let rates = [
            ("read", "rbps", self.read_bytes_per_s),
            ("write", "wbps", self.write_bytes_per_s),
        ];
        let weights = if hierarchy.unified {
            let file = directory.join("io.max");
            if !file.exists() {
                return Ok(false);
            }
            for (_, key, rate) in rates {
                if let Some(rate) = rate {
                    write(&file, &format!("{device} {key}={rate}"))?;
                }
            }
            WEIGHTS
        } else {
            if !hierarchy.controls(V1_CONTROLLER) {
                return Ok(false);
            }
            for (name, _, rate) in rates {
                if let Some(rate) = rate {
                    let file = directory.join(format!("blkio.throttle.{name}_bps_device"));
                    write(&file, &format!("{device} {rate}"))?;
                }
            }
            V1_WEIGHTS
        };
        let parent = directory.parent().unwrap_or(directory);
        self.total_weight
            .map_or(Ok(()), |weight| set_weight(parent, weights, weight))?;
        Ok(true)
    }
}

fn set_weight(parent: &Path, files: &[&str], weight: u16) -> Result<(), MakeCgroupError> {
    let found = files.iter().map(|file| parent.join(file));
    let mut found = found.filter(|file| file.exists()).peekable();
    if found.peek().is_none() {
        return Err(MakeCgroupError::NoController {
            controller: "io weight (io.cost, or the scheduler BFQ)",
        });
    }
    found.try_for_each(|file| write(&file, &weight.to_string()))
}

/// Enables the v2 controller for the children of these cgroups, the topmost first. Where it belongs to v1, or
/// the kernel lacks it, the limit is refused when it is set.
pub(crate) fn hand_on(ancestors: &[&Path]) {
    for ancestor in ancestors {
        let control = ancestor.join("cgroup.subtree_control");
        if let Err(error) = write(&control, &format!("+{CONTROLLER}")) {
            tracing::debug!(%error, "cannot enable the io controller for child cgroups");
        }
    }
}

impl CgroupLayout {
    /// Whether some hierarchy can limit I/O.
    #[must_use]
    pub fn limits_io(&self) -> bool {
        self.hierarchies().iter().any(|hierarchy| {
            let text = hierarchy
                .directory("")
                .filter(|_| hierarchy.unified)
                .and_then(|top| fs::read_to_string(top.join("cgroup.controllers")).ok());
            hierarchy.controls(V1_CONTROLLER)
                || text.is_some_and(|text| text.split_whitespace().any(|one| one == CONTROLLER))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: IoLimits = IoLimits {
        device: (8, 16),
        read_bytes_per_s: Some(1_000),
        write_bytes_per_s: None,
        total_weight: Some(50),
    };

    /// A hierarchy in a directory with the cgroup `/conman-x/a.1`, which has these files.
    fn hierarchy(kind: &str, files: &[&str]) -> (tempfile::TempDir, CgroupLayout, PathBuf) {
        let mounted = tempfile::tempdir().expect("a directory");
        let point = mounted.path().display();
        let line = format!("37 31 0:34 / {point} rw - {kind}\n");
        let cgroup = mounted.path().join("conman-x/a.1");
        fs::create_dir_all(&cgroup).expect("made");
        for file in files {
            fs::write(mounted.path().join("conman-x").join(file), "").expect("written");
        }
        let layout = CgroupLayout::parse(line.as_bytes());
        (mounted, layout, cgroup)
    }

    fn read(cgroup: &Path, file: &str) -> String {
        fs::read_to_string(cgroup.join(file)).unwrap_or_default()
    }

    #[test]
    fn both_versions_get_the_rate_and_the_weight_of_all() {
        let files = ["a.1/io.max", "io.weight"];
        let (_mounted, layout, cgroup) = hierarchy("cgroup2 cgroup2 rw", &files);
        let set = LIMITS.set(&layout.hierarchies()[0], &cgroup);
        assert!(set.expect("written"));
        assert_eq!(read(&cgroup, "io.max"), "8:16 rbps=1000");
        assert_eq!(read(&cgroup, "../io.weight"), "50");
        let files = ["blkio.bfq.weight"];
        let (_mounted, layout, cgroup) = hierarchy("cgroup cgroup rw,blkio", &files);
        assert!(layout.limits_io());
        let set = LIMITS.set(&layout.hierarchies()[0], &cgroup);
        assert!(set.expect("written"));
        assert_eq!(read(&cgroup, "blkio.throttle.read_bps_device"), "8:16 1000");
        assert_eq!(read(&cgroup, "../blkio.bfq.weight"), "50");
    }

    #[test]
    fn a_host_without_the_controller_or_without_weights_is_told_apart() {
        let (_mounted, layout, cgroup) = hierarchy("cgroup2 cgroup2 rw", &[]);
        assert!(!layout.limits_io());
        let set = LIMITS.set(&layout.hierarchies()[0], &cgroup);
        assert!(!set.expect("nothing to write"));
        let (_mounted, layout, cgroup) = hierarchy("cgroup cgroup rw,blkio", &[]);
        let error = LIMITS.set(&layout.hierarchies()[0], &cgroup);
        let error = error.expect_err("no scheduler with weights").to_string();
        assert!(error.contains("io weight"), "{error}");
    }

    #[test]
    fn a_file_system_without_a_disk_has_none() {
        assert_eq!(Disk::of(Path::new("/proc")).expect("readable"), None);
    }
}
