//! The token file: checked strictly, replaced as a whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustix::fs::OFlags;
use thiserror::Error;

use crate::token_set::TokenSet;
use crate::{Caller, TokenMistake};

/// Maximum size of a token file: a thousand entries need a sixth of it.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// The bearer tokens, from a file of `[[token]]` tables with `name`, `scope` and `sha256`.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    tokens: ArcSwap<TokenSet>,
}

/// Why a token file cannot be used.
#[derive(Debug, Error)]
pub enum TokenFileError {
    #[error("cannot read the token file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the token file {path} is not a regular file")]
    NotAFile { path: PathBuf },
    #[error(
        "the token file {path} is open to other users (mode {mode:04o}); run: chmod 600 {path}"
    )]
    Open { path: PathBuf, mode: u32 },
    #[error(
        "the token file {path} belongs to uid {owner}, who could put tokens of theirs into it; \
         run: chown {wanted} {path}"
    )]
    Owner {
        path: PathBuf,
        owner: u32,
        wanted: u32,
    },
    #[error("the token file {path} is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge { path: PathBuf },
    #[error("the token file {path} is not UTF-8 text")]
    NotText { path: PathBuf },
    #[error("{}", list(.path, .mistakes))]
    Mistakes {
        path: PathBuf,
        mistakes: Vec<TokenMistake>,
    },
}

fn list(path: &Path, mistakes: &[TokenMistake]) -> String {
    let lines: Vec<String> = mistakes
        .iter()
        .map(|mistake| format!("{}:{mistake}", path.display()))
        .collect();
    lines.join("\n")
}

impl TokenFile {
    /// Reads the file.
    ///
    /// # Errors
    /// A file that other users can read or write, that is not a regular file, or that holds
    /// mistakes: all of them.
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
    let path_buf = || path.to_path_buf();
    let failed = |source| TokenFileError::Read {
        path: path.to_path_buf(),
        source,
    };
    // Without O_NONBLOCK, opening a FIFO would wait for its writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(failed)?;
    check(&file, path)?;
    let mut bytes = Vec::new();
    let read = (&mut file)
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if read as u64 > MAX_FILE_BYTES {
        return Err(TokenFileError::TooLarge { path: path_buf() });
    }
    let text =
        String::from_utf8(bytes).map_err(|_| TokenFileError::NotText { path: path_buf() })?;
    TokenSet::parse(&text).map_err(|mistakes| TokenFileError::Mistakes {
        path: path_buf(),
        mistakes,
    })
}

/// Checks the open file instead of its path, which could name another file a moment later.
fn check(file: &File, path: &Path) -> Result<(), TokenFileError> {
    let path_buf = || path.to_path_buf();
    let metadata = file.metadata().map_err(|source| TokenFileError::Read {
        path: path_buf(),
        source,
    })?;
    if !metadata.is_file() {
        return Err(TokenFileError::NotAFile { path: path_buf() });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(TokenFileError::Open {
            path: path_buf(),
            mode,
        });
    }
    let wanted = rustix::process::geteuid().as_raw();
    let owner = metadata.uid();
    if owner != 0 && owner != wanted {
        return Err(TokenFileError::Owner {
            path: path_buf(),
            owner,
            wanted,
        });
    }
    Ok(())
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
    fn a_failed_reload_keeps_the_tokens_and_reports_every_mistake() {
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
        let message = tokens.reload().expect_err("mistakes").to_string();
        for line in [2, 3, 4] {
            let place = format!("{}:{line}: ", path.display());
            assert!(message.contains(&place), "{place} in {message}");
        }
        fs::remove_file(&path).expect("removing");
        assert!(matches!(tokens.reload(), Err(TokenFileError::Read { .. })));
        assert!(tokens.find(&token.text).is_some());
        assert_eq!(tokens.count(), 1);
    }

    #[test]
    fn a_file_that_others_may_read_or_write_is_refused_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens.toml");
        for mode in [0o644, 0o640, 0o602, 0o610, 0o604] {
            write(&path, mode, &[]);
            let message = TokenFile::load(&path)
                .expect_err("open to others")
                .to_string();
            assert!(message.contains(&format!("{mode:04o}")), "{message}");
            assert!(message.contains("chmod 600"), "{message}");
        }
        write(&path, 0o400, &[]);
        TokenFile::load(&path).expect("readable by its owner alone");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a fifo");
        for path in [fifo.as_path(), folder.path()] {
            assert!(matches!(
                TokenFile::load(path),
                Err(TokenFileError::NotAFile { .. })
            ));
        }
    }

    #[test]
    fn a_file_that_is_too_large_or_no_text_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokens.toml");
        let large = "#".repeat(usize::try_from(MAX_FILE_BYTES).expect("small") + 1);
        write_text(&path, 0o600, &large);
        assert!(matches!(
            TokenFile::load(&path),
            Err(TokenFileError::TooLarge { .. })
        ));
        fs::write(&path, [0xff, 0xfe]).expect("writing");
        assert!(matches!(
            TokenFile::load(&path),
            Err(TokenFileError::NotText { .. })
        ));
    }
}
