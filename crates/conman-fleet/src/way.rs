use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use conman_auth::Sealer;
use conman_proxy::{Backend, Link, Seal};
use http::request::Parts;

use crate::PeerAddress;
use crate::dial::{Dialed, Dialer};
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
    async fn connect(&self) -> io::Result<Link> {
        let stopped = |silent: Silent| io::Error::new(io::ErrorKind::TimedOut, silent);
        self.pulse.check(&self.address).await.map_err(stopped)?;
        let Dialed { stream, sealer } = self.dialer.dial(&self.address).await?;
        Ok(Link {
            stream,
            seal: Some(Arc::new(Sealed(sealer))),
        })
    }

    fn was_silent(&self) -> bool {
        self.pulse.was_silent(&self.address)
    }

    async fn falls_silent(&self) -> String {
        self.pulse.falls_silent(&self.address).await.to_string()
    }
}

#[derive(Debug)]
struct Sealed(Sealer);

impl Seal for Sealed {
    fn seal(&self, parts: &mut Parts) {
        self.0.seal(parts);
    }
}
