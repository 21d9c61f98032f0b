//! A machine's containers: what a kernel does with orders, and when it fails to.

use conman_core::ownership::{BootTime, Event, FenceEvent, Slot, SlotView};

use crate::slow_death::SlowDeath;
use crate::world::{Ev, HEAL_MS, World};

/// So many kills of one container fail: the bound of the fence has time for their repetition.
const FAILED_KILLS: u64 = 3;

/// A slot's cgroup and what may be in it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Process {
    exists: bool,
    frozen: bool,
    /// Counts freezes and thaws, so that a late freeze does not outlive its thaw.
    freeze: u64,
    /// Never comes to be seen frozen, frozen or not.
    unconfirmed: bool,
    /// Is not frozen by any order once it exists.
    unfreezable: bool,
    /// In D state: neither frozen nor dead before this.
    blocked_until: u64,
    /// SIGKILL is pending: not one instruction runs in user mode any more.
    killed: bool,
    failed_kills: u64,
    slow_death: Option<SlowDeath>,
    /// Others than its init run, although that was sent SIGKILL.
    others_run: bool,
    /// With another node: flushed and unlocked as the kernel takes it down.
    shares_files: bool,
}

impl Process {
    /// What a new shim finds.
    pub(crate) fn seen(&self, slot: &Slot) -> SlotView {
        SlotView {
            slot: slot.clone(),
            present: self.exists,
            frozen: self.frozen && !self.unconfirmed,
            certified: false,
        }
    }
}

impl World {
    /// The slot is open: the create is on its way.
    pub(crate) fn create(&mut self, node: usize, now: BootTime, slot: Slot) {
        self.checker.creates((node, slot.clone()), now.0);
        let faulty = self.now < HEAL_MS && !self.only_outages && self.random.percent(25);
        let (kind, boot) = (self.random.range(0, 9), self.machines[node].boot);
        if faulty && kind < 2 {
            // The program does not exist, say.
            self.checker.gone(&(node, slot.clone()));
            return self.notice(node, 5, 300, FenceEvent::StartOver(slot));
        }
        let process = Process {
            unfreezable: faulty && kind < 4,
            unconfirmed: faulty && (4..6).contains(&kind),
            ..Process::default()
        };
        let process = self.drawn_death(process);
        self.machines[node].processes.insert(slot.clone(), process);
        let most = if faulty && kind >= 6 { 15_000 } else { 200 };
        self.soon(5, most, Ev::Appear(node, boot, slot));
    }

    fn drawn_death(&mut self, process: Process) -> Process {
        if !self.preempts || self.now >= HEAL_MS || self.random.percent(75) {
            return process;
        }
        let takes_ms = self.random.range(400, 15_000);
        Process {
            slow_death: Some(SlowDeath::new(takes_ms)),
            shares_files: self.random.percent(25),
            ..process
        }
    }

    pub(crate) fn slow_death(&mut self, node: usize, slot: &Slot) -> Option<&mut SlowDeath> {
        let process = self.machines[node].processes.get_mut(slot)?;
        process.slow_death.as_mut()
    }

    pub(crate) fn shares_files(&self, node: usize, slot: &Slot) -> bool {
        let process = self.machines[node].processes.get(slot);
        process.is_some_and(|process| process.shares_files)
    }

    /// None of its other threads runs any more; `exiting`: all of them, the init's too, have begun to exit.
    pub(crate) fn others_stop(&mut self, node: usize, slot: &Slot, exiting: bool) {
        if let Some(process) = self.machines[node].processes.get_mut(slot) {
            process.others_run = false;
            if exiting && !process.shares_files {
                self.checker.exiting((node, slot.clone()));
            }
            self.judge(node, slot);
        }
    }

    /// What the kernel tells the shim of now; one that comes later looks for itself.
    fn notice(&mut self, node: usize, low: u64, high: u64, event: FenceEvent) {
        let epoch = self.machines[node].shim_epoch;
        self.soon(low, high, Ev::Shim(node, epoch, event));
    }

    /// The process, if this is still its boot; `None` as well while the machine stands still, when
    /// `event` comes again.
    fn process(&mut self, node: usize, boot: u64, slot: &Slot, event: Ev) -> Option<&mut Process> {
        if self.machines[node].boot != boot {
            return None;
        }
        if self.machines[node].paused.is_some() {
            self.at(100, event);
            return None;
        }
        self.machines[node].processes.get_mut(slot)
    }

    pub(crate) fn appear(&mut self, node: usize, boot: u64, slot: Slot) {
        let again = Ev::Appear(node, boot, slot.clone());
        if let Some(process) = self.process(node, boot, &slot, again) {
            process.exists = true;
            self.judge(node, &slot);
            if self.preempts {
                self.start_answered(node, &slot);
            }
            self.notice(node, 0, 20, FenceEvent::Appeared(slot));
        }
    }

    pub(crate) fn freeze(&mut self, node: usize, slot: Slot) {
        let (boot, now) = (self.machines[node].boot, self.now);
        let Some(process) = self.machines[node].processes.get(&slot) else {
            return;
        };
        let resists = process.unfreezable || process.blocked_until > now;
        if !(resists && process.exists) {
            let freeze = process.freeze;
            self.soon(1, 100, Ev::Frozen(node, boot, slot, freeze));
        }
    }

