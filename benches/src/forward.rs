//! A program with nothing but conman's proxy.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use async_trait::async_trait;
use conman_auth::{ClusterSecret, FleetTls};
use conman_core::{Activity, Closing};
use conman_fleet::PeerBackend;
use conman_peer::{Dialer, PeerAcceptor, PeerAddress, PeerClient, PeerRefusal, Stream};
use conman_proto::{Generation, SessionId};
use conman_proxy::{
    Backend, Directory, Gate, OwnSessions, PeerFront, Proxy, ProxyOptions, Refusal, Route, Verdict,
    Way,
};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::arguments::Forwarding;

/// Names of the benchmark's nodes.
const OWNER: &str = "owner";
const ENTRY: &str = "entry";

/// Only conman's proxy: compared with nginx and HAProxy, and used as the two nodes of a hop.
/// Every session leads to one place, and every client may connect.
///
/// # Errors
/// When an address cannot be listened on.
pub(crate) async fn serve_forward(arguments: Forwarding) -> Result<()> {
    let (closing, receiver) = watch::channel(None);
    let everywhere = |way, backend| {
        Arc::new(Everywhere {
            way,
            backend,
            activity: Arc::default(),
            closing: receiver.clone(),
        })
    };
    let secret = arguments.secret_file.as_deref().map(secret).transpose()?;
    let (directory, peers) = match (arguments.backend, arguments.node) {
        (Some(backend), _) => {
            let backend = Arc::new(Address(backend));
            let directory = everywhere(Way::Session, backend.clone());
            let peers = arguments.peers;
            let peers = peers.map(|peers| serve_peers(peers, secret, directory.clone(), backend));
            (directory, peers.transpose()?)
        }
        (None, Some(node)) => {
            let way = Way::Peer {
                node: OWNER.into(),
                incarnation: 1,
            };
            (everywhere(way, to_node(node, secret)?), None)
        }
        (None, None) => bail!("give --backend or --node"),
    };
    let proxy = Proxy::start(
        bound(arguments.listen)?,
        ProxyOptions::default(),
        directory,
        Arc::new(Open),
    )
    .map_err(|error| anyhow!("starting the proxy: {error}"))?;
    tokio::signal::ctrl_c()
        .await
        .context("waiting for a signal")?;
    drop((proxy, peers, closing));
    Ok(())
}

fn serve_peers(
    listen: SocketAddr,
    secret: Option<Arc<ClusterSecret>>,
    sessions: Arc<Everywhere>,
    api: Arc<dyn Backend>,
) -> Result<Proxy> {
    let front = PeerFront {
        accept: Arc::new(PeerAcceptor::new(tls(secret, OWNER)?)),
        sessions,
        api,
    };
    let options = ProxyOptions::default().for_nodes();
    Proxy::start_peers(bound(listen)?, options, front)
        .map_err(|error| anyhow!("starting the listener for nodes: {error}"))
}

fn to_node(node: SocketAddr, secret: Option<Arc<ClusterSecret>>) -> Result<Arc<PeerBackend>> {
    let dialer = Dialer::new(ENTRY, tls(secret, ENTRY)?);
    let address = PeerAddress::new(OWNER, &format!("https://{node}"));
    Ok(Arc::new(PeerBackend {
        liveness: PeerClient::new(dialer.clone()).liveness().clone(),
        dialer,
        address: address.context("the node's address")?,
    }))
}

fn tls(secret: Option<Arc<ClusterSecret>>, node: &str) -> Result<Option<Arc<FleetTls>>> {
    let tls = secret.map(|secret| FleetTls::derive(secret, node));
    Ok(tls.transpose()?.map(Arc::new))
}

fn secret(file: &Path) -> Result<Arc<ClusterSecret>> {
    Ok(Arc::new(
        ClusterSecret::load(file).context("the nodes' secret")?,
    ))
}

fn bound(address: SocketAddr) -> Result<std::net::TcpListener> {
    let listener =
        std::net::TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
    listener
        .set_nonblocking(true)
        .context("making the listener nonblocking")?;
    Ok(listener)
}

struct Everywhere {
    way: Way,
    backend: Arc<dyn Backend>,
    activity: Arc<Activity>,
    closing: watch::Receiver<Option<Closing>>,
}

impl Everywhere {
    fn lead(&self, id: &SessionId) -> Route {
        Route {
            session: id.clone(),
            generation: Generation::FIRST,
            activity: Arc::clone(&self.activity),
            closing: self.closing.clone(),
            port: None,
            strip_prefix: true,
            way: self.way.clone(),
            backend: Arc::clone(&self.backend),
        }
    }
}

#[async_trait]
impl Directory for Everywhere {
    async fn route(&self, id: &SessionId, _may_start: bool) -> Result<Route, Refusal> {
        Ok(self.lead(id))
    }
}

impl OwnSessions for Everywhere {
    fn own(&self, id: &SessionId, _generation: Generation) -> Result<Route, PeerRefusal> {
        Ok(self.lead(id))
    }
}

struct Address(SocketAddr);

#[async_trait]
impl Backend for Address {
    async fn connect(&self) -> io::Result<Stream> {
        TcpStream::connect(self.0).await.map(Stream::from)
    }
}

struct Open;

impl Gate for Open {
    fn admit(&self, _: &mut http::request::Parts, _: &SessionId, _: &str) -> Verdict {
        Verdict::Admit { may_start: false }
    }
}
