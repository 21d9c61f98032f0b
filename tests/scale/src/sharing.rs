//! A processor that all jobs share equally, as the goroutines of etcd do: a short job beside a thousand long ones
//! takes a thousand times its work, and not the time of all work before it.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

struct Job<T> {
    /// The virtual time at which it is done.
    done: f64,
    number: u64,
    what: T,
}

impl<T> PartialEq for Job<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Job<T> {}

impl<T> PartialOrd for Job<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Job<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_time = self.done.total_cmp(&other.done);
        by_time.then(self.number.cmp(&other.number))
    }
}

/// Jobs under way. Times are in microseconds.
pub(super) struct Sharing<T> {
    jobs: BinaryHeap<Reverse<Job<T>>>,
    /// Grows by one for each microsecond of work that every present job has received.
    virtual_us: f64,
    now_us: f64,
    busy_us: f64,
    next_number: u64,
}

impl<T> Sharing<T> {
    pub(super) fn new() -> Self {
        Self {
            jobs: BinaryHeap::new(),
            virtual_us: 0.0,
            now_us: 0.0,
            busy_us: 0.0,
            next_number: 0,
        }
    }

    /// Time in which there was a job.
    pub(super) fn busy_us(&self) -> f64 {
        self.busy_us
    }

    pub(super) fn begin(&mut self, now_us: f64, work_us: f64, what: T) {
        self.advance(now_us);
        self.next_number += 1;
        self.jobs.push(Reverse(Job {
            done: self.virtual_us + work_us,
            number: self.next_number,
            what,
        }));
    }

    /// When the next job is done, if no other one begins.
    pub(super) fn next_us(&self) -> Option<f64> {
        let Reverse(next) = self.jobs.peek()?;
        let left = (next.done - self.virtual_us).max(0.0);
        Some(self.now_us + left * self.jobs.len() as f64)
    }

    /// The next job, at [the time when it is done](Self::next_us).
    pub(super) fn finish(&mut self, now_us: f64) -> Option<T> {
        self.advance(now_us);
        self.jobs.pop().map(|Reverse(job)| job.what)
    }

    fn advance(&mut self, now_us: f64) {
        let passed = (now_us - self.now_us).max(0.0);
        if !self.jobs.is_empty() {
            self.virtual_us += passed / self.jobs.len() as f64;
            self.busy_us += passed;
        }
        self.now_us = self.now_us.max(now_us);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_job_beside_a_long_one_takes_twice_its_work() {
        let mut sharing = Sharing::new();
        sharing.begin(0.0, 1_000.0, "long");
        sharing.begin(100.0, 50.0, "short");
        let next = sharing.next_us().expect("two jobs");
        assert!((next - 200.0).abs() < 1e-6, "{next}");
        assert_eq!(sharing.finish(next), Some("short"));
        let next = sharing.next_us().expect("one job");
        assert!((next - 1_050.0).abs() < 1e-6, "{next}");
        assert_eq!(sharing.finish(next), Some("long"));
        assert!((sharing.busy_us() - 1_050.0).abs() < 1e-6);
        assert_eq!(sharing.next_us(), None);
    }
}
