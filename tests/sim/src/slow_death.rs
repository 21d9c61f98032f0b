//! A container whose PID namespace is not empty for a long time after its kill.
//!
//! Its init is in the kernel, taking down its memory; the other process, of two threads, runs until it is
//! killed as well, and may have made a child that the kill has missed.

use conman_core::ownership::Slot;
use conman_core::preemption::ThreadSeen;

use crate::world::{Ev, World};

const INIT: i32 = 1;
const OTHER: i32 = 2;
const THREAD: i32 = 3;
const CHILD: i32 = 4;

#[derive(Debug, Clone)]
pub(crate) struct SlowDeath {
    /// The kernel takes so long.
    pub(crate) takes_ms: u64,
    init_exits_at: u64,
    /// When all but the init was killed: then the leader and the thread exit.
    ordered: Option<(u64, u64)>,
    /// When a child was made, and whether a scan has missed it.
    child: Option<(u64, bool)>,
    child_killed: bool,
}

impl SlowDeath {
    pub(crate) fn new(takes_ms: u64) -> Self {
        Self {
            takes_ms,
            init_exits_at: u64::MAX,
            ordered: None,
            child: None,
            child_killed: false,
        }
    }

    /// It exits at once, or when it is out of D state.
    pub(crate) fn init_killed(&mut self, at: u64) {
        self.init_exits_at = self.init_exits_at.min(at + 5);
    }

    /// Whether every thread has begun to exit.
    fn is_exiting(&self, now: u64) -> bool {
        let all = self.ordered.is_some_and(|(_, thread)| thread <= now);
        all && self.init_exits_at <= now && (self.child.is_none() || self.child_killed)
    }
}

impl World {
    /// Everything in the cgroup is ordered to freeze and to die.
    pub(crate) fn end_all(&mut self, node: usize, slot: &Slot) {
        let (now, boot) = (self.now, self.machines[node].boot);
        let (leader, thread) = (self.random.range(1, 20), self.random.range(1, 80));
        let has_child = self.random.percent(50);
        let Some(slow) = self.slow_death(node, slot) else {
            return;
        };
        if slow.ordered.is_some() {
            // A second kill finds the child.
            slow.child_killed = slow.child.is_some_and(|(born, _)| born < now);
        } else {
            slow.ordered = Some((now + leader, now + thread));
            slow.child = has_child.then_some((now + leader.max(thread), false));
        }
        self.at(thread, Ev::Exiting(node, boot, slot.clone()));
        self.at(0, Ev::Exiting(node, boot, slot.clone()));
    }

    /// What there is of it stops to run, which the checker learns. A child that the kill has missed is frozen.
    pub(crate) fn exiting(&mut self, node: usize, boot: u64, slot: &Slot) {
        let now = self.now;
        if self.machines[node].boot == boot
            && let Some(slow) = self.slow_death(node, slot)
            && slow.ordered.is_some_and(|(_, thread)| thread <= now)
        {
            let exiting = slow.is_exiting(now);
            self.others_stop(node, slot, exiting);
        }
    }

    /// One pass over the threads of the cgroup.
    pub(crate) fn scan(&mut self, node: usize, slot: &Slot) -> Vec<ThreadSeen> {
        let now = self.now;
        let seen = |process, thread, exiting| ThreadSeen {
            process,
            thread,
            started: 0,
            exiting,
        };
        let Some(slow) = self.slow_death(node, slot) else {
            // It would be dead if it did not hang in a system call.
            return vec![seen(INIT, INIT, false)];
        };
        let (leader, thread) = slow.ordered.unwrap_or((u64::MAX, u64::MAX));
        let mut threads = vec![
            seen(INIT, INIT, slow.init_exits_at <= now),
            seen(OTHER, OTHER, leader <= now),
            seen(OTHER, THREAD, thread <= now),
        ];
        if let Some((born, missed)) = &mut slow.child
            && *born <= now
            && std::mem::replace(missed, true)
        {
            threads.push(seen(CHILD, CHILD, slow.child_killed));
        }
        threads
    }
}
