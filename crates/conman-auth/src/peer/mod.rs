//! How the nodes of a fleet authenticate each other: by a shared secret, by certificates, or by
//! both.
//!
//! ```text
//! Sealer (one a connection, at the caller) ── X-Conman-Peer, -Hop, -Seal ──> PeerConnection
//!    └ ClusterSecret, the connection's nonce                         (one a connection, at the
//!                                                                     other node) └ PeerGuard
//! FleetTls: configuration of both sides of a TLS connection between nodes
//! ```
//!
//! A seal is an HMAC over the request, the caller it is sent for, the target node and the time. Its
//! nonce belongs to one connection, the first that it was used on, and its number grows there. So a
//! recorded request cannot be replayed: on that connection its number is used up, on any other its
//! nonce is known, and after [`MAX_SKEW_MS`] it has expired. With TLS the seal also covers the
//! connection's key material, so that it is invalid on any other connection. It does not cover
//! bodies: on a network where others may change packets, use TLS.

mod cluster_secret;
mod fleet_tls;
mod guard;
mod replay;
mod seal;

pub use cluster_secret::{ClusterSecret, ClusterSecretError};
pub use fleet_tls::{FleetTls, FleetTlsError, FleetTlsFiles, certificates_expire_at};
pub use guard::{PeerConnection, PeerGuard};
pub use seal::{MAX_SKEW_MS, Sealer, X_CONMAN_HOP, X_CONMAN_PEER, X_CONMAN_SEAL};
