//! The file with the key of connect tokens.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use conman_linux::replace_file;
use pasetors::keys::{Generate as _, SymmetricKey};
use pasetors::paserk::FormatAsPaserk as _;
use pasetors::version4::V4;
use rustix::fs::OFlags;
use thiserror::Error;

/// The key, as a PASERK string and a newline.
const FILE: &str = "connect.key";

/// A PASERK of a symmetric key has 53 bytes.
const MAX_FILE_BYTES: u64 = 128;

/// Why the key of connect tokens is not available.
#[derive(Debug, Error)]
pub enum KeyFileError {
    #[error("cannot {action} the key file {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the key file {path} is not safe to use: {why}; remove it to make conman create a new one, \
         which invalidates all current connect tokens"
    )]
    Unsafe { path: PathBuf, why: &'static str },
    #[error("cannot generate a random key")]
    Random,
}

/// Reads the key in `state_dir`, or creates one. Only the daemon that holds the lock of the state
/// directory may call this: two callers could each create a key.
pub(crate) fn open(state_dir: &Path) -> Result<SymmetricKey<V4>, KeyFileError> {
    match read(&state_dir.join(FILE))? {
        Some(key) => Ok(key),
        None => create(state_dir),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KeyFileError {
    move |source| KeyFileError::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}

fn read(path: &Path) -> Result<Option<SymmetricKey<V4>>, KeyFileError> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let flags = flags.bits().cast_signed();
    let mut file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open", path)(error)),
    };
    let refused = |why| KeyFileError::Unsafe {
        path: path.to_path_buf(),
        why,
    };
    let metadata = file.metadata().map_err(failed("read", path))?;
    if !metadata.is_file() {
        return Err(refused("it is not a regular file"));
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(refused("other users may read or change it"));
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(refused("it belongs to another user"));
    }
    let mut text = String::new();
    (&mut file)
        .take(MAX_FILE_BYTES)
        .read_to_string(&mut text)
        .map_err(failed("read", path))?;
    SymmetricKey::try_from(text.trim_end())
        .map(Some)
        .map_err(|_| refused("it holds no key"))
}

fn create(state_dir: &Path) -> Result<SymmetricKey<V4>, KeyFileError> {
    let key = SymmetricKey::<V4>::generate().map_err(|_| KeyFileError::Random)?;
    let mut text = String::new();
    key.fmt(&mut text).map_err(|_| KeyFileError::Random)?;
    text.push('\n');
    let path = state_dir.join(FILE);
    replace_file(&path, text.as_bytes()).map_err(failed("create", &path))?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn the_key_is_made_once_for_its_owner_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        // Left by a daemon that was killed while it created the key.
        fs::write(folder.path().join("connect.key.new"), "k4.lo").expect("writing");
        let key = open(folder.path()).expect("made");
        let metadata = fs::metadata(folder.path().join(FILE)).expect("there");
        assert_eq!(metadata.mode() & 0o7777, 0o600);
        assert!(!folder.path().join("connect.key.new").exists());
        assert!(key == open(folder.path()).expect("read"));
    }

    #[test]
    fn a_key_file_that_others_could_know_or_choose_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        open(folder.path()).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let error = open(folder.path()).expect_err("readable by its group");
        assert!(matches!(error, KeyFileError::Unsafe { .. }));
        fs::rename(&path, folder.path().join("elsewhere")).expect("rename");
        symlink("elsewhere", &path).expect("symlink");
        assert!(open(folder.path()).is_err(), "a symlink was followed");
    }

    #[test]
    fn a_damaged_key_is_refused_rather_than_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        open(folder.path()).expect("made");
        for text in ["", "k4.local.", "k4.local.AAAA", &"x".repeat(1_000)] {
            fs::write(&path, text).expect("writing");
            let error = open(folder.path()).expect_err(text);
            assert!(error.to_string().contains("holds no key"), "{error}");
        }
    }
}
