use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_auth::{ClusterSecret, FleetTls, Sealer};
use conman_proxy::Stream;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, InvalidMessage};
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

use crate::PeerAddress;
use crate::stream::{ToNode, binding, tune};

/// Timeout of a connection to another node, TLS included. Nodes are near each other; one that takes
/// longer counts as lost. A packet that is lost once is sent again after one second.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens connections to other nodes.
#[derive(Debug, Clone)]
pub struct Dialer {
    me: Arc<str>,
    secret: Option<Arc<ClusterSecret>>,
    tls: Option<Arc<FleetTls>>,
}

/// A new connection to another node.
#[derive(Debug)]
pub struct Dialed {
    pub stream: Stream,
    /// Seals the requests on it.
    pub sealer: Sealer,
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
         {configured}: configure `fleet.tls` alike on both"
    )]
    Mismatch {
        node: String,
        address: String,
        announced: &'static str,
        configured: &'static str,
    },
    #[error(
        "no TLS with node `{node}` at {address}: its certificate must be signed by `fleet.tls.ca` \
         and name that address"
    )]
    Tls {
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
    #[error("cannot seal requests to node `{node}`")]
    Seal {
        node: String,
        #[source]
        source: io::Error,
    },
}

impl Dialer {
    /// For the node `me`.
    #[must_use]
    pub fn new(me: &str, secret: Option<Arc<ClusterSecret>>, tls: Option<Arc<FleetTls>>) -> Self {
        let me = Arc::from(me);
        Self { me, secret, tls }
    }

    /// The node that dials.
    #[must_use]
    pub fn me(&self) -> &str {
        &self.me
    }

    /// The TLS configuration of new connections; replaced each time the certificates are reloaded.
    pub(crate) fn certificates(&self) -> Option<Arc<ClientConfig>> {
        self.tls.as_ref().map(|tls| tls.client())
    }

    /// Opens a connection to a node, with a timeout; it is registered with the runtime of the
    /// calling task. Cancelling closes what was opened.
    ///
    /// # Errors
    /// The node cannot be reached, or the two are configured differently.
    pub async fn dial(&self, to: &PeerAddress) -> Result<Dialed, DialError> {
        match timeout(DIAL_TIMEOUT, self.connect(to)).await {
            Ok(dialed) => dialed,
            Err(_elapsed) => Err(DialError::Timeout {
                node: to.node.clone(),
                address: to.to_string(),
            }),
        }
    }

    async fn connect(&self, to: &PeerAddress) -> Result<Dialed, DialError> {
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
        let (stream, bound) = match &self.tls {
            None => (Stream::Tcp(socket), Vec::new()),
            Some(tls) => encrypt(tls, to, socket).await.map_err(|source| {
                let (node, address) = place();
                match is_no_room(&source) {
                    true => DialError::NoRoom {
                        node,
                        address,
                        source,
                    },
                    false => DialError::Tls {
                        node,
                        address,
                        source,
                    },
                }
            })?,
        };
        let sealer = Sealer::new(self.secret.clone(), &self.me, &to.node, bound);
        let sealer = sealer.map_err(|source| DialError::Seal {
            node: to.node.clone(),
            source,
        })?;
        Ok(Dialed { stream, sealer })
    }
}

async fn encrypt(
    tls: &FleetTls,
    to: &PeerAddress,
    socket: TcpStream,
) -> io::Result<(Stream, Vec<u8>)> {
    let name = ServerName::try_from(to.host().to_owned()).map_err(io::Error::other)?;
    let stream = TlsConnector::from(tls.client())
        .connect(name, socket)
        .await?;
    let stream = TlsStream::Client(stream);
    let bound = binding(&stream)?;
    Ok((Stream::Other(Box::new(ToNode(stream))), bound))
}

/// Whether the other end did not take part in TLS at all: a refused certificate is reported in TLS.
fn is_no_room(error: &io::Error) -> bool {
    let why = error.get_ref().and_then(|why| why.downcast_ref());
    match why {
        Some(rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType)) => true,
        Some(_) => false,
        None => matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
        ),
    }
}

impl From<DialError> for io::Error {
    fn from(error: DialError) -> Self {
        let kind = match &error {
            DialError::Connect { source, .. }
            | DialError::Tls { source, .. }
            | DialError::NoRoom { source, .. }
            | DialError::Seal { source, .. } => source.kind(),
            DialError::Timeout { .. } => io::ErrorKind::TimedOut,
            DialError::Mismatch { .. } => io::ErrorKind::InvalidInput,
        };
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        Self::new(kind, text)
    }
}
