//! A container's link, made while the shim starts it.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::pin::pin;

use conman_net::Namespace;
use conman_net::egress::EgressSockets;
use conman_shim_protocol::{NetworkSpec, link_socket};
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::Inner;
use super::failure::refused;
use crate::shared::container_network::{ContainerNetwork, StoredLink};
use crate::{ContainerKey, RuntimeError};

/// The shim's view of what a container has.
pub(super) fn network_spec(link: Option<&StoredLink>) -> NetworkSpec {
    match link {
        None => NetworkSpec::Loopback,
        Some(
            StoredLink::Routed { .. } | StoredLink::Interface { .. } | StoredLink::EgressProxy,
        ) => NetworkSpec::Linked,
        Some(StoredLink::Host { .. }) => NetworkSpec::Host,
    }
}

impl Inner {
    /// Prepares a link for a start.
    pub(super) fn connecting(
        &self,
        key: &ContainerKey,
        link: StoredLink,
    ) -> Result<Connecting, RuntimeError> {
        let failed = |error: io::Error| refused("start", key, format!("no socket: {error}"));
        let (client, container) = link_socket::pair().map_err(failed)?;
        Ok(Connecting {
            client: UnixStream::from_std(StdStream::from(client)).map_err(failed)?,
            container,
            network: self.network.clone(),
            key: key.clone(),
            link,
        })
    }
}

/// A link that is made while its container starts.
#[derive(Debug)]
pub(super) struct Connecting {
    client: UnixStream,
    container: OwnedFd,
    network: ContainerNetwork,
    key: ContainerKey,
    link: StoredLink,
}

impl Connecting {
    /// The end for the container.
    pub(super) fn container(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }

    /// Makes the link while the shim starts the container.
    pub(super) async fn during<T>(
        &self,
        start: impl Future<Output = T>,
    ) -> (T, Option<EgressSockets>) {
        let mut start = pin!(start);
        tokio::select! {
            // It has failed before it needed the link, or after. Cancel safe: a link that is still made
            // disappears with the container's namespace.
            started = &mut start => (started, None),
            sockets = self.connect() => (start.await, sockets),
        }
    }

    /// Waits for the container's namespace, makes the link, and answers.
    async fn connect(&self) -> Option<EgressSockets> {
        let receive = || link_socket::receive(&self.client);
        let namespace = match self.client.async_io(Interest::READABLE, receive).await {
            Ok(Some(namespace)) => Namespace {
                file: namespace.file,
                socket: namespace.netlink,
            },
            // The start reports why.
            Ok(None) => return None,
            Err(error) => {
                self.answer(Err(&error.to_string()));
                return None;
            }
        };
        let connected = self.network.connect(&self.key, &self.link, namespace);
        let connected = connected.await;
        self.answer(connected.as_ref().map(drop).map_err(String::as_str));
        connected.ok().flatten()
    }

    fn answer(&self, connected: Result<(), &str>) {
        // If the container has died, its start reports why.
        if let Err(error) = link_socket::answer(&self.client, connected) {
            tracing::debug!(%error, "cannot answer a starting container");
        }
    }
}
