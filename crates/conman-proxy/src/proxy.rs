use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::{Directory, Gate, ProxyOptions};

/// A running sessions listener.
#[derive(Debug)]
pub struct Proxy {
    local_addr: SocketAddr,
}

/// Numbers of the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProxyStats {
    /// Open client connections, tunnels included.
    pub connections: u64,
    /// Open tunnels.
    pub tunnels: u64,
    /// Requests that wait for their session.
    pub held: u64,
}

impl Proxy {
    /// Serves `listener` on threads of its own.
    ///
    /// # Errors
    /// Options out of range (`InvalidInput`), or threads and runtimes that cannot be made.
    pub fn start(
        listener: TcpListener,
        _options: ProxyOptions,
        _directory: Arc<dyn Directory>,
        _gate: Arc<dyn Gate>,
    ) -> io::Result<Self> {
        Ok(Self { local_addr: listener.local_addr()? })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// What is open now.
    #[must_use]
    pub fn stats(&self) -> ProxyStats {
        ProxyStats::default()
    }

    /// Stops accepting, closes the tunnels with 1012, and lets requests in flight end for at most
    /// `patience`.
    pub async fn shutdown(self, _patience: Duration) {}
}
