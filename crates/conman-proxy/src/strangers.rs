use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::future::{Future, pending};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::Sparing;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The part of an IPv6 address that one customer has to themselves.
const CUSTOMER_BITS: u128 = !0 << 64;

/// Connections to the listener for nodes on which no node has made itself known yet, by where they
/// come from: bounded for each address and in all, so that who is no node takes no node's place.
///
/// A newcomer beyond a bound is let in, and the oldest has to leave: containers share the address of
/// their host, whose own daemon must not be shut out by a place that one of them sits on. A flood does
/// not keep a node out either. The request by which a node makes itself known follows its connection
/// by one round trip, and by three with TLS, and what has arrived is read before a connection is
/// closed; so a flood would have to bring as many newcomers as there are places within a few
/// milliseconds, each of which the acceptor's one thread takes in turn, and that for as long as the
/// node tries anew. To refuse newcomers while all others are young would ask much less of a flood: as
/// many within that age.
#[derive(Debug)]
pub(crate) struct Strangers {
    max: usize,
    all: usize,
    present: Mutex<Present>,
}

/// The oldest first, from each address.
#[derive(Debug, Default)]
struct Present {
    next: u64,
    count: usize,
    from: HashMap<IpAddr, BTreeMap<u64, Arc<Notify>>>,
}

/// One such connection; dropped once a node is known by it, or when it ends.
#[derive(Debug)]
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    from: IpAddr,
    number: u64,
    leave: Arc<Notify>,
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
    /// At most `max` from one address and `all` together, each at least one.
    pub(crate) fn new(max: usize, all: usize) -> Arc<Self> {
        let present = Mutex::default();
        Arc::new(Self { max, all, present })
    }

    /// Lets one in; where there are as many as may be, another has to leave.
    pub(crate) fn come(self: &Arc<Self>, address: IpAddr) -> Arc<Stranger> {
        let from = match address.to_canonical() {
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & CUSTOMER_BITS))
            }
            v4 @ IpAddr::V4(_) => v4,
        };
        let mut present = self.lock();
        if present.from.get(&from).map_or(0, BTreeMap::len) >= self.max {
            present.evict(from);
        } else if present.count >= self.all {
            present.evict_any();
        }
        let number = present.next;
        present.next += 1;
        present.count += 1;
        let leave = Arc::<Notify>::default();
        let others = present.from.entry(from).or_default();
        others.insert(number, Arc::clone(&leave));
        Arc::new(Stranger {
            strangers: Arc::clone(self),
            from,
            number,
            leave,
        })
    }

    /// Has one leave; `false` where there is none.
    pub(crate) fn evict(&self) -> bool {
        self.lock().evict_any()
    }

    /// What is present is sound after every single step.
    fn lock(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Present {
    /// Of the address with the most, the oldest; where several have as many, the oldest of all.
    fn evict_any(&mut self) -> bool {
        let most = self.from.iter().max_by_key(|(_, numbers)| {
            let oldest = numbers.first_key_value().map(|(number, _)| *number);
            (numbers.len(), Reverse(oldest))
        });
        let most = most.map(|(from, _)| *from);
        most.is_some_and(|from| self.evict(from))
    }

    fn evict(&mut self, from: IpAddr) -> bool {
        let numbers = self.from.get(&from);
        let oldest = numbers.and_then(|numbers| numbers.keys().next().copied());
        let evicted = oldest.and_then(|number| self.remove(from, number));
        evicted.inspect(|leave| leave.notify_one()).is_some()
    }

    fn remove(&mut self, from: IpAddr, number: u64) -> Option<Arc<Notify>> {
        let numbers = self.from.get_mut(&from)?;
        let removed = numbers.remove(&number)?;
        if numbers.is_empty() {
            self.from.remove(&from);
        }
        self.count -= 1;
        Some(removed)
    }
}

impl Stranger {
    /// Ends when the connection has to leave; never once a node is known by it.
    pub(crate) fn evicted(self: &Arc<Self>) -> impl Future<Output = ()> + use<> {
        let leave = Arc::clone(&self.leave);
        let stranger = Arc::downgrade(self);
        async move {
            leave.notified().await;
            if stranger.strong_count() == 0 {
                pending::<()>().await;
            }
        }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.strangers.lock().remove(self.from, self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn is_evicted(stranger: &Arc<Stranger>) -> bool {
        let evicted = stranger.evicted().now_or_never().is_some();
        if evicted {
            // Asked for once more, it is still so.
            stranger.leave.notify_one();
        }
        evicted
    }

    #[test]
    fn beyond_an_addresss_bound_its_oldest_leaves_and_nothing_is_left_behind() {
        let strangers = Strangers::new(2, 10);
        let come = |text: &str| strangers.come(text.parse().expect("an address"));
        let (other, a, b) = (come("10.0.0.9"), come("10.0.0.1"), come("::ffff:10.0.0.1"));
        assert!(!is_evicted(&a) && !is_evicted(&b));
        let c = come("10.0.0.1");
        assert!(is_evicted(&a) && !is_evicted(&b) && !is_evicted(&c));
        // The end of one that had to leave makes no more room.
        drop(a);
        let d = come("10.0.0.1");
        assert!(is_evicted(&b) && !is_evicted(&c) && !is_evicted(&d) && !is_evicted(&other));
        drop(c);
        let e = come("10.0.0.1");
        assert!(!is_evicted(&d), "there was room");
        drop((b, d, e, other));
        let (f, g) = (come("fd00::1"), come("fd00::2"));
        let h = come("fd00::3");
        assert!(is_evicted(&f) && !is_evicted(&g), "one customer's");
        drop((f, g, h));
        let present = strangers.lock();
        assert!(present.from.is_empty() && present.count == 0);
    }

    #[test]
    fn beyond_the_bound_of_all_the_oldest_of_the_address_with_the_most_leaves() {
        let strangers = Strangers::new(10, 4);
        let come = |text: &str| strangers.come(text.parse().expect("an address"));
        let (a, b) = (come("10.0.0.1"), come("10.0.0.2"));
        let (c, d) = (come("10.0.0.2"), come("10.0.0.3"));
        let e = come("10.0.0.3");
        assert!(
            is_evicted(&b) && !is_evicted(&a),
            "the most, not the oldest"
        );
        assert!(strangers.evict());
        assert!(is_evicted(&d));
        assert!(strangers.evict());
        assert!(is_evicted(&a), "as many from each, so the oldest");
        assert!(strangers.evict() && strangers.evict() && !strangers.evict());
        assert!(is_evicted(&c) && is_evicted(&e));
    }

    #[test]
    fn a_connection_that_was_to_leave_stays_when_a_node_is_known_by_it() {
        let strangers = Strangers::new(1, 1);
        let address = "10.0.0.1".parse().expect("an address");
        let stranger = strangers.come(address);
        let evicted = stranger.evicted();
        let _next = strangers.come(address);
        drop(stranger);
        assert!(evicted.now_or_never().is_none());
    }
}
