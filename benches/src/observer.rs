//! Watches processes die, from outside.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Poll interval: short compared to what is measured, long enough not to use up a core.
const POLL: Duration = Duration::from_millis(4);

/// Watches processes die from outside: it only reads `/proc`, does not use pidfds, conman or
/// Docker, and runs on a separate thread.
#[derive(Debug)]
pub(crate) struct Observer {
    cgroup: String,
    alive: Vec<(i32, u64)>,
}

impl Observer {
    /// Records every live process below a cgroup.
    pub(crate) fn of_cgroup(cgroup: &str) -> Result<Self> {
        let alive: Vec<_> = conman_observer::alive_below(cgroup)
            .into_iter()
            .map(|process| (process.pid, process.start_time_ticks))
            .collect();
        if alive.is_empty() {
            bail!("no process runs below the cgroup {cgroup}; is Docker's cgroup driver cgroupfs?");
        }
        Ok(Self {
            cgroup: cgroup.to_owned(),
            alive,
        })
    }

    pub(crate) fn pids(&self) -> Vec<i32> {
        self.alive.iter().map(|(pid, _)| *pid).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.alive.len()
    }

    /// The moment at which the last of them was first seen dead: gone, a zombie, or another
    /// process under its PID.
    #[expect(clippy::disallowed_methods, reason = "this runs on a separate thread")]
    pub(crate) fn wait_all_dead(mut self, patience: Duration) -> Result<Instant> {
        let deadline = Instant::now() + patience;
        while !self.alive.is_empty() {
            // Only the last one left is checked until it has gone: one read for each poll.
            while let Some((pid, start_time)) = self.alive.last() {
                if is_alive(*pid, *start_time) {
                    break;
                }
                self.alive.pop();
            }
            if Instant::now() > deadline {
                bail!(
                    "{} processes still live after {} s",
                    self.alive.len(),
                    patience.as_secs()
                );
            }
            if !self.alive.is_empty() {
                std::thread::sleep(POLL);
            }
        }
        let seen = Instant::now();
        let left = conman_observer::alive_below(&self.cgroup);
        if !left.is_empty() {
            bail!("{} processes appeared while the others died", left.len());
        }
        Ok(seen)
    }
}

fn is_alive(pid: i32, start_time: u64) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The program's name may contain anything; the fields begin after its last parenthesis.
    let Some((_, fields)) = stat.rsplit_once(')') else {
        return false;
    };
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next();
    let started = fields.nth(18).and_then(|field| field.parse().ok());
    !matches!(state, Some("Z" | "X")) && started == Some(start_time)
}
