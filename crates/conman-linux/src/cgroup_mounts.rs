//! Finds the mounted cgroup hierarchies.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use procfs::process::MountInfo;

/// Where programs look for cgroups.
const USUAL_ROOT: &str = "/sys/fs/cgroup";

/// The cgroup hierarchies to use: all mounted ones, or a part of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupLayout {
    hierarchies: Vec<Hierarchy>,
}

/// Which of the mounted hierarchies to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupPart {
    All,
    /// As if the host had only v1.
    V1,
    /// As if the host had only v2.
    Unified,
}

impl CgroupLayout {
    /// Finds what is mounted, which may be nothing. Later mounts are not noticed.
    pub fn detect() -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read("/proc/self/mountinfo")?))
    }

    /// What the text of a `/proc/PID/mountinfo` describes.
    #[must_use]
    pub fn parse(mountinfo: &[u8]) -> Self {
        Self {
            hierarchies: parse_mountinfo(mountinfo),
        }
    }

    /// Restricts it to a part.
    #[must_use]
    pub fn part(mut self, part: CgroupPart) -> Self {
        self.hierarchies.retain(|hierarchy| match part {
            CgroupPart::All => true,
            CgroupPart::V1 => !hierarchy.unified,
            CgroupPart::Unified => hierarchy.unified,
        });
        self
    }

    pub(crate) fn hierarchies(&self) -> &[Hierarchy] {
        &self.hierarchies
    }
}

/// One mounted cgroup hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    /// Whether it is the unified one (v2).
    pub(crate) unified: bool,
    /// Which directory of the hierarchy is mounted; `/` unless the mount shows a part only.
    root: String,
    mount_point: PathBuf,
    /// The controllers of a v1 hierarchy, among other options of it; none for the unified one.
    options: BTreeSet<String>,
}

impl Hierarchy {
    /// Whether this v1 hierarchy has the controller.
    pub(crate) fn controls(&self, controller: &str) -> bool {
        !self.unified && self.options.contains(controller)
    }

    /// Where programs look for this hierarchy, below `/sys/fs/cgroup`; empty for that directory itself. `None` if
    /// the host has it elsewhere.
    pub(crate) fn usual_place(&self) -> Option<&str> {
        self.mount_point.strip_prefix(USUAL_ROOT).ok()?.to_str()
    }

    /// The directory of the cgroup with this path; `None` where the mount does not show it.
    pub(crate) fn directory(&self, path: &str) -> Option<PathBuf> {
        let below = if self.root == "/" {
            path
        } else {
            path.strip_prefix(self.root.as_str())?
        };
        if !below.is_empty() && !below.starts_with('/') {
            return None;
        }
        Some(self.mount_point.join(below.trim_start_matches('/')))
    }
}

/// The cgroup hierarchies in the text of `/proc/PID/mountinfo`, each once.
fn parse_mountinfo(text: &[u8]) -> Vec<Hierarchy> {
    let mut seen = BTreeSet::new();
    String::from_utf8_lossy(text)
        .lines()
        // A host may have a hundred thousand others.
        .filter(|line| line.contains(" - cgroup"))
        .filter_map(|line| hierarchy(MountInfo::from_line(line).ok()?))
        .filter(|(device, hierarchy)| seen.insert((device.clone(), hierarchy.root.clone())))
        .map(|(_, hierarchy)| hierarchy)
        .collect()
}

/// `None` if something else is mounted there.
fn hierarchy(mount: MountInfo) -> Option<(String, Hierarchy)> {
    let unified = match mount.fs_type.as_str() {
        "cgroup" => false,
        "cgroup2" => true,
        _ => return None,
    };
    let hierarchy = Hierarchy {
        unified,
        root: unescape(&mount.root)?,
        mount_point: unescape(mount.mount_point.to_str()?)?.into(),
        options: mount.super_options.into_keys().collect(),
    };
    Some((mount.majmin, hierarchy))
}

/// Decodes space, tab, newline and backslash, which are written as a backslash and three octal digits.
/// `procfs` leaves them as they are.
fn unescape(field: &str) -> Option<String> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| byte == b'\\').and_then(|digits| {
            digits.iter().try_fold(0_u32, |value, digit| {
                matches!(digit, b'0'..=b'7').then(|| value * 8 + u32::from(digit - b'0'))
            })
        });
        match octal.and_then(|value| u8::try_from(value).ok()) {
            Some(value) => {
                plain.push(value);
                rest = &tail[3..];
            }
            None => {
                plain.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8(plain).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HYBRID: &[u8] = b"31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu rw shared:9 master:1 - cgroup cgroup rw,cpu\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n\
        99 31 0:29 / /somewhere/else rw - cgroup cgroup rw,cpu\n\
        50 31 0:40 /docker/abc /sys/fs/with\\040space rw - cgroup cgroup rw,pids\n";

    #[test]
    fn every_hierarchy_is_found_once_whatever_else_is_mounted() {
        let found = parse_mountinfo(HYBRID);
        let points: Vec<_> = found
            .iter()
            .map(|h| (h.mount_point.to_str(), h.unified))
            .collect();
        assert_eq!(
            points,
            [
                (Some("/sys/fs/cgroup/cpu"), false),
                (Some("/sys/fs/cgroup/unified"), true),
                (Some("/sys/fs/with space"), false),
            ]
        );
    }

    #[test]
    fn a_cgroup_outside_a_partial_mount_has_no_directory() {
        let found = parse_mountinfo(HYBRID);
        let whole = found[0].directory("/conman-1/a.1");
        assert_eq!(
            whole,
            Some(PathBuf::from("/sys/fs/cgroup/cpu/conman-1/a.1"))
        );
        assert_eq!(
            found[2].directory("/docker/abc/x"),
            Some(PathBuf::from("/sys/fs/with space/x"))
        );
        assert_eq!(found[2].directory("/docker/abcd"), None);
        assert_eq!(found[2].directory("/conman-1/a.1"), None);
    }

    proptest! {
        #[test]
        fn no_mountinfo_panics(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_mountinfo(&text);
        }

        #[test]
        fn unescaping_leaves_plain_names_alone(name in "[a-z0-9./-]{0,40}") {
            prop_assert_eq!(unescape(&name), Some(name));
        }
    }
}
