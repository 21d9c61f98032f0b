//! What is sent to the launcher, and what it reports.

use std::os::fd::{AsFd, BorrowedFd};

use conman_shim_protocol::{decode, seqpacket};

use super::Launching;
use crate::launcher_messages::Report;

impl Launching {
    /// Stops or resumes sending to the launcher.
    pub(crate) fn hold_back(&mut self, held_back: bool) {
        self.held_back = held_back;
    }

    pub(crate) fn is_held_back(&self) -> bool {
        self.held_back
    }

    /// Whether the launcher has answered every start that was sent to it.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.len() == self.unsent().count()
    }

    /// Sends as much as the socket takes. A launcher's death is noticed by its signal, not here.
    pub(crate) fn flush(&mut self) {
        while self.may_send() {
            let (Some(launcher), Some(one)) = (&self.process, self.waiting.front()) else {
                return;
            };
            let fds: Vec<BorrowedFd<'_>> = one.fds.iter().map(AsFd::as_fd).collect();
            if seqpacket::send(launcher, &one.bytes, &fds).is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// While they are held back, orders are sent up to the last one that no other program can carry out.
    pub(super) fn may_send(&self) -> bool {
        !self.held_back || self.waiting.iter().any(|one| one.finishes)
    }

    /// Whether the launcher's socket must become writable first.
    pub(crate) fn is_waiting(&self) -> bool {
        self.process.is_some() && !self.waiting.is_empty() && self.may_send()
    }

    /// Reads the next report, if any.
    pub(crate) fn report(&self, buffer: &mut [u8]) -> Option<Report> {
        let received = seqpacket::receive(self.process.as_ref()?, buffer).ok()??;
        match decode(received.bytes) {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::error!(%error, "cannot decode the launcher's report");
                None
            }
        }
    }
}
