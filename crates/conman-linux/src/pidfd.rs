//! A handle on a process that no reuse of its PID can redirect.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::exit_scan::threads_of;
use crate::identity::ProcessIdentity;
use crate::proc_files::{Stat, read_proc};
use crate::{Signal, SignalNumber};

/// Why a process could not be opened or signalled.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No process has the PID. If it was the init of a PID namespace, no process of that namespace lives.
    #[error("process {pid} is gone")]
    Gone { pid: i32 },
    /// The PID belongs to a later process; the recorded one is gone.
    #[error(
        "process {pid} has been replaced: it started at tick {found}, the recorded one at tick \
         {recorded}"
    )]
    Reused { pid: i32, recorded: u64, found: u64 },
    /// The record is from before a reboot; the recorded process is gone.
    #[error("process {pid} was recorded in another boot ({recorded})")]
    OtherBoot { pid: i32, recorded: String },
    /// Nothing is known about the process.
    #[error("cannot {action} process {pid}")]
    Io {
        action: &'static str,
        pid: i32,
        #[source]
        source: io::Error,
    },
}

impl ProcessError {
    /// Whether this proves that the intended process is dead.
    #[must_use]
    pub fn proves_death(&self) -> bool {
        match self {
            Self::Gone { .. } | Self::Reused { .. } | Self::OtherBoot { .. } => true,
            Self::Io { .. } => false,
        }
    }

    /// Whether the PID is of a thread, and not of a process.
    pub(crate) fn denies_process(&self) -> bool {
        let Self::Io { source, .. } = self else {
            return false;
        };
        // The latter from Linux 6.9 on.
        let errno = Errno::from_io_error(source);
        matches!(errno, Some(Errno::INVAL | Errno::NOENT))
    }
}

/// Whether reading in `/proc/PID` failed because the process is dead: the directory is missing, or the
/// process died during the read.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// A handle on one process that no reuse of its PID can redirect. Close-on-exec.
///
/// For the init of a PID namespace, death means that *no* process of that namespace is left: the
/// kernel reaps all other members before the init itself becomes a zombie
/// (`zap_pid_ns_processes`). That makes [`PidFd::is_dead`] a death certificate.
#[derive(Debug)]
pub struct PidFd {
    fd: OwnedFd,
    pid: i32,
}

impl PidFd {
    /// From a descriptor that the kernel created together with the process.
    pub(crate) fn from_parts(fd: OwnedFd, pid: i32) -> Self {
        Self { fd, pid }
    }

    /// From a pidfd that came through a socket, with the PID that its sender reports.
    #[must_use]
    pub fn received(fd: OwnedFd, pid: i32) -> Self {
        Self::from_parts(fd, pid)
    }

