//! Tests of the states of a session's life.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const TIMING: Timing = Timing {
    ready_timeout_ms: 60_000,
    stuck_after_ms: 5_000,
    retry_ms: 500,
};

fn asked(why: &str) -> Event {
    Event::StopAsked(EndCause::Deleted, why.to_owned())
}

fn unfinished() -> Cause {
    Cause::StartFailed("an earlier daemon did not finish this start".to_owned())
}

fn generation() -> Generation {
    Generation::new(7).expect("not zero")
}

/// Drives a fresh life through events at time 0 and returns the last event's actions.
fn after(events: impl IntoIterator<Item = Event>) -> (Lifecycle, Vec<Action>) {
    let (mut life, mut actions) = Lifecycle::start(TIMING);
    for event in events {
        actions = life.on(0, event);
    }
    (life, actions)
}

fn until_started() -> Vec<Event> {
    vec![Event::Claimed(generation()), Event::Created]
}

fn until_recorded() -> Vec<Event> {
    let mut events = until_started();
    events.extend([
        Event::StartAnswered { pid: 9 },
        Event::Held,
        Event::Recorded,
    ]);
    events
}

fn with(mut events: Vec<Event>, more: impl IntoIterator<Item = Event>) -> Vec<Event> {
    events.extend(more);
    events
}

#[test]
fn an_undisturbed_start_runs_after_six_answers() {
    let (mut life, first) = Lifecycle::start(TIMING);
    assert_eq!(first, [Action::Claim]);
    for (event, expected) in [
        (Event::Claimed(generation()), vec![Action::Create]),
        (Event::Created, vec![Action::SendStart]),
        (
            Event::StartAnswered { pid: 9 },
            vec![Action::Hold { pid: 9 }],
        ),
        (Event::Held, vec![Action::Record]),
        (Event::Recorded, vec![Action::Probe]),
        (Event::Ready, vec![Action::Publish]),
    ] {
        assert_eq!(life.on(0, event.clone()), expected, "{event:?}");
    }
    assert_eq!(
        life.state(),
        &LifeState::Running {
            generation: generation(),
            pid: 9
        }
    );
    assert_eq!(life.deadline_ms(), None);
}

#[test]
fn a_running_session_that_is_stopped_is_killed_certified_and_released_in_that_order() {
    let mut life = Lifecycle::adopt(TIMING, generation(), 9);
    let stop = life.on(0, asked("wanted"));
    assert_eq!(stop, [Action::Kill, Action::Publish]);
    assert_eq!(life.on(1, asked("again")), []);
    assert_eq!(life.on(2, Event::Exited), [Action::Release]);
    assert_eq!(
        life.on(3, Event::Released),
        [Action::Cleanup, Action::Publish]
    );
    let cause = Cause::Asked(EndCause::Deleted, "wanted".to_owned());
    assert_eq!(
        life.state(),
        &LifeState::Ended {
            generation: Some(generation()),
            cause
        }
    );
    assert_eq!(life.public_state(), SessionState::Stopped);
}

#[test]
fn a_program_that_is_not_ready_in_time_is_killed() {
    let (mut life, _) = after(until_recorded());
    assert_eq!(life.deadline_ms(), Some(60_000));
    assert_eq!(life.on(59_999, Event::Tick), []);
    assert_eq!(
        life.on(60_000, Event::Tick),
        [Action::Kill, Action::Publish]
    );
    let _ = life.on(60_001, Event::Exited);
    let _ = life.on(60_002, Event::Released);
    assert_eq!(life.public_state(), SessionState::Failed);
}

#[test]
fn a_start_without_an_answer_is_not_released_before_it_is_known_to_have_come_to_nothing() {
    let lost = with(until_started(), [Event::StartAmbiguous("hung".to_owned())]);
    let (mut life, actions) = after(lost);
    assert_eq!(actions, [Action::ResolveStart, Action::Publish]);
    assert_eq!(
        life.on(100, Event::StartUnknown("still hung".to_owned())),
        []
    );
    assert_eq!(life.on(600, Event::Tick), [Action::ResolveStart]);
    // An unanswered attempt is not repeated.
    assert_eq!(life.on(1_100, Event::Tick), []);
    assert_eq!(
        life.on(1_200, Event::StartFound { pid: 9 }),
        [Action::Hold { pid: 9 }]
    );
    assert_eq!(life.on(1_300, Event::Held), [Action::Kill]);
    assert_eq!(life.on(1_400, Event::Exited), [Action::Release]);

    let gone = [Event::StartAmbiguous(String::new()), Event::StartGone];
    let (_, actions) = after(with(until_started(), gone));
    assert_eq!(actions, [Action::Release]);
}

