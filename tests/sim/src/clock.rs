//! A machine's clock.

/// CLOCK_BOOTTIME, running wrong.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) at: u64,
    pub(crate) shows: u64,
    pub(crate) drift_ppm: i64,
}

impl Clock {
    pub(crate) fn read(&self, now: u64) -> u64 {
        let passed = now - self.at;
        let drift = (passed as i64 * self.drift_ppm) / 1_000_000;
        (self.shows + passed).saturating_add_signed(drift)
    }
}
