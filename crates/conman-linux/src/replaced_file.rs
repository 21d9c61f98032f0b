//! Replaces small files atomically and durably.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Writes a file durably: after a crash either the old or the new file is there. Only its owner may read it.
/// A file of the same name with `.new` appended is overwritten.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(&new).and_then(|mut file| {
        // A leftover file keeps the permissions that it was created with.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(bytes)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&new, path)) {
        // On a full disk, this frees a block for other files.
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    sync_parent(path)
}

/// Makes the creation, renaming or removal of a file durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("state.json");
        let draft = dir.path().join("state.json.new");
        fs::write(&draft, "left behind, and to be read by all").expect("written");
        replace_file(&path, b"one and more").expect("made");
        replace_file(&path, b"two").expect("replaced");
        assert_eq!(fs::read(&path).expect("read"), b"two");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // Where it cannot be written, nothing changes.
        fs::create_dir(&draft).expect("made");
        replace_file(&path, b"three").expect_err("there is a directory");
        assert_eq!(fs::read(&path).expect("read"), b"two");
    }
}
