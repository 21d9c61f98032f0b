use std::io;

use async_trait::async_trait;
use conman_proxy::{Backend, Stream};

use crate::PeerAddress;
use crate::dial::Dialer;
use crate::pulse::{Pulse, Silent};

/// Connects the proxy to another node's peer listener.
#[derive(Debug)]
pub struct ToNode {
    pub dialer: Dialer,
    pub pulse: Pulse,
    pub address: PeerAddress,
}

#[async_trait]
impl Backend for ToNode {
    async fn connect(&self) -> io::Result<Stream> {
        let stopped = |silent: Silent| io::Error::new(io::ErrorKind::TimedOut, silent);
        self.pulse.check(&self.address).await.map_err(stopped)?;
        Ok(self.dialer.dial(&self.address).await?)
    }

    fn was_silent(&self) -> bool {
        self.pulse.was_silent(&self.address)
    }

    async fn falls_silent(&self) -> String {
        self.pulse.falls_silent(&self.address).await.to_string()
    }
}
