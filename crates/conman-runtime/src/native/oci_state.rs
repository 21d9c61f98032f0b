//! Files of an OCI runtime's state, in the container, which the daemon shares with it: pid files, and descriptions of
//! commands. What breaks out of the session into the container may have changed all of them.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

use conman_linux::{open_file_in_root, open_in_root};
use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};

/// Where the state is in the container; the session cannot reach it.
pub(super) const STATE: &str = "/state";

/// The same, below the container's directory.
const STATE_ON_HOST: &str = "runtime/state";

/// Most bytes that are read of a file.
const MAX_STATE_BYTES: u64 = 1 << 20;

/// The directory of the runtime's state, in whose place there may be a link.
fn state_directory(root: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    open_in_root(File::open(root)?, Path::new(STATE_ON_HOST), flags)
}

/// Reads a file of the runtime's state, where there may be links, pipes and endless files.
pub(super) fn read_state(root: &Path, name: &str) -> io::Result<String> {
    let path = Path::new(STATE_ON_HOST).join(name);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open_file_in_root(File::open(root)?, &path, flags)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut text = String::new();
    file.take(MAX_STATE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Writes a new file of the runtime's state, and nothing outside of it.
pub(super) fn write_state(root: &Path, name: &str, text: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // The runtime is another user on the host, and reads it.
    let mode = Mode::from_raw_mode(0o644);
    let file = openat(state_directory(root)?, name, flags, mode)?;
    File::from(file).write_all(text.as_bytes())
}

/// Removes a file of the runtime's state, and nothing outside of it.
pub(super) fn remove_state(root: &Path, name: &str) -> io::Result<()> {
    Ok(unlinkat(state_directory(root)?, name, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn what_breaks_out_of_a_session_cannot_make_conman_read_write_or_remove_anything_of_the_host() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("root");
        let state = root.join(STATE_ON_HOST);
        std::fs::create_dir_all(&state).expect("made");
        let outside = directory.path().join("outside");
        std::fs::write(&outside, "42\n").expect("written");
        std::fs::write(state.join("exec.1"), "7\n").expect("written");
        assert_eq!(read_state(&root, "exec.1").expect("read"), "7\n");
        std::os::unix::fs::symlink(&outside, state.join("link")).expect("linked");
        rustix::fs::mknodat(
            CWD,
            state.join("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .expect("made");
        for name in ["link", "pipe", "absent"] {
            read_state(&root, name).expect_err(name);
        }
        write_state(&root, "exec.1", "8\n").expect_err("it is there");
        write_state(&root, "link", "8\n").expect_err("it is a link");
        remove_state(&root, "exec.1").expect("removed");
        write_state(&root, "exec.1", "8\n").expect("written");
        // In place of the whole state.
        std::fs::remove_dir_all(&state).expect("removed");
        std::os::unix::fs::symlink(directory.path(), &state).expect("linked");
        read_state(&root, "outside").expect_err("outside");
        remove_state(&root, "outside").expect_err("outside");
        write_state(&root, "new", "8\n").expect_err("outside");
        assert!(outside.exists());
    }
}
