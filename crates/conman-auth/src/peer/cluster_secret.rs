//! The secret that the nodes of a fleet share.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use ring::hmac;
use thiserror::Error;

use crate::private_file::{PrivateFileError, read_private_file};

/// Maximum size of a secret file.
const MAX_FILE_BYTES: u64 = 4 * 1024;
/// Maximum number of secrets in a file: the current one, and those before and after it during a
/// replacement.
const MAX_SECRETS: usize = 4;
/// Minimum length of a secret, in bytes of text: 16 random bytes in hexadecimal.
const MIN_SECRET_BYTES: usize = 32;

/// The secret of a fleet, from a file with one secret a line. The first signs; what any of them has
/// signed is valid. So a secret can be replaced without an interruption between nodes: first add the
/// new one after the old one on all nodes, then put it first, then remove the old one.
pub struct ClusterSecret {
    path: PathBuf,
    keys: ArcSwap<Vec<hmac::Key>>,
}

/// Why a secret file cannot be used.
#[derive(Debug, Error)]
pub enum ClusterSecretError {
    #[error("the secret file cannot be used")]
    File(#[from] PrivateFileError),
    #[error(
        "line {line} of the secret file {path} has fewer than {MIN_SECRET_BYTES} characters; make \
         a secret with: head -c 32 /dev/urandom | base64"
    )]
    Short { path: PathBuf, line: usize },
    #[error(
        "the secret file {path} holds {count} secrets; it must hold one, and at most {MAX_SECRETS} \
         while the secret is replaced"
    )]
    Count { path: PathBuf, count: usize },
}

impl ClusterSecret {
    /// Reads the file.
    ///
    /// # Errors
    /// A file that other users can read or write, that is not a regular file, or that holds no
    /// valid secret.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self, ClusterSecretError> {
        let path = path.into();
        let keys = ArcSwap::from_pointee(read(&path)?);
        Ok(Self { path, keys })
    }

    /// Reads the file again, and returns whether its secrets or their order have changed.
    ///
    /// # Errors
    /// As for [`ClusterSecret::load`]; the secret stays as it was.
    pub fn reload(&self) -> Result<bool, ClusterSecretError> {
        let keys = read(&self.path)?;
        let changed = derive(&keys, b"") != self.derive(b"");
        if changed {
            self.keys.store(Arc::new(keys));
        }
        Ok(changed)
    }

    /// Path of the secret file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Derives a key of 32 bytes for a purpose from each secret, in the file's order.
    pub(crate) fn derive(&self, purpose: &[u8]) -> Vec<Vec<u8>> {
        derive(&self.keys.load(), purpose)
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ClusterSecret")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

fn derive(keys: &[hmac::Key], purpose: &[u8]) -> Vec<Vec<u8>> {
    keys.iter()
        .map(|key| hmac::sign(key, purpose).as_ref().to_vec())
        .collect()
}

fn read(path: &Path) -> Result<Vec<hmac::Key>, ClusterSecretError> {
    let text = read_private_file(path, MAX_FILE_BYTES)?;
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let secret = line.trim();
        if secret.is_empty() || secret.starts_with('#') {
            continue;
        }
        if secret.len() < MIN_SECRET_BYTES {
            return Err(ClusterSecretError::Short {
                path: path.to_path_buf(),
                line: index + 1,
            });
        }
        keys.push(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()));
    }
    if !(1..=MAX_SECRETS).contains(&keys.len()) {
        return Err(ClusterSecretError::Count {
            path: path.to_path_buf(),
            count: keys.len(),
        });
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const OLD: &str = "0123456789abcdef0123456789abcdef";
    const NEW: &str = "fedcba9876543210fedcba9876543210";

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fleet.key");
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
        (folder, path)
    }

    #[test]
    fn a_file_that_has_changed_is_read_again_and_a_bad_one_is_not_used() {
        let (_one, old_path) = file(&format!("{OLD}\n{NEW}\n"), 0o600);
        let (_other, new_path) = file(&format!("# two\n\n{NEW}\n{OLD}\n"), 0o600);
        let old = ClusterSecret::load(old_path).expect("valid").derive(b"x");
        let secret = ClusterSecret::load(&new_path).expect("valid");
        let reversed: Vec<_> = old.iter().rev().cloned().collect();
        assert_eq!(secret.derive(b"x"), reversed);
        assert_ne!(secret.derive(b"y"), reversed);
        fs::write(&new_path, NEW).expect("written");
        assert!(secret.reload().expect("valid"), "it has changed");
        assert!(!secret.reload().expect("valid"), "not again");
        assert_eq!(secret.derive(b"x"), old[1..]);
        fs::write(&new_path, "short").expect("written");
        secret.reload().expect_err("too short");
        assert_eq!(secret.derive(b"x"), old[1..], "it stays as it was");
    }

    #[test]
    fn a_file_that_is_no_secret_is_refused_with_its_reason() {
        for (text, reason) in [
            ("", "holds 0 secrets"),
            ("\n\nsecret\n", "line 3"),
            (&format!("{OLD}\n").repeat(5), "holds 5 secrets"),
        ] {
            let (_folder, path) = file(text, 0o600);
            let error = ClusterSecret::load(path).expect_err(reason);
            assert!(error.to_string().contains(reason), "{error}");
        }
        let (_folder, path) = file(OLD, 0o640);
        let error = ClusterSecret::load(path).expect_err("open to others");
        assert!(matches!(error, ClusterSecretError::File(_)), "{error}");
    }

    #[test]
    fn the_secret_is_not_shown_by_debug() {
        let (_folder, path) = file(OLD, 0o600);
        let secret = ClusterSecret::load(path).expect("valid");
        assert!(!format!("{secret:?}").contains(OLD));
    }
}
