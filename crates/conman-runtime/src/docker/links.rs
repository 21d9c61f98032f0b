//! The links of Docker's containers, which Docker starts without a network of its own.
//!
//! ```text
//! <directory>/<session>.<generation>/plan.json   what a container has; its presence keeps its addresses
//! ```
//! It is stored before the container is created, because dockerd may hang when the next daemon has to know which
//! addresses are in use.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_net::Namespace;
use conman_proto::{ResolvedSpec, RuntimeKind};

use super::Shared;
use crate::shared::container_files::{host_error, if_present};
use crate::shared::container_network::{ContainerNetwork, StoredLink};
use crate::shared::stored_plan;
use crate::shim_link::{key_of, name};
use crate::{ContainerKey, RuntimeError};

const MODE: u32 = 0o700;

/// What links connect containers, and which container has which.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) network: ContainerNetwork,
    /// `None`: no container has a link.
    directory: Option<PathBuf>,
    links: Mutex<HashMap<ContainerKey, StoredLink>>,
}

impl Links {
    /// Keeps what containers of an earlier daemon have. Blocks on the disk.
    pub(super) fn open(
        network: ContainerNetwork,
        directory: Option<PathBuf>,
    ) -> Result<Self, RuntimeError> {
        let mut links = HashMap::new();
        if let Some(directory) = &directory {
            let failed = |source| host_error("read", directory, source);
            let made = DirBuilder::new()
                .recursive(true)
                .mode(MODE)
                .create(directory);
            made.map_err(failed)?;
            for entry in fs::read_dir(directory).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let key = entry.file_name().to_str().and_then(key_of);
                // What a power failure has cut off was of a container that it has ended.
                let link = stored_plan::read::<StoredLink>(&entry.path()).ok();
                match key.zip(link.flatten()) {
                    Some((key, link)) => {
                        network.adopt(&key, &link);
                        links.insert(key, link);
                    }
                    // A crash came before the plan, so no container was created.
                    None => fs::remove_dir_all(entry.path()).map_err(failed)?,
                }
            }
        }
        Ok(Self {
            network,
            directory,
            links: Mutex::new(links),
        })
    }

    /// Takes for a container what its spec wants, unless it has it from an earlier attempt. Blocks on the disk, and
    /// until the kernel and the fabric have answered.
    pub(super) fn take(&self, key: &ContainerKey, spec: &ResolvedSpec) -> Result<(), RuntimeError> {
        let traits = spec.network.traits();
        if !traits.leads_out || traits.by_docker || self.lock().contains_key(key) {
            return Ok(());
        }
        let Some(link) = self.network.take(key, spec)? else {
            return Ok(());
        };
        let stored = self.place(key).map_or(Ok(()), |place| {
            let made = DirBuilder::new().recursive(true).mode(MODE).create(&place);
            made.map_err(|source| host_error("make", &place, source))?;
            stored_plan::write(&place, &link)
        });
        if stored.is_err() {
            self.network.give_back(key, &link);
        }
        stored?;
        self.lock().insert(key.clone(), link);
        Ok(())
    }

    /// Whether the container is to have a link.
    pub(super) fn has(&self, key: &ContainerKey) -> bool {
        self.lock().contains_key(key)
    }

    /// Makes the container's link, if it is to have one. The container runs already.
    pub(super) async fn connect(
        &self,
        key: &ContainerKey,
        namespace: OwnedFd,
    ) -> Result<(), String> {
        let link = self.lock().get(key).cloned();
        let Some(link) = link else {
            return Ok(());
        };
        let namespace = Namespace::open(namespace).await;
        let namespace = namespace.map_err(|error| format!("its network namespace: {error}"))?;
        self.network.connect(key, &link, namespace).await?;
        if let (StoredLink::Routed { .. }, Some(plane)) = (&link, &self.network.plane) {
            // Nothing reports the container's death in time to close it.
            plane.let_go(&name(key));
        }
        Ok(())
    }

    /// The container was never created.
    pub(super) fn give_back(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let link = self.lock().remove(key);
        if let Some(link) = link {
            self.network.give_back(key, &link);
        }
        self.forget(key)
    }

    /// The container is dead: its addresses return once its link is gone.
    pub(super) async fn leave(&self, key: &ContainerKey) {
        let link = self.lock().remove(key);
        if let Some(link) = link {
            self.network.leave(key, &link).await;
        }
    }

    /// Nothing of the container is stored from now on. Blocks on the disk.
    pub(super) fn forget(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let Some(place) = self.place(key) else {
            return Ok(());
        };
        match if_present(fs::remove_dir_all(&place)) {
            Ok(_) => Ok(()),
            Err(source) => Err(host_error("remove", &place, source)),
        }
    }

    fn place(&self, key: &ContainerKey) -> Option<PathBuf> {
        Some(self.directory.as_ref()?.join(name(key)))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerKey, StoredLink>> {
        // A panic while the lock is held cannot leave half a change: each is one map operation.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Makes a container's link, or puts the rules for what every session is refused into its network namespace if it
    /// is on Docker's bridge. Its program runs already; the start has not been reported. The error is an ambiguous
    /// one, so that the caller kills it.
    pub(super) async fn connect_started(
        &self,
        key: &ContainerKey,
        init: i32,
        is_bridged: bool,
    ) -> Result<(), RuntimeError> {
        let namespace = std::fs::File::open(format!("/proc/{init}/ns/net"));
        if !self.kernel.shows(key, init).is_ok_and(|shows| shows) {
            // It has ended, which the caller finds out. The PID may be another process's.
            return Ok(());
        }
        let failed = |reason: String| RuntimeError::Unavailable {
            runtime: RuntimeKind::Docker,
            action: "connect",
            reason: format!("the network of {key}: {reason}"),
        };
        let namespace = namespace.map_err(|error| failed(error.to_string()))?;
        if !is_bridged {
            let connected = self.links.connect(key, namespace.into()).await;
            return connected.map_err(failed);
        }
        // The class of a template is for its egress, which Docker's bridge does not have.
        let rules = &self.links.network.rules;
        let applied = rules.apply(0, namespace.into()).await;
        applied.map_err(|error| failed(error.to_string()))
    }
}
