//! Everything that answers requests: the sessions listener, the API, and the listener for other nodes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_api::{ApiState, Listener, ServeOptions, StreamPlaces, serve_tcp, serve_unix};
use conman_auth::{AdminToken, ApiGuard, ConnectTokens, TokenFile};
use conman_core::placement::PlacementLimits;
use conman_core::retention::Retention;
use conman_fleet::{FleetMap, Locator, run_reach, run_restarter};
use conman_image::ImageKeeper;
use conman_node::Node;
use conman_peer::PeerClient;
use conman_proxy::{Proxy, answer_agent_checks};
use conman_watchdog::essential;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::directory::NodeDirectory;
use super::listeners::{Listeners, SocketPath};
use super::peers::{self, Credentials, PeerApi};
use super::proxy::start_proxy;
use super::readiness::NodeReadiness;
use super::state::LockedState;
use crate::config::Config;

/// Names of the tasks that accept connections to the API.
const API: &str = "API";
const ADMIN_API: &str = "admin API";

/// Time for open tunnels and requests when the daemon stops.
const PATIENCE: Duration = Duration::from_secs(5);

/// The tokens and credentials that authenticate clients and other nodes.
pub(super) struct AuthSources {
    pub(super) tokens: Option<Arc<TokenFile>>,
    /// `None` with `auth.loopback = "open"`.
    pub(super) administrator: Option<Arc<AdminToken>>,
    pub(super) credentials: Credentials,
}

/// The parts of the daemon that the services use.
pub(super) struct Services<'a> {
    pub(super) config: &'a Config,
    pub(super) state: &'a LockedState,
    pub(super) node: &'a Arc<Node>,
    pub(super) auth: &'a AuthSources,
    pub(super) connect_tokens: Arc<ConnectTokens>,
    pub(super) images: ImageKeeper,
    pub(super) metrics: PrometheusHandle,
    /// Ends long answers, such as streams of events.
    pub(super) closing: CancellationToken,
}

/// Running services.
pub(super) struct Serving {
    closing: CancellationToken,
    proxy: Proxy,
    peers: Option<Proxy>,
    servers: [JoinHandle<()>; 2],
    admin: SocketPath,
}

impl Services<'_> {
    pub(super) async fn start(self, listeners: Listeners) -> Result<Serving> {
        let (config, watchdog) = (self.config, &self.state.watchdog);
        let map = listeners.peers.is_some().then(|| self.map());
        let locator = map.as_ref().map(|map| self.locator(map));
        if let Some(locator) = &locator {
            let closing = self.closing.clone();
            run_restarter(locator, watchdog, Retention::default(), closing);
        }
        if let Some(map) = &map {
            run_reach(map, self.node.status(), watchdog, self.closing.clone());
        }
        let readiness = NodeReadiness::new(self.node, watchdog);
        let access = self.node.access().clone();
        let directory = NodeDirectory::new(access, readiness.clone(), locator);
        let proxy = start_proxy(&self, &listeners, directory)?;
        if let Some(address) = config.listen.agent {
            let closing = self.closing.clone();
            answer_agent_checks(address, &config.state_dir, readiness, closing)
                .await
                .with_context(|| {
                    format!("cannot listen on {address} for HAProxy's agent check; change `listen.agent`")
                })?;
        }
        let api_address = listeners.api.local_addr();
        let api_address = api_address.context("cannot read the API's address")?;
        let api = self.api(&listeners, api_address, map)?;
        let options = ServeOptions {
            max_connections: config.limits.max_api_connections,
            ..ServeOptions::default()
        };
        // Only the server holds the listener, so that the kernel refuses clients once it has stopped.
        drop(listeners.sessions);
        let peers = listeners.peers.map(|socket| {
            let api = PeerApi {
                router: conman_api::router(api.clone(), Listener::Peers),
                options: options.clone(),
                closing: self.closing.clone(),
            };
            peers::start(&self, socket.listen()?, api)
        });
        let peers = peers.transpose()?;
        let tcp = serve_tcp(
            listeners.api,
            conman_api::router(api.clone(), Listener::Tcp),
            options.clone(),
            self.closing.clone(),
            watchdog.task(API),
        );
        let admin = serve_unix(
            listeners.admin.listener,
            conman_api::router(api, Listener::Admin),
            options,
            self.closing.clone(),
            watchdog.task(ADMIN_API),
        );
        let servers = [
            tokio::spawn(essential(API, tcp)),
            tokio::spawn(essential(ADMIN_API, admin)),
        ];
        tracing::info!(
            api = %api_address, sessions = %listeners.sessions_address,
            admin = %config.listen.admin.display(), "ready"
        );
        Ok(Serving {
            closing: self.closing,
            proxy,
            peers,
            servers,
            admin: listeners.admin.path,
        })
    }

    fn map(&self) -> Arc<FleetMap> {
        let fleet = Arc::clone(&self.state.fleet);
        let client = PeerClient::new(self.auth.credentials.dialer(&self.config.name));
        // However many wait for one node, half of the connections are left for the others.
        let limits = &self.config.limits;
        let waiting = limits.node.max_held.min(limits.max_api_connections / 2);
        let map = FleetMap::new(fleet, client, PlacementLimits::default());
        Arc::new(map.waiting(waiting.max(1)).leaving(self.node.leave()))
    }

    fn locator(&self, map: &Arc<FleetMap>) -> Arc<Locator> {
        Locator::new(
            Arc::clone(self.node),
            Arc::clone(map),
            self.auth.credentials.dialer(&self.config.name),
            self.config.limits.node.max_held,
            self.closing.clone(),
        )
    }

    fn api(
        &self,
        listeners: &Listeners,
        address: SocketAddr,
        fleet: Option<Arc<FleetMap>>,
    ) -> Result<ApiState> {
        let guard = ApiGuard::new(
            self.auth.tokens.clone(),
            listeners.host_rules(self.config, address)?,
            self.config.listen.origins.clone(),
        );
        let guard = match &self.auth.administrator {
            Some(token) => guard.with_administrator(Arc::clone(token)),
            None => guard,
        };
        Ok(ApiState {
            node: Arc::clone(self.node),
            guard: Arc::new(guard),
            fleet,
            connect_tokens: Arc::clone(&self.connect_tokens),
            images: self.images.clone(),
            metrics: self.metrics.clone(),
            streams: StreamPlaces::default(),
            closing: self.closing.clone(),
        })
    }
}

impl Serving {
    /// Ends tunnels and streams; the listeners accept nothing more from here on. Returns the path of the
    /// admin socket, which stays until the node has stopped.
    pub(super) async fn stop(self, node: &Node) -> Result<SocketPath> {
        self.closing.cancel();
        let peers_end = async {
            if let Some(peers) = self.peers {
                peers.shutdown(PATIENCE).await;
            }
        };
        tokio::join!(
            self.proxy.shutdown(PATIENCE),
            peers_end,
            node.close_through(PATIENCE)
        );
        for server in self.servers {
            server.await.context("a listener's task panicked")?;
        }
        Ok(self.admin)
    }
}
