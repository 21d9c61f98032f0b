//! How the roots of native sessions are made, and the room for what sessions write.

use std::fs;
use std::io;
use std::path::Path;

use conman_linux::LoopDevice;
use serde::Serialize;

/// Where the kernel describes mounted BTRFS file systems.
const FILE_SYSTEMS: &str = "/sys/fs/btrfs";

/// What BTRFS allocates space for.
const KINDS: [&str; 3] = ["data", "metadata", "system"];

/// The store of sessions' roots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Roots {
    pub store: &'static str,
    /// Bytes of its file system.
    pub bytes: Option<u64>,
    /// `None` while it is not mounted.
    pub used_bytes: Option<u64>,
    /// What it lacks.
    pub missing: Option<String>,
}

impl Roots {
    /// Overlays in a directory, which need not exist yet.
    #[must_use]
    pub fn overlays(directory: &Path) -> Self {
        let existing = directory.ancestors().find(|path| path.exists());
        let found = existing.and_then(|path| rustix::fs::statvfs(path).ok());
        let room = found.map(|found| {
            let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
            (bytes(found.f_blocks), bytes(found.f_bavail))
        });
        Self {
            store: "overlay",
            bytes: room.map(|(bytes, _)| bytes),
            used_bytes: room.map(|(bytes, free)| bytes.saturating_sub(free)),
            missing: None,
        }
    }

    /// Snapshots in the BTRFS file system of a file, which the daemon makes.
    #[must_use]
    pub fn snapshots(file: &Path) -> Self {
        let kernel = fs::read_to_string("/proc/filesystems").unwrap_or_default();
        let is_there = |directory: &Path| directory.join("mkfs.btrfs").is_file();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let missing = match std::env::split_paths(&path).any(|directory| is_there(&directory)) {
            _ if !kernel.split_whitespace().any(|name| name == "btrfs") => {
                Some("the kernel has no BTRFS; load its module")
            }
            false => Some("there is no mkfs.btrfs; install the package btrfs-progs"),
            true => None,
        };
        Self {
            store: "btrfs",
            bytes: fs::metadata(file).ok().map(|file| file.len()),
            used_bytes: used_bytes(file).ok(),
            missing: missing.map(str::to_owned),
        }
    }

    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mib = |bytes: u64| bytes >> 20;
        let room = match (self.used_bytes, self.bytes) {
            (Some(used), Some(bytes)) => {
                format!("{} of {} MiB are used", mib(used), mib(bytes))
            }
            (None, Some(bytes)) => format!("{} MiB, not in use at present", mib(bytes)),
            (_, None) => "made at the daemon's start".to_owned(),
        };
        let missing = self.missing.as_ref();
        let missing = missing.map_or_else(String::new, |missing| format!(". It lacks: {missing}"));
        format!(
            "Roots of native sessions: images.store = \"{}\", {room}{missing}.",
            self.store
        )
    }
}

/// What the file system of a file has in use, as the kernel counts it.
fn used_bytes(file: &Path) -> io::Result<u64> {
    let device = LoopDevice::find(file)?.ok_or(io::ErrorKind::NotFound)?;
    let device = device.node().file_name().unwrap_or_default();
    for entry in fs::read_dir(FILE_SYSTEMS)?.flatten() {
        let described = entry.path();
        if !described.join("devices").join(device).exists() {
            continue;
        }
        return KINDS.iter().try_fold(0, |sum, kind| {
            let path = described.join("allocation").join(kind).join("bytes_used");
            let text = fs::read_to_string(path)?;
            let bytes: u64 = text.trim().parse().map_err(io::Error::other)?;
            Ok(sum + bytes)
        });
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_store_its_room_and_what_it_lacks() {
        let roots = Roots {
            store: "btrfs",
            bytes: Some(1 << 30),
            used_bytes: Some(64 << 20),
            missing: None,
        };
        let text = roots.to_text();
        assert!(text.contains("\"btrfs\", 64 of 1024 MiB"), "{text}");
        let absent = Roots {
            bytes: None,
            used_bytes: None,
            missing: Some("a program".to_owned()),
            ..roots
        };
        assert!(absent.to_text().contains("It lacks: a program."));
        let here = Roots::overlays(Path::new("/no/such/directory"));
        assert!(here.used_bytes <= here.bytes, "{here:?}");
    }

    #[test]
    fn a_file_that_is_not_mounted_has_no_use() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let roots = Roots::snapshots(file.path());
        assert_eq!((roots.bytes, roots.used_bytes), (Some(0), None));
    }
}
