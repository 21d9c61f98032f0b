//! Recording what a later shim must know.

use std::io;

use conman_linux::{ProcessIdentity, boot_id};

use super::Control;
use crate::launching::{Left, Pending};
use crate::ledger::{LineRef, Record};

impl Control {
    /// Appends a line, and rewrites the file when most lines are stale.
    pub(super) fn append(&mut self, line: &LineRef<'_>) -> io::Result<()> {
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

    /// Records a change of a container. It has happened, so a failure is only logged.
    pub(super) fn record(&mut self, name: &str) {
        let Some(container) = self.containers.get(name) else {
            return;
        };
        if let Err(error) = self.ledger.append(&Record::Put { name, container }) {
            tracing::error!(name, %error, "cannot record a container's change for a later shim");
        }
    }

    /// Records that a start is about to be ordered.
    pub(super) fn record_start(&mut self, start: &Pending) -> io::Result<()> {
        let container = start.container();
        self.append(&Record::Put {
            name: &start.name,
            container: &container,
        })
    }

    /// Records that a container is forgotten.
    pub(super) fn forget(&mut self, name: &str) {
        self.terminals.close(name);
        if let Err(error) = self.append(&Record::Drop { name }) {
            tracing::error!(name, %error, "cannot record a container's removal for a later shim");
        }
    }

    /// Records that its start, which may yet be ordered, must never begin. After a failure it is written
    /// with the rest as soon as there is space.
    pub(super) fn record_forbidden(&mut self, name: &str) {
        if let Err(error) = self.append(&Record::Condemned { name }) {
            tracing::error!(name, %error, "cannot record a forbidden start for a later shim");
        }
    }

    /// Schedules the removal of what a start may have left.
    pub(super) fn sweep_later(&mut self, left: Left) {
        let ticket = self.launching.sweep_later(left.clone());
        self.record_sweep(ticket, left);
    }

    /// Schedules a notification about the end of what a start may have left. `false` when nothing is left.
    pub(super) fn report_when_swept(&mut self, name: &str) -> bool {
        let found = self.launching.report_when_swept(name);
        let is_left = found.is_some();
        if let Some((ticket, left)) = found {
            self.record_sweep(ticket, left);
        }
        is_left
    }

    fn record_sweep(&mut self, ticket: u64, left: Left) {
        let line = Record::Sweep { ticket, left };
        if let Err(error) = self.append(&line) {
            tracing::error!(?line, %error, "cannot record a pending removal for a later shim");
        }
    }

    /// Nothing of a start is left.
    pub(super) fn swept(&mut self, ticket: u64) {
        let Some(left) = self.launching.swept(ticket) else {
            return;
        };
        self.give_back(left.ids);
        if let Err(error) = self.append(&Record::Swept { ticket }) {
            tracing::warn!(%error, "cannot record a finished removal; a later shim repeats it");
        }
        if let Some(name) = left.name {
            self.start_failed(name, left.cgroup, left.killed);
        }
    }

    /// Records the fence's state. A shim without it freezes too early or stays closed, and never lets anything
    /// run too long, so a failure is only logged.
    pub(super) fn record_fence(&mut self) {
        let state = self.fence.kept();
        if let Err(error) = self.append(&Record::Fence { state }) {
            tracing::error!(%error, "cannot record the fence's state for a later shim");
        }
    }

    /// Records the launcher's process.
    pub(super) fn record_launcher(&mut self) {
        let Some(pid) = self.launching.pid() else {
            return;
        };
        let line = Record::Launcher {
            pid,
            start_ticks: start_ticks(pid),
        };
        if let Err(error) = self.append(&line) {
            tracing::error!(%error, "cannot record the launcher for a later shim");
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
        let launcher = self.launching.pid().map(|pid| Record::Launcher {
            pid,
            start_ticks: start_ticks(pid),
        });
        let sweeps = self.launching.sweeps();
        let sweeps = sweeps.map(|(ticket, left)| Record::Sweep {
            ticket,
            left: left.clone(),
        });
        let forbidden = self.forbidden_starts.iter();
        let forbidden = forbidden.map(|name| Record::Condemned { name });
        let lines = std::iter::once(fence)
            .chain(launcher)
            .chain(forbidden)
            .chain(sweeps)
            .chain(begun)
            .chain(starting);
        self.ledger.rewrite(&boot_id()?, lines)
    }
}

/// 0, which no process has, for a process that is dead.
fn start_ticks(pid: i32) -> u64 {
    ProcessIdentity::of(pid).map_or(0, |found| found.start_time_ticks)
}
