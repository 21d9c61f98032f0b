use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// The part of an IPv6 address that one customer has to themselves.
const CUSTOMER_BITS: u128 = !0 << 64;

/// Connections that no caller with credentials is known by yet.
#[derive(Debug, Default)]
pub(crate) struct Newcomers {
    next: u64,
    /// Without an answered request.
    silent: Crowd,
    /// With one, for example to a health probe, which asks for no credentials.
    answered: Crowd,
}

/// Connections by the address that they come from, the oldest first.
#[derive(Debug, Default)]
struct Crowd(HashMap<IpAddr, BTreeMap<u64, Arc<Leave>>>);

/// How one connection learns that it has to leave.
#[derive(Debug, Default)]
pub(crate) struct Leave {
    pub(crate) notify: Notify,
    /// A caller is known by the connection, so it stays, whatever `notify` says.
    pub(crate) stays: AtomicBool,
}

/// One connection among them.
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
        // One that has to leave is not among them any more.
        if let Some(leave) = leave {
            self.answered.insert(newcomer.from, newcomer.number, leave);
        }
    }

    /// The connection has ended, or a caller is known by it.
    pub(crate) fn remove(&mut self, newcomer: &Newcomer) {
        let crowd = if newcomer.is_answered {
            &mut self.answered
        } else {
            &mut self.silent
        };
        crowd.remove(newcomer.from, newcomer.number);
    }

    /// Has one leave, and says where it came from; `None` where there is none.
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

    /// Of the address with the most, the oldest; where several have as many, the oldest of all.
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
    pub(crate) async fn told(self: Arc<Self>) {
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
        // One customer's two of IPv6; then as many from each, so the oldest.
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
        // What has to leave does not come back by an answer.
        all.answered(&mut a);
        assert_eq!(evict(&mut all), None);
    }
}