#[test]
fn a_stop_during_a_start_waits_for_the_start_and_then_kills_it() {
    let stopped = with(until_started(), [asked("wanted")]);
    let (mut life, actions) = after(stopped);
    assert_eq!(actions, [Action::Publish]);
    assert_eq!(
        life.on(1, Event::StartAnswered { pid: 9 }),
        [Action::Hold { pid: 9 }]
    );
    assert_eq!(life.on(2, Event::Held), [Action::Kill]);
}

#[test]
fn a_stop_while_the_container_is_made_releases_at_once_and_never_starts_it() {
    let early = [Event::Claimed(generation()), asked("wanted")];
    let (mut life, actions) = after(early);
    assert_eq!(actions, [Action::Release, Action::Publish]);
    assert_eq!(
        life.on(1, Event::Released),
        [Action::Cleanup, Action::Publish]
    );
    // A container that is created too late is removed as well.
    assert_eq!(life.on(2, Event::Created), [Action::Cleanup]);
}

#[test]
fn a_process_that_does_not_die_makes_the_session_stuck_until_it_does() {
    let mut life = Lifecycle::adopt(TIMING, generation(), 9);
    let _ = life.on(0, asked("wanted"));
    assert_eq!(life.on(500, Event::Tick), [Action::Kill]);
    assert_eq!(life.on(5_000, Event::Tick), [Action::Kill, Action::Publish]);
    assert_eq!(life.public_state(), SessionState::Stuck);
    assert_eq!(life.on(5_500, Event::Tick), [Action::Kill]);
    assert_eq!(life.on(9_000, Event::Exited), [Action::Release]);
    assert_eq!(life.public_state(), SessionState::Stuck);
    assert_eq!(
        life.on(9_001, Event::Released),
        [Action::Cleanup, Action::Publish]
    );
}

#[test]
fn a_release_that_fails_is_tried_again_and_a_superseded_one_is_over() {
    let mut life = Lifecycle::adopt(TIMING, generation(), 9);
    let _ = life.on(0, Event::Exited);
    assert_eq!(life.on(1, Event::ReleaseFailed("disk full".to_owned())), []);
    assert_eq!(life.on(501, Event::Tick), [Action::Release]);
    assert_eq!(
        life.on(502, Event::Superseded),
        [Action::Cleanup, Action::Publish]
    );
}

#[test]
fn a_process_that_cannot_be_held_is_tried_again_before_anything_is_released() {
    let failed = [
        Event::StartAnswered { pid: 9 },
        Event::HoldFailed("no descriptors".to_owned()),
    ];
    let (mut life, actions) = after(with(until_started(), failed));
    assert_eq!(actions, [Action::Publish]);
    assert_eq!(life.on(500, Event::Tick), [Action::Hold { pid: 9 }]);
    assert_eq!(life.on(501, Event::Vanished), [Action::Release]);
}

#[test]
fn a_start_that_an_earlier_daemon_left_is_looked_for() {
    let (life, actions) = Lifecycle::recover(10, TIMING, generation(), unfinished());
    assert_eq!(actions, [Action::ResolveStart, Action::Publish]);
    assert_eq!(life.generation(), Some(generation()));
}

#[test]
fn a_program_that_an_earlier_daemon_did_not_see_ready_gets_its_whole_time_anew() {
    let (mut ready, actions) = Lifecycle::adopt_unready(100, TIMING, generation(), 9);
    assert_eq!(actions, [Action::Probe]);
    assert_eq!(ready.deadline_ms(), Some(60_100));
    let mut late = ready.clone();
    assert_eq!(ready.on(60_099, Event::Ready), [Action::Publish]);
    assert_eq!(ready.public_state(), SessionState::Running);
    assert_eq!(
        late.on(60_100, Event::Tick),
        [Action::Kill, Action::Publish]
    );
}

#[test]
fn a_program_that_ends_counts_by_its_exit_code() {
    let failed = |code| Cause::Exited.outcome(code).failed;
    assert_eq!(
        [failed(Some(0)), failed(Some(1)), failed(None)],
        [false, true, true]
    );
    assert!(Cause::ExitedEarly.outcome(Some(0)).failed);
    assert!(
        !Cause::Asked(EndCause::Deleted, "wanted".to_owned())
            .outcome(Some(137))
            .failed
    );
}

