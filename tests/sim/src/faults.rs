//! What goes wrong in a simulated fleet, and when.

use conman_core::ownership::NodeName;

use crate::Pauses;
use crate::grey::Grey;
use crate::world::{Ev, HEAL_MS, World};

const PREEMPTIONS_PERCENT: u64 = 40;
/// After one pause of a machine, or one restart of its shim, none for so long: the bound of the
/// fence has room for one of each.
const SPARE_MS: u64 = 20_000;
/// A pause is shorter than the takeover time leaves room for by this: the shim wakes late, too.
const WAKE_MS: u64 = 190;
const SHIM_RESTART_MS: u64 = 900;

impl World {
    pub(crate) fn fault(&mut self) {
        if self.now >= HEAL_MS {
            return;
        }
        let node = self.any_node();
        let kind = match (self.only_outages, self.only_deaths) {
            (true, _) => 0,
            (_, true) => 10,
            _ if self.preempts && self.random.percent(PREEMPTIONS_PERCENT) => 11,
            _ if self.grey.is_alone() => 14,
            _ if self.grey == Grey::Mixed => self.random.range(0, 16).min(14),
            _ => self.random.range(0, 13),
        };
        let machine = &self.machines[node];
        let (up, running) = (machine.up, machine.daemon.is_some() && !machine.stopped);
        self.note(|| format!("fault {kind} at n{node}"));
        match kind {
            0 => self.store_down_until = self.now + self.random.range(500, 25_000),
            1 | 2 => {
                let lasts = self.random.range(500, 30_000);
                self.at(0, Ev::RequestsLost(node, lasts));
            }
            3 => {
                self.machines[node].cut_in = true;
                self.soon(500, 30_000, Ev::AnswersPass(node));
            }
            4 if up && running => {
                self.machines[node].stopped = true;
                self.soon(100, 25_000, Ev::DaemonContinues(node));
            }
            5 | 6 if up => self.pause(node),
            7 if up => self.daemon_crashes(node),
            8 if up => self.shim_crashes(node),
            9 if up => {
                self.daemon_crashes(node);
                self.shim_crashes(node);
            }
            10 if up => self.machine_crashes(node),
            11 if self.preempts => self.notice_preemption(node),
            11 => self.preempt(node),
            12 => self.program_ends(node),
            14 => self.becomes_grey(),
            _ => self.process_blocks(node),
        }
        let burst = self.random.percent(20);
        let (low, high) = if burst { (0, 300) } else { (500, 8_000) };
        self.soon(low, high, Ev::Fault);
    }

    /// Any of the others, or none.
    pub(crate) fn watch_others(&mut self, node: usize) {
        let chosen = self.random.range(0, (1 << self.names.len()) - 1);
        let others = self.names.iter().enumerate();
        let others = others.filter(|(other, _)| *other != node && chosen & (1 << *other) != 0);
        let others: Vec<NodeName> = others.map(|(_, name)| name.clone()).collect();
        self.watch(node, &others);
    }

    /// What makes the dead come back, or die again, just while others take over.
    pub(crate) fn stir(&mut self, node: usize) {
        let only = self.only_deaths || self.grey.is_alone();
        if self.now >= HEAL_MS || only || self.random.percent(50) {
            return;
        }
        self.soon(0, 1_000, Ev::RequestsPass(node));
        self.soon(0, 1_000, Ev::AnswersPass(node));
        if self.random.percent(50) {
            self.at(0, Ev::DaemonDies(node));
        }
    }

    /// What interrupts a daemon in the middle of its rejoining.
    pub(crate) fn stir_rejoin(&mut self, node: usize) {
        let only = self.only_outages || self.only_deaths || self.grey.is_alone();
        if !only && self.random.percent(15) {
            let lasts = self.random.range(5_000, 25_000);
            self.soon(10, 150, Ev::RequestsLost(node, lasts));
        }
    }

    /// The whole machine stands still; half the time its clock does not notice.
    fn pause(&mut self, node: usize) {
        if self.machines[node].paused.is_some() || self.now < self.machines[node].may_pause_at {
            return;
        }
        let beyond = self.pauses == Pauses::Beyond;
        let seen = !beyond && self.random.percent(50);
        let most = self.timing.slack_ms().unwrap_or(0) - WAKE_MS;
        let (low, high) = match beyond {
            true => (most, 6 * most),
            false => (100, most),
        };
        let pause = self.random.range(low, high);
        self.machines[node].may_pause_at = self.now + pause + SPARE_MS;
        self.machine_pauses(node, seen);
        self.at(pause, Ev::MachineContinues(node));
    }

    fn shim_crashes(&mut self, node: usize) {
        if self.now < self.machines[node].shim_may_crash_at || self.machines[node].fence.is_none() {
            return;
        }
        self.machines[node].shim_may_crash_at = self.now + SPARE_MS;
        self.shim_dies(node);
        self.soon(50, SHIM_RESTART_MS, Ev::ShimUp(node));
    }

    fn daemon_crashes(&mut self, node: usize) {
        if self.machines[node].daemon.is_some() {
            self.daemon_dies(node);
            self.soon(100, 20_000, Ev::DaemonUp(node));
        }
    }

    pub(crate) fn machine_crashes(&mut self, node: usize) {
        self.machine_dies(node);
        self.soon(500, 30_000, Ev::MachineUp(node));
    }
}
