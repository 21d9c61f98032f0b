//! Recording what a later shim must know.

use std::io;

use conman_linux::{ProcessIdentity, boot_id};

use super::Control;
use crate::launching::{Pending, StartRemains};
use crate::ledger::{LineRef, Record};

impl Control {
    /// Appends a line, and rewrites the file when most lines are stale.
    fn append(&mut self, line: &LineRef<'_>) -> io::Result<()> {
        self.ledger.append(line)?;
        let names = self.containers.len() + self.launching.pending.len();
        if self
            .ledger
            .is_overgrown(names + self.forbidden_starts.len())
            && let Err(error) = self.rewrite_ledger()
        {
            tracing::error!(%error, "cannot compact the shim's state file; it keeps growing");
        }
        Ok(())
    }

    /// Appends a line about a change that has happened, so a failure is only logged. It is written with the
    /// rest as soon as there is space.
    fn append_or_log(&mut self, line: &LineRef<'_>) {
        if let Err(error) = self.append(line) {
            tracing::error!(?line, %error, "cannot record a change for a later shim");
        }
    }

    /// Records a change of a container.
    pub(super) fn record(&mut self, name: &str) {
        let Some(container) = self.containers.get(name) else {
            return;
        };
        if let Err(error) = self.ledger.append(&Record::Put { name, container }) {
            tracing::error!(name, %error, "cannot record a container's change for a later shim");
        }
    }

    /// Records that a start is about to be ordered. It does not compact the file: that would drop the line
    /// of a start that is not among the others yet.
    pub(super) fn record_start(&mut self, start: &Pending) -> io::Result<()> {
        let container = start.container();
        self.ledger.append(&Record::Put {
            name: &start.name,
            container: &container,
        })
    }

    /// Records that a container is forgotten.
    pub(super) fn forget(&mut self, name: &str) {
        self.streams.close(name);
        self.append_or_log(&Record::Drop { name });
    }

    /// Records that its start, which may yet be ordered, must never begin.
    pub(super) fn record_forbidden(&mut self, name: &str) {
        self.append_or_log(&Record::StartForbidden { name });
    }

    /// Schedules the removal of what a start may have left.
    pub(super) fn sweep_later(&mut self, left: StartRemains) {
        let ticket = self.launching.sweep_later(left.clone());
        self.append_or_log(&Record::Sweep { ticket, left });
    }

    /// Schedules a notification about the end of what a start may have left. `false` when nothing is left.
    pub(super) fn report_when_swept(&mut self, name: &str) -> bool {
        let found = self.launching.report_when_swept(name);
        let is_left = found.is_some();
        if let Some((ticket, left)) = found {
            self.append_or_log(&Record::Sweep { ticket, left });
        }
        is_left
    }

    /// Nothing of a start is left.
    pub(super) fn swept(&mut self, ticket: u64) {
        let Some(left) = self.launching.swept(ticket) else {
            return;
        };
        self.give_back(left.ids);
        self.append_or_log(&Record::Swept { ticket });
        if let Some(name) = left.name {
            self.start_failed(name, left.killed);
        }
    }

    /// Records the fence's state. A shim without it freezes too early or stays closed, and never lets anything
    /// run too long.
    pub(super) fn record_fence(&mut self) {
        let state = self.fence.kept();
        self.append_or_log(&Record::Fence { state });
    }

    /// Records the launcher's process.
    pub(super) fn record_launcher(&mut self) {
        if let Some(line) = launcher_line(self.launching.pid()) {
            self.append_or_log(&line);
        }
    }

    /// Rewrites the file with the present state only.
    pub(super) fn rewrite_ledger(&mut self) -> io::Result<()> {
        let fence = Record::Fence {
            state: self.fence.kept(),
        };
        let begun = self.containers.iter();
        let begun = begun.map(|(name, container)| Record::Put {
            name: name.as_str(),
            container,
        });
        let starting: Vec<_> = self
            .launching
            .pending
            .values()
            .filter(|start| self.containers.get(&start.name).is_none())
            .map(|start| (start.name.as_str(), start.container()))
            .collect();
        let starting = starting.iter();
        let starting = starting.map(|(name, container)| Record::Put {
            name: *name,
            container,
        });
        let sweeps = self.launching.sweeps();
        let sweeps = sweeps.map(|(ticket, left)| Record::Sweep {
            ticket,
            left: left.clone(),
        });
        let forbidden = self.forbidden_starts.iter();
        let forbidden = forbidden.map(|name| Record::StartForbidden { name });
        let lines = std::iter::once(fence)
            .chain(launcher_line(self.launching.pid()))
            .chain(forbidden)
            .chain(sweeps)
            .chain(begun)
            .chain(starting);
        self.ledger.rewrite(&boot_id()?, lines)
    }
}

fn launcher_line(pid: Option<i32>) -> Option<LineRef<'static>> {
    pid.map(|pid| Record::Launcher {
        pid,
        start_ticks: start_ticks(pid),
    })
}

/// 0, which no process has, for a process that is dead.
pub(super) fn start_ticks(pid: i32) -> u64 {
    ProcessIdentity::of(pid).map_or(0, |found| found.start_time_ticks)
}
