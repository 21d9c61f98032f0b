//! The steps of leaving, as the listener of clients follows them.

use std::time::Duration;

/// Time within which tunnels are closed in [`Departure::Closing`], so that not all clients connect again at once.
pub const CLOSING_SPREAD: Duration = Duration::from_secs(2);

/// The same for [`Departure::ClosingQuickly`]: half of the shortest time that a preemption keeps for closing.
pub const QUICK_CLOSING_SPREAD: Duration = Duration::from_millis(500);

/// How far a node has got with leaving, for its listener of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Departure {
    /// The node serves, and takes new clients.
    #[default]
    Staying,
    /// Load balancers see that the node leaves. Everything is still served, and answers ask clients
    /// to connect again.
    Announced,
    /// Tunnels, and connections without a request, are closed. Clients that connect nevertheless
    /// are served for a short time.
    Closing,
    /// As [`Self::Closing`], on a machine that is gone before [`CLOSING_SPREAD`] has passed.
    ClosingQuickly,
}

impl Departure {
    /// Returns the step that closes tunnels in the time that is `left`.
    #[must_use]
    pub fn closing(left: Duration) -> Self {
        match left < CLOSING_SPREAD {
            true => Self::ClosingQuickly,
            false => Self::Closing,
        }
    }
}