fn any_event() -> impl Strategy<Value = Event> {
    let why = || Just(String::from("why"));
    prop_oneof![
        Just(Event::Claimed(generation())),
        Just(Event::Created),
        (1_i32..4).prop_map(|pid| Event::StartAnswered { pid }),
        Just(Event::Held),
        Just(Event::Recorded),
        Just(Event::Ready),
        Just(Event::Exited),
        Just(Event::Released),
        Just(Event::Tick),
        prop_oneof![
            why().prop_map(Event::ClaimFailed),
            why().prop_map(Event::CreateFailed),
            why().prop_map(Event::StartFailed),
            why().prop_map(Event::StartAmbiguous),
            why().prop_map(Event::StartUnknown),
            why().prop_map(Event::HoldFailed),
            why().prop_map(Event::RecordFailed),
            why().prop_map(Event::ReadyFailed),
            why().prop_map(Event::ReleaseFailed),
        ],
        prop_oneof![
            (1_i32..4).prop_map(|pid| Event::StartFound { pid }),
            Just(Event::StartGone),
            Just(Event::Vanished),
            Just(Event::NotOurs),
            Just(Event::Superseded),
        ],
        why().prop_map(|why| asked(&why)),
        why().prop_map(|why| Event::ReleasedElsewhere(EndCause::Preempted, why)),
    ]
}

fn is_ending(life: &Lifecycle) -> bool {
    matches!(
        life.state(),
        LifeState::Stopping(_) | LifeState::Stuck(_) | LifeState::Ended { .. }
    )
}

