use std::io;
use std::sync::Arc;

use conman_auth::{FleetTls, PeerConnection, PeerGuard};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream};

use crate::stream::{PeerStream, binding, tune};

/// Takes the connections of other nodes.
#[derive(Debug, Clone)]
pub struct PeerAcceptor {
    guard: Arc<PeerGuard>,
    tls: Option<Arc<FleetTls>>,
}

impl PeerAcceptor {
    #[must_use]
    pub fn new(guard: Arc<PeerGuard>, tls: Option<Arc<FleetTls>>) -> Self {
        Self { guard, tls }
    }

    /// Begins a connection: with TLS, only one whose other end has a certificate of the fleet.
    /// The caller bounds the time. Cancelling closes the connection.
    ///
    /// # Errors
    /// The other end is no node of the fleet, or gone.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<(PeerStream, PeerConnection)> {
        tune(&socket);
        let Some(tls) = &self.tls else {
            return Ok((PeerStream::Plain(socket), self.guard.connection(Vec::new())));
        };
        let stream = TlsAcceptor::from(tls.server()).accept(socket).await?;
        let stream = TlsStream::Server(stream);
        let connection = self.guard.connection(binding(&stream)?);
        Ok((PeerStream::Tls(Box::new(stream)), connection))
    }
}
