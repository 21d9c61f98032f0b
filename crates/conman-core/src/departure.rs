//! The steps of leaving, as the listener of clients follows them.

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
}
