//! Lets the connections end that pass through this node to sessions on other nodes, before the node
//! is done with leaving.
//!
//! ```text
//!           drain, notice, stop             sessions gone, delay over
//!  Staying ─────────────────────▶ Announced ─────────────────────────▶ Closing
//!     ▲                               │        or little time left        │
//!     └───────undrain, readmit────────┴───────────────────────────────────┘
//! ```
//! Each [`LeaveCause`] has such a state; the listeners follow the furthest of them. The delay gives load
//! balancers time to notice: until then they send new clients, which would be cut off when the machine is
//! switched off. It is cut short if nothing passes through and no load balancer probes the node. Everything here works on any thread and never blocks, so that a preemption
//! can use it while the rest of the daemon hangs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::preemption::closing_time;
use conman_core::{Activity, Departure};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Interval between checks whether anything still passes through.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Why a node leaves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LeaveCause {
    Drain = 0,
    Preemption = 1,
    Stop = 2,
}

/// How far a node has got with leaving, and what still passes through it.
#[derive(Debug)]
pub struct Leave {
    through: Arc<Activity>,
    /// One for each cause.
    states: Mutex<[Departure; 3]>,
    departure: watch::Sender<Departure>,
    delay: Duration,
    /// When a load balancer last probed the node.
    probed_at: Mutex<Option<Instant>>,
}

impl Leave {
    /// `delay`: time for load balancers to notice that the node leaves.
    pub(crate) fn new(delay: Duration) -> Self {
        Self {
            through: Arc::default(),
            states: Mutex::default(),
            departure: watch::Sender::new(Departure::default()),
            delay,
            probed_at: Mutex::default(),
        }
    }

    /// Notes that a load balancer has probed the node.
    pub fn probed(&self) {
        *self.last_probe() = Some(Instant::now());
    }

    /// Whether a load balancer has probed the node within the last delay.
    pub(crate) fn is_probed(&self) -> bool {
        self.last_probe()
            .is_some_and(|at| at.elapsed() < self.delay)
    }

    /// Returns the counter of tunnels and requests to sessions on other nodes.
    #[must_use]
    pub fn through(&self) -> &Arc<Activity> {
        &self.through
    }

    /// Returns the furthest state of all causes, for the listeners.
    #[must_use]
    pub fn departure(&self) -> watch::Receiver<Departure> {
        self.departure.subscribe()
    }

    pub(crate) fn delay(&self) -> Duration {
        self.delay
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.state(LeaveCause::Stop) != Departure::Staying
    }

    pub(crate) fn announce(&self, cause: LeaveCause) {
        self.change(cause, |_| Departure::Announced);
    }

    /// The cause is withdrawn.
    pub(crate) fn stay(&self, cause: LeaveCause) {
        self.change(cause, |_| Departure::Staying);
    }

    /// Closes what passes through, once load balancers have had the delay since `began`, and returns when
    /// nothing passes through any more, at `until` at the latest, or when the cause is withdrawn. Safe to
    /// cancel.
    pub(crate) async fn close(&self, cause: LeaveCause, began: Instant, until: Instant) {
        let closing = closing_time(until.saturating_duration_since(began));
        let latest = until.checked_sub(closing).unwrap_or(until);
        let noticed = (began + self.delay).min(latest);
        // For another cause, they have noticed already.
        let must_notice = self.is_probed() && *self.departure.borrow() < Departure::Closing;
        self.while_leaving(cause, noticed, || {
            let is_closing = self.state(cause) >= Departure::Closing;
            !is_closing && (self.through.in_flight() > 0 || must_notice)
        })
        .await;
        self.close_now(cause, until);
        self.while_leaving(cause, until, || self.through.in_flight() > 0)
            .await;
    }

    /// Begins to close what passes through, on a machine that may be gone at `until`.
    pub(crate) fn close_now(&self, cause: LeaveCause, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        self.change(cause, |state| match state {
            Departure::Announced => Departure::closing(left),
            Departure::Staying | Departure::Closing | Departure::ClosingQuickly => state,
        });
    }

    /// Waits while this holds, until `until` at the latest, or until the cause is withdrawn.
    async fn while_leaving(&self, cause: LeaveCause, until: Instant, holds: impl Fn() -> bool) {
        let mut departure = self.departure();
        while holds() && self.state(cause) != Departure::Staying && Instant::now() < until {
            let _ = timeout(POLL_INTERVAL, departure.changed()).await;
        }
    }

