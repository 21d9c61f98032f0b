//! The token file: checked strictly, replaced as a whole.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use thiserror::Error;

use crate::private_file::{PrivateFileError, read_private_file};
use crate::token_set::TokenSet;
use crate::{Caller, TokenMistake};

/// Maximum size of a token file: a thousand entries need a sixth of it.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The bearer tokens, from a file of `[[token]]` tables with `name`, `scope` and `sha256`.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    tokens: ArcSwap<TokenSet>,
}

/// Why a token file cannot be used.
#[derive(Debug, Error)]
pub enum TokenFileError {
    #[error("the token file cannot be used")]
    File(#[from] PrivateFileError),
    #[error("{path}:{mistake}")]
    Mistake {
        path: PathBuf,
        mistake: TokenMistake,
    },
}

impl TokenFile {
    /// Reads the file.
    ///
    /// # Errors
    /// A file that other users can read or write, that is not a regular file, or that holds a
    /// mistake: the first.
    pub fn load(path: impl Into<PathBuf>) -> Result<Self, TokenFileError> {
        let path = path.into();
        let tokens = read(&path)?;
        Ok(Self {
            path,
            tokens: ArcSwap::from_pointee(tokens),
        })
    }

    /// Reads the file again and returns the number of valid tokens.
    ///
    /// # Errors
    /// As for [`TokenFile::load`]; the tokens stay as they were.
    pub fn reload(&self) -> Result<usize, TokenFileError> {
        let tokens = read(&self.path)?;
        let count = tokens.len();
        self.tokens.store(Arc::new(tokens));
        Ok(count)
    }

    /// The number of valid tokens.
    #[must_use]
    pub fn count(&self) -> usize {
        self.tokens.load().len()
    }

    /// Path of the token file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The caller with this token, if it is valid.
    #[must_use]
    pub fn find(&self, token: &str) -> Option<Caller> {
        self.tokens.load().find(token)
    }
}

fn read(path: &Path) -> Result<TokenSet, TokenFileError> {
    let text = read_private_file(path, MAX_FILE_BYTES)?;
    TokenSet::parse(&text).map_err(|mistake| TokenFileError::Mistake {
        path: path.to_path_buf(),
        mistake,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::{NewToken, Scope, generate};

    fn new_token(scope: Scope) -> NewToken {
        generate(scope).expect("random numbers")
    }

    fn write(path: &Path, mode: u32, tokens: &[(&str, Scope, &NewToken)]) {
        let text: String = tokens
            .iter()
            .map(|(name, scope, token)| {
                format!(
                    "[[token]]\nname = \"{name}\"\nscope = \"{scope}\"\nsha256 = \"{}\"\n",
                    token.sha256
                )
            })
            .collect();
        write_text(path, mode, &text);
    }

    fn write_text(path: &Path, mode: u32, text: &str) {
        fs::write(path, text).expect("writing");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
    }

    #[test]
    fn a_reload_replaces_the_tokens() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens.toml");
        let (old, new) = (new_token(Scope::Admin), new_token(Scope::Read));
        write(&path, 0o600, &[("old", Scope::Admin, &old)]);
        let tokens = TokenFile::load(&path).expect("valid");
        assert_eq!(
            tokens.find(&old.text).map(|caller| caller.scope),
            Some(Scope::Admin)
        );
        write(&path, 0o600, &[("new", Scope::Read, &new)]);
        assert_eq!(tokens.reload().expect("valid"), 1);
        assert_eq!(tokens.find(&old.text), None);
        assert_eq!(
            tokens.find(&new.text).map(|caller| caller.scope),
            Some(Scope::Read)
        );
    }

    #[test]
    fn a_failed_reload_keeps_the_tokens_and_names_the_mistakes_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens.toml");
        let token = new_token(Scope::Frontend);
        write(&path, 0o600, &[("web", Scope::Frontend, &token)]);
        let tokens = TokenFile::load(&path).expect("valid");
        write_text(
            &path,
            0o600,
            "[[token]]\nname = 3\nscope = \"x\"\nsha256 = \"\"\n",
        );
        let message = tokens.reload().expect_err("a mistake").to_string();
        let place = format!("{}:2: ", path.display());
        assert!(message.starts_with(&place), "{place} in {message}");
        fs::remove_file(&path).expect("removing");
        assert!(matches!(tokens.reload(), Err(TokenFileError::File(_))));
        assert!(tokens.find(&token.text).is_some());
        assert_eq!(tokens.count(), 1);
    }
}
