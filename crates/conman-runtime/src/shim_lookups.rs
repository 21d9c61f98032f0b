//! What the shim knows of its containers.

use std::time::Duration;

use conman_shim_protocol::{CommandView, ContainerView, Reply, Request};
use tokio::time::timeout;

use crate::ContainerKey;
use crate::shim_link::{Connection, Link, LinkError, name};

/// Bound on an answer that a release waits for.
const FENCED_PATIENCE: Duration = Duration::from_secs(2);

/// What the shim knows of one name.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) container: Option<ContainerView>,
    /// A start of this name was accepted and has neither begun nor failed.
    pub(crate) starting: bool,
    /// Of a kept command.
    pub(crate) command: Option<CommandView>,
}

impl Connection {
    /// Lists all containers, including commands in them.
    pub(crate) async fn containers(
        &self,
        patience: Duration,
    ) -> Result<Vec<ContainerView>, LinkError> {
        let mut all: Vec<ContainerView> = Vec::new();
        loop {
            let after = all.last().map(|view| view.name.clone());
            let answer = self.call(&Request::List { after }, &[], patience).await?;
            let (Reply::Containers { containers, more }, _) = answer else {
                return Err(LinkError::Unexpected);
            };
            all.extend(containers);
            if !more {
                return Ok(all);
            }
        }
    }
}

impl Link {
    /// Lists all containers; starts over once if the connection breaks.
    pub(crate) async fn containers(
        &self,
        patience: Duration,
    ) -> Result<Vec<ContainerView>, LinkError> {
        match self.connection().await?.containers(patience).await {
            Err(LinkError::Lost) => self.connection().await?.containers(patience).await,
            listed => listed,
        }
    }

    pub(crate) async fn find(&self, name: String, patience: Duration) -> Result<Found, LinkError> {
        match self.ask(&Request::Find { name }, patience).await? {
            Reply::Found {
                container,
                starting,
                command,
            } => Ok(Found {
                container,
                starting,
                command,
            }),
            _ => Err(LinkError::Unexpected),
        }
    }

    /// Whether the fence killed a container without an order, as far as the shim reports.
    pub(crate) async fn was_fenced(&self, key: &ContainerKey) -> bool {
        let after = FENCED_PATIENCE;
        let found = timeout(after, self.find(name(key), after)).await;
        match found.unwrap_or(Err(LinkError::TimedOut { after })) {
            Ok(found) => found.container.is_some_and(|view| view.fenced),
            Err(error) => {
                tracing::warn!(container = %key, %error, "cannot ask whether the fence killed it");
                false
            }
        }
    }
}
