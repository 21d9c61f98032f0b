//! How the nodes of a fleet know each other: by a shared secret, by certificates, or by both.
//!
//! ```text
//! Sealer (one a connection, at the caller) ── X-Conman-Peer, -Hop, -Seal ──> PeerConnection
//!    └ ClusterSecret, the connection's nonce                         (one a connection, at the
//!                                                                     other node) └ PeerGuard
//! FleetTls: what both sides of a TLS connection between nodes are made with
//! ```
//!
//! A seal is an HMAC over what a request asks for, on whose behalf, of which node and when. Its
//! nonce belongs to one connection, the first that it came on, and its number grows there, so that
//! a recorded request is of no use: on that connection its number is used up, on any other its
//! nonce is known, and after [`MAX_SKEW_MS`] its time is over. With TLS the seal covers the
//! connection's own key material too, so that it holds on no other connection at all. It does not
//! cover bodies: on a network where others may change packets, use TLS.

mod cluster_secret;
mod fleet_tls;
mod guard;
mod replay;
mod seal;

pub use cluster_secret::{ClusterSecret, ClusterSecretError};
pub use fleet_tls::{FleetTls, FleetTlsError, FleetTlsFiles, certificates_expire_at};
pub use guard::{PeerConnection, PeerGuard};
pub use seal::{MAX_SKEW_MS, Sealer, X_CONMAN_HOP, X_CONMAN_PEER, X_CONMAN_SEAL};
