//! The phases of a start, and a clock that makes each begin where the previous one ended.

use std::time::Duration;

use conman_registry::{Phase, Phases};
use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// The start is recorded in the registry.
pub(crate) const CLAIM: &str = "claim";
/// Waiting for its turn among the starts that the runtime works on.
pub(crate) const ADMIT: &str = "admit";
/// Binds are checked.
pub(crate) const PREPARE: &str = "prepare";
/// The runtime makes the container.
pub(crate) const CREATE: &str = "create";
/// The runtime starts it. The steps that the runtime reports are called `start.…`.
pub(crate) const START: &str = "start";
/// Its init is opened and verified.
pub(crate) const VERIFY: &str = "verify";
/// The program answers on its port. The record of the container is written meanwhile.
pub(crate) const READY: &str = "ready";
/// The time for writing the container's record beyond `ready`.
pub(crate) const RECORD: &str = "record";
/// The session is shown as running.
pub(crate) const PUBLISH: &str = "publish";

/// Measures consecutive phases: each begins where the previous one ended.
#[derive(Debug)]
pub(crate) struct PhaseClock {
    began_at: Timestamp,
    began: Instant,
    mark: Instant,
    /// All phases, if some were measured since they were shared last; else empty.
    open: Vec<Phase>,
    shared: Phases,
}

impl PhaseClock {
    /// Begins the first phase now.
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        Self {
            began_at: Timestamp::now(),
            began: now,
            mark: now,
            open: Vec::new(),
            shared: Phases::default(),
        }
    }

    /// A clock that continues with the phases of an earlier daemon.
    pub(crate) fn resumed(shared: Phases) -> Self {
        Self {
            shared,
            ..Self::start()
        }
    }

    /// Ends the present phase now.
    pub(crate) fn end(&mut self, name: &'static str) {
        self.end_at(name, Instant::now());
    }

    /// Ends the present phase at a moment that is not before its beginning.
    pub(crate) fn end_at(&mut self, name: &'static str, at: Instant) {
        let at = at.max(self.mark);
        let offset = self.mark - self.began;
        let duration = at - self.mark;
        self.mark = at;
        if self.open.is_empty() {
            self.open = self.shared.to_vec();
        }
        self.open.push(Phase {
            name: name.into(),
            started_at: later(self.began_at, offset),
            duration_ms: duration.as_secs_f64() * 1_000.0,
        });
    }

    /// Ends the present phase now, and adds known steps of it, under names with a dot.
    pub(crate) fn end_with_steps(
        &mut self,
        name: &'static str,
        steps: &[(&'static str, Duration)],
    ) {
        let mut offset = self.mark - self.began;
        self.end(name);
        for (step, duration) in steps {
            self.open.push(Phase {
                name: (*step).into(),
                started_at: later(self.began_at, offset),
                duration_ms: duration.as_secs_f64() * 1_000.0,
            });
            offset += *duration;
        }
    }

    pub(crate) fn phases(&self) -> &[Phase] {
        if self.open.is_empty() {
            &self.shared
        } else {
            &self.open
        }
    }

    /// The phases as one shared copy, which the clock uses from now on too.
    pub(crate) fn shared(&mut self) -> Phases {
        if !self.open.is_empty() {
            self.shared = std::mem::take(&mut self.open).into();
        }
        self.shared.clone()
    }
}

/// The wall-clock time `offset` after `at`, by the monotonic clock.
fn later(at: Timestamp, offset: Duration) -> Timestamp {
    SignedDuration::try_from(offset)
        .ok()
        .and_then(|offset| at.checked_add(offset).ok())
        .unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_leave_no_gap_and_never_run_backwards() {
        let mut clock = PhaseClock::start();
        let first = clock.mark + Duration::from_millis(30);
        clock.end_at(CLAIM, first);
        clock.end_at(ADMIT, first - Duration::from_millis(20));
        clock.end_at(CREATE, first + Duration::from_millis(12));
        let durations: Vec<_> = clock
            .phases()
            .iter()
            .map(|phase| phase.duration_ms)
            .collect();
        assert_eq!(durations, [30.0, 0.0, 12.0]);
        let shared = clock.shared();
        assert_eq!(&*shared, clock.phases());
        clock.end(READY);
        assert_eq!(clock.phases()[..3], *shared);
        let steps = [
            ("start.a", Duration::from_secs(1)),
            ("start.b", Duration::from_secs(2)),
        ];
        clock.end_with_steps(START, &steps);
        let names: Vec<_> = clock.phases()[4..].iter().map(|one| &*one.name).collect();
        assert_eq!(names, [START, "start.a", "start.b"]);
        clock.end(PUBLISH);
        let phase = clock.phases().last().expect("it was measured");
        assert!(phase.duration_ms < 1_000.0, "parts are no phases");
        let last = &clock.phases()[2];
        let offset = last.started_at.duration_since(clock.began_at);
        assert_eq!(offset, SignedDuration::from_millis(30));
    }
}
