//! Starts that wait for a session: containers made ahead.

use std::io;
use std::os::fd::OwnedFd;

use conman_linux::PidFd;
use conman_shim_protocol::{Ahead, LaunchSpec, encode};

use super::{Launching, Pending, Waiting};
use crate::launcher_messages::Order;

/// A container made ahead, for a start that is not known yet.
#[derive(Debug, Clone)]
pub(crate) struct MadeAhead {
    /// [`LaunchSpec::kind`] of the starts that can take it.
    pub(crate) kind: Box<LaunchSpec>,
    /// It waits for a start.
    pub(crate) waits: bool,
}

impl Pending {
    /// Whether a start of this kind can take it.
    fn can_be_taken(&self, spec: &LaunchSpec) -> bool {
        let fits = |made: &MadeAhead| made.waits && *made.kind == spec.kind();
        !self.killed && self.ahead.as_ref().is_some_and(fits) && self.is_alive()
    }

    fn is_alive(&self) -> bool {
        let process = self.pidfd.as_ref().and_then(|fd| fd.try_clone().ok());
        let process = process.map(|fd| PidFd::received(fd, 0));
        process.is_some_and(|process| matches!(process.is_dead(), Ok(false)))
    }
}

impl Launching {
    /// The ticket of the container made ahead that this start takes.
    pub(crate) fn ahead_for(&self, spec: &LaunchSpec) -> Option<u64> {
        let Ahead::Take { name } = &spec.ahead else {
            return None;
        };
        let mut all = self.pending.iter().filter(|_| !self.held_back);
        let (ticket, start) = all.find(|(_, start)| start.name == *name)?;
        start.can_be_taken(spec).then_some(*ticket)
    }

    /// The names of all containers made ahead, or about to be.
    pub(crate) fn ahead(&self) -> Vec<String> {
        let all = self.pending.values().filter(|start| start.ahead.is_some());
        all.map(|start| start.name.clone()).collect()
    }

    pub(crate) fn waits(&mut self, ticket: u64) -> Option<&Pending> {
        let start = self.pending.get_mut(&ticket)?;
        start.ahead.as_mut()?.waits = true;
        Some(start)
    }

    /// Queues the order that finishes a container made ahead as the one of this start.
    pub(crate) fn complete(
        &mut self,
        ticket: u64,
        start: Pending,
        fds: Vec<OwnedFd>,
        order: &Order,
    ) -> io::Result<()> {
        let bytes = encode(order).map_err(io::Error::other)?;
        self.waiting.push_back(Waiting {
            // It cannot be withdrawn.
            ticket: None,
            bytes,
            fds,
        });
        self.pending.insert(ticket, start);
        Ok(())
    }

    /// Whether a start waits for a report of the launcher.
    pub(crate) fn is_under_way(&self) -> bool {
        let waits = |start: &Pending| start.ahead.as_ref().is_some_and(|made| made.waits);
        self.pending.values().any(|start| !waits(start))
    }
}
