//! The listener for other nodes, and the connections to them.

use std::io;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use axum::Router;
use conman_api::{ServeOptions, serve_node};
use conman_auth::{ClusterSecret, FleetTls};
use conman_fleet::{Dialer, PeerAcceptor, own_route};
use conman_node::{Node, NotHere};
use conman_proto::{Generation, SessionId};
use conman_proxy::{
    Backend, HOP_HEAD_BYTES, HOP_HEADERS, OwnSessions, PeerFront, PeerRefusal, Proxy, ProxyOptions,
    Route, Stream,
};
use conman_vitals::Vitals;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;

/// Buffered bytes between the listener and the API, in each direction.
const API_PIPE_BYTES: usize = 64 * 1024;

/// The credentials that authenticate nodes.
#[derive(Debug, Clone)]
pub(super) struct Credentials {
    pub(super) secret: Option<Arc<ClusterSecret>>,
    /// The certificates: given, or derived from the secret.
    pub(super) tls: Option<Arc<FleetTls>>,
}

impl Credentials {
    /// Reads the files that the configuration names.
    pub(super) fn load(config: &Config) -> Result<Self> {
        let secret = config.fleet.secret_file.clone().map(ClusterSecret::load);
        let secret = secret.transpose().context("`fleet.secret_file`")?;
        let tls = config.fleet.tls.clone().map(FleetTls::load);
        let tls = tls.transpose().context("`fleet.tls`")?;
        Ok(Self {
            secret: secret.map(Arc::new),
            tls: tls.map(Arc::new),
        })
    }

    /// With certificates for the node `me` from the secret, unless some are given.
    pub(super) fn derive(mut self, me: &str) -> Result<Self> {
        if let (None, Some(secret)) = (&self.tls, &self.secret) {
            let tls = FleetTls::derive(Arc::clone(secret), me).context("`fleet.secret_file`")?;
            self.tls = Some(Arc::new(tls));
        }
        Ok(self)
    }

    pub(super) fn dialer(&self, me: &str) -> Dialer {
        Dialer::new(me, self.tls.clone())
    }
}

/// Serves other nodes: session traffic by `node`, everything else by `api`.
pub(super) fn start(
    config: &Config,
    listener: std::net::TcpListener,
    credentials: &Credentials,
    node: &Arc<Node>,
    serving: (Router, ServeOptions, CancellationToken),
    vitals: &Vitals,
) -> Result<Proxy> {
    let options = ProxyOptions {
        domain: None,
        max_connections: config.limits.max_connections,
        // Connections of other nodes wait in their pools for the next request.
        idle_timeout: ProxyOptions::default().pool_idle_timeout * 2,
        vitals: vitals.clone(),
        ..ProxyOptions::default()
    }
    .for_nodes();
    start_with(options, listener, credentials, node, serving)
}

/// Like [`start`], with these options.
pub(super) fn start_with(
    proxied: ProxyOptions,
    listener: std::net::TcpListener,
    credentials: &Credentials,
    node: &Arc<Node>,
    (api, options, closing): (Router, ServeOptions, CancellationToken),
) -> Result<Proxy> {
    let front = PeerFront {
        accept: Arc::new(PeerAcceptor::new(credentials.tls.clone())),
        sessions: Arc::new(Own(Arc::clone(node))),
        api: Arc::new(Api {
            router: api,
            options: ServeOptions {
                max_headers: options.max_headers + HOP_HEADERS,
                max_header_bytes: options.max_header_bytes + HOP_HEAD_BYTES,
                ..options
            },
            closing,
            main: Handle::current(),
        }),
    };
    Proxy::start_peers(listener, proxied, front)
        .context("cannot start the threads of the listener for nodes")
}

/// The sessions of this node.
struct Own(Arc<Node>);

impl OwnSessions for Own {
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, PeerRefusal> {
        match self.0.own_route(id, generation) {
            Ok(route) => Ok(own_route(route)),
            Err(NotHere::NotOwner) => Err(PeerRefusal::NotOwner),
            Err(NotHere::NotReady) => Err(PeerRefusal::NotReady),
        }
    }
}

/// The API of this node, at the other end of a pipe. It runs on the main runtime, so that it does
/// not delay session traffic.
struct Api {
    router: Router,
    options: ServeOptions,
    closing: CancellationToken,
    main: Handle,
}

#[async_trait]
impl Backend for Api {
    async fn connect(&self) -> io::Result<Stream> {
        let (here, there) = tokio::io::duplex(API_PIPE_BYTES);
        let (router, options) = (self.router.clone(), self.options.clone());
        self.main
            .spawn(serve_node(there, router, options, self.closing.clone()));
        Ok(Stream::Other(Box::new(here)))
    }
}
