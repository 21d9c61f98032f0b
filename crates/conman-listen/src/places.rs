//! The places of a listener, and which connection is closed when they run out.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::RateLimitedLog;
use metrics::{Counter, counter, describe_counter};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::newcomers::{Newcomer, Newcomers};

/// Minimum interval between two warnings of one listener.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Maximum wait for the place of a connection that has to close, which its task does at once. It
/// stays if its caller is authenticated at that moment; then another connection has to close.
const EVICTION: Duration = Duration::from_millis(100);
/// Maximum number of connections that are closed for one new connection.
const EVICTIONS: u32 = 10;

/// The places of one listener.
pub struct Places {
    listener: &'static str,
    free: Semaphore,
    newcomers: Mutex<Newcomers>,
    evicted: Counter,
    warnings: RateLimitedLog,
    began: Instant,
}

/// One connection's place, returned when dropped.
///
/// The connection can lose it until [`Place::known`]; [`Place::evicted`] signals this.
pub struct Place {
    places: Arc<Places>,
    newcomer: Mutex<Option<Box<Newcomer>>>,
}

impl Places {
    /// `max` places of a listener; `listener` is its name in metrics and in the log.
    #[must_use]
    pub fn new(listener: &'static str, max: usize) -> Arc<Self> {
        describe_counter!(
            "conman_connections_evicted_total",
            "Connections without a completed request that were closed to make room for others"
        );
        Arc::new(Self {
            listener,
            free: Semaphore::new(max.min(Semaphore::MAX_PERMITS)),
            newcomers: Mutex::default(),
            evicted: counter!("conman_connections_evicted_total", "listener" => listener),
            warnings: RateLimitedLog::new(WARN_EVERY),
            began: Instant::now(),
        })
    }

    /// Takes a place for a connection from `address`. If none is free, another connection has to
    /// close; `None` if none can. Cancel safe. Takes at most a second.
    pub async fn take(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        if let Ok(free) = self.free.try_acquire() {
            return Some(self.give(free, address));
        }
        for _ in 0..EVICTIONS {
            self.evict()?;
            let free = tokio::time::timeout(EVICTION, self.free.acquire()).await;
            if let Ok(Ok(free)) = free {
                return Some(self.give(free, address));
            }
        }
        None
    }

    /// Like [`Self::take`], but waits if no connection can be closed. Cancel safe.
    pub async fn wait(self: &Arc<Self>, address: IpAddr) -> Place {
        loop {
            if let Some(place) = self.take(address).await {
                return place;
            }
            // The semaphore is never closed.
            if let Ok(free) = self.free.acquire().await {
                return self.give(free, address);
            }
        }
    }

    fn give(self: &Arc<Self>, free: SemaphorePermit<'_>, address: IpAddr) -> Place {
        // Returned by `Place`.
        free.forget();
        let newcomer = self.lock().come(address);
        Place {
            places: Arc::clone(self),
            newcomer: Mutex::new(Some(Box::new(newcomer))),
        }
    }

    fn evict(&self) -> Option<()> {
        let address = self.lock().evict()?;
        self.evicted.increment(1);
        if let Some(withheld) = self.warnings.allow(self.listener, self.began.elapsed()) {
            tracing::warn!(
                listener = self.listener,
                %address,
                withheld,
                "all places are taken: closed the oldest connection without a completed request, \
                 of the address that has most of these"
            );
        }
        Some(())
    }

    fn lock(&self) -> MutexGuard<'_, Newcomers> {
        lock(&self.newcomers)
    }
}

impl Place {
    /// A request on the connection was answered; connections without an answer are closed before
    /// it.
    pub fn answered(&self) {
        if let Some(newcomer) = lock(&self.newcomer).as_mut() {
            self.places.lock().answered(newcomer);
        }
    }

    /// The caller is authenticated: the connection keeps its place from here on.
    pub fn known(&self) {
        if let Some(newcomer) = lock(&self.newcomer).take() {
            newcomer.leave.stays.store(true, Ordering::Relaxed);
            self.places.lock().remove(&newcomer);
        }
    }

    /// Completes when the connection has to close; never after its caller is authenticated.
    pub fn evicted(&self) -> impl Future<Output = ()> + use<> {
        let newcomer = lock(&self.newcomer);
        let leave = newcomer
            .as_ref()
            .map(|newcomer| Arc::clone(&newcomer.leave));
        async move {
            match leave {
                Some(leave) => leave.must_leave().await,
                None => std::future::pending().await,
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.known();
        self.places.free.add_permits(1);
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Places")
            .field("listener", &self.listener)
            .field("free", &self.free.available_permits())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Place").finish_non_exhaustive()
    }
}

/// The data behind the locks is consistent after every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// A place whose connection closes when it has to.
    async fn closing(places: &Arc<Places>) -> Place {
        places.take(HERE).await.expect("a place")
    }

    #[tokio::test]
    async fn where_no_place_is_free_the_oldest_leaves_and_a_known_caller_stays() {
        let places = Places::new("test", 2);
        let (oldest, next) = (closing(&places).await, closing(&places).await);
        oldest.known();
        let evicted = next.evicted();
        let leaving = async {
            evicted.await;
            drop(next);
        };
        let (third, ()) = tokio::join!(places.take(HERE), leaving);
        let third = third.expect("the place of the one that left");
        third.known();
        assert!(oldest.evicted().now_or_never().is_none());
        assert!(places.take(HERE).await.is_none(), "both callers are known");
        let waiting = places.wait(HERE);
        drop(oldest);
        waiting.await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_becomes_known_as_it_has_to_leave_stays_and_another_leaves() {
        let places = Places::new("test", 2);
        let (first, second) = (closing(&places).await, closing(&places).await);
        let (stays, leaves) = (first.evicted(), second.evicted());
        let leaving = async {
            leaves.await;
            drop(second);
        };
        let becoming_known = async {
            tokio::task::yield_now().await;
            first.known();
        };
        let (third, (), ()) = tokio::join!(places.take(HERE), leaving, becoming_known);
        assert!(third.is_some());
        assert!(stays.now_or_never().is_none());
    }
}
