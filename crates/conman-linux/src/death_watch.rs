use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::PidFd;

/// Deaths taken from the kernel in one call.
const BATCH: usize = 256;

/// Waits for many deaths at once on a separate thread, without an async runtime.
///
/// A process is reported once. Dropping its [`PidFd`] (and every duplicate) before its death removes it
/// silently, so the caller must hold it.
#[derive(Debug)]
pub struct DeathWatch {
    epoll: OwnedFd,
}

impl DeathWatch {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
        })
    }

    /// Adds a process under a token of the caller's choice. One that is dead already is reported by the next
    /// [`DeathWatch::wait`]. `AlreadyExists` for a [`PidFd`] that is in the set.
    pub fn add(&self, token: u64, fd: &PidFd) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::ONESHOT;
        Ok(epoll::add(
            &self.epoll,
            fd,
            EventData::new_u64(token),
            flags,
        )?)
    }

    /// Blocks until at least one process of the set is dead, at most for `timeout` (`None`: without
    /// a bound), and appends the tokens of the dead to `out`. May return early with nothing.
    pub fn wait(&self, timeout: Option<Duration>, out: &mut Vec<u64>) -> io::Result<()> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut buffer = [MaybeUninit::<Event>::uninit(); BATCH];
        match epoll::wait(&self.epoll, &mut buffer, timeout.as_ref()) {
            Ok((events, _)) => {
                out.extend(events.iter().map(|event| event.data.u64()));
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
