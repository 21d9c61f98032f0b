//! Ports of the host that containers with the network `host` serve.
//!
//! Such a container's clients and its readiness check are connected to its port of the host. If another
//! program listened there, they would reach that one.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// By port: the container that has it.
#[derive(Debug, Default)]
pub struct HostPorts(Mutex<BTreeMap<u16, String>>);

/// Why a container does not get a port of the host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortError {
    #[error(
        "port {port} of this node is that of container {owner}, which has the network `host`, too"
    )]
    Taken { port: u16, owner: String },
    #[error(
        "a program on this node listens on port {port} already; stop it, or choose another port"
    )]
    Listening { port: u16 },
}

impl HostPorts {
    /// Takes a port where nothing listens.
    pub(crate) fn take(&self, port: u16, owner: &str) -> Result<(), PortError> {
        let mut ports = self.lock();
        if let Some(other) = ports.get(&port).filter(|other| *other != owner) {
            let owner = other.clone();
            return Err(PortError::Taken { port, owner });
        }
        for any in [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()] {
            // The library allows it where connections of an earlier listener are still being closed.
            let bound = TcpListener::bind(SocketAddr::new(any, port));
            if bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse) {
                return Err(PortError::Listening { port });
            }
        }
        ports.insert(port, owner.to_owned());
        Ok(())
    }

    /// Keeps the port of a container of an earlier daemon.
    pub(crate) fn adopt(&self, port: Option<u16>, owner: &str) {
        self.lock()
            .extend(port.map(|port| (port, owner.to_owned())));
    }

    /// The container has ended, or was not created.
    pub(crate) fn leave(&self, port: Option<u16>, owner: &str) {
        let mut ports = self.lock();
        if let Some(port) = port
            && ports.get(&port).is_some_and(|present| present == owner)
        {
            ports.remove(&port);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, String>> {
        // A panic while the lock is held cannot leave half a change: each is one map operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
