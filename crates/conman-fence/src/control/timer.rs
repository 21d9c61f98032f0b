//! The timer that wakes the loop for the next due time of any part.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A timer on CLOCK_BOOTTIME.
#[derive(Debug)]
pub(super) struct Timer {
    fd: OwnedFd,
    set_for_ns: Option<u64>,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Self {
            fd: timerfd_create(TimerfdClockId::Boottime, flags)?,
            set_for_ns: None,
        })
    }

    /// Makes an expired timer unreadable; it must be set again.
    pub(super) fn clear(&mut self) {
        let mut count = [0_u8; 8];
        // It fails where the timer has not expired.
        let _ = rustix::io::read(&self.fd, &mut count);
        self.set_for_ns = None;
    }

    /// Sets it, or disarms it with `None`.
    pub(super) fn set(&mut self, at_ns: Option<u64>) {
        // Zero would disarm the timer.
        let at_ns = at_ns.map(|at| at.max(1));
        if at_ns == self.set_for_ns {
            return;
        }
        let value = Itimerspec {
            it_interval: timespec(0),
            it_value: timespec(at_ns.unwrap_or(0)),
        };
        match timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &value) {
            Ok(_) => self.set_for_ns = at_ns,
            Err(error) => tracing::error!(%error, "cannot set the timer"),
        }
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
    }
}
