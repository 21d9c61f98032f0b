use conman_core::ActivityGuard;
use conman_runtime::TerminalIo;
use tokio::sync::OwnedSemaphorePermit;

/// A terminal of a session that somebody is attached to. As long as it is held the session is in
/// use, so that it is not stopped for idling.
#[derive(Debug)]
pub struct Attached {
    pub io: TerminalIo,
    /// Held, and of no other use.
    pub presence: Presence,
}

/// That somebody is attached; dropping it makes room for another.
#[derive(Debug)]
pub struct Presence {
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) _activity: ActivityGuard,
}
