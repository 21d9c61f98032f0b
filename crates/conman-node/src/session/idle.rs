//! Decides when a running session has reached its idle timeout or longest lifetime.

use std::time::Duration;

use conman_core::{Activity, EndCause};
use conman_linux::PidFd;
use conman_proto::ResolvedSpec;
use jiff::Timestamp;
use tokio::time::Instant;

use super::view::View;
use crate::phases;

/// Readings in one idle timeout: a session may idle longer by this fraction.
const READINGS: u32 = 8;

/// Bounds on the time between readings: more precision is not needed, and a day's timeout must not take
/// hours longer.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);
const LONGEST_INTERVAL: Duration = Duration::from_secs(30);

/// Time since an earlier daemon found it ready: by the age of its process, as the machine's clock may
/// have been set since.
pub(super) fn lived(process: &PidFd, view: &View) -> Duration {
    let Ok(age) = process.age() else {
        let by_clock = |at| Duration::try_from(Timestamp::now().duration_since(at)).ok();
        return view.started_at.and_then(by_clock).unwrap_or_default();
    };
    let getting_ready = view.phases.iter().find(|phase| phase.name == phases::READY);
    let getting_ready_ms = getting_ready.map_or(0.0, |phase| phase.duration_ms);
    age.saturating_sub(Duration::try_from_secs_f64(getting_ready_ms / 1_000.0).unwrap_or_default())
}

/// Watches one running session.
#[derive(Debug)]
pub(super) struct Patience {
    idle_timeout: Option<Duration>,
    lifetime_ends: Option<(Instant, String)>,
    /// When this watch began, and how long the session had run before that.
    since: (Instant, Duration),
    /// Time of the last known activity.
    active: Instant,
    changes: u64,
    next_reading: Instant,
}

impl Patience {
    /// Begins now; it may have `lived` for long under earlier daemons.
    pub(super) fn begin(
        spec: &ResolvedSpec,
        activity: &Activity,
        lived: Duration,
        now: Instant,
    ) -> Self {
        let mut patience = Self {
            idle_timeout: None,
            lifetime_ends: None,
            since: (now, lived),
            active: now,
            changes: 0,
            next_reading: now,
        };
        patience.follow(spec, activity, now);
        patience
    }

    /// Takes the times of a changed spec. The session counts as active now.
    pub(super) fn follow(&mut self, spec: &ResolvedSpec, activity: &Activity, now: Instant) {
        let seconds = |value: u32| Duration::from_secs(value.into());
        self.idle_timeout = (spec.idle_timeout_s > 0).then(|| seconds(spec.idle_timeout_s));
        let longest = (spec.max_lifetime_s > 0).then(|| {
            let (since, lived) = self.since;
            let left = seconds(spec.max_lifetime_s).saturating_sub(lived);
            let why = format!("its longest lifetime of {} s is over", spec.max_lifetime_s);
            (since + left, why)
        });
        let expiry = spec.expires_at.map(|at| {
            let left = Duration::try_from(at.duration_since(Timestamp::now()));
            (
                now + left.unwrap_or_default(),
                format!("it was to end at {at}"),
            )
        });
        self.lifetime_ends = expiry.or(longest);
        self.active = now;
        self.changes = activity.changes();
        self.next_reading = now + self.interval();
    }

    fn interval(&self) -> Duration {
        self.idle_timeout
            .map_or(LONGEST_INTERVAL, |timeout| timeout / READINGS)
            .clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)
    }

    /// When to look; `None` for never.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let reading = self.idle_timeout.map(|_| self.next_reading);
        let lifetime = self.lifetime_ends.as_ref().map(|(at, _)| *at);
        match (reading, lifetime) {
            (Some(reading), Some(lifetime)) => Some(reading.min(lifetime)),
            (one, other) => one.or(other),
        }
    }

    /// Returns why the session should stop, if it should. `runs_commands`: kept commands may run in it.
    pub(super) fn look(
        &mut self,
        activity: &Activity,
        runs_commands: bool,
        now: Instant,
    ) -> Option<(EndCause, String)> {
        if let Some((at, why)) = &self.lifetime_ends
            && now >= *at
        {
            return Some((EndCause::Lifetime, why.clone()));
        }
        let timeout = self.idle_timeout?;
        if now < self.next_reading {
            return None;
        }
        self.next_reading = now + self.interval();
        let changes = activity.changes();
        if activity.in_flight() > 0 || runs_commands || changes != self.changes {
            self.changes = changes;
            self.active = now;
            return None;
        }
        (now.duration_since(self.active) >= timeout)
            .then(|| (EndCause::Idle, idle_for(timeout, activity)))
    }
}

/// Why a session is stopped or paused, with its last activity as far as this daemon has seen it.
fn idle_for(timeout: Duration, activity: &Activity) -> String {
    let seconds = timeout.as_secs();
    match activity.latest() {
        Some(latest) => format!("idle for {seconds} s after {}", latest.name()),
        None => format!("idle for {seconds} s"),
    }
}
