//! Removes what interrupted or failed starts may have left: processes, files and cgroups.
//!
//! A container may have reached its program before its start was interrupted, so what it left is hostile
//! and may be huge. It is removed in small steps between orders, so that an order waits for at most one
//! step. A directory counts as removed only when every process is dead that could still write there.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use conman_fence::Sweep;
use conman_linux::{Cgroups, Freezer, remove_tree_partly};
use rustix::event::{Timespec, poll};

/// Entries removed in one step: some milliseconds.
const ENTRIES_A_STEP: usize = 512;

/// Pause between two polls for the end of processes and cgroups, at first and later.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Tries to remove a cgroup after its last processes are gone; the kernel needs a moment.
const CGROUP_TRIES: u32 = 50;

/// Bound on a start's wait for remains of an earlier one in the same place. A client that gives each
/// start its own place does not wait.
const PLACE_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Begun {
    sweep: Sweep,
    stage: Stage,
    due: Instant,
    pause: Duration,
    tries: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Processes,
    /// Before the cgroup, which the files' last pages would keep.
    Files,
    Cgroup,
}

/// All sweeps.
#[derive(Debug, Default)]
pub(super) struct Sweeping {
    all: VecDeque<Begun>,
}

impl Sweeping {
    pub(super) fn add(&mut self, sweep: Sweep) {
        self.all.push_back(Begun {
            sweep,
            stage: Stage::Processes,
            due: Instant::now(),
            pause: FIRST_PAUSE,
            tries: 0,
        });
    }

    /// Time until the next step is due; `None` when there is nothing to do.
    pub(super) fn idle_for(&self) -> Option<Duration> {
        let next = self.all.iter().map(|begun| begun.due).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Does one step that is due. Returns the ticket of a sweep that is finished.
    pub(super) fn step(&mut self, cgroups: &Cgroups, freezer: &Freezer) -> Option<u64> {
        let now = Instant::now();
        let due = self.all.iter().position(|begun| begun.due <= now)?;
        // The next call takes another one first.
        let mut begun = self.all.remove(due)?;
        if begun.step(cgroups, freezer) {
            return Some(begun.sweep.ticket);
        }
        self.all.push_back(begun);
        None
    }

    /// Whether a start has to wait for the removal of something in its place.
    fn is_in_the_way(&self, cgroup: &str, scratch: &Path) -> bool {
        let mut sweeps = self.all.iter().map(|begun| &begun.sweep);
        sweeps.any(|sweep| sweep.cgroup == cgroup || sweep.scratch == scratch)
    }

    /// Waits, with a bound, until nothing is in a start's way; calls back for sweeps that finish meanwhile.
    pub(super) fn clear(
        &mut self,
        cgroup: &str,
        scratch: &Path,
        cgroups: &Cgroups,
        freezer: &Freezer,
        over: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let deadline = Instant::now() + PLACE_PATIENCE;
        while self.is_in_the_way(cgroup, scratch) && Instant::now() < deadline {
            match self.step(cgroups, freezer) {
                Some(ticket) => over(ticket)?,
                None => {
                    let idle = self.idle_for().unwrap_or_default().min(FIRST_PAUSE);
                    // Interrupted or not, it polls again.
                    let _ = poll(&mut [], Timespec::try_from(idle).ok().as_ref());
                }
            }
        }
        Ok(())
    }
}

impl Begun {
    /// Returns `true` when it is finished.
    fn step(&mut self, cgroups: &Cgroups, freezer: &Freezer) -> bool {
        let Sweep {
            cgroup, scratch, ..
        } = &self.sweep;
        match self.stage {
            Stage::Processes if is_empty(cgroups, cgroup) => {
                self.stage = Stage::Files;
                self.pause = FIRST_PAUSE;
            }
            Stage::Processes => {
                // They were killed before; a process that joined later was not.
                if let Err(error) = freezer.kill(cgroup) {
                    tracing::debug!(cgroup, %error, "cannot kill an interrupted start's cgroup");
                }
                if self.pause == LAST_PAUSE && self.tries == 0 {
                    self.tries = 1;
                    tracing::warn!(cgroup, "an interrupted start's processes do not end");
                }
                self.due = Instant::now() + self.pause;
                self.pause = (self.pause * 2).min(LAST_PAUSE);
            }
            Stage::Files => match remove_tree_partly(scratch, ENTRIES_A_STEP) {
                Ok(false) => {}
                outcome => {
                    if let Err(error) = outcome {
                        let path = scratch.display();
                        tracing::warn!(%path, %error, "cannot remove an interrupted start's files");
                    }
                    self.stage = Stage::Cgroup;
                    self.tries = 0;
                }
            },
            Stage::Cgroup => {
                let left = cgroups.remove_tree(cgroup);
                self.tries += 1;
                if left.is_empty() {
                    return true;
                }
                if self.tries >= CGROUP_TRIES {
                    for error in left {
                        tracing::warn!(%error, "cannot remove an interrupted start's cgroup");
                    }
                    return true;
                }
                self.due = Instant::now() + FIRST_PAUSE;
            }
        }
        false
    }
}

/// A cgroup that cannot be read counts as not empty.
fn is_empty(cgroups: &Cgroups, cgroup: &str) -> bool {
    match cgroups.try_pids_below(cgroup) {
        Ok(pids) => pids.is_empty(),
        Err(error) => {
            tracing::debug!(cgroup, %error, "cannot read whether an interrupted start has ended");
            false
        }
    }
}