    /// Opens the process that has this PID now, even if it is a zombie.
    pub fn open(pid: i32) -> Result<Self, ProcessError> {
        // Zero and negative numbers name no process, and rustix does not accept them.
        let raw = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        let raw = raw.ok_or(ProcessError::Gone { pid })?;
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(fd) => Ok(Self { fd, pid }),
            Err(Errno::SRCH) => Err(ProcessError::Gone { pid }),
            Err(errno) => Err(ProcessError::Io {
                action: "open a pidfd of",
                pid,
                source: errno.into(),
            }),
        }
    }

    /// Opens the recorded process, or returns why it does not exist any more.
    ///
    /// The pidfd is opened before the start time is read. The recorded process lived before this call, so a
    /// matching start time shows that it had the PID all the time and is the one that the pidfd holds.
    pub fn open_verified(identity: &ProcessIdentity) -> Result<Self, ProcessError> {
        let pidfd = Self::open(identity.pid);
        let boot_id = crate::boot_id().map_err(|source| ProcessError::Io {
            action: "read the boot id for",
            pid: identity.pid,
            source,
        })?;
        if boot_id != identity.boot_id {
            return Err(ProcessError::OtherBoot {
                pid: identity.pid,
                recorded: identity.boot_id.clone(),
            });
        }
        let pidfd = pidfd?;
        let found = ProcessIdentity::of(identity.pid)?.start_time_ticks;
        if found == identity.start_time_ticks {
            Ok(pidfd)
        } else {
            Err(ProcessError::Reused {
                pid: identity.pid,
                recorded: identity.start_time_ticks,
                found,
            })
        }
    }

    /// Time since the start of the process, including the machine's sleep, independent of changes of its clock.
    /// Read by PID: meaningless if the process is dead and reaped.
    pub fn age(&self) -> io::Result<Duration> {
        let ticks = read_proc::<Stat>(format!("/proc/{}/stat", self.pid))?.starttime;
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1);
        let began = Duration::from_millis(ticks.saturating_mul(1_000) / ticks_per_second);
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let now = Duration::try_from(now).unwrap_or_default();
        Ok(now.saturating_sub(began))
    }

    /// Opens the process that has this PID now, and returns its identity. [`ProcessError::Gone`] if it dies
    /// meanwhile.
    pub fn open_identified(pid: i32) -> Result<(Self, ProcessIdentity), ProcessError> {
        let pidfd = Self::open(pid)?;
        let identity = ProcessIdentity::of(pid)?;
        // Alive now, so it had the PID when the start time was read.
        if pidfd.is_dead().map_err(|source| ProcessError::Io {
            action: "poll",
            pid,
            source,
        })? {
            return Err(ProcessError::Gone { pid });
        }
        Ok((pidfd, identity))
    }

    /// The PID it was opened with; only for messages, since it may have been reused.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Sends a signal; `false` when the process was dead already.
    pub fn signal(&self, signal: impl Into<SignalNumber>) -> Result<bool, ProcessError> {
        let error = |source| ProcessError::Io {
            action: "signal",
            pid: self.pid,
            source,
        };
        // The kernel accepts signals to a zombie.
        if self.is_dead().map_err(error)? {
            return Ok(false);
        }
        match pidfd_send_signal(&self.fd, signal.into().to_rustix()) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(errno) => Err(error(errno.into())),
        }
    }

    /// Sends SIGKILL; `false` when the process was dead already.
    pub fn kill(&self) -> Result<bool, ProcessError> {
        self.signal(Signal::SIGKILL)
    }

    /// Whether the process is dead, without waiting.
    pub fn is_dead(&self) -> io::Result<bool> {
        self.wait_dead(Duration::ZERO)
    }

    /// Whether the process has begun to exit, or is dead. In between, the init of a PID namespace waits for the ends of
    /// the others there, which the kernel kills.
    #[must_use]
    pub fn is_exiting(&self) -> bool {
        let threads = threads_of(self.pid);
        // They are another process's if this one is dead.
        self.is_dead().unwrap_or(false)
            || threads.is_ok_and(|threads| threads.iter().all(|thread| thread.exiting))
    }

    /// Blocks the calling thread until the process is dead, at most for `timeout`. A `timeout`
    /// too long for the kernel's clock waits without a bound.
    pub fn wait_dead(&self, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now().checked_add(timeout);
        let mut left = timeout;
        loop {
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                // HUP comes with IN on newer kernels, after the process was reaped.
                Ok(_) => return Ok(fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP)),
                Err(Errno::INTR) => {
                    left = deadline
                        .map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits until the process is dead. Cancel safe: the next call sees the same.
    ///
    /// Any number of tasks may wait at a time, on any tokio runtimes that have I/O enabled.
    ///
    /// # Panics
    /// Outside such a runtime.
    pub async fn dead(&self) -> io::Result<()> {
        // One epoll instance accepts a descriptor once; only a second waiter needs a duplicate, so
        // that a thousand sessions do not cost two thousand descriptors.
        match register(self.fd.as_fd()) {
            Ok(registered) => self.until_dead(registered).await,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.until_dead(register(self.fd.try_clone()?)?).await
            }
            Err(error) => Err(error),
        }
    }

    async fn until_dead<T: AsRawFd>(&self, registered: AsyncFd<T>) -> io::Result<()> {
        loop {
            let mut guard = registered.readable().await?;
            if self.is_dead()? {
                return Ok(());
            }
            guard.clear_ready();
        }
    }
}

/// A descriptor that its type keeps open and unchanged.
trait StableFd: AsRawFd {}
impl StableFd for OwnedFd {}
impl StableFd for BorrowedFd<'_> {}

#[expect(
    unsafe_code,
    reason = "tokio leaves the descriptor's validity to its caller"
)]
fn register<T: StableFd>(fd: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: the descriptor must stay open, refer to the same description, and be what every
    // `as_raw_fd` returns, while the `AsyncFd` lives. `OwnedFd` and `BorrowedFd` (the only
    // implementors of the private `StableFd`) are open throughout their lifetimes, return one
    // number, and neither is handed out mutably; a description behind a number changes only by
    // dup2(2) onto it, which would break those types' own invariant.
    let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    Ok(registered?)
}

impl From<PidFd> for OwnedFd {
    fn from(process: PidFd) -> Self {
        process.fd
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
