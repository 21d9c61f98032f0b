//! The way to another node for connections to its sessions.

use std::io;

use async_trait::async_trait;
use conman_peer::{Dialer, Liveness, PeerAddress, Stream, Unresponsive};
use conman_proxy::Backend;

/// Connects the proxy to another node's peer listener.
#[derive(Debug)]
pub struct PeerBackend {
    pub dialer: Dialer,
    pub liveness: Liveness,
    pub address: PeerAddress,
}

#[async_trait]
impl Backend for PeerBackend {
    async fn connect(&self) -> io::Result<Stream> {
        let stopped = |error: Unresponsive| io::Error::new(io::ErrorKind::TimedOut, error);
        self.liveness.check(&self.address).await.map_err(stopped)?;
        Ok(self.dialer.dial(&self.address).await?)
    }

    fn was_unresponsive(&self) -> bool {
        self.liveness.was_unresponsive(&self.address)
    }

    fn certificates(&self) -> u64 {
        self.dialer.certificates()
    }

    async fn becomes_unresponsive(&self) -> String {
        self.liveness
            .becomes_unresponsive(&self.address)
            .await
            .to_string()
    }
}
