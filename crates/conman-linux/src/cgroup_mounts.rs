//! Finds the mounted cgroup hierarchies.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

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
    options: Vec<String>,
}

impl Hierarchy {
    /// Whether this v1 hierarchy has the controller.
    pub(crate) fn controls(&self, controller: &str) -> bool {
        !self.unified && self.options.iter().any(|option| option == controller)
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
    text.split(|&byte| byte == b'\n')
        .filter_map(parse_line)
        .filter(|(device, hierarchy)| seen.insert((device.clone(), hierarchy.root.clone())))
        .map(|(_, hierarchy)| hierarchy)
        .collect()
}

/// A line is `id parent device root mount-point options [optional…] - type source options`
/// (proc_pid_mountinfo(5)).
fn parse_line(line: &[u8]) -> Option<(Vec<u8>, Hierarchy)> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let separator = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
    let unified = match *fields.get(separator + 1)? {
        b"cgroup" => false,
        b"cgroup2" => true,
        _ => return None,
    };
    let root = String::from_utf8(unescape(fields[3])).ok()?;
    let mount_point = PathBuf::from(OsString::from_vec(unescape(fields[4])));
    let options = fields.get(separator + 3).copied().unwrap_or_default();
    let options = String::from_utf8_lossy(options);
    Some((
        fields[2].to_vec(),
        Hierarchy {
            unified,
            root,
            mount_point,
            options: options.split(',').map(str::to_owned).collect(),
        },
    ))
}

/// Decodes space, tab, newline and backslash, which are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
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
    plain
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
            prop_assert_eq!(unescape(name.as_bytes()), name.as_bytes());
        }
    }
}
