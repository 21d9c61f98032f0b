//! The counters and limits of one session.

use std::sync::atomic::{AtomicU64, Ordering};

use conman_proto::{Bandwidth, Rate};

use crate::token_bucket::TokenBucket;

/// A session may send or receive at once what its rate allows in a tenth of a second, and some full-size packets.
const BURST_PARTS: u64 = 10;
const MIN_BURST_BYTES: u64 = 16 << 10;

/// What conman's proxies carry for a session.
#[derive(Debug, Default)]
pub struct Traffic {
    pub(crate) inward: Flow,
    pub(crate) outward: Flow,
}

/// One direction.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    bytes: AtomicU64,
    pub(crate) bucket: Option<TokenBucket>,
}

impl Traffic {
    /// Nothing was carried yet.
    #[must_use]
    pub fn new(bandwidth: &Bandwidth) -> Self {
        Self {
            inward: Flow::new(bandwidth.inward),
            outward: Flow::new(bandwidth.outward),
        }
    }

    /// Bytes carried to the session and from it.
    #[must_use]
    pub fn carried(&self) -> (u64, u64) {
        let bytes = |flow: &Flow| flow.bytes.load(Ordering::Relaxed);
        (bytes(&self.inward), bytes(&self.outward))
    }
}

impl Flow {
    fn new(rate: Option<Rate>) -> Self {
        Self {
            bytes: AtomicU64::new(0),
            bucket: rate.map(|rate| TokenBucket::new(rate.bytes_per_s(), burst_bytes(rate))),
        }
    }

    pub(crate) fn count(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// What may pass at once, in bytes, after a pause.
#[must_use]
pub fn burst_bytes(rate: Rate) -> u64 {
    (rate.bytes_per_s() / BURST_PARTS).max(MIN_BURST_BYTES)
}
