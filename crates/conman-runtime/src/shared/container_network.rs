//! A container's part of the network: its addresses or its port of the host from `create` to the removal, and
//! its link during a start.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use conman_core::error_chain;
use conman_net::egress::EgressSockets;
use conman_net::{Addresses, InterfacePools, Namespace, Plane, SessionRules, class_of};
use conman_proto::{Bandwidth, LinkTarget, Network, ResolvedSpec};
use serde::{Deserialize, Serialize};

use super::container_files::own_resolver;
use super::host_ports::HostPorts;
use crate::shim_link::name;
use crate::{ContainerKey, RuntimeError};

/// What connects containers.
#[derive(Debug, Clone, Default)]
pub struct ContainerNetwork {
    /// For `routed`; without it there is none.
    pub plane: Option<Arc<Plane>>,
    /// Addresses for links on the host's interfaces.
    pub interfaces: Arc<InterfacePools>,
    pub host_ports: Arc<HostPorts>,
    /// Whether containers may share the host's network: its API must need tokens.
    pub host_allowed: bool,
    /// Those that a container with a link can reach.
    pub name_servers: Vec<IpAddr>,
    /// Those that the host can reach.
    pub host_name_servers: Vec<IpAddr>,
    /// What containers with a link are refused.
    pub rules: Arc<SessionRules>,
}

/// What of the network a container has, from `create` to the removal, as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum StoredLink {
    Routed {
        addresses: Addresses,
        /// What it may reach.
        class: u16,
        #[serde(default)]
        bandwidth: Bandwidth,
        /// It finds others by name.
        #[serde(default)]
        talks: bool,
    },
    /// A link on an interface of the host.
    Interface {
        to: LinkTarget,
        address: Ipv4Addr,
        #[serde(default)]
        bandwidth: Bandwidth,
    },
    /// The egress proxy on its loopback interface.
    EgressProxy,
    /// The host's network namespace, with the port that the program is to serve there.
    Host { port: Option<u16> },
}

impl ContainerNetwork {
    /// Takes for a container what its spec wants of the network.
    pub(crate) fn take(
        &self,
        key: &ContainerKey,
        spec: &ResolvedSpec,
    ) -> Result<Option<StoredLink>, RuntimeError> {
        let owner = name(key);
        let missing = |reason: &dyn Display| RuntimeError::Refused {
            runtime: spec.runtime,
            action: "create",
            subject: key.to_string(),
            reason: reason.to_string(),
        };
        let bandwidth = spec.bandwidth;
        if let Some(to) = spec.network.link() {
            let address = self.interfaces.take(&to, &owner);
            let address = address.map_err(|error| missing(&error))?;
            return Ok(Some(StoredLink::Interface {
                to,
                address,
                bandwidth,
            }));
        }
        match (&spec.network, &self.plane) {
            (Network::Loopback, _) => {
                Ok(spec.has_egress_proxy().then_some(StoredLink::EgressProxy))
            }
            (Network::Routed, Some(plane)) => {
                let addresses = match spec.talk.is_empty() {
                    true => plane.take(&owner).map_err(|full| missing(&full))?,
                    false => plane
                        .take_in(&owner, &spec.talk)
                        .map_err(|why| missing(&why))?,
                };
                let class = class_of(spec.template.as_deref().unwrap_or_default());
                Ok(Some(StoredLink::Routed {
                    addresses,
                    class,
                    bandwidth,
                    talks: !spec.talk.is_empty(),
                }))
            }
            // A session of a lost node may come to a node with another configuration.
            (Network::Host, _) if !self.host_allowed => Err(missing(
                &"the network `host` needs `auth.tokens_file` on this node: its sessions reach the API; set it \
                  and restart conman",
            )),
            (Network::Host, _) => {
                let port = spec.port;
                let taken = port.map_or(Ok(()), |port| self.host_ports.take(port, &owner));
                taken.map_err(|error| missing(&error))?;
                Ok(Some(StoredLink::Host { port }))
            }
            (
                other @ (Network::Routed
                | Network::Bridge
                | Network::Macvlan(_)
                | Network::Ipoib(_)),
                _,
            ) => Err(missing(&format_args!(
                "this node has no network `{other}` for it; see `net.pool`"
            ))),
        }
    }

