//! What figures of density depend on, besides the number of sessions.

use std::fs;

use anyhow::{Context, Result};
use conman_linux::SuperblockArray;
use serde::Serialize;

/// Without 0 the kernel reclaims memory through all memory cgroups although memory is free.
const WATERMARK_BOOST: &str = "/proc/sys/vm/watermark_boost_factor";

/// Longest time since the boot of a host that counts as fresh, in seconds.
const FRESH_S: f64 = 600.0;

/// The conditions of a measurement.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Conditions {
    uptime_s: f64,
    /// The node's `limits.max_sessions`.
    max_sessions: usize,
    watermark_boost_factor: u64,
    /// The most superblocks that were on the host at once since the boot; absent where the kernel does not show it.
    superblocks_before: Option<u64>,
    superblocks_after: Option<u64>,
    /// What each session pays for those, in bytes.
    session_bytes: Option<u64>,
}

impl Conditions {
    /// Called before the daemon starts.
    pub(super) fn now(max_sessions: usize) -> Result<Self> {
        let array = superblocks()?;
        Ok(Self {
            uptime_s: number("/proc/uptime")?,
            max_sessions,
            watermark_boost_factor: number(WATERMARK_BOOST)?,
            superblocks_before: array.map(|array| array.superblocks),
            superblocks_after: None,
            session_bytes: None,
        })
    }

    /// Called with all sessions alive.
    pub(super) fn with_sessions(self) -> Result<Self> {
        let array = superblocks()?;
        Ok(Self {
            superblocks_after: array.map(|array| array.superblocks),
            session_bytes: array.map(|array| array.bytes),
            ..self
        })
    }

    /// The most superblocks at once with all sessions alive, and what each session pays for them.
    pub(super) fn superblocks(self) -> Option<(u64, u64)> {
        self.superblocks_after.zip(self.session_bytes)
    }

    pub(super) fn to_text(self) -> String {
        let seen = |number: Option<u64>| number.map_or("unknown".to_owned(), |it| it.to_string());
        format!(
            "host: {} {:.1} hours ago, max_sessions {}, vm.watermark_boost_factor {}, superblocks at once since the \
             boot {} before and {} after, for which a session pays {} bytes\n",
            if self.uptime_s < FRESH_S {
                "freshly booted"
            } else {
                "booted"
            },
            self.uptime_s / 3_600.0,
            self.max_sessions,
            self.watermark_boost_factor,
            seen(self.superblocks_before),
            seen(self.superblocks_after),
            seen(self.session_bytes),
        )
    }
}

fn superblocks() -> Result<Option<SuperblockArray>> {
    SuperblockArray::measure().context("measuring what superblocks cost a session")
}

/// The first number of a file of the kernel's.
fn number<T: std::str::FromStr>(path: &str) -> Result<T> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    let first = text.split_ascii_whitespace().next();
    first
        .and_then(|first| first.parse().ok())
        .with_context(|| format!("{path} has no number"))
}
