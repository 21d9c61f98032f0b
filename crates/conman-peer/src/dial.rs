//! Opens connections to other nodes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_auth::FleetTls;
use conman_core::error_chain;
use rustls::{CertificateError, InvalidMessage};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::tls_stream::{ToNode, tune};
use crate::{PeerAddress, Stream};

/// Timeout of a connection to another node, TLS included. Nodes are near each other; one that takes
/// longer counts as lost. A packet that is lost once is sent again after one second.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens connections to other nodes.
#[derive(Debug, Clone)]
pub struct Dialer {
    me: Arc<str>,
    tls: Option<Arc<FleetTls>>,
}

/// Why there is no connection to a node.
#[derive(Debug, Error)]
pub enum DialError {
    #[error("node `{node}` at {address} cannot be connected to")]
    Connect {
        node: String,
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("node `{node}` at {address} did not answer within {} s", DIAL_TIMEOUT.as_secs())]
    Timeout { node: String, address: String },
    #[error(
        "node `{node}` at {address} announces {announced}, and this node is configured for \
         {configured}: nodes of a fleet use TLS, see `fleet.peer_url` of both"
    )]
    Mismatch {
        node: String,
        address: String,
        announced: &'static str,
        configured: &'static str,
    },
    #[error(
        "no TLS with node `{node}` at {address}: another node answers there, or its certificate \
         in `fleet.tls.cert` does not name that address"
    )]
    Tls {
        node: String,
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("the certificate of node `{node}` at {address} is not one of this node's fleet")]
    Foreign {
        node: String,
        address: String,
        #[source]
        source: io::Error,
    },
    /// It answered without TLS that it is full, or closed a connection to free a place.
    #[error(
        "node `{node}` at {address} closed the connection before TLS was set up, as a node does at \
         its limit of connections: try again shortly"
    )]
    NoRoom {
        node: String,
        address: String,
        #[source]
        source: io::Error,
    },
}

impl Dialer {
    /// For the node `me`.
    #[must_use]
    pub fn new(me: &str, tls: Option<Arc<FleetTls>>) -> Self {
        let me = Arc::from(me);
        Self { me, tls }
    }

    /// The node that dials.
    #[must_use]
    pub fn me(&self) -> &str {
        &self.me
    }

    /// How often the certificates of new connections were replaced.
    #[must_use]
    pub fn certificates(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.reloads())
    }

    /// Opens a connection to a node, with a timeout; it is registered with the runtime of the
    /// calling task. Cancelling closes what was opened.
    ///
    /// # Errors
    /// The node cannot be reached, or the two are configured differently.
    pub async fn dial(&self, to: &PeerAddress) -> Result<Stream, DialError> {
        match timeout(DIAL_TIMEOUT, self.connect(to)).await {
            Ok(stream) => stream,
            Err(_elapsed) => Err(DialError::Timeout {
                node: to.node.clone(),
                address: to.to_string(),
            }),
        }
    }

    async fn connect(&self, to: &PeerAddress) -> Result<Stream, DialError> {
        let place = || (to.node.clone(), to.to_string());
        if to.is_tls() != self.tls.is_some() {
            let (node, address) = place();
            let called = |tls| if tls { "TLS" } else { "no TLS" };
            return Err(DialError::Mismatch {
                node,
                address,
                announced: called(to.is_tls()),
                configured: called(self.tls.is_some()),
            });
        }
        let socket = TcpStream::connect((to.host(), to.port()))
            .await
            .map_err(|source| {
                let (node, address) = place();
                DialError::Connect {
                    node,
                    address,
                    source,
                }
            })?;
        tune(&socket);
        let Some(tls) = &self.tls else {
            return Ok(Stream::Tcp(socket));
        };
        encrypt(tls, to, socket).await.map_err(|source| {
            let (node, address) = place();
            match fault(&source) {
                Fault::NoRoom => DialError::NoRoom {
                    node,
                    address,
                    source,
                },
                Fault::Foreign => DialError::Foreign {
                    node,
                    address,
                    source,
                },
                Fault::Other => DialError::Tls {
                    node,
                    address,
                    source,
                },
            }
        })
    }
}

async fn encrypt(tls: &FleetTls, to: &PeerAddress, socket: TcpStream) -> io::Result<Stream> {
    let name = tls.server_name(&to.node, to.host());
    let name = name.map_err(io::Error::other)?;
    let connector = TlsConnector::from(tls.client());
    let stream = connector.connect(name, socket).await?;
    Ok(Stream::Other(Box::new(ToNode(stream))))
}

/// Why TLS could not be set up.
enum Fault {
    /// The other end did not take part in TLS at all: a refused certificate is reported in TLS.
    NoRoom,
    /// This node does not accept the certificate, whichever node's it is.
    Foreign,
    Other,
}

fn fault(error: &io::Error) -> Fault {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    let why = error.get_ref().and_then(|why| why.downcast_ref());
    match why {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => Fault::NoRoom,
        Some(rustls::Error::InvalidCertificate(
            NotValidForName | NotValidForNameContext { .. },
        )) => Fault::Other,
        Some(rustls::Error::InvalidCertificate(_)) => Fault::Foreign,
        Some(_) => Fault::Other,
        None => match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => Fault::NoRoom,
            _ => Fault::Other,
        },
    }
}

impl From<DialError> for io::Error {
    fn from(error: DialError) -> Self {
        let kind = match &error {
            DialError::Connect { source, .. }
            | DialError::Tls { source, .. }
            | DialError::NoRoom { source, .. } => match source.kind() {
                // The kind means a refused certificate; a firewall's refusal is not one.
                io::ErrorKind::PermissionDenied => io::ErrorKind::HostUnreachable,
                kind => kind,
            },
            // As if the other node had refused this one's certificate.
            DialError::Foreign { .. } => io::ErrorKind::PermissionDenied,
            DialError::Timeout { .. } => io::ErrorKind::TimedOut,
            DialError::Mismatch { .. } => io::ErrorKind::InvalidInput,
        };
        Self::new(kind, error_chain(&error))
    }
}