/// Whether an event, if true, proves that nothing of the session runs or will run.
fn is_proof(event: &Event) -> bool {
    matches!(
        event,
        Event::StartFailed(_) | Event::StartGone | Event::Vanished | Event::Exited
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Events in any order, valid or not.
    #[test]
    fn no_order_of_events_breaks_the_order_of_actions(
        events in proptest::collection::vec((any_event(), 0_u64..3_000), 0..40),
    ) {
        let (mut life, _) = Lifecycle::start(TIMING);
        let (mut now_ms, mut starts, mut creates) = (0, 0, 0);
        let (mut proven, mut held, mut killed) = (true, false, false);
        for (event, passed_ms) in events {
            now_ms += passed_ms;
            let was_ending = is_ending(&life);
            let was_ended = matches!(life.state(), LifeState::Ended { .. });
            let asked = matches!(event, Event::StopAsked(..));
            let actions = life.on(now_ms, event.clone());
            proven |= is_proof(&event);
            held |= actions.contains(&Action::Record);
            for action in actions {
                match action {
                    Action::Create => creates += 1,
                    Action::SendStart => {
                        starts += 1;
                        proven = false;
                        prop_assert!(!was_ending && !is_ending(&life));
                    }
                    Action::Kill => {
                        killed = true;
                        prop_assert!(is_ending(&life));
                    }
                    Action::Release => prop_assert!(proven, "released without proof by {event:?}"),
                    Action::Cleanup => {
                        let over = matches!(life.state(), LifeState::Ended { .. });
                        prop_assert!(over, "cleaned up alive");
                    },
                    other => prop_assert!(!was_ended, "{other:?} after the end"),
                }
            }
            if asked && !was_ending && held {
                prop_assert!(killed, "a held process outlived the decision to end");
            }
            let idle = matches!(life.state(), LifeState::Running { .. } | LifeState::Ended { .. })
                || matches!(life.state(), LifeState::Starting(step) if !matches!(step, Step::Probing { .. }));
            prop_assert_eq!(life.deadline_ms().is_none(), idle);
        }
        prop_assert!(starts <= 1 && creates <= 1);
    }

    /// A world that answers truthfully, but late and in any order; that loses answers, fails, and
    /// keeps processes from dying, until its bad luck is used up.
    #[test]
    fn in_a_truthful_world_nothing_alive_is_released_and_every_life_comes_to_rest(
        luck in proptest::collection::vec(any::<u8>(), 0..120),
    ) {
        let mut world = World::new(luck);
        world.run();
        prop_assert_eq!(world.alive, matches!(world.life.state(), LifeState::Running { .. }));
        if let LifeState::Running { .. } = world.life.state() {
            world.event(asked("wanted"));
            world.run();
        }
        prop_assert!(matches!(world.life.state(), LifeState::Ended { .. }), "{:?}", world.life);
        prop_assert!(!world.alive && !world.may_appear);
    }
}

const PID: i32 = 9;

struct World {
    life: Lifecycle,
    now_ms: u64,
    luck: VecDeque<u8>,
    pending: Vec<Action>,
    alive: bool,
    held: bool,
    told_exit: bool,
    /// A start was sent, and its process may still appear.
    may_appear: bool,
}

impl World {
    fn new(luck: Vec<u8>) -> Self {
        let (life, pending) = Lifecycle::start(TIMING);
        Self {
            life,
            now_ms: 0,
            luck: luck.into(),
            pending,
            alive: false,
            held: false,
            told_exit: false,
            may_appear: false,
        }
    }

    /// One of `choices`, 0 (all is well) once the bad luck is used up.
    fn draw(&mut self, choices: u8) -> u8 {
        self.luck.pop_front().map_or(0, |byte| byte % choices)
    }

    fn event(&mut self, event: Event) {
        let actions = self.life.on(self.now_ms, event);
        self.pending.extend(actions);
    }

    /// Runs until nothing is under way. All bad luck is used up after some steps, and then each
    /// step answers something, so a limit on the steps shows that nothing hangs.
    fn run(&mut self) {
        for _ in 0..2_000 {
            if self.alive && self.held && self.draw(40) == 39 {
                self.die();
            }
            if self.draw(30) == 29 {
                self.event(asked("wanted"));
            }
            let due = self.pending.len();
            let skipped = due == 0 || self.draw(3) == 2;
            if skipped {
                let Some(deadline_ms) = self.life.deadline_ms() else {
                    if due == 0 {
                        return;
                    }
                    continue;
                };
                self.now_ms = self.now_ms.max(deadline_ms);
                self.event(Event::Tick);
            } else {
                let index = usize::from(self.draw(u8::MAX)) % due;
                let action = self.pending.remove(index);
                self.answer(action);
            }
        }
        panic!(
            "never came to rest: {:?}, {:?} pending",
            self.life, self.pending
        );
    }

    fn die(&mut self) {
        self.alive = false;
        if self.held && !self.told_exit {
            self.told_exit = true;
            self.event(Event::Exited);
        }
    }

    fn answer(&mut self, action: Action) {
        let why = || "bad luck".to_owned();
        match action {
            Action::Claim => match self.draw(5) {
                4 => self.event(Event::ClaimFailed(why())),
                _ => self.event(Event::Claimed(generation())),
            },
            Action::Create => match self.draw(5) {
                4 => self.event(Event::CreateFailed(why())),
                _ => self.event(Event::Created),
            },
            Action::SendStart => match self.draw(5) {
                4 => self.event(Event::StartFailed(why())),
                3 => {
                    self.may_appear = true;
                    self.event(Event::StartAmbiguous(why()));
                }
                _ => {
                    self.alive = true;
                    self.event(Event::StartAnswered { pid: PID });
                }
            },
            Action::ResolveStart => self.look(),
            Action::Hold { pid } => {
                assert_eq!(pid, PID);
                match self.draw(4) {
                    3 => self.event(Event::HoldFailed(why())),
                    2 if self.alive => self.event(Event::NotOurs),
                    1 => {
                        self.alive = false;
                        self.event(Event::Vanished);
                    }
                    _ if !self.alive => self.event(Event::Vanished),
                    _ => {
                        self.held = true;
                        self.event(Event::Held);
                    }
                }
            }
            Action::Record => match self.draw(5) {
                4 => self.event(Event::RecordFailed(why())),
                _ => self.event(Event::Recorded),
            },
            Action::Probe => match self.draw(4) {
                3 => self.event(Event::ReadyFailed(why())),
                // It never answers; the readiness timeout has to end it.
                2 => {}
                _ => self.event(Event::Ready),
            },
            Action::Kill => match self.draw(3) {
                2 => {}
                _ => self.die(),
            },
            Action::Release => {
                assert!(
                    !self.alive && !self.may_appear,
                    "released alive: {:?}",
                    self.life
                );
                match self.draw(4) {
                    3 => self.event(Event::ReleaseFailed(why())),
                    _ => self.event(Event::Released),
                }
            }
            Action::Cleanup | Action::Publish => {}
        }
    }

    fn look(&mut self) {
        if self.alive {
            self.event(Event::StartFound { pid: PID });
            return;
        }
        match self.draw(4) {
            3 => self.event(Event::StartUnknown("bad luck".to_owned())),
            2 if self.may_appear => {
                self.may_appear = false;
                self.alive = true;
                self.event(Event::StartFound { pid: PID });
            }
            _ => {
                self.may_appear = false;
                self.event(Event::StartGone);
            }
        }
    }
}
