//! A registry that is not dead, but slow or refusing: what such a store does to requests, and what a
//! node owes it.

use conman_core::ownership::{Answer, Event, Request, Transaction};

use crate::world::{Ev, HEAL_MS, World};

/// From this seed on, the registry is slow and refuses, besides every other fault.
pub(crate) const GREY_FROM: u64 = 3_000_000;

/// Refusals as short as this freeze nobody: F less a renewal's interval, a retry, and the messages.
const SHORT_REFUSAL_MS: u64 = 3_300;
/// A node is thawed this long after the refusals have ended: R, two requests and ticks, and what a
/// leaderless registry keeps a request waiting.
const THAWED_AFTER_MS: u64 = 2_500;

/// Which faults a fleet meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grey {
    /// The registry is alive or dead.
    Never,
    /// Besides every other fault.
    Mixed,
    /// Nothing but round trips below a third of F: nothing may freeze.
    OnlySlow,
    /// Nothing but refusals: nothing may freeze before its deadline, and all is thawed soon after.
    OnlyRefusals,
}

impl Grey {
    pub(crate) fn of(seed: u64) -> Self {
        match (seed >= GREY_FROM, seed % 4) {
            (false, _) => Self::Never,
            (true, 1) => Self::OnlySlow,
            (true, 3) => Self::OnlyRefusals,
            (true, _) => Self::Mixed,
        }
    }

    pub(crate) fn is_alone(self) -> bool {
        matches!(self, Self::OnlySlow | Self::OnlyRefusals)
    }
}

/// Why the registry refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The quota is used up: writes are refused at once, and some are executed all the same.
    Full,
    /// Expired credentials, too many requests: everything is refused at once, with certainty.
    Credentials,
    /// No leader: after a while nobody knows whether a write was executed.
    Leaderless,
    /// Reads of a compacted revision, or that are too large, fail; writes do not.
    Reads,
}

impl World {
    pub(crate) fn becomes_grey(&mut self) {
        let slow = match self.grey {
            Grey::OnlySlow => true,
            Grey::OnlyRefusals => false,
            _ => self.random.percent(50),
        };
        if slow {
            let most = match self.grey {
                Grey::OnlySlow => self.timing.fence_ms / 3 - 70,
                _ => self.timing.fence_ms,
            };
            self.slow_ms = self.random.range(200, most);
            let slow_ms = self.slow_ms;
            self.note(|| format!("store: {slow_ms} ms for a round trip"));
            let lasts = self.random.range(3_000, 30_000);
            self.at(lasts, Ev::StoreIsFast);
            return;
        }
        if self.refusal.is_some() {
            return;
        }
        let refusal = match self.random.range(0, 3) {
            0 => Refusal::Full,
            1 => Refusal::Credentials,
            2 => Refusal::Leaderless,
            _ => Refusal::Reads,
        };
        let lasts = match self.random.percent(50) {
            true => self.random.range(500, SHORT_REFUSAL_MS),
            false => self.random.range(5_000, 55_000),
        };
        self.note(|| format!("store: refuses, {refusal:?}, for {lasts} ms"));
        self.refusal = Some(refusal);
        self.refuses_since.get_or_insert(self.now);
        self.at(lasts, Ev::StoreAccepts);
    }

    pub(crate) fn store_accepts(&mut self) {
        self.note(|| "store: refuses no more".into());
        self.refusal = None;
        self.accepts_since = self.now;
        self.at(THAWED_AFTER_MS, Ev::Thawed(self.now));
    }

    /// Whether everything is thawed: the refusals ended at `since`.
    pub(crate) fn is_thawed(&mut self, since: u64) {
        if self.grey != Grey::OnlyRefusals || self.refusal.is_some() || self.accepts_since != since
        {
            return;
        }
        self.refuses_since = None;
        for (node, machine) in self.machines.iter().enumerate() {
            let frozen = machine
                .fence
                .as_ref()
                .is_some_and(|fence| fence.has_fired());
            if frozen {
                self.checker.thawed_late(node, self.now - since);
            }
        }
    }

    /// A fence has reached its deadline.
    pub(crate) fn fence_fired(&mut self, node: usize) {
        if !self.grey.is_alone() {
            return;
        }
        let needed = self
            .refuses_since
            .is_some_and(|since| self.now - since >= SHORT_REFUSAL_MS);
        if !needed {
            self.checker.frozen_without_need(node, self.grey.into());
        }
    }

    /// What a refusing registry answers; `None` if it executes the request.
    pub(crate) fn refused(&mut self, node: usize, op: u64, request: &Request) -> Option<Answer> {
        let refusal = self.refusal.filter(|_| self.now < HEAL_MS)?;
        match (refusal, request) {
            (Refusal::Full, Request::Commit(transaction)) => {
                if self.random.percent(3) {
                    self.executed_all_the_same(node, op, transaction);
                }
                Some(Answer::Ambiguous)
            }
            (Refusal::Credentials, _) => Some(Answer::Unavailable),
            (Refusal::Leaderless, Request::Commit(_)) => Some(Answer::Ambiguous),
            (Refusal::Leaderless | Refusal::Reads, Request::Read(_) | Request::ReadSessions) => {
                Some(Answer::Unavailable)
            }
            (Refusal::Full, _) | (Refusal::Reads, Request::Commit(_)) => None,
        }
    }

    fn executed_all_the_same(&mut self, node: usize, op: u64, transaction: &Transaction) {
        self.commit(node, op, transaction);
    }

    /// A request's answer is late, and may still come where the registry is slow.
    pub(crate) fn time_out(&mut self, node: usize, epoch: u64, op: u64) {
        let answer = Answer::Ambiguous;
        let machine = &mut self.machines[node];
        if self.grey != Grey::Never && machine.daemon_epoch == epoch && machine.open.remove(&op) {
            self.daemon(node, Event::StoreAnswer { op, answer });
            self.machines[node].late.insert(op);
            return;
        }
        self.deliver(node, epoch, None, Event::StoreAnswer { op, answer });
    }

    pub(crate) fn heal(&mut self) {
        self.note(|| "everything is healed".into());
        self.store_down_until = 0;
        self.slow_ms = 0;
        self.store_accepts();
        self.lossy = 0;
        for node in 0..self.machines.len() {
            self.machines[node].cut_in = false;
            self.machines[node].cut_out = false;
            self.machine_continues(node);
            self.daemon_continues(node);
            self.readmit(node);
            let watched = self.watched(node);
            self.watch(node, &watched);
        }
    }

    /// How long a refusal is under way.
    pub(crate) fn refusal_delay(&mut self) -> u64 {
        match self.refusal {
            Some(Refusal::Leaderless) => self.random.range(500, 900),
            _ => 1,
        }
    }
}

impl From<Grey> for &'static str {
    fn from(grey: Grey) -> Self {
        match grey {
            Grey::Never => "a registry that is alive or dead",
            Grey::Mixed => "faults of all kinds",
            Grey::OnlySlow => "round trips below a third of F",
            Grey::OnlyRefusals => "refusals for less than F",
        }
    }
}
