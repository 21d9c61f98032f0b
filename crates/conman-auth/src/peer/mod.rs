//! How the nodes of a fleet authenticate each other: by TLS with certificates on both sides, which
//! are given, or derived from a secret that the nodes share.
//!
//! ```text
//! FleetTlsFiles (given) ─────────────────────┐
//!                                            ├─> FleetTls: configuration of both sides of a TLS
//! ClusterSecret ─> derived CA and certificate ┘   connection between nodes
//! ```
//!
//! A given certificate names the node's address, a derived one its name: there the caller notices
//! if another node answers at the address. Every holder of the secret can derive the certificate of
//! any node, as every holder of the CA's key can sign one.

mod cluster_secret;
mod derived;
mod fleet_tls;

pub use cluster_secret::{ClusterSecret, ClusterSecretError};
pub use fleet_tls::{FleetTls, FleetTlsError, FleetTlsFiles, certificates_expire_at};
