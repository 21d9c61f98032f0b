//! One preemption, from its notice to its end.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::target::{Progress, Target};
use super::{
    Action, Certificate, Event, KillResult, Outcome, ReleaseResult, TableStage, closing_time,
};
use crate::ownership::{SessionName, Slot};

/// Minimum interval between polls of sessions that are still starting.
const START_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A poll waits at least this multiple of the previous poll's duration, so that polling thousands of
/// sessions does not compete with killing and releasing them.
const POLL_BACKOFF: u32 = 8;

/// How long a claim under way may take to show in the registry. A claim that a hung task did not even
/// send never shows.
const CLAIM_PATIENCE: Duration = Duration::from_secs(1);

/// A session that has not died so long after its kill is released as soon as nothing of it can run: almost
/// all die sooner, and the proof costs more than their deaths.
pub const EXIT_PROOF_AFTER: Duration = Duration::from_millis(200);

/// Pause between two tries of a release that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Sessions in one batch of releases: large enough for one commit to serve many, small enough for the
/// first ones not to wait for the last.
const BATCH: usize = 512;

/// When to begin to close what passes through the node, at the latest.
fn latest_closing(began: Duration, deadline: Duration) -> Duration {
    deadline.saturating_sub(closing_time(deadline.saturating_sub(began)))
}

#[derive(Debug, Default)]
pub(super) struct Run {
    noticed_at: Duration,
    deadline: Duration,
    /// When to begin to close what passes through the node, at the latest. `None` once that is ordered.
    close_through_at: Option<Duration>,
    targets: BTreeMap<SessionName, Target>,
    /// Targets for which something is left to do.
    open: usize,
    uncertain: usize,
    warned: usize,
    /// When to read the table again, if that is needed.
    poll_at: Duration,
    table_was_read: bool,
    looks_up_claims: bool,
    /// When to prove the exit of what was killed, in the order of the times.
    overdue: VecDeque<(Duration, Slot)>,
    to_release: Vec<Slot>,
    releases_under_way: bool,
    retry_at: Option<Duration>,
    has_priority: bool,
    killed: u64,
    certified: u64,
    last_kill: Option<Duration>,
    last_certificate: Option<Duration>,
    last_release: Option<Duration>,
}

impl Run {
    pub(super) fn new(now: Duration, noticed_at: Duration, deadline: Duration) -> Self {
        Self {
            noticed_at,
            deadline,
            close_through_at: Some(latest_closing(noticed_at, deadline)),
            poll_at: now,
            ..Self::default()
        }
    }

    /// Whether every session is released, or cannot be.
    pub(super) fn is_settled(&self) -> bool {
        self.table_was_read && self.open == 0
    }

    pub(super) fn is_over(&self, now: Duration) -> bool {
        now >= self.deadline
    }

    /// A later notice may leave less time: half of it is for the remaining grace.
    pub(super) fn hurry(&mut self, now: Duration, deadline: Duration) {
        if deadline >= self.deadline {
            return;
        }
        self.deadline = deadline;
        let closing = latest_closing(now, deadline);
        self.close_through_at = self.close_through_at.map(|at| at.min(closing));
        let latest = now + deadline.saturating_sub(now) / 2;
        for target in self.targets.values_mut() {
            if let Progress::Warned(_, at) = &mut target.progress {
                *at = latest.min(*at);
            }
        }
    }