    /// Keeps what a container of an earlier daemon has.
    pub(crate) fn adopt(&self, key: &ContainerKey, link: &StoredLink) {
        let owner = name(key);
        match link {
            StoredLink::Routed { addresses, .. } => {
                if let Some(plane) = &self.plane {
                    plane.adopt(&owner, *addresses);
                }
            }
            StoredLink::Interface { to, address, .. } => {
                self.interfaces.adopt(to, &owner, *address)
            }
            StoredLink::Host { port } => self.host_ports.adopt(*port, &owner),
            StoredLink::EgressProxy => {}
        }
    }

    /// The container is dead: its addresses return once its link is gone.
    pub(crate) async fn leave(&self, key: &ContainerKey, link: &StoredLink) {
        match (link, &self.plane) {
            (StoredLink::Routed { addresses, .. }, Some(plane)) => {
                plane.leave(&name(key), *addresses).await;
            }
            _ => self.give_back(key, link),
        }
    }

    /// The addresses by which other sessions reach a container.
    pub(crate) fn addresses(&self, key: &ContainerKey) -> Vec<IpAddr> {
        let plane = self.plane.as_ref();
        plane.map_or(Vec::new(), |plane| plane.fabric_addresses(&name(key)))
    }

    /// Returns what a container had for which no link was ever made.
    pub(crate) fn give_back(&self, key: &ContainerKey, link: &StoredLink) {
        let owner = name(key);
        match link {
            StoredLink::Routed { addresses, .. } => {
                if let Some(plane) = &self.plane {
                    plane.give_back(&owner, *addresses);
                }
            }
            StoredLink::Interface { to, address, .. } => {
                self.interfaces.leave(to, &owner, *address)
            }
            StoredLink::Host { port } => self.host_ports.leave(*port, &owner),
            StoredLink::EgressProxy => {}
        }
    }

    /// The name servers of a container.
    pub(crate) fn name_servers(&self, spec: &ResolvedSpec) -> Vec<IpAddr> {
        match spec.network {
            // Its resolver sends them queries for other names.
            Network::Routed if spec.has_resolver() => own_resolver(spec),
            Network::Routed | Network::Macvlan(_) | Network::Ipoib(_) => self.name_servers.clone(),
            Network::Host => self.host_name_servers.clone(),
            Network::Loopback | Network::Bridge => own_resolver(spec),
        }
    }

    /// Makes a container's link in its namespace, and opens the sockets of its egress proxy and resolver there.
    pub(crate) async fn connect(
        &self,
        key: &ContainerKey,
        link: &StoredLink,
        namespace: Namespace,
    ) -> Result<Option<EgressSockets>, String> {
        let class = match link {
            StoredLink::EgressProxy => {
                let sockets = EgressSockets::open(namespace.file, true).await;
                let sockets = sockets.map_err(|error| format!("egress proxy: {error}"))?;
                return Ok(Some(sockets));
            }
            StoredLink::Routed { class, .. } => *class,
            // Only the egress of routed templates is part of the rules.
            StoredLink::Interface { .. } | StoredLink::Host { .. } => 0,
        };
        let file = namespace.file.try_clone();
        let file = file.map_err(|error| format!("its network namespace: {error}"))?;
        let applied = self.rules.apply(class, file).await;
        applied.map_err(|error| format!("rules inside: {}", error_chain(&error)))?;
        match link {
            StoredLink::Routed {
                addresses,
                class,
                bandwidth,
                talks,
            } => {
                let file = namespace.file.try_clone();
                let file = file.map_err(|error| format!("its network namespace: {error}"))?;
                let plane = self.plane.as_ref().ok_or("`net.pool` is missing")?;
                let owner = name(key);
                let connected = plane.connect(&owner, *addresses, *class, *bandwidth, namespace);
                let connected = connected.await;
                connected.map_err(|error| format!("link with {addresses}: {error}"))?;
                if *talks {
                    let sockets = EgressSockets::open(file, false).await;
                    let sockets = sockets.map_err(|error| format!("resolver: {error}"))?;
                    return Ok(Some(sockets));
                }
            }
            StoredLink::Interface {
                to,
                address,
                bandwidth,
            } => {
                let (interfaces, target) = (Arc::clone(&self.interfaces), to.clone());
                let (address, bandwidth) = (*address, *bandwidth);
                let make = move || interfaces.make(&target, address, bandwidth, namespace);
                let made = tokio::task::spawn_blocking(make);
                let made = made.await.map_err(|error| error.to_string())?;
                made.map_err(|error| format!("link `{to}`: {}", error_chain(&error)))?;
            }
            StoredLink::EgressProxy | StoredLink::Host { .. } => {}
        }
        Ok(None)
    }
}
