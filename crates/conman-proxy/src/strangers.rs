use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::Sparing;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// The part of an IPv6 address that one customer has to themselves.
const CUSTOMER_BITS: u128 = !0 << 64;

/// Connections to the listener for nodes on which no node has made itself known yet, by where they
/// come from: bounded for each address and in all, so that who is no node takes no node's place.
#[derive(Debug)]
pub(crate) struct Strangers {
    max: usize,
    all: Arc<Semaphore>,
    from: Mutex<HashMap<IpAddr, usize>>,
}

/// One such connection; dropped once a node is known by it, or when it ends.
#[derive(Debug)]
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    from: IpAddr,
    _one_of_all: OwnedSemaphorePermit,
}

/// Between two warnings that requests from one address are refused.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// What the log is told of requests that were no node's: not each.
#[derive(Debug)]
pub(crate) struct Refusals {
    began: Instant,
    sparing: Mutex<Sparing>,
}

impl Refusals {
    pub(crate) fn new() -> Self {
        let every_ms = u64::try_from(WARN_EVERY.as_millis()).unwrap_or(u64::MAX);
        Self {
            began: Instant::now(),
            sparing: Mutex::new(Sparing::new(every_ms)),
        }
    }

    /// Whether to tell of one from there, and of how many it was not told.
    pub(crate) fn say(&self, address: &str) -> Option<u64> {
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut sparing = self.sparing.lock().unwrap_or_else(PoisonError::into_inner);
        sparing.say(address, now_ms)
    }
}

impl Strangers {
    /// At most `max` from one address and `all` together.
    pub(crate) fn new(max: usize, all: usize) -> Arc<Self> {
        let from = Mutex::default();
        let all = Arc::new(Semaphore::new(all));
        Arc::new(Self { max, all, from })
    }

    /// `None` where there are as many from there, or in all, as may be.
    pub(crate) fn come(self: &Arc<Self>, address: IpAddr) -> Option<Stranger> {
        let one_of_all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        let from = match address.to_canonical() {
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & CUSTOMER_BITS))
            }
            v4 @ IpAddr::V4(_) => v4,
        };
        let mut counts = self.lock();
        let count = counts.entry(from).or_default();
        // A count that is there is above zero, as is the bound.
        if *count >= self.max {
            return None;
        }
        *count += 1;
        let strangers = Arc::clone(self);
        Some(Stranger {
            strangers,
            from,
            _one_of_all: one_of_all,
        })
    }

    /// The map is sound after every single step.
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.from.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut counts = self.strangers.lock();
        if let Some(count) = counts.get_mut(&self.from) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_bound_and_all_have_one_and_nothing_is_left_behind() {
        let strangers = Strangers::new(2, 3);
        let come = |text: &str| strangers.come(text.parse().expect("an address"));
        let (a, b) = (come("10.0.0.1"), come("::ffff:10.0.0.1"));
        assert!(a.is_some() && b.is_some() && come("10.0.0.1").is_none());
        let other = come("10.0.0.2");
        assert!(
            other.is_some() && come("10.0.0.3").is_none(),
            "three in all"
        );
        drop((a, other));
        assert!(come("10.0.0.1").is_some());
        drop(b);
        let (c, d) = (come("fd00::1"), come("fd00::2"));
        assert!(c.is_some() && d.is_some() && come("fd00::3").is_none());
        drop((c, d));
        assert!(strangers.lock().is_empty());
    }
}
