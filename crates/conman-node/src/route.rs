//! What a connection needs to reach a session's program.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_core::{Activity, Closing};
use conman_linux::{NetnsSockets, PidFd};
use conman_proto::{Generation, PortRange, ResolvedSpec, SessionId};
use conman_runtime::Runtime;
use conman_traffic::{MeteredStream, Traffic};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::session::Leaving;

/// How long to wait when checking whether a signalled session still takes connections.
const SHUT_PATIENCE: Duration = Duration::from_secs(1);

/// The route to a running session, valid as long as its generation lives.
#[derive(Debug, Clone)]
pub struct SessionRoute {
    pub id: SessionId,
    pub generation: Generation,
    /// The main one.
    pub port: u16,
    pub spec: Arc<ResolvedSpec>,
    /// The container's init.
    pub process: Arc<PidFd>,
    /// Counts open tunnels and requests; their owner counts them.
    pub activity: Arc<Activity>,
    pub(crate) traffic: Arc<Traffic>,
    /// Set once the session's tunnels must end.
    pub closing: watch::Receiver<Option<Closing>>,
    /// `None` if this node is no longer configured to use it.
    pub(crate) runtime: Option<Arc<dyn Runtime>>,
    pub(crate) sockets: Arc<NetnsSockets>,
    pub(crate) leaving: Arc<Leaving>,
}

impl SessionRoute {
    /// A connection to a port of the session ([`conman_runtime::Lifecycle::connect`]).
    pub async fn connect(&self, port: u16) -> io::Result<MeteredStream<TcpStream>> {
        let missing = || io::Error::other("this node is no longer configured to use its runtime");
        let runtime = self.runtime.as_ref().ok_or_else(missing)?;
        let (process, network) = (&self.process, &self.spec.network);
        let connected = runtime.connect(&self.sockets, process, network, port);
        let traffic = Arc::clone(&self.traffic);
        Ok(MeteredStream::new(connected.await?, traffic))
    }

    /// Whether clients may connect to this port; with `public_only`, those without a token.
    #[must_use]
    pub fn has_port(&self, port: u16, public_only: bool) -> bool {
        let listed = |ports: &PortRange| ports.contains(port) && (ports.public || !public_only);
        (port == self.port && !public_only) || self.spec.ports.iter().any(listed)
    }

    /// Whether the session takes no more connections because it was signalled to stop: it is on its way to
    /// another node, and a client waits for that. Only a signalled session is checked.
    pub async fn has_closed(&self) -> bool {
        if !self.leaving.is_signalled() || self.leaving.is_shut() {
            return self.leaving.is_shut();
        }
        let asked = timeout(SHUT_PATIENCE, self.connect(self.port)).await;
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if asked.is_ok_and(|asked| asked.is_err_and(refused)) {
            self.leaving.shut();
        }
        self.leaving.is_shut()
    }
}
