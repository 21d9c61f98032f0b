//! A small file system that a test fills.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs; unmounted when it is dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one at a directory; `options` as of tmpfs.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn mount(at: &Path, options: &str) -> Self {
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(at)
            .status();
        assert!(mounted.expect("mount runs").success());
        Self(at.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, since a session may not have ended.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
