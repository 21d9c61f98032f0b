//! The administrator's token, which the first start of the daemon makes.

use std::io;
use std::path::{Path, PathBuf};

use conman_linux::replace_file;
use subtle::ConstantTimeEq as _;
use thiserror::Error;

use crate::bearer::{self, GenerateError, TokenHash, generate};
use crate::private_file::{PrivateFileError, read_private_file};
use crate::{Caller, CallerOrigin, Scope};

/// A token and a newline need a quarter of it.
const MAX_FILE_BYTES: u64 = 256;

/// The administrator's token, in a file that only root and the daemon's user can read: as the admin
/// socket's, its permissions decide who is an administrator.
#[derive(Debug)]
pub struct AdminToken {
    path: PathBuf,
    hash: TokenHash,
}

/// Why the administrator's token is not available.
#[derive(Debug, Error)]
pub enum AdminTokenError {
    #[error("the administrator's token cannot be used")]
    File(#[from] PrivateFileError),
    #[error(
        "{path} contains no administrator's token; remove it, and the next start of conman makes \
         a new one"
    )]
    NoToken { path: PathBuf },
    #[error("cannot write the administrator's token to {path}")]
    Create {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Random(#[from] GenerateError),
}

impl AdminToken {
    /// Reads the token in `path`, or makes one if the file does not exist.
    ///
    /// # Errors
    /// A file that other users can read or write, or that contains something else.
    pub fn open(path: &Path) -> Result<Self, AdminTokenError> {
        let path = path.to_path_buf();
        let text = match read_private_file(&path, MAX_FILE_BYTES) {
            Ok(text) => text,
            Err(PrivateFileError::Read { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                create(&path)?
            }
            Err(error) => return Err(error.into()),
        };
        let token = text.trim();
        if !bearer::is_complete(token, Scope::Admin) {
            return Err(AdminTokenError::NoToken { path });
        }
        let hash = bearer::hash(token);
        Ok(Self { path, hash })
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The administrator, if `token` is theirs.
    pub(crate) fn find(&self, token: &str) -> Option<Caller> {
        bool::from(self.hash.ct_eq(&bearer::hash(token))).then(|| Caller {
            name: "administrator".to_owned(),
            scope: Scope::Admin,
            origin: CallerOrigin::Token,
        })
    }
}

fn create(path: &Path) -> Result<String, AdminTokenError> {
    let text = generate(Scope::Admin)?.text + "\n";
    replace_file(path, text.as_bytes()).map_err(|source| AdminTokenError::Create {
        path: path.to_path_buf(),
        source,
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn the_token_is_made_once_for_its_owner_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.token");
        let first = AdminToken::open(&path).expect("made");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o7777, 0o600);
        let text = fs::read_to_string(&path).expect("readable");
        let caller = first.find(text.trim()).expect("known");
        assert_eq!(caller.scope, Scope::Admin);
        let second = AdminToken::open(&path).expect("read");
        assert!(second.find(text.trim()).is_some());
        assert_eq!(fs::read_to_string(&path).expect("readable"), text);
        for other in ["", "cmn_admin_", &text] {
            assert_eq!(second.find(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_file_that_others_can_read_or_that_has_no_token_is_refused_and_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.token");
        AdminToken::open(&path).expect("made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("chmod");
        let error = AdminToken::open(&path).expect_err("others can read it");
        assert!(matches!(error, AdminTokenError::File(_)), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        let read = generate(Scope::Read).expect("random numbers").text;
        for text in ["", "cmn_admin_short\n", "a word\n", &read] {
            fs::write(&path, text).expect("written");
            let error = AdminToken::open(&path).expect_err(text);
            assert!(error.to_string().contains("remove it"), "{error}");
            assert_eq!(fs::read_to_string(&path).expect("there"), text);
        }
    }
}
