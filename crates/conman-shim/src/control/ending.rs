//! Ceasing to be the shim, by SIGTERM.
//!
//! What runs under an armed fence must not go on without one: nobody would stop it at the deadline,
//! and another node claims it some seconds later. So the fence closes first, which is written down
//! for whoever succeeds this shim, and the end comes when everything is proven frozen or is dead.
//! An unarmed fence protects nothing; what runs goes on.

use std::io;

use super::fencing::MAX_NAMED;
use super::{Control, boottime_ns};
use crate::LastHold;

/// How long, besides the time to freeze, what does not freeze has to die of its kill.
const KILLS_MS: u64 = 10_000;

/// Why the shim does not go on as another program.
pub(super) const IS_ENDING: &str = "the shim is about to end";

impl Control {
    /// As often as it is told. `true` when nothing has to be waited for.
    pub(super) fn begin_ending(&mut self) -> bool {
        if !self.fence.is_armed() || self.fence.holds_nothing() {
            return true;
        }
        if !self.is_ending() {
            let patience_ms = self.fence.freeze_ms().saturating_add(KILLS_MS);
            let until_ns = boottime_ns().saturating_add(patience_ms.saturating_mul(1_000_000));
            self.ending_until_ns = Some(until_ns);
            self.give_up_replacing(IS_ENDING.to_owned());
            self.freeze_all();
            tracing::warn!(
                "the shim is to end: everything freezes, and goes on once the next one is told to \
                 let it"
            );
        }
        self.has_ended()
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending_until_ns.is_some()
    }

    /// Whether it was told to end, and nothing runs any more, or nothing that could be stopped has by
    /// now: whoever waits for the end is not helped by waiting for what a disk holds up.
    pub(super) fn has_ended(&mut self) -> bool {
        let Some(until_ns) = self.ending_until_ns else {
            return false;
        };
        if self.is_settled() {
            return true;
        }
        if boottime_ns() < until_ns {
            return false;
        }
        let left: Vec<&String> = self.unverified.iter().take(MAX_NAMED).collect();
        tracing::error!(
            ?left,
            "the shim ends though not everything is proven frozen or dead: it was killed, and is held \
             up in the kernel; see that it dies before another node may take it over"
        );
        // Said once.
        self.ending_until_ns = Some(u64::MAX);
        true
    }

    /// Is the shim no more. Its socket goes first, and the launcher and the sweeper.
    pub(crate) fn end(self) -> io::Result<LastHold> {
        let lock = self.lock.try_clone()?;
        let mut known = self.containers.iter();
        let is_alone = !known.any(|(_, one)| one.is_alive())
            && self.launching.pending.is_empty()
            && self.doomed.is_empty()
            && self.condemned_early.len() == 0;
        Ok(LastHold {
            _lock: lock,
            is_alone,
        })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.launching.stop();
        self.sweeper.stop();
        // A later shim at the same path may have replaced it; then it is gone already or renewed.
        let _ = std::fs::remove_file(&self.options.socket);
    }
}
