//! The disk with what is installed on a machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// What is brought to a machine to be installed: a read-only disk, labelled `conman`.
#[derive(Debug)]
pub struct Medium {
    directory: TempDir,
}

/// Beyond what the files take: the file system's own tables.
const OVERHEAD_BYTES: u64 = 32 << 20;

impl Medium {
    /// With nothing on it.
    ///
    /// # Panics
    /// When there is no room for it.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary folder can be made");
        fs::create_dir(directory.path().join("files")).expect("a folder can be made in it");
        Self { directory }
    }

    /// Puts a file of the host on it.
    ///
    /// # Panics
    /// When it cannot be copied.
    #[must_use]
    pub fn with_file(self, name: &str, source: &Path) -> Self {
        let copied = fs::copy(source, self.files().join(name));
        assert!(copied.is_ok(), "{}: {copied:?}", source.display());
        self
    }

    /// Puts a program on it, without what only debuggers read where that can be taken out: the
    /// machine reads its disks slowly.
    ///
    /// # Panics
    /// When it cannot be copied.
    #[must_use]
    pub fn with_program(self, name: &str, source: &Path) -> Self {
        let stripped = Command::new("strip")
            .args(["--strip-debug", "-o"])
            .args([&self.files().join(name), source])
            .status();
        if stripped.is_ok_and(|status| status.success()) {
            self
        } else {
            self.with_file(name, source)
        }
    }

    /// Puts a text on it.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn with_text(self, name: &str, text: &str) -> Self {
        fs::write(self.files().join(name), text).expect("a small file can be written");
        self
    }

    fn files(&self) -> PathBuf {
        self.directory.path().join("files")
    }

    /// Writes the disk.
    pub(crate) fn image(&self) -> PathBuf {
        let image = self.directory.path().join("image");
        let bytes: u64 = fs::read_dir(self.files())
            .expect("the folder is there")
            .map(|entry| {
                let entry = entry.expect("the folder can be listed");
                entry.metadata().expect("the file is there").len()
            })
            .sum();
        let blocks = (bytes + bytes / 8 + OVERHEAD_BYTES) >> 10;
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-L", "conman", "-d"])
            .args([&self.files(), &image])
            .arg(format!("{blocks}k"))
            // Where it says that the file is new.
            .stdout(Stdio::null())
            .status();
        assert!(made.is_ok_and(|status| status.success()), "mke2fs failed");
        image
    }
}

impl Default for Medium {
    fn default() -> Self {
        Self::new()
    }
}
