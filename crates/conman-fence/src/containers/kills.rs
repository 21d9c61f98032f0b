//! Kills that last longer than one signal.
//!
//! A start by another program may still create processes: they are killed as they appear, until that
//! program reports the start's outcome.
//!
//! A killed container needs processor time to die, and its limit may give all of its processes one
//! millisecond in 100 ms. The launcher lifts the limit: the kernel visits every cgroup of the host for
//! each change, and the fence must not wait for that.
//!
//! A kept command is killed when its time is over.

use std::collections::{BTreeSet, VecDeque};

/// Pause between two checks for processes of starts that are to be killed.
const APPEARED_CHECK_NS: u64 = 20_000_000;

/// Most containers die sooner, and their limits are not changed.
const LIFT_AFTER_NS: u64 = 100_000_000;

/// Kills under way.
#[derive(Debug, Default)]
pub(super) struct PendingKills {
    /// Starts by other programs; all their processes are killed.
    appearing: BTreeSet<String>,
    checked_ns: u64,
    /// Killed containers, and when their CPU limit is lifted unless they are dead.
    cpu_limits: VecDeque<(u64, String)>,
    /// When kept commands are killed.
    deadlines: BTreeSet<(u64, String)>,
}

impl PendingKills {
    /// Kill everything that appears of this start.
    pub(super) fn add_appearing(&mut self, name: &str) {
        self.appearing.insert(name.to_owned());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.appearing.is_empty()
    }

    /// Forgets starts whose outcome is known. Returns the others.
    pub(super) fn appearing(
        &mut self,
        now_ns: u64,
        may_appear: impl Fn(&str) -> bool,
    ) -> &BTreeSet<String> {
        self.checked_ns = now_ns;
        self.appearing.retain(|name| may_appear(name));
        &self.appearing
    }

    /// SIGKILL was sent to a container that has a limit.
    pub(super) fn lift_cpu_limit_later(&mut self, name: &str, now_ns: u64) {
        let due_ns = now_ns.saturating_add(LIFT_AFTER_NS);
        self.cpu_limits.push_back((due_ns, name.to_owned()));
    }

    /// The next container whose limit is due to be lifted.
    pub(super) fn next_cpu_limit(&mut self, now_ns: u64) -> Option<String> {
        let (_, name) = self
            .cpu_limits
            .pop_front_if(|(due_ns, _)| *due_ns <= now_ns)?;
        Some(name)
    }

    /// Kill a command then.
    pub(super) fn add_deadline(&mut self, name: &str, deadline_ns: u64) {
        self.deadlines.insert((deadline_ns, name.to_owned()));
    }

    pub(super) fn remove_deadline(&mut self, name: &str, deadline_ns: u64) {
        self.deadlines.remove(&(deadline_ns, name.to_owned()));
    }

    /// The next command whose time is over.
    pub(super) fn next_timed_out(&mut self, now_ns: u64) -> Option<String> {
        let (deadline_ns, _) = self.deadlines.first()?;
        let is_due = *deadline_ns <= now_ns;
        is_due
            .then(|| self.deadlines.pop_first())?
            .map(|(_, name)| name)
    }

    pub(super) fn next_due_ns(&self) -> Option<u64> {
        let check_ns = self.checked_ns.saturating_add(APPEARED_CHECK_NS);
        let check = (!self.appearing.is_empty()).then_some(check_ns);
        let lift = self.cpu_limits.front().map(|(due_ns, _)| *due_ns);
        let deadline = self.deadlines.first().map(|(due_ns, _)| *due_ns);
        check.into_iter().chain(lift).chain(deadline).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appearing_processes_are_killed_until_the_outcome_is_known() {
        let mut kills = PendingKills::default();
        assert_eq!(kills.next_due_ns(), None);
        kills.add_appearing("a.1");
        assert_eq!(kills.appearing(1, |_| true).len(), 1);
        assert_eq!(kills.next_due_ns(), Some(1 + APPEARED_CHECK_NS));
        assert!(kills.appearing(2, |_| false).is_empty());
        assert!(kills.is_empty() && kills.next_due_ns().is_none());
    }

    #[test]
    fn a_limit_is_lifted_only_after_the_usual_time_to_die() {
        let mut kills = PendingKills::default();
        kills.lift_cpu_limit_later("a.1", 5);
        let due_ns = 5 + LIFT_AFTER_NS;
        assert_eq!(kills.next_due_ns(), Some(due_ns));
        assert_eq!(kills.next_cpu_limit(due_ns - 1), None);
        assert_eq!(kills.next_cpu_limit(due_ns), Some("a.1".to_owned()));
        assert_eq!(kills.next_cpu_limit(due_ns), None);
    }
}
