//! Connections without an authenticated caller, by source address.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// The part of an IPv6 address that belongs to one customer.
const CUSTOMER_BITS: u128 = !0 << 64;

/// Connections without an authenticated caller.
#[derive(Debug, Default)]
pub(crate) struct Newcomers {
    next: u64,
    /// Without an answered request.
    silent: Crowd,
    /// With an answered request, for example a health probe, which needs no credentials.
    answered: Crowd,
}

/// Connections by source address, the oldest first.
#[derive(Debug, Default)]
struct Crowd(HashMap<IpAddr, BTreeMap<u64, Arc<Leave>>>);

/// Signals a connection that it has to close.
#[derive(Debug, Default)]
pub(crate) struct Leave {
    pub(crate) notify: Notify,
    /// The connection has an authenticated caller, so it stays, whatever `notify` says.
    pub(crate) stays: AtomicBool,
}

/// One of these connections.
#[derive(Debug)]
pub(crate) struct Newcomer {
    from: IpAddr,
    number: u64,
    is_answered: bool,
    pub(crate) leave: Arc<Leave>,
}

impl Newcomers {
    pub(crate) fn come(&mut self, address: IpAddr) -> Newcomer {
        let from = match address.to_canonical() {
            IpAddr::V6(address) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & CUSTOMER_BITS))
            }
            v4 @ IpAddr::V4(_) => v4,
        };
        let number = self.next;
        self.next += 1;
        let leave = Arc::<Leave>::default();
        self.silent.insert(from, number, Arc::clone(&leave));
        Newcomer {
            from,
            number,
            is_answered: false,
            leave,
        }
    }

    /// A request on the connection was answered.
    pub(crate) fn answered(&mut self, newcomer: &mut Newcomer) {
        if newcomer.is_answered {
            return;
        }
        newcomer.is_answered = true;
        let leave = self.silent.remove(newcomer.from, newcomer.number);
        // A connection that has to close was already removed.
        if let Some(leave) = leave {
            self.answered.insert(newcomer.from, newcomer.number, leave);
        }
    }

    /// The connection has ended, or its caller is authenticated.
    pub(crate) fn remove(&mut self, newcomer: &Newcomer) {
        let crowd = if newcomer.is_answered {
            &mut self.answered
        } else {
            &mut self.silent
        };
        crowd.remove(newcomer.from, newcomer.number);
    }

    /// Makes one connection close, and returns its address; `None` if there is none.
    pub(crate) fn evict(&mut self) -> Option<IpAddr> {
        self.silent.evict().or_else(|| self.answered.evict())
    }
}

impl Crowd {
    fn insert(&mut self, from: IpAddr, number: u64, leave: Arc<Leave>) {
        self.0.entry(from).or_default().insert(number, leave);
    }

    fn remove(&mut self, from: IpAddr, number: u64) -> Option<Arc<Leave>> {
        let numbers = self.0.get_mut(&from)?;
        let removed = numbers.remove(&number);
        if numbers.is_empty() {
            self.0.remove(&from);
        }
        removed
    }

    /// Selects the oldest connection of the address with the most; on a tie, the oldest of all.
    fn evict(&mut self) -> Option<IpAddr> {
        let oldest = |numbers: &BTreeMap<u64, _>| numbers.keys().next().copied();
        let crowds = self.0.iter();
        let (&from, numbers) =
            crowds.max_by_key(|(_, numbers)| (numbers.len(), Reverse(oldest(numbers))))?;
        let leave = self.remove(from, oldest(numbers)?)?;
        leave.notify.notify_one();
        Some(from)
    }
}

impl Leave {
    pub(crate) async fn must_leave(self: Arc<Self>) {
        self.notify.notified().await;
        if self.stays.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn come(newcomers: &mut Newcomers, address: &str) -> Newcomer {
        newcomers.come(address.parse().expect("an address"))
    }

    fn evict(newcomers: &mut Newcomers) -> Option<String> {
        newcomers.evict().map(|from| from.to_string())
    }

    #[test]
    fn the_oldest_of_the_address_with_the_most_leaves() {
        let mut all = Newcomers::default();
        let addresses = [
            "10.0.0.1",
            "10.0.0.2",
            "::ffff:10.0.0.2",
            "fd00::1",
            "fd00::2",
        ];
        let come: Vec<_> = addresses.map(|from| come(&mut all, from)).into();
        all.remove(&come[1]);
        let order: Vec<_> = std::iter::from_fn(|| evict(&mut all)).collect();
        // First one of the two from one IPv6 customer; then all have one, so the oldest.
        assert_eq!(order, ["fd00::", "10.0.0.1", "10.0.0.2", "fd00::"]);
        assert!(all.silent.0.is_empty() && all.answered.0.is_empty());
    }

    #[test]
    fn those_with_an_answered_request_leave_last() {
        let mut all = Newcomers::default();
        let [mut a, mut b] = ["10.0.0.1", "10.0.0.1"].map(|from| come(&mut all, from));
        let _c = come(&mut all, "10.0.0.2");
        for newcomer in [&mut a, &mut b] {
            all.answered(newcomer);
        }
        all.remove(&b);
        assert_eq!(evict(&mut all).as_deref(), Some("10.0.0.2"));
        assert_eq!(evict(&mut all).as_deref(), Some("10.0.0.1"));
        // An answer does not bring back a connection that has to close.
        all.answered(&mut a);
        assert_eq!(evict(&mut all), None);
    }
}