    pub(super) fn on(&mut self, now: Duration, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Tick => self.tick(now, actions),
            Event::TableChanged => actions.push(Action::ReadTable),
            Event::Table(entries) => self.table(entries, actions),
            Event::TableHandled { took } => {
                self.poll_at = now + START_POLL_INTERVAL.max(took * POLL_BACKOFF);
            }
            Event::NotWarned(slot) => {
                if self.generation_warned(&slot.session) == Some(slot.generation) {
                    self.set(&slot.session, Progress::ToKill(slot.generation));
                    actions.push(Action::Kill(vec![slot]));
                }
            }
            Event::KillSent { slot, result } => self.kill_sent(now, slot, result, actions),
            Event::Searched { slot, killed, init } => {
                self.searched(now, slot, killed, init, actions);
            }
            Event::Certificates(certificates) => {
                for (slot, certificate) in certificates {
                    self.certified(now, slot, certificate, actions);
                }
            }
            Event::ReleasesAnswered(answers) => self.released(now, answers, actions),
            Event::ClaimsFound(found) => {
                self.looks_up_claims = false;
                for slot in found {
                    if self.progress(&slot.session) == Some(&Progress::Claiming) {
                        // The table is closed, so this generation's start is never sent.
                        self.never_ran(slot);
                    }
                }
            }
            Event::Notice { .. } | Event::Readmit(_) => {}
        }
    }

    /// Begins what is possible now.
    pub(super) fn proceed(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let pauses = self.retry_at.is_some_and(|at| now < at);
        if !self.releases_under_way && !pauses && !self.to_release.is_empty() {
            self.retry_at = None;
            self.releases_under_way = true;
            let size = self.to_release.len().min(BATCH);
            actions.push(Action::Release(self.to_release.drain(..size).collect()));
        }
        // A session in its grace would get all processors.
        if !self.has_priority && self.warned == 0 && self.last_kill.is_some() {
            self.has_priority = true;
            actions.push(Action::RaisePriority);
        }
    }

    fn tick(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let due: Vec<Slot> = self
            .targets
            .iter()
            .filter_map(|(session, target)| match target.progress {
                Progress::Warned(generation, at) if at <= now => Some(Slot {
                    session: session.clone(),
                    generation,
                }),
                _ => None,
            })
            .collect();
        if !due.is_empty() {
            self.kill(due, actions);
        }
        while self.overdue.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, slot)) = self.overdue.pop_front()
        {
            self.prove_exit(slot, actions);
        }
        if !self.table_was_read || (self.uncertain > 0 && now >= self.poll_at) {
            actions.push(Action::ReadTable);
            self.look_up_claims(now, actions);
        }
        if self.close_through_at.take_if(|at| *at <= now).is_some() {
            actions.push(Action::CloseThrough(self.deadline));
        }
    }

    pub(super) fn next_wake(&self) -> Duration {
        let polls = !self.table_was_read || self.uncertain > 0;
        let poll = polls.then_some(self.poll_at);
        let retries = !self.releases_under_way && !self.to_release.is_empty();
        let retry = self.retry_at.filter(|_| retries);
        let graces = match self.warned {
            0 => None,
            _ => self
                .targets
                .values()
                .filter_map(|target| target.kill_at())
                .min(),
        };
        let proof = self.overdue.front().map(|(at, _)| *at);
        let wakes = poll.into_iter().chain(retry).chain(graces).chain(proof);
        let wakes = wakes.chain(self.close_through_at);
        wakes.fold(self.deadline, Duration::min)
    }

    /// The table, whose entries change only for sessions that are still starting.
    fn table(&mut self, entries: Vec<(SessionName, TableStage)>, actions: &mut Vec<Action>) {
        self.table_was_read = true;
        let entries: BTreeMap<SessionName, TableStage> = entries.into_iter().collect();
        let uncertain = self
            .targets
            .iter()
            .filter(|(_, one)| one.progress.is_uncertain());
        let settled = uncertain.filter(|(session, _)| !entries.contains_key(*session));
        // Their own tasks released them. Others are settled by their certificates.
        for session in settled
            .map(|(session, _)| session.clone())
            .collect::<Vec<_>>()
        {
            self.set(&session, Progress::Settled);
        }
        let mut to_kill = Vec::new();
        for (session, stage) in entries {
            self.take_over(session, stage, &mut to_kill, actions);
        }
        // Before what the others need.
        if !to_kill.is_empty() {
            let others = std::mem::take(actions);
            self.kill(to_kill, actions);
            actions.extend(others);
        }
    }

    /// Takes over an entry; `to_kill` gets it if it is to be killed now.
    fn take_over(
        &mut self,
        session: SessionName,
        stage: TableStage,
        to_kill: &mut Vec<Slot>,
        actions: &mut Vec<Action>,
    ) {
        match self.progress(&session) {
            None => self.add(session.clone()),
            Some(progress) if progress.is_uncertain() => {}
            Some(_) => return,
        }
        let slot = |generation| Slot {
            session: session.clone(),
            generation,
        };
        match stage {
            TableStage::Claiming => {}
            // A closed table lets no start be sent, so it has no process and gets none.
            TableStage::Reserved { generation } => self.never_ran(slot(generation)),
            TableStage::Sent { generation } => {
                self.set(&session, Progress::Sent(generation));
                actions.push(Action::Search(slot(generation)));
            }
            TableStage::Running {
                generation,
                grace,
                shares_files,
            } => {
                if let Some(target) = self.targets.get_mut(&session) {
                    target.shares_files = shares_files;
                }
                if grace.is_zero() {
                    return to_kill.push(slot(generation));
                }
                let at = self.noticed_at + grace;
                self.set(&session, Progress::Warned(generation, at));
                actions.push(Action::Warn(slot(generation)));
                actions.push(Action::AwaitDeath(slot(generation)));
            }
        }
    }

    fn kill(&mut self, slots: Vec<Slot>, actions: &mut Vec<Action>) {
        for slot in &slots {
            self.set(&slot.session, Progress::ToKill(slot.generation));
        }
        actions.push(Action::Kill(slots));
    }

    fn kill_sent(
        &mut self,
        now: Duration,
        slot: Slot,
        result: KillResult,
        actions: &mut Vec<Action>,
    ) {
        if self.progress(&slot.session) != Some(&Progress::ToKill(slot.generation)) {
            return;
        }
        match result {
            KillResult::Sent => self.note_kill(now, &slot, actions),
            KillResult::DeadAlready => {}
            KillResult::Failed(why) => {
                return self.set(&slot.session, Progress::Failed(Some(slot.generation), why));
            }
        }
        self.set(&slot.session, Progress::Killed(slot.generation));
        self.overdue
            .push_back((now + EXIT_PROOF_AFTER, slot.clone()));
        actions.push(Action::AwaitDeath(slot));
    }

    /// It has not died yet.
    fn prove_exit(&mut self, slot: Slot, actions: &mut Vec<Action>) {
        let shares_files = self
            .targets
            .get(&slot.session)
            .is_none_or(|one| one.shares_files);
        let killed = self.progress(&slot.session) == Some(&Progress::Killed(slot.generation));
        if killed && !shares_files {
            actions.push(Action::ProveExit(slot));
        }
    }

    fn searched(
        &mut self,
        now: Duration,
        slot: Slot,
        killed: bool,
        init: bool,
        actions: &mut Vec<Action>,
    ) {
        if self.progress(&slot.session) != Some(&Progress::Sent(slot.generation)) {
            return;
        }
        if killed {
            self.note_kill(now, &slot, actions);
        }
        // A container is started once, so the certificate of its init is the container's.
        if init {
            self.set(&slot.session, Progress::Killed(slot.generation));
            actions.push(Action::AwaitDeath(slot));
        }
    }

    fn note_kill(&mut self, now: Duration, slot: &Slot, actions: &mut Vec<Action>) {
        if let Some(target) = self.targets.get_mut(&slot.session)
            // A start under way may take several passes.
            && !std::mem::replace(&mut target.kill_sent, true)
        {
            self.killed += 1;
            self.last_kill = Some(now);
            actions.push(Action::NoteKilled(slot.clone()));
        }
    }

    fn never_ran(&mut self, slot: Slot) {
        self.set(&slot.session, Progress::Dead(slot.generation));
        self.to_release.push(slot);
    }

    fn certified(
        &mut self,
        now: Duration,
        slot: Slot,
        certificate: Certificate,
        actions: &mut Vec<Action>,
    ) {
        let awaited = self.progress(&slot.session);
        if !awaited.is_some_and(|progress| progress.awaits_death(slot.generation)) {
            return;
        }
        self.certified += 1;
        self.last_certificate = Some(now);
        self.set(&slot.session, Progress::Dead(slot.generation));
        actions.push(Action::NoteDead(slot.clone(), certificate));
        self.to_release.push(slot);
    }

    fn released(
        &mut self,
        now: Duration,
        answers: Vec<(Slot, ReleaseResult)>,
        actions: &mut Vec<Action>,
    ) {
        self.releases_under_way = false;
        for (slot, result) in answers {
            if self.progress(&slot.session) != Some(&Progress::Dead(slot.generation)) {
                continue;
            }
            match result {
                ReleaseResult::Recorded => {
                    self.last_release = Some(now);
                    self.set(&slot.session, Progress::Released);
                    actions.push(Action::NoteReleased(slot));
                }
                ReleaseResult::Unavailable => {
                    self.retry_at = Some(now + RETRY_PAUSE);
                    self.to_release.push(slot);
                }
                ReleaseResult::Refused(why) => {
                    let failed = Progress::Failed(Some(slot.generation), why);
                    self.set(&slot.session, failed);
                }
            }
        }
    }

    /// Reads the generations of claims under way from the registry. After a while, gives up on claims that
    /// it does not have.
    fn look_up_claims(&mut self, now: Duration, actions: &mut Vec<Action>) {
        let claiming = |(session, target): (&SessionName, &Target)| {
            (target.progress == Progress::Claiming).then(|| session.clone())
        };
        let claiming: Vec<SessionName> = self.targets.iter().filter_map(claiming).collect();
        if claiming.is_empty() {
            return;
        }
        if now >= self.noticed_at + CLAIM_PATIENCE {
            let why = "its claim was still under way; it has no container, and the record, if \
                any, is released at the next start of conman";
            for session in claiming {
                self.set(&session, Progress::Failed(None, why.to_owned()));
            }
        } else if !self.looks_up_claims {
            self.looks_up_claims = true;
            actions.push(Action::LookUpClaims(claiming));
        }
    }

    fn progress(&self, session: &SessionName) -> Option<&Progress> {
        self.targets.get(session).map(|target| &target.progress)
    }

    fn generation_warned(&self, session: &SessionName) -> Option<u64> {
        match self.progress(session) {
            Some(Progress::Warned(generation, _)) => Some(*generation),
            _ => None,
        }
    }

    fn add(&mut self, session: SessionName) {
        let target = Target {
            progress: Progress::Claiming,
            kill_sent: false,
            shares_files: true,
        };
        self.targets.insert(session, target);
        self.open += 1;
        self.uncertain += 1;
    }

    /// The only place that changes a target's progress: the numbers follow it.
    fn set(&mut self, session: &SessionName, progress: Progress) {
        let Some(target) = self.targets.get_mut(session) else {
            return;
        };
        let before = std::mem::replace(&mut target.progress, progress);
        let after = &target.progress;
        let warned = |progress: &Progress| usize::from(matches!(progress, Progress::Warned(..)));
        self.open -= usize::from(before.is_open());
        self.open += usize::from(after.is_open());
        self.uncertain -= usize::from(before.is_uncertain());
        self.uncertain += usize::from(after.is_uncertain());
        self.warned -= warned(&before);
        self.warned += warned(after);
    }

    pub(super) fn outcome(&self) -> Outcome {
        let since = |at: Option<Duration>| at.map(|at| at.saturating_sub(self.noticed_at));
        let mut unreleased = Vec::new();
        let mut released = 0;
        for (session, target) in &self.targets {
            match target.progress.unreleased() {
                None => released += 1,
                Some((generation, why)) => unreleased.push((session.clone(), generation, why)),
            }
        }
        Outcome {
            sessions: self.targets.len(),
            killed: self.killed,
            certified: self.certified,
            released,
            last_kill: since(self.last_kill),
            last_certificate: since(self.last_certificate),
            last_release: since(self.last_release),
            unreleased,
        }
    }

    #[cfg(test)]
    pub(super) fn counts_are_right(&self) -> bool {
        let count = |is: fn(&Progress) -> bool| {
            self.targets
                .values()
                .filter(|one| is(&one.progress))
                .count()
        };
        (self.open, self.uncertain) == (count(Progress::is_open), count(Progress::is_uncertain))
    }

    #[cfg(test)]
    pub(super) fn waits_for_table(&self) -> bool {
        !self.table_was_read || self.uncertain > 0
    }
}
