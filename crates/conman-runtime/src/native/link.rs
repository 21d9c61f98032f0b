//! A container's link: its addresses from `create` to the removal, and the link itself during a start.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::pin::pin;
use std::sync::Arc;

use conman_net::{Addresses, Namespace, Plane, class_of};
use conman_proto::{Network, ResolvedSpec};
use conman_shim::link_socket;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::failure::refused;
use super::store::ContainerDir;
use super::{Inner, store};
use crate::shared::container_files::own_resolver;
use crate::{ContainerKey, RuntimeError};

/// The network of containers with a link.
#[derive(Debug, Clone)]
pub struct NativeNetwork {
    pub plane: Arc<Plane>,
    pub name_servers: Vec<IpAddr>,
}

/// A container's link, as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredLink {
    pub(super) addresses: Addresses,
    /// What it may reach.
    pub(super) class: u16,
}

impl Inner {
    /// Takes addresses for a container whose spec wants a link.
    pub(super) fn take_link(
        &self,
        key: &ContainerKey,
        spec: &ResolvedSpec,
    ) -> Result<Option<StoredLink>, RuntimeError> {
        match (spec.network, &self.network) {
            (Network::Loopback, _) => Ok(None),
            (Network::Routed, Some(network)) => {
                let taken = network.plane.take(&store::name(key));
                let addresses = taken.map_err(|full| refused("create", key, full.to_string()))?;
                let class = class_of(spec.template.as_deref().unwrap_or_default());
                Ok(Some(StoredLink { addresses, class }))
            }
            (other, _) => {
                let reason = format!("this node has no network `{other}` for it; see `net.pool`");
                Err(refused("create", key, reason))
            }
        }
    }

    /// The name servers of a container.
    pub(super) fn name_servers(&self, spec: &ResolvedSpec) -> Vec<IpAddr> {
        match (&self.network, spec.network) {
            (Some(network), Network::Routed) => network.name_servers.clone(),
            _ => own_resolver(spec),
        }
    }

    /// Prepares a link for a start.
    pub(super) fn connecting(
        &self,
        key: &ContainerKey,
        link: StoredLink,
    ) -> Result<Connecting, RuntimeError> {
        let failed = |error: io::Error| refused("start", key, format!("no socket: {error}"));
        let network = self.network.clone().ok_or_else(|| {
            refused(
                "start",
                key,
                "it has a link, and `net.pool` is missing".to_owned(),
            )
        })?;
        let (client, container) = link_socket::pair().map_err(failed)?;
        Ok(Connecting {
            client: UnixStream::from_std(StdStream::from(client)).map_err(failed)?,
            container,
            network,
            link,
        })
    }

    /// The container is dead: its addresses return once its link is gone.
    pub(super) async fn leave_link(&self, key: &ContainerKey, dir: Option<&ContainerDir>) {
        let link = dir.and_then(|dir| dir.plan().ok().flatten()?.link);
        if let (Some(network), Some(link)) = (&self.network, link) {
            network.plane.leave(&store::name(key), link.addresses).await;
        }
    }
}

/// A link that is made while its container starts.
#[derive(Debug)]
pub(super) struct Connecting {
    client: UnixStream,
    container: OwnedFd,
    network: NativeNetwork,
    link: StoredLink,
}

impl Connecting {
    /// The end for the container.
    pub(super) fn container(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }

    /// Makes the link while the shim starts the container.
    pub(super) async fn during<T>(&self, start: impl Future<Output = T>) -> T {
        let mut start = pin!(start);
        tokio::select! {
            // It has failed before it needed the link, or after. Cancel safe: a link that is still made
            // disappears with the container's namespace.
            started = &mut start => started,
            () = self.connect() => start.await,
        }
    }

    /// Waits for the container's namespace, makes the link, and answers.
    async fn connect(&self) {
        let receive = || link_socket::receive(&self.client);
        let namespace = match self.client.async_io(Interest::READABLE, receive).await {
            Ok(Some(namespace)) => Namespace {
                file: namespace.file,
                socket: namespace.netlink,
            },
            // The start reports why.
            Ok(None) => return,
            Err(error) => return self.answer(Err(&error.to_string())),
        };
        let StoredLink { addresses, class } = self.link;
        let connected = self
            .network
            .plane
            .connect(addresses, class, namespace)
            .await;
        match connected {
            Ok(()) => self.answer(Ok(())),
            Err(error) => self.answer(Err(&format!("link with {addresses}: {error}"))),
        }
    }

    fn answer(&self, connected: Result<(), &str>) {
        // If the container has died, its start reports why.
        if let Err(error) = link_socket::answer(&self.client, connected) {
            tracing::debug!(%error, "cannot answer a starting container");
        }
    }
}
