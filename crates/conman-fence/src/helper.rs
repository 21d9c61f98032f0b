//! Helper processes of the shim, each at the other end of a socket: the launcher and the log sweeper.
//!
//! They do what may wait on a disk or on rtnl, die with the shim, and inherit nothing else of it. A
//! helper's death is noticed by its signal, not by its socket.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use conman_linux::{
    CloneOptions, PidFd, ProcessError, Resource, Signal, SoleThread, clone_process, lower_limit,
    reap_if_dead,
};
use conman_shim_protocol::seqpacket;
use nix::sys::prctl::{set_dumpable, set_name, set_pdeathsig};
use nix::sys::resource::setrlimit;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Pid, getpid, getppid};

/// Bound on the death of a helper that may be waiting for a disk.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// Limits for all users of a container together, of what the kernel limits by user: queued signals
/// (including timers), bytes of POSIX message queues, bytes of locked memory. A user namespace is bounded
/// by the limits of the process that creates it, so the launcher has them itself.
const USER_LIMITS: [(Resource, u64); 3] = [
    (Resource::RLIMIT_SIGPENDING, 4_096),
    (Resource::RLIMIT_MSGQUEUE, 819_200),
    (Resource::RLIMIT_MEMLOCK, 8 << 20),
];

/// A running helper.
#[derive(Debug)]
pub(crate) struct Helper {
    process: PidFd,
    /// The shim's end; it does not block.
    socket: OwnedFd,
}

impl Helper {
    /// Forks a helper that serves the other end of the socket.
    pub(crate) fn start(
        sole: &SoleThread,
        name: &'static CStr,
        serve: impl FnOnce(&OwnedFd) -> io::Result<()>,
    ) -> io::Result<Self> {
        let (socket, theirs) = seqpacket::pair()?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        // No other descriptors: a connection that is open here too would not close with the shim.
        let keep = [theirs.as_fd()];
        let how = CloneOptions {
            keep_only: Some(&keep),
            ..CloneOptions::default()
        };
        let shim = getpid();
        let process = clone_process(sole, &how, || {
            let served = prepare_process(shim, name).and_then(|()| serve(&theirs));
            if let Err(error) = &served {
                tracing::error!(?name, %error, "a helper of the shim failed");
            }
            i32::from(served.is_err())
        })?;
        Ok(Self { process, socket })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.pid()
    }

    pub(crate) fn kill(&self) -> Result<bool, ProcessError> {
        self.process.kill()
    }

    /// Kills and reaps it; its work ends with it.
    pub(crate) fn stop(self) {
        if self.kill().is_ok() && self.process.wait_dead(STOP_TIMEOUT).unwrap_or(false) {
            // It may have been reaped already.
            let _ = reap_if_dead(&self.process);
        }
    }
}

impl AsFd for Helper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Resets what a helper, and through the launcher every container, must not inherit from the shim.
fn prepare_process(shim: Pid, name: &CStr) -> io::Result<()> {
    set_name(name)?;
    set_pdeathsig(Signal::SIGKILL)?;
    if getppid() != shim {
        return Err(io::Error::other("the shim died before its helper began"));
    }
    // A process that enters a container is visible to those in it before it is confined: they must
    // neither trace it nor reach the program that it still runs.
    set_dumpable(false)?;
    conman_linux::reset_signal_actions();
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    // Files that others may write get their mode explicitly.
    umask(Mode::from_bits_truncate(0o022));
    for (resource, limit) in USER_LIMITS {
        lower_limit(resource, limit)?;
    }
    forbid_core_dumps();
    // The shim may be protected from the OOM killer; containers are not.
    let score = std::fs::read_to_string("/proc/self/oom_score_adj")?;
    if score.starts_with('-') {
        std::fs::write("/proc/self/oom_score_adj", "0")?;
    }
    Ok(())
}

/// With a pipe in `kernel.core_pattern`, the host would run a program as root for each crash of a session.
/// Exactly 1 is the value with which the kernel does not: 0 only keeps files away.
fn forbid_core_dumps() {
    if let Err(error) = setrlimit(Resource::RLIMIT_CORE, 1, 1) {
        tracing::warn!(
            %error,
            "cannot set RLIMIT_CORE to 1; a program in core_pattern runs when a session's program crashes"
        );
    }
}
