use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_auth::{FleetTls, PeerConnection, PeerGuard};
use conman_proto::Problem;
use conman_proxy::{PeerAccept, PeerVisitor, Stream};
use http::request::Parts;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream};

use crate::stream::{binding, tune};

/// Accepts the connections of other nodes.
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

    /// Sets up a connection. With TLS, the other end must have a certificate of the fleet. The
    /// caller sets a timeout. Cancelling closes the connection.
    ///
    /// # Errors
    /// The other end is not a node of the fleet, or has closed the connection.
    pub async fn accept(&self, socket: TcpStream) -> io::Result<(Stream, PeerConnection)> {
        tune(&socket);
        let Some(tls) = &self.tls else {
            return Ok((Stream::Tcp(socket), self.guard.connection(Vec::new())));
        };
        let stream = TlsAcceptor::from(tls.server()).accept(socket).await?;
        let stream = TlsStream::Server(stream);
        let connection = self.guard.connection(binding(&stream)?);
        Ok((Stream::Other(Box::new(stream)), connection))
    }
}

#[async_trait]
impl PeerAccept for PeerAcceptor {
    async fn accept(&self, stream: TcpStream) -> io::Result<(Stream, Box<dyn PeerVisitor>)> {
        let (stream, connection) = Self::accept(self, stream).await?;
        Ok((stream, Box::new(Visitor(connection))))
    }
}

struct Visitor(PeerConnection);

impl PeerVisitor for Visitor {
    fn admit(&self, parts: &Parts) -> Result<String, Box<Problem>> {
        self.0.admit(parts)
    }
}
