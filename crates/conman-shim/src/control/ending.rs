//! Ceasing to be the shim, by SIGTERM.
//!
//! What runs under an armed fence must not go on without one: nobody would stop it at the deadline,
//! and another node claims it some seconds later. So the fence closes first, which is written down
//! for whoever succeeds this shim, and the end comes when everything is proven frozen or is dead.
//! An unarmed fence protects nothing; what runs goes on.

use std::io;

use super::Control;
use crate::LastHold;

/// Why the shim does not go on as another program.
pub(super) const IS_ENDING: &str = "the shim is about to end";

impl Control {
    /// As often as it is told. `true` when nothing has to be waited for.
    pub(super) fn begin_ending(&mut self) -> bool {
        if !self.fence.is_armed() || self.fence.holds_nothing() {
            return true;
        }
        if !self.ending {
            self.ending = true;
            self.give_up_replacing(IS_ENDING.to_owned());
            self.freeze_all();
            tracing::warn!(
                "the shim is to end: everything freezes, and goes on once the next one is told to \
                 let it"
            );
        }
        self.has_ended()
    }

    /// Whether it was told to end, and nothing runs any more.
    pub(super) fn has_ended(&self) -> bool {
        self.ending && self.is_settled()
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
