//! The shim's side of the launcher: orders out, reports in, and a new launcher when one dies.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use conman_linux::{Features, PidFd, SoleThread};

use crate::launcher::{self, Order, Report};
use crate::options::ShimOptions;
use crate::protocol::{decode, encode};
use crate::seqpacket;

/// Starts that wait or are under way. A start takes about a millisecond, so this is seconds of
/// work; more are refused.
pub(crate) const MAX_PENDING: usize = 4_096;

/// Bound on the death of a launcher that may be waiting for a disk.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);

/// A start that has not been answered.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) client: u64,
    pub(crate) call: u64,
    pub(crate) name: String,
    pub(crate) cgroup: String,
    /// A container's own; a command has neither.
    pub(crate) own: Option<Own>,
    /// The container of a command.
    pub(crate) exec_in: Option<String>,
    /// The answer's, from the moment of its clone.
    pub(crate) pidfd: Option<OwnedFd>,
}

/// What is one container's alone.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) ids: u32,
    pub(crate) scratch: PathBuf,
}

/// The launcher and what it has been asked.
#[derive(Debug, Default)]
pub(crate) struct Launching {
    process: Option<(PidFd, OwnedFd)>,
    waiting: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    pub(crate) pending: BTreeMap<u64, Pending>,
    /// What starts may have left whose launcher died: cgroup and directory, until a launcher has
    /// lived to remove them.
    sweeps: BTreeMap<u64, (String, PathBuf)>,
    next_ticket: u64,
    /// What the last launcher found that this kernel can do.
    pub(crate) features: Option<Features>,
}

impl Launching {
    /// Forks one when there is none. `true` when its socket is a new one.
    pub(crate) fn ensure(&mut self, sole: &SoleThread, options: &ShimOptions) -> io::Result<bool> {
        if self.process.is_some() {
            return Ok(false);
        }
        let (process, socket) = launcher::start(sole, options)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        self.process = Some((process, socket));
        // Before any start, which may be of the same name.
        let sweeps: Vec<Order> = self
            .sweeps
            .iter()
            .map(|(ticket, (cgroup, scratch))| Order::Sweep {
                ticket: *ticket,
                cgroup: cgroup.clone(),
                scratch: scratch.clone(),
            })
            .collect();
        for sweep in sweeps {
            self.push(&sweep, Vec::new())?;
        }
        Ok(true)
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(|(process, _)| process.pid())
    }

    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().map(|(_, socket)| socket.as_fd())
    }

    /// Whether a container of this name is being started.
    pub(crate) fn is_starting(&self, name: &str) -> bool {
        self.pending.values().any(|start| start.name == name)
    }

    /// Takes a start, given as what to order by its ticket; the launcher gets it when it reads.
    pub(crate) fn order(
        &mut self,
        start: Pending,
        fds: Vec<OwnedFd>,
        order: impl FnOnce(u64) -> Order,
    ) -> io::Result<()> {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        self.push(&order(ticket), fds)?;
        self.pending.insert(ticket, start);
        Ok(())
    }

    /// Remembers to remove what a start may have left.
    pub(crate) fn sweep_later(&mut self, ticket: u64, cgroup: &str, own: &Own) {
        let left = (cgroup.to_owned(), own.scratch.clone());
        self.sweeps.insert(ticket, left);
    }

    /// A launcher has removed it.
    pub(crate) fn swept(&mut self, ticket: u64) {
        self.sweeps.remove(&ticket);
    }

    fn push(&mut self, order: &Order, fds: Vec<OwnedFd>) -> io::Result<()> {
        let bytes = encode(order).map_err(io::Error::other)?;
        self.waiting.push_back((bytes, fds));
        Ok(())
    }

    /// Sends what can be sent. A launcher that has died is noticed by its end, not here.
    pub(crate) fn flush(&mut self) {
        let Some((_, socket)) = &self.process else {
            return;
        };
        while let Some((bytes, fds)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            if seqpacket::send(socket, bytes, &fds).is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// Whether the launcher must become writable first.
    pub(crate) fn is_waiting(&self) -> bool {
        self.process.is_some() && !self.waiting.is_empty()
    }

    /// The next report that has come, if any.
    pub(crate) fn report(&self, buffer: &mut [u8]) -> Option<Report> {
        let (_, socket) = self.process.as_ref()?;
        let received = seqpacket::receive(socket, buffer).ok()??;
        match decode(received.bytes) {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::error!(%error, "the launcher's report is unreadable");
                None
            }
        }
    }

    /// Ends it and reaps it, since the shim ends; what it was doing ends with it.
    pub(crate) fn stop(&mut self) {
        let Some((process, _)) = self.process.take() else {
            return;
        };
        let pid = rustix::process::Pid::from_raw(process.pid());
        if process.kill().is_ok() && process.wait_dead(STOP_TIMEOUT).unwrap_or(false) {
            // It may have been reaped already.
            let _ = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG);
        }
    }

    /// It has died: forgets it and hands over what it was asked.
    pub(crate) fn died(&mut self) -> BTreeMap<u64, Pending> {
        self.process = None;
        self.waiting.clear();
        std::mem::take(&mut self.pending)
    }
}
