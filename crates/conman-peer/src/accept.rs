//! Accepts connections of other nodes.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_auth::FleetTls;
use rustls::{Error, InvalidMessage};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::Stream;
use crate::tls_stream::{refuses_certificate, tune};

/// Accepts connections of other nodes.
#[async_trait]
pub trait PeerAccept: Send + Sync + 'static {
    /// Does the handshake before HTTP, which authenticates the other end. The proxy bounds its time;
    /// cancel safe.
    ///
    /// # Errors
    /// The connection is not a node's. `InvalidData` is logged.
    async fn accept(&self, stream: TcpStream) -> io::Result<Stream>;
}

/// Accepts the connections of other nodes.
#[derive(Debug, Clone)]
pub struct PeerAcceptor {
    tls: Option<Arc<FleetTls>>,
}

impl PeerAcceptor {
    /// Without `tls` every connection counts as a node's.
    #[must_use]
    pub fn new(tls: Option<Arc<FleetTls>>) -> Self {
        Self { tls }
    }
}

#[async_trait]
impl PeerAccept for PeerAcceptor {
    /// With TLS, the other end must have a certificate of the fleet: before it has shown one, it
    /// learns nothing but this node's certificate.
    async fn accept(&self, socket: TcpStream) -> io::Result<Stream> {
        tune(&socket);
        let Some(tls) = &self.tls else {
            return Ok(Stream::Tcp(socket));
        };
        let accepted = TlsAcceptor::from(tls.server()).accept(socket).await;
        Ok(Stream::Other(Box::new(accepted.map_err(explained)?)))
    }
}

/// Adds to an error of TLS what it means between nodes.
fn explained(error: io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|error| error.downcast_ref());
    let meaning = match tls {
        Some(Error::InvalidMessage(InvalidMessage::InvalidContentType)) => {
            "it does not use TLS: this listener is for the nodes of the fleet alone; clients use \
             `listen.api` or `listen.sessions`"
        }
        Some(Error::NoCertificatesPresented) => {
            "it has no certificate: this listener is for the nodes of the fleet alone"
        }
        Some(Error::InvalidCertificate(_)) => {
            "this node does not accept its certificate: their `fleet.secret_file` differs, or the \
             certificate in its `fleet.tls.cert` has expired or was not signed by `fleet.tls.ca` \
             of this node"
        }
        Some(Error::AlertReceived(alert)) if refuses_certificate(*alert) => {
            "it does not accept this node's certificate: another node is expected at this \
             address, their `fleet.secret_file` differs, or `fleet.tls` of one does not fit the \
             other's"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{meaning} ({error})"))
}
