//! Starts that the process that was cloned for them finishes.
//!
//! The launcher takes the next order meanwhile, and returns to a start when its process reports
//! something, ends, executes its program (which closes its socket) or takes too long. So neither a slow
//! program nor a container that is frozen while a command enters it delays other starts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use conman_fence::Report;
use conman_linux::PidFd;
use conman_shim_protocol::{LaunchError, Phases, decode, seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::child::{ChildReport, GO};
use super::launch::Made;
use super::steps::step;

/// Bound on the process's part: a fraction of a millisecond, unless the disk below the overlay stalls,
/// the memory limit is too small even for it, or a client freezes its container.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// A failed start.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: LaunchError,
    /// Something of it may still live.
    pub(super) left: bool,
}

/// From an error before anything was made that could be left.
impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        Self { error, left: false }
    }
}

/// A start that waits for its process.
#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) ticket: u64,
    socket: OwnedFd,
    /// `None` while a container made ahead waits for its start.
    deadline: Option<Instant>,
    clock: Clock,
    phases: Phases,
    stage: Stage,
    /// Its next step is exec.
    executing: bool,
}

#[derive(Debug)]
enum Stage {
    /// The container's first process sets itself up.
    Container(Box<Made>),
    /// A helper enters the container to clone the command there.
    Entering(PidFd),
    /// The command sets itself up.
    Command(PidFd),
}

impl UnderWay {
    /// A container that was sent all it needs.
    pub(super) fn container(
        ticket: u64,
        made: Made,
        socket: OwnedFd,
        clock: Clock,
        phases: Phases,
    ) -> Self {
        Self {
            ticket,
            socket,
            deadline: Some(Instant::now() + SETUP_TIMEOUT),
            clock,
            phases,
            stage: Stage::Container(Box::new(made)),
            executing: false,
        }
    }

