//! Files that hold secrets.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// Why a file with a secret is not used.
#[derive(Debug, Error)]
pub enum PrivateFileError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} is not safe to use: {why}")]
    Unsafe { path: PathBuf, why: String },
}

/// Reads a text of at most `max_bytes`, if no other user but root can read or change it.
///
/// # Errors
/// A file that other users can read or write, that is not a regular file, or that is too large.
pub fn read_private_file(path: &Path, max_bytes: u64) -> Result<String, PrivateFileError> {
    let failed = |source| PrivateFileError::Read {
        path: path.to_path_buf(),
        source,
    };
    let refused = |why| {
        Err(PrivateFileError::Unsafe {
            path: path.to_path_buf(),
            why,
        })
    };
    // Without O_NONBLOCK, opening a FIFO would wait for its writer.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(flags).open(path);
    let file = file.map_err(failed)?;
    // Of the open file: the path could name another one a moment later.
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return refused("it is not a regular file".to_owned());
    }
    let mode = metadata.mode() & 0o7777;
    if mode & OTHERS != 0 {
        let shown = path.display();
        return refused(format!(
            "other users may read or change it (mode {mode:04o}); run: chmod 600 {shown}"
        ));
    }
    let (owner, own) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if owner != 0 && owner != own {
        let shown = path.display();
        return refused(format!(
            "it belongs to uid {owner}; run: chown {own} {shown}"
        ));
    }
    let mut text = String::new();
    let read = file.take(max_bytes + 1).read_to_string(&mut text);
    if read.map_err(failed)? as u64 > max_bytes {
        return refused(format!("it is larger than {max_bytes} bytes"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn refusal(path: &Path) -> String {
        let error = read_private_file(path, 8).expect_err("refused");
        assert!(matches!(error, PrivateFileError::Unsafe { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn a_file_that_others_may_read_or_write_is_refused_with_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        fs::write(&path, "secret").expect("writing");
        let chmod = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode));
        for mode in [0o644, 0o640, 0o602, 0o610, 0o604] {
            chmod(mode).expect("chmod");
            let message = refusal(&path);
            assert!(message.contains(&format!("{mode:04o}")), "{message}");
            assert!(message.contains("chmod 600"), "{message}");
        }
        chmod(0o400).expect("chmod");
        assert_eq!(read_private_file(&path, 8).expect("its owner's"), "secret");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let fifo = folder.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
            .expect("a fifo");
        for path in [fifo.as_path(), folder.path()] {
            assert!(refusal(path).contains("regular file"));
        }
    }

    #[test]
    fn a_file_that_is_too_large_or_no_text_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        fs::write(&path, "123456789").expect("writing");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        assert!(refusal(&path).contains("larger than 8 bytes"));
        fs::write(&path, [0xff, 0xfe]).expect("writing");
        let error = read_private_file(&path, 8).expect_err("no text");
        assert!(matches!(error, PrivateFileError::Read { .. }), "{error}");
    }
}
