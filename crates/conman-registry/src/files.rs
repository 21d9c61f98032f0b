//! Creates files that only their owner can read and whose names are durable.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use conman_linux::{remove_if_present, sync_parent, with_suffix};

/// Private to its owner; never follows a symbolic link.
pub(crate) fn open_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    options
}

/// Creates the state directory, readable only by its owner: specs may hold secrets.
pub(crate) fn ensure_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Renames a damaged file to the same name with `.damaged` appended. One such file is kept; a later
/// one replaces it.
pub(crate) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let aside = with_suffix(path, ".damaged");
    fs::rename(path, &aside)?;
    sync_parent(path)?;
    Ok(aside)
}

/// Gives a file a second name, the same with `.damaged` appended, so that the first name can be
/// replaced without a moment in which no file exists. `None` when there is no such file.
pub(crate) fn keep_as_damaged(path: &Path) -> io::Result<Option<PathBuf>> {
    let aside = with_suffix(path, ".damaged");
    remove_if_present(&aside)?;
    match fs::hard_link(path, &aside) {
        Ok(()) => Ok(Some(aside)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
