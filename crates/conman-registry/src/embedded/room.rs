//! Disk space for releases, allocated in advance.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::RegistryError;
use crate::files::open_options;

/// Minimum space allocated beyond the end of the file, so that a new registry can take its first
/// claims on a full disk.
const LEAST_BYTES: u64 = 1 << 20;

/// Keeps as much space allocated beyond the registry file's end as the file is long.
///
/// redb writes changed pages to new places and doubles its file when it runs out of them. With the
/// blocks for one doubling allocated, the file can take every release and note of the sessions it
/// holds after other programs have filled the disk. Only claims make it grow permanently, so a
/// claim is refused while that space is not available. The first claim after a start, and one of a thousand after it,
/// also needs room for a new `generations` file. Where the file system cannot preallocate
/// space, or also copies allocated blocks on write, a full disk may refuse releases too.
#[derive(Debug)]
pub(super) struct Room {
    path: PathBuf,
}

impl Room {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    /// Whether the file still exists under its name. If it was removed, the next start of the
    /// daemon would miss its records, although this daemon could still write.
    pub(super) fn has_file(&self) -> bool {
        !matches!(fs::metadata(&self.path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Allocates the space unless it already is.
    pub(super) fn ensure(&self) -> Result<(), RegistryError> {
        self.allocate().map_err(|source| RegistryError::Io {
            action: "set space aside for",
            path: self.path.clone(),
            source: Arc::new(source),
        })
    }

    fn allocate(&self) -> io::Result<()> {
        let metadata = fs::metadata(&self.path)?;
        let wanted = metadata
            .len()
            .saturating_add(metadata.len().max(LEAST_BYTES));
        // `st_blocks` counts units of 512 bytes, whatever the file system's block size is.
        if metadata.blocks().saturating_mul(512) >= wanted {
            return Ok(());
        }
        let file = open_options().open(&self.path)?;
        match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, wanted) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