    pub(crate) fn frozen(&mut self, node: usize, boot: u64, slot: Slot, freeze: u64) {
        let again = Ev::Frozen(node, boot, slot.clone(), freeze);
        if let Some(process) = self.process(node, boot, &slot, again)
            && process.freeze == freeze
        {
            process.frozen = true;
            let confirmed = !process.unconfirmed;
            self.judge(node, &slot);
            if confirmed {
                // Seen by a look at the cgroup, which shows no freeze before the last thaw.
                self.shim(node, FenceEvent::FreezeVerified(slot));
            }
        }
    }

    pub(crate) fn thaw(&mut self, node: usize, now: BootTime, slot: &Slot) {
        if let Some(process) = self.machines[node].processes.get_mut(slot) {
            process.freeze += 1;
            process.frozen = false;
            self.checker.thaws(&(node, slot.clone()), now.0);
            self.judge(node, slot);
        }
    }

    pub(crate) fn kill(&mut self, node: usize, slot: &Slot) {
        let fails = self.random.percent(30);
        let Some(process) = self.machines[node].processes.get_mut(slot) else {
            return;
        };
        if process.others_run {
            return self.end_all(node, slot);
        }
        if process.killed || !process.exists {
            return;
        }
        if fails && process.failed_kills < FAILED_KILLS {
            process.failed_kills += 1;
            return;
        }
        self.dying(node, slot);
        self.end_all(node, slot);
    }

    pub(crate) fn dying(&mut self, node: usize, slot: &Slot) {
        let (boot, now) = (self.machines[node].boot, self.now);
        if let Some(process) = self.machines[node].processes.get_mut(slot) {
            let is_first = !std::mem::replace(&mut process.killed, true);
            let mut blocked = process.blocked_until.saturating_sub(now);
            if let Some(slow) = &mut process.slow_death {
                slow.init_killed(now + blocked);
                process.others_run |= is_first;
                blocked += slow.takes_ms;
            }
            self.judge(node, slot);
            self.soon(
                blocked + 1,
                blocked + 80,
                Ev::Dead(node, boot, slot.clone()),
            );
        }
    }

    pub(crate) fn dead(&mut self, node: usize, boot: u64, slot: Slot) {
        let again = Ev::Dead(node, boot, slot.clone());
        if self.process(node, boot, &slot, again).is_some() {
            self.machines[node].processes.remove(&slot);
            self.checker.gone(&(node, slot.clone()));
            self.child_changes(node, &slot);
            self.certify(node, slot.clone());
            // The daemon may see it before the shim does.
            if self.random.percent(50) {
                self.daemon(node, Event::DeathCertificate(slot));
            }
        }
    }

    /// The kernel reports a change of a child to the shim: its end, or what a hostile program makes
    /// look like one, as a stop under the shim as its tracer does. What counts is whether the pidfd
    /// shows it dead.
    fn child_changes(&mut self, node: usize, slot: &Slot) {
        if !self.machines[node].processes.contains_key(slot) {
            self.notice(node, 0, 30, FenceEvent::Died(slot.clone()));
        }
    }

    /// Whether it exists and was not sent SIGKILL.
    pub(crate) fn is_alive(&self, node: usize, slot: &Slot) -> bool {
        let process = self.machines[node].processes.get(slot);
        process.is_some_and(|process| process.exists && !process.killed)
    }

    pub(crate) fn alive(&self, node: usize) -> Vec<Slot> {
        let processes = &self.machines[node].processes;
        let alive = processes.iter().filter(|(_, p)| p.exists && !p.killed);
        alive.map(|(slot, _)| slot.clone()).collect()
    }

    /// The machine is being preempted: its daemon kills every container itself.
    pub(crate) fn preempt(&mut self, node: usize) {
        if self.machines[node].is_awake() {
            for slot in self.alive(node) {
                self.dying(node, &slot);
            }
        }
    }

    fn any_process(&mut self, node: usize) -> Option<Slot> {
        let alive = self.alive(node);
        let last = (alive.len() as u64).checked_sub(1)?;
        let which = self.random.range(0, last) as usize;
        alive.get(which).cloned()
    }

    /// It exits by itself.
    pub(crate) fn program_ends(&mut self, node: usize) {
        let slot = self.any_process(node);
        if let Some(slot) = &slot {
            self.note(|| format!("n{node} {slot:?} fakes its end"));
            self.child_changes(node, slot);
        }
        let frozen =
            |slot: &Slot| self.machines[node].processes[slot].frozen || !self.machines[node].up;
        if let Some(slot) = slot.filter(|slot| !frozen(slot)) {
            self.note(|| format!("n{node} {slot:?} ends by itself"));
            self.dying(node, &slot);
        }
    }

    pub(crate) fn process_blocks(&mut self, node: usize) {
        let until = self.now + self.random.range(1_000, 15_000);
        if let Some(slot) = self.any_process(node)
            && let Some(process) = self.machines[node].processes.get_mut(&slot)
        {
            process.blocked_until = until;
            self.note(|| format!("n{node} {slot:?} in D state until {until}"));
        }
    }

    /// Tells the checker whether the container runs just now.
    fn judge(&mut self, node: usize, slot: &Slot) {
        let machine = &self.machines[node];
        let runs = machine.paused.is_none()
            && machine
                .processes
                .get(slot)
                .is_some_and(|p| p.exists && !p.frozen && (!p.killed || p.others_run));
        let container = (node, slot.clone());
        if runs {
            self.checker.runs(container);
        } else {
            self.checker.stops(&container);
        }
    }

    pub(crate) fn judge_all(&mut self, node: usize) {
        let slots: Vec<_> = self.machines[node].processes.keys().cloned().collect();
        for slot in slots {
            self.judge(node, &slot);
        }
    }
}
