//! Containers that are no children: an earlier shim or another program started them. Their pidfds are
//! polled, and the kernel is asked how they ended.
//!
//! ```text
//! living ── its pidfd is readable ──▶ dead ── status found, or not in time ──▶ ended
//! ```

use std::collections::BTreeMap;

/// Pause before the second check for a status that the new parent has not reaped yet. Each pause is as
/// long as all before together, since ten thousand containers may die at the same time.
const CHECK_NS: u64 = 5_000_000;

/// Bound on those checks; afterwards the status counts as unknown.
const PATIENCE_NS: u64 = 500_000_000;

/// Pidfds that are polled, and deaths whose status is not available yet.
#[derive(Debug, Default)]
pub(super) struct Adopted {
    /// By the numbers of their pidfds in the epoll.
    living: BTreeMap<u64, String>,
    next_number: u64,
    dead: BTreeMap<String, Death>,
}

#[derive(Debug, Clone, Copy)]
struct Death {
    since_ns: u64,
    check_ns: u64,
}

/// A death to check now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DueDeath {
    pub(super) name: String,
    /// The last check: a status that is still missing counts as unknown.
    pub(super) is_last: bool,
}

impl Adopted {
    /// Returns the number under which its pidfd is to be polled.
    pub(super) fn add(&mut self, name: &str) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.living.insert(number, name.to_owned());
        number
    }

    /// Its pidfd is readable. Returns its name.
    pub(super) fn died(&mut self, number: u64, now_ns: u64) -> Option<String> {
        let name = self.living.remove(&number)?;
        let death = Death {
            since_ns: now_ns,
            check_ns: now_ns,
        };
        self.dead.insert(name.clone(), death);
        Some(name)
    }

    pub(super) fn is_dead(&self, name: &str) -> bool {
        self.dead.contains_key(name)
    }

    /// Returns deaths to check now. Each is due later again unless [`Adopted::ended`] follows.
    pub(super) fn due(&mut self, now_ns: u64) -> Vec<DueDeath> {
        let mut due = Vec::new();
        for (name, death) in &mut self.dead {
            if death.check_ns <= now_ns {
                let waited_ns = now_ns.saturating_sub(death.since_ns);
                death.check_ns = now_ns.saturating_add(waited_ns.max(CHECK_NS));
                due.push(DueDeath {
                    name: name.clone(),
                    is_last: waited_ns >= PATIENCE_NS,
                });
            }
        }
        due
    }

    /// Its status is known, or counts as unknown.
    pub(super) fn ended(&mut self, name: &str) {
        self.dead.remove(name);
    }

    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.dead.values().map(|death| death.check_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_is_checked_at_once_then_less_and_less_often_until_its_last_check() {
        let mut adopted = Adopted::default();
        let number = adopted.add("a");
        assert_eq!(adopted.died(number + 1, 0), None);
        assert_eq!(adopted.died(number, 0), Some("a".to_owned()));
        let mut checks = Vec::new();
        while let Some(now_ns) = adopted.next_due_ns() {
            for death in adopted.due(now_ns) {
                checks.push(now_ns / CHECK_NS);
                if death.is_last {
                    adopted.ended(&death.name);
                }
            }
        }
        assert_eq!(checks, [0, 1, 2, 4, 8, 16, 32, 64, 128]);
        assert!(!adopted.is_dead("a"));
    }
}
