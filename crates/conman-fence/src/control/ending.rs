//! Ending the shim on SIGTERM.
//!
//! Containers under an armed fence must not run without one: nothing would stop them at the deadline,
//! and another node claims the sessions some seconds later. So the fence closes first, which is recorded
//! for the next shim, and the shim ends when everything is proven frozen or is dead. An unarmed fence
//! protects nothing; containers keep running.

use std::io;

use super::effects::MAX_NAMED;
use super::{Control, boottime_ns};
use crate::LastHold;

/// Time to die for killed containers that did not freeze, in addition to the time to freeze.
const KILLS_MS: u64 = 10_000;

/// Why the shim refuses a replacement.
pub(super) const IS_ENDING: &str = "the shim is about to end";

impl Control {
    /// May be called repeatedly. Returns `true` when there is nothing to wait for.
    pub(super) fn begin_ending(&mut self) -> bool {
        if !self.fence.is_armed() || self.fence.holds_nothing() {
            return true;
        }
        if !self.is_ending() {
            let patience_ms = self.fence.freeze_ms().saturating_add(KILLS_MS);
            let until_ns = boottime_ns().saturating_add(patience_ms.saturating_mul(1_000_000));
            self.ending_until_ns = Some(until_ns);
            let effects = self.replacement.give_up(IS_ENDING);
            self.carry_out(effects);
            self.freeze_all();
            tracing::warn!(
                "the shim is about to end: freezing all containers until a client opens the next \
                 shim's fence"
            );
        }
        self.has_ended()
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending_until_ns.is_some()
    }

    /// Whether it was ordered to end, and nothing runs any more, or the time is up: waiting for processes
    /// that a disk holds up does not help the caller.
    pub(super) fn has_ended(&mut self) -> bool {
        let Some(until_ns) = self.ending_until_ns else {
            return false;
        };
        if self.fence.is_settled() {
            return true;
        }
        if boottime_ns() < until_ns {
            return false;
        }
        let left: Vec<&String> = self.fence.unverified().take(MAX_NAMED).collect();
        tracing::error!(
            ?left,
            "the shim ends, but not everything is proven frozen or dead: these were killed and hang \
             in the kernel; make sure that they die before another node takes them over"
        );
        // Logged once.
        self.ending_until_ns = Some(u64::MAX);
        true
    }

    /// Ends the shim. Its socket is closed first, then the launcher and the sweeper.
    pub(crate) fn end(self) -> io::Result<LastHold> {
        let lock = self.lock.try_clone()?;
        let mut known = self.containers.iter();
        let is_alone = !known.any(|(_, one)| one.is_alive())
            && self.launching.pending.is_empty()
            && self.containers.has_no_pending_kills()
            && self.forbidden_starts.len() == 0;
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
        // A later shim at the same path may have replaced it; then it is removed already or new.
        let _ = std::fs::remove_file(&self.options.socket);
    }
}
