//! Removing what starts may have left that were interrupted, or that something has outlived: their
//! processes, files and cgroups.
//!
//! A container may have come as far as its program before its start was interrupted, so what it has
//! left is hostile, and may be huge. So it is removed in small steps, between orders, which never
//! wait for more than one of them. A directory counts as removed only when every process is gone
//! that could still write there.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use conman_linux::{Cgroups, Freezer, remove_tree_partly};
use rustix::event::{Timespec, poll};

/// Entries that are removed in one step: some milliseconds.
const ENTRIES_A_STEP: usize = 512;

/// Pause between two looks at what the kernel is about to give up, at first and later.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Tries to remove a cgroup whose last processes are gone; it takes the kernel a moment.
const CGROUP_TRIES: u32 = 50;

/// Bound on a start's waiting for what was left of an earlier one in the same place. Whoever gives
/// starts places of their own does not wait.
const PLACE_PATIENCE: Duration = Duration::from_secs(5);

/// What one start may have left.
#[derive(Debug)]
pub(super) struct Sweep {
    pub(super) ticket: u64,
    pub(super) cgroup: String,
    pub(super) scratch: PathBuf,
}

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
    /// Before the cgroup, which its files' last pages would keep.
    Files,
    Cgroup,
}

/// All that is to be removed.
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

    /// How long nothing is to be done; `None` when there is nothing to do at all.
    pub(super) fn idle_for(&self) -> Option<Duration> {
        let next = self.all.iter().map(|begun| begun.due).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Does a little of what is due, and answers whose removal is over.
    pub(super) fn step(&mut self, cgroups: &Cgroups, freezer: &Freezer) -> Option<u64> {
        let now = Instant::now();
        let due = self.all.iter().position(|begun| begun.due <= now)?;
        // The next time another one's turn comes first.
        let mut begun = self.all.remove(due)?;
        if begun.step(cgroups, freezer) {
            return Some(begun.sweep.ticket);
        }
        self.all.push_back(begun);
        None
    }

    /// Whether a start has to wait until something is removed that is in its place.
    fn is_in_the_way(&self, cgroup: &str, scratch: &Path) -> bool {
        let mut sweeps = self.all.iter().map(|begun| &begun.sweep);
        sweeps.any(|sweep| sweep.cgroup == cgroup || sweep.scratch == scratch)
    }

    /// Waits until nothing is in a start's way, or for as long as is reasonable; tells what was
    /// over meanwhile.
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
                    // Interrupted or not, it is looked again.
                    let _ = poll(&mut [], Timespec::try_from(idle).ok().as_ref());
                }
            }
        }
        Ok(())
    }
}

impl Begun {
    /// `true` when it is over.
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
                // They were killed before; one that joined late was not.
                if let Err(error) = freezer.kill(cgroup) {
                    tracing::debug!(cgroup, %error, "an interrupted start's cgroup is not killed");
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
                        tracing::warn!(%path, %error, "an interrupted start leaves files");
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
                        tracing::warn!(%error, "an interrupted start leaves a cgroup");
                    }
                    return true;
                }
                self.due = Instant::now() + FIRST_PAUSE;
            }
        }
        false
    }
}

/// What cannot be looked at may hold something.
fn is_empty(cgroups: &Cgroups, cgroup: &str) -> bool {
    match cgroups.try_pids_below(cgroup) {
        Ok(pids) => pids.is_empty(),
        Err(error) => {
            tracing::debug!(cgroup, %error, "whether an interrupted start has ended is not known");
            false
        }
    }
}