    /// A command whose helper was ordered to continue.
    pub(super) fn command(ticket: u64, helper: PidFd, socket: OwnedFd, clock: Clock) -> Self {
        Self {
            ticket,
            socket,
            deadline: Some(Instant::now() + SETUP_TIMEOUT),
            clock,
            phases: Phases::default(),
            stage: Stage::Entering(helper),
            executing: false,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether it is a container that sets itself up.
    pub(super) fn is_container(&self) -> bool {
        matches!(self.stage, Stage::Container(_)) && self.deadline.is_some()
    }

    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        let left = |deadline: Instant| deadline.saturating_duration_since(now);
        self.deadline.map(left)
    }

    /// Whether it is a container made ahead that is no start's yet.
    pub(super) fn waits(&self) -> bool {
        matches!(self.stage, Stage::Container(_)) && self.deadline.is_none()
    }

    /// The container made ahead that waits; `None` if it has ended. It sends nothing until then.
    pub(super) fn waiting(&mut self) -> Option<&mut Made> {
        if !self.waits() {
            return None;
        }
        let Stage::Container(made) = &mut self.stage else {
            return None;
        };
        let mut socket = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)];
        let ended = poll(&mut socket, Some(&Timespec::default()));
        (ended == Ok(0)).then_some(made)
    }

    /// It is a start's, and finished from now on.
    pub(super) fn resume(&mut self) -> Option<(&mut Made, &OwnedFd)> {
        let Stage::Container(made) = &mut self.stage else {
            return None;
        };
        self.deadline = Some(Instant::now() + SETUP_TIMEOUT);
        self.clock = Clock::start();
        self.phases = Phases {
            ahead: true,
            ..Phases::default()
        };
        Some((made, &self.socket))
    }

    /// Reads the process's report, which must be there. `Some` when the start is finished; `send` takes what the shim
    /// needs earlier: the PID of a command before the command can do anything.
    pub(super) fn receive(
        &mut self,
        buffer: &mut [u8],
        send: &mut dyn FnMut(Report) -> io::Result<()>,
    ) -> Option<Result<Phases, LaunchError>> {
        let received = match seqpacket::receive(&self.socket, buffer) {
            Ok(received) => received,
            // Returned once, for an end that left something unread, and before its reports.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
            Err(error) => return Some(Err(LaunchError::step("read the child's report", &error))),
        };
        let Some(received) = received else {
            return Some(self.closed());
        };
        let report = decode(received.bytes).map_err(|error| {
            LaunchError::step("read the child's report", &io::Error::other(error))
        });
        match report.and_then(|report| self.take(report, send)) {
            Ok(()) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// The error of a start whose time is up.
    pub(super) fn timed_out() -> LaunchError {
        let after_ms = u64::try_from(SETUP_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        LaunchError::TimedOut { after_ms }
    }

    /// Undoes what was made for it. Returns whether something of a container may still live. A command, which
    /// the shim kills, leaves nothing else.
    pub(super) fn take_back(self) -> bool {
        match self.stage {
            Stage::Container(made) => made.take_back(),
            // The command, if it exists, reads the socket's end and exits.
            Stage::Entering(helper) | Stage::Command(helper) => {
                let _ = helper.kill();
                false
            }
        }
    }

    fn take(
        &mut self,
        report: ChildReport,
        send: &mut dyn FnMut(Report) -> io::Result<()>,
    ) -> Result<(), LaunchError> {
        match report {
            ChildReport::Failed { error } => Err(error),
            ChildReport::Entered { pid } => {
                self.entered()?;
                let ticket = self.ticket;
                send(Report::Cloned { ticket, pid }).map_err(step("report"))?;
                self.go_on()
            }
            ChildReport::Waits if self.is_container() => {
                self.deadline = None;
                self.phases.setup_us = self.clock.lap();
                let (ticket, phases) = (self.ticket, self.phases);
                send(Report::Waits { ticket, phases }).map_err(step("report"))
            }
            ChildReport::Waits => Err(LaunchError::EndedEarly),
            ChildReport::Executing
                if !matches!(self.stage, Stage::Entering(_)) && !self.executing =>
            {
                self.executing = true;
                Ok(())
            }
            ChildReport::Executing => Err(LaunchError::EndedEarly),
        }
    }

    fn entered(&mut self) -> Result<(), LaunchError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Container(Box::default()));
        let (stage, outcome) = match stage {
            Stage::Entering(helper) => (Stage::Command(helper), Ok(())),
            other => (other, Err(LaunchError::EndedEarly)),
        };
        self.stage = stage;
        outcome
    }

    fn go_on(&mut self) -> Result<(), LaunchError> {
        self.deadline = Some(Instant::now() + SETUP_TIMEOUT);
        go_on(&self.socket)
    }

    /// The process has executed its program, or has ended before that.
    fn closed(&mut self) -> Result<Phases, LaunchError> {
        if !self.executing {
            return Err(LaunchError::EndedEarly);
        }
        let mut phases = std::mem::take(&mut self.phases);
        phases.setup_us = self.clock.lap();
        Ok(phases)
    }
}

/// Lets a command's process continue.
pub(super) fn go_on(socket: &OwnedFd) -> Result<(), LaunchError> {
    seqpacket::send(socket, GO, &[]).map_err(step("let a process continue"))
}

/// Returns why a process has ended that has closed its end of the socket.
pub(super) fn last_words(socket: &OwnedFd) -> LaunchError {
    let mut buffer = seqpacket::buffer();
    while let Ok(Some(received)) = seqpacket::receive(socket, &mut buffer) {
        if let Ok(ChildReport::Failed { error }) = decode(received.bytes) {
            return error;
        }
    }
    LaunchError::EndedEarly
}

/// Measures phases one after the other.
#[derive(Debug)]
pub(super) struct Clock {
    last: Instant,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self {
            last: Instant::now(),
        }
    }

    pub(super) fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let micros = now.duration_since(self.last).as_micros();
        self.last = now;
        u64::try_from(micros).unwrap_or(u64::MAX)
    }
}
