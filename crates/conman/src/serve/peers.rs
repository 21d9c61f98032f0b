//! The listener for other nodes, and the connections to them.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::Router;
use conman_api::{ApiBackend, ServeOptions};
use conman_auth::{ClusterSecret, FleetTls};
use conman_fleet::NodeSessions;
use conman_peer::{Dialer, PeerAcceptor};
use conman_proxy::{PeerFront, Proxy, ProxyOptions};
use tokio_util::sync::CancellationToken;

use super::services::Services;
use crate::config::Config;

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

/// The API for other nodes.
pub(super) struct PeerApi {
    pub(super) router: Router,
    pub(super) options: ServeOptions,
    pub(super) closing: CancellationToken,
}

/// Serves other nodes: session traffic, and everything else by `api`.
pub(super) fn start(
    services: &Services<'_>,
    listener: std::net::TcpListener,
    api: PeerApi,
) -> Result<Proxy> {
    let access = services.node.access().clone();
    let options = ProxyOptions {
        domain: None,
        max_connections: services.config.limits.max_connections,
        // Connections of other nodes wait in their pools for the next request.
        idle_timeout: ProxyOptions::default().pool_idle_timeout * 2,
        watchdog: services.state.watchdog.clone(),
        ..ProxyOptions::default()
    }
    .for_nodes();
    let front = PeerFront {
        accept: Arc::new(PeerAcceptor::new(services.auth.credentials.tls.clone())),
        sessions: Arc::new(NodeSessions(access)),
        api: Arc::new(ApiBackend::new(api.router, api.options, api.closing)),
    };
    Proxy::start_peers(listener, options, front)
        .context("cannot start the threads of the listener for nodes")
}
