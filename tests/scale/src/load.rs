//! What is asked of etcd.

use serde::Serialize;

/// Requests a second, as a mean over a time, and the share of it in which etcd had something to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Load {
    pub transactions_per_s: f64,
    pub reads_per_s: f64,
    pub records_read_per_s: f64,
    pub deliveries_per_s: f64,
    pub busy_percent: f64,
}

/// Counts of requests.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) transactions: u64,
    pub(super) reads: u64,
    pub(super) records: u64,
    pub(super) deliveries: u64,
    pub(super) busy_us: f64,
}

impl Counts {
    /// Nothing for a time that did not come.
    pub(super) fn since(&self, earlier: &Self, us: f64) -> Load {
        if us <= 0.0 {
            return Load::default();
        }
        let a_second = |now: u64, before: u64| (now - before) as f64 * 1e6 / us;
        Load {
            transactions_per_s: a_second(self.transactions, earlier.transactions),
            reads_per_s: a_second(self.reads, earlier.reads),
            records_read_per_s: a_second(self.records, earlier.records),
            deliveries_per_s: a_second(self.deliveries, earlier.deliveries),
            busy_percent: (self.busy_us - earlier.busy_us) * 100.0 / us,
        }
    }
}
