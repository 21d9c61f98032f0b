//! The first process of a native session, below which its program runs: a tiny program of this crate's (`init/init.rs`).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::unistd::fexecve;
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use crate::process_facts::inner_pid;

/// Made by the build script.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/init"));

const NAME: &CStr = c"conman-init";

/// How it calls itself if a signal has ended the program. The number of the signal follows.
const SIGNAL_NAME: &str = "conman-init:";

/// What it adds to the number of a signal for its exit code.
const SIGNALLED: i32 = 128;

/// The session's program in its PID namespace: the first process that its init clones there.
const PROGRAM_PID: i32 = 2;

/// The program, in a sealed file without a name. All that execute it share its pages.
#[derive(Debug)]
pub struct InitProgram(OwnedFd);

impl InitProgram {
    /// Makes the file.
    ///
    /// # Errors
    /// The kernel has no memory for it, or allows no programs in memory files.
    pub fn make() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = match memfd_create(NAME, flags | MemfdFlags::EXEC) {
            // Before Linux 6.3.
            Err(Errno::INVAL) => memfd_create(NAME, flags)?,
            Err(Errno::ACCESS) => {
                return Err(io::Error::other(
                    "vm.memfd_noexec is 2, so no program can be run from memory; set it to 0 or 1",
                ));
            }
            made => made?,
        };
        let mut rest = PROGRAM;
        while !rest.is_empty() {
            rest = &rest[rustix::io::write(&file, rest)?..];
        }
        // Users of sessions may execute it and not read it. So no process of a session can trace it, or see its
        // memory, environment and descriptors in /proc.
        fchmod(&file, Mode::from_raw_mode(0o111))?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(Self(file))
    }

    /// Becomes it, without arguments and environment. The calling process must be process 1 of its PID namespace, have
    /// cloned one child there, and block all signals. Returns only with the reason for a failure.
    #[must_use]
    pub fn execute(&self) -> io::Error {
        match fexecve(&self.0, &[NAME], &[] as &[&CStr]) {
            Ok(never) => match never {},
            Err(errno) => errno.into(),
        }
    }
}

impl AsFd for InitProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns the session's program, whose init this process is; `None` once it has ended, and if the kernel lists no
/// children.
#[must_use]
pub fn program_of_init(init: i32) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{init}/task/{init}/children")).ok()?;
    // The oldest is the first.
    let first = children.split_ascii_whitespace().next()?.parse().ok()?;
    (inner_pid(first) == Some(PROGRAM_PID)).then_some(first)
}

/// The signal that has ended the program, of an init with this name that has exited with this code.
pub(crate) fn signal_of_program(name: &str, code: i32) -> Option<i32> {
    let signal: i32 = name.trim_end().strip_prefix(SIGNAL_NAME)?.parse().ok()?;
    (code == SIGNALLED + signal).then_some(signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_smaller_than_a_page_and_sealed() {
        assert!(PROGRAM.starts_with(b"\x7fELF"));
        assert!(PROGRAM.len() < 4_096, "{} bytes", PROGRAM.len());
        let made = InitProgram::make().expect("made");
        let refused = rustix::io::write(&made, b"x");
        assert_eq!(refused, Err(Errno::PERM));
    }

    #[test]
    fn an_end_by_a_signal_is_told_from_an_exit_code() {
        assert_eq!(signal_of_program("conman-init:09\n", 137), Some(9));
        assert_eq!(signal_of_program("conman-init:64\n", 192), Some(64));
        for (name, code) in [
            ("conman-init\n", 137),
            ("conman-init:09\n", 9),
            ("conman-init:\n", 128),
            ("sh\n", 137),
        ] {
            assert_eq!(signal_of_program(name, code), None, "{name}");
        }
    }
}
