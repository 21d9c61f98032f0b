//! The deaths of a node's processes as `/proc` tells of them, which knows nothing of pidfds.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use conman_observer::alive_below;
use tokio::sync::oneshot;

/// Between two looks: short against what is measured, long enough not to take a processor.
const POLL: Duration = Duration::from_millis(4);
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Deaths {
    /// Pids and start times.
    alive: Vec<(i32, u64)>,
}

impl Deaths {
    /// Notes every live process below a cgroup.
    pub(super) fn below(cgroup: &str) -> Result<Self> {
        let found = alive_below(cgroup).into_iter();
        let alive: Vec<_> = found.map(|one| (one.pid, one.start_time_ticks)).collect();
        ensure!(!alive.is_empty(), "nothing runs below {cgroup}");
        Ok(Self { alive })
    }

    pub(super) fn count(&self) -> usize {
        self.alive.len()
    }

    /// When the last of them was first seen dead. It looks by a thread of its own.
    #[expect(clippy::disallowed_methods, reason = "a thread of its own")]
    pub(super) fn watch(mut self) -> oneshot::Receiver<Result<Instant>> {
        let (tell, told) = oneshot::channel();
        std::thread::spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            loop {
                // One that lives is asked about until it is dead: one read a look.
                while self.alive.last().is_some_and(|one| !is_alive(*one)) {
                    self.alive.pop();
                }
                let now = Instant::now();
                if self.alive.is_empty() {
                    return tell.send(Ok(now));
                }
                if now > deadline {
                    let left = self.alive.len();
                    return tell.send(still_alive(left));
                }
                std::thread::sleep(POLL);
            }
        });
        told
    }
}

fn still_alive(left: usize) -> Result<Instant> {
    bail!("{left} processes live {PATIENCE:?} after the notice")
}

/// Not gone, no zombie, and no other process under its number.
fn is_alive((pid, start_time): (i32, u64)) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let parse = || {
        // The name before it may contain anything.
        let (_, fields) = stat.rsplit_once(')').context("no name")?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next().context("no state")?;
        let started: u64 = fields.nth(18).context("no start time")?.parse()?;
        anyhow::Ok(!matches!(state, "Z" | "X") && started == start_time)
    };
    parse().unwrap_or(false)
}
