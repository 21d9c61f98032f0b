//! How a process ended, from its pidfd.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::thread::CapabilitySet;

use crate::init_program::signal_of_program;
use crate::privileges::with_effective;
use crate::proc_files::{Stat, read_proc};
use crate::{PidFd, ProcessIdentity};

/// Requests an exit code, and reports that there is one (Linux 6.15).
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// `struct pidfd_info`, first revision, 64 bytes, and space for later ones.
#[repr(C)]
#[derive(Debug, Default)]
struct PidfdInfo {
    mask: u64,
    cgroupid: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    /// ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid.
    ids: [u32; 8],
    exit_code: i32,
    coredump_mask: u32,
    spare: u32,
}

/// `_IOWR(0xFF, 11, struct pidfd_info)` for the size above.
const PIDFD_GET_INFO: libc::c_ulong =
    (3 << 30) | ((std::mem::size_of::<PidfdInfo>() as libc::c_ulong) << 16) | (0xFF << 8) | 11;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It exited with this code.
    Exited(i32),
    /// A signal ended it.
    Signalled(i32),
}

impl Ended {
    /// From the status word of wait(2).
    #[must_use]
    pub fn from_wait_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self::Exited((status >> 8) & 0xff),
            signal => Self::Signalled(signal),
        }
    }

    /// The exit code as a shell reports it: the code, or 128 plus the signal.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Exited(code) => code,
            Self::Signalled(signal) => 128 + signal,
        }
    }
}

/// How an unreaped process ended; for a session's init, how its program did. It need not be the caller's child. `None` for one that lives or is reaped,
/// or that the caller may not trace. CAP_SYS_PTRACE need only be permitted.
#[must_use]
pub fn ended_unreaped(identity: &ProcessIdentity) -> Option<Ended> {
    with_effective(CapabilitySet::SYS_PTRACE, || read_unreaped(identity))
}

fn read_unreaped(identity: &ProcessIdentity) -> Option<Ended> {
    // Without it the kernel reports a zero.
    let capable = rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE));
    let stat = read_proc::<Stat>(format!("/proc/{}/stat", identity.pid)).ok();
    let stat = stat.filter(|_| capable)?;
    let same = stat.starttime == identity.start_time_ticks;
    let ended = Ended::from_wait_status(stat.exit_code.unwrap_or(0));
    let ended = match ended {
        Ended::Exited(code) => signal_of_program(&stat.comm, code).map_or(ended, Ended::Signalled),
        Ended::Signalled(_) => ended,
    };
    (stat.state == 'Z' && same).then_some(ended)
}

impl PidFd {
    /// How the process ended; it need not be the caller's child. `None` while it lives, until its parent has
    /// reaped it, and on kernels without support (before 6.15).
    #[expect(unsafe_code, reason = "this ioctl has no safe wrapper")]
    pub fn ended(&self) -> io::Result<Option<Ended>> {
        let mut info = PidfdInfo {
            mask: PIDFD_INFO_EXIT,
            ..PidfdInfo::default()
        };
        // SAFETY: the request number encodes the size of `PidfdInfo`, so the kernel reads and
        // writes at most that many bytes of `info`, which is alive, initialised and made of
        // integers only.
        let result =
            unsafe { libc::ioctl(self.as_fd().as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
        if result == 0 {
            let told = info.mask & PIDFD_INFO_EXIT != 0;
            return Ok(told.then(|| Ended::from_wait_status(info.exit_code)));
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // Unknown to this kernel; or dead, and its status is not available.
            Some(libc::ENOTTY | libc::EINVAL | libc::ESRCH | libc::EREMOTE) => Ok(None),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_end_of_a_zombie_can_be_read_by_whoever_may_trace_it() {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "exit 42"])
            .spawn()
            .expect("spawned");
        let (process, identity) =
            PidFd::open_identified(child.id().cast_signed()).unwrap_or_else(|_| {
                // It exited before, but it is a zombie of this process.
                let pid = child.id().cast_signed();
                let identity = ProcessIdentity::of(pid).expect("a zombie");
                (PidFd::open(pid).expect("a zombie"), identity)
            });
        assert!(process.wait_dead(Duration::from_secs(20)).expect("waited"));
        let capable = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_PTRACE));
        let expected = capable.then_some(Ended::Exited(42));
        assert_eq!(ended_unreaped(&identity), expected);
        child.wait().expect("reaped");
        assert_eq!(ended_unreaped(&identity), None);
    }
}
