//! Terminals with attached clients.

use conman_core::ActivityGuard;
use conman_runtime::AttachedIo;
use tokio::sync::OwnedSemaphorePermit;

/// A terminal of a session with an attached client. While it is held the session counts as in use and
/// is not stopped for idling.
#[derive(Debug)]
pub struct Attached {
    pub io: AttachedIo,
    /// Held only for its effect.
    pub presence: Presence,
}

/// Marks an attached client; dropping it makes room for another.
#[derive(Debug)]
pub struct Presence {
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) _activity: ActivityGuard,
}
