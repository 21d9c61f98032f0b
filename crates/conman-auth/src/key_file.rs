//! The file with the key of connect tokens.

use std::io;
use std::path::{Path, PathBuf};

use conman_linux::replace_file;
use pasetors::keys::{Generate as _, SymmetricKey};
use pasetors::paserk::FormatAsPaserk as _;
use pasetors::version4::V4;
use thiserror::Error;

use crate::private_file::{PrivateFileError, read_private_file};

/// The key, as a PASERK string and a newline.
const FILE: &str = "connect.key";

/// A PASERK of a symmetric key has 53 bytes.
const MAX_FILE_BYTES: u64 = 128;

/// Why the key of connect tokens is not available.
#[derive(Debug, Error)]
pub enum KeyFileError {
    #[error("the key of connect tokens cannot be used")]
    File(#[from] PrivateFileError),
    #[error(
        "the key file {path} holds no key; remove it to make conman create a new one, which \
         invalidates all current connect tokens"
    )]
    NoKey { path: PathBuf },
    #[error("cannot create the key file {path}")]
    Create {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot generate a random key")]
    Random,
}

/// Reads the key in `state_dir`, or creates one. Only the daemon that holds the lock of the state
/// directory may call this: two callers could each create a key.
pub(crate) fn open(state_dir: &Path) -> Result<SymmetricKey<V4>, KeyFileError> {
    let path = state_dir.join(FILE);
    match read_private_file(&path, MAX_FILE_BYTES) {
        Ok(text) => {
            SymmetricKey::try_from(text.trim_end()).map_err(|_| KeyFileError::NoKey { path })
        }
        Err(PrivateFileError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            create(path)
        }
        Err(error) => Err(error.into()),
    }
}

fn create(path: PathBuf) -> Result<SymmetricKey<V4>, KeyFileError> {
    let key = SymmetricKey::<V4>::generate().map_err(|_| KeyFileError::Random)?;
    let mut text = String::new();
    key.fmt(&mut text).map_err(|_| KeyFileError::Random)?;
    text.push('\n');
    match replace_file(&path, text.as_bytes()) {
        Ok(()) => Ok(key),
        Err(source) => Err(KeyFileError::Create { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

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
    fn a_key_file_that_others_could_know_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        open(folder.path()).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let error = open(folder.path()).expect_err("readable by its group");
        assert!(matches!(error, KeyFileError::File(_)), "{error}");
    }

    #[test]
    fn a_damaged_key_is_refused_rather_than_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(FILE);
        open(folder.path()).expect("made");
        for text in ["", "k4.local.", "k4.local.AAAA", &"x".repeat(100)] {
            fs::write(&path, text).expect("writing");
            let error = open(folder.path()).expect_err(text);
            assert!(error.to_string().contains("holds no key"), "{error}");
        }
    }
}