    fn last_probe(&self) -> MutexGuard<'_, Option<Instant>> {
        self.probed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self, cause: LeaveCause) -> Departure {
        let states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states[cause as usize]
    }

    fn change(&self, cause: LeaveCause, change: impl FnOnce(Departure) -> Departure) {
        // No panic can happen while the lock is held.
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states[cause as usize] = change(states[cause as usize]);
        let furthest = states.iter().copied().max().unwrap_or_default();
        self.departure
            .send_if_modified(|present| std::mem::replace(present, furthest) != furthest);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tunnels_are_closed_after_the_delay_and_at_once_if_there_are_none() {
        let leave = Arc::new(Leave::new(Duration::from_secs(5)));
        let departure = leave.departure();
        let began = Instant::now();
        let until = began + Duration::from_secs(60);
        leave.announce(LeaveCause::Drain);
        leave.close(LeaveCause::Drain, began, until).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert_eq!(*departure.borrow(), Departure::Closing);

        leave.announce(LeaveCause::Drain);
        let tunnel = leave.through().begin();
        let closing = Arc::clone(&leave);
        let closing =
            tokio::spawn(async move { closing.close(LeaveCause::Drain, began, until).await });
        sleep(Duration::from_secs(4)).await;
        assert_eq!(*departure.borrow(), Departure::Announced);
        sleep(Duration::from_secs(2)).await;
        assert_eq!(*departure.borrow(), Departure::Closing);
        drop(tunnel);
        closing.await.expect("it returns");
        assert!(began.elapsed() < Duration::from_secs(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_behind_a_load_balancer_is_empty_only_once_that_has_noticed() {
        let leave = Arc::new(Leave::new(Duration::from_secs(5)));
        leave.probed();
        sleep(Duration::from_secs(4)).await;
        let began = Instant::now();
        let until = began + Duration::from_secs(60);
        leave.announce(LeaveCause::Preemption);
        let closing = Arc::clone(&leave);
        tokio::spawn(async move { closing.close(LeaveCause::Preemption, began, until).await });
        // Another notice of the same preemption does not wait for longer.
        let later = began + Duration::from_secs(2);
        leave.close(LeaveCause::Preemption, later, until).await;
        assert_eq!(began.elapsed(), Duration::from_secs(5));

        // The balancer has noticed: the node has left for another cause.
        leave.probed();
        let began = Instant::now();
        leave.announce(LeaveCause::Drain);
        leave.close(LeaveCause::Drain, began, until).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_is_gone_soon_has_time_for_closing_what_passes_through() {
        let leave = Arc::new(Leave::new(Duration::from_secs(5)));
        let mut departure = leave.departure();
        let tunnel = leave.through().begin();
        let began = Instant::now();
        leave.announce(LeaveCause::Preemption);
        let closing = Arc::clone(&leave);
        let until = began + Duration::from_secs(5);
        tokio::spawn(async move { closing.close(LeaveCause::Preemption, began, until).await });
        let closes = departure.wait_for(|state| *state == Departure::Closing);
        closes.await.expect("it leaves");
        let left = until - Instant::now();
        assert!(left >= Duration::from_millis(2_400), "{left:?}");

        // Of two seconds, one is left, in which the proxy could not spread the ends over two.
        leave.announce(LeaveCause::Preemption);
        let began = Instant::now();
        let until = began + Duration::from_secs(2);
        leave.close(LeaveCause::Preemption, began, until).await;
        assert_eq!(*departure.borrow(), Departure::ClosingQuickly);
        drop(tunnel);
    }

    #[tokio::test(start_paused = true)]
    async fn a_withdrawn_cause_leaves_the_state_of_the_others() {
        let leave = Leave::new(Duration::from_secs(5));
        let departure = leave.departure();
        let _tunnel = leave.through().begin();
        let began = Instant::now();
        leave.announce(LeaveCause::Drain);
        leave.announce(LeaveCause::Preemption);
        let until = began + Duration::from_secs(8);
        leave.close(LeaveCause::Preemption, began, until).await;
        assert_eq!(*departure.borrow(), Departure::Closing);
        leave.stay(LeaveCause::Preemption);
        assert_eq!(*departure.borrow(), Departure::Announced);
        leave.stay(LeaveCause::Drain);
        leave.close(LeaveCause::Drain, began, until).await;
        assert_eq!(*departure.borrow(), Departure::Staying);
    }
}
