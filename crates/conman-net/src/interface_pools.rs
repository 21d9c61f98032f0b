//! Addresses of sessions' links on interfaces of the host, for each interface.
//!
//! An address is free again once its owner has ended. Its link may outlive the owner for a moment; until then
//! the kernel brings no other macvlan link with this address up, and the pool gives it again as late as possible.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_proto::{Bandwidth, InterfaceName, LinkTarget};
use ipnet::{IpNet, Ipv4Net};

use crate::attached::{self, LinkError, NewLink, NewRoute, check_interface};
use crate::host_netlink::{HostNetlink, Namespace};
use crate::link_identity::link_index;
use crate::link_messages::SESSION_LINK;
use crate::pool::{AddressPool, PoolNetworks};

/// The network behind an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceNetwork {
    pub subnet: Ipv4Net,
    /// From which sessions get their addresses; within the subnet.
    pub range: PoolNetworks,
    /// Of the default route, if there is one.
    pub gateway: Option<Ipv4Addr>,
}

/// Why a session gets no address.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    #[error(
        "`net.interfaces.{0}` is missing in this node's configuration: the addresses of sessions there"
    )]
    NotConfigured(InterfaceName),
    #[error("all addresses for sessions of `net.interfaces.{0}` are in use; use a larger `range`")]
    Exhausted(InterfaceName),
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// Which addresses are in use, by interface.
#[derive(Debug, Default)]
pub struct InterfacePools {
    netlink: HostNetlink,
    networks: BTreeMap<InterfaceName, InterfaceNetwork>,
    pools: Mutex<BTreeMap<InterfaceName, AddressPool>>,
}

impl InterfacePools {
    /// Pools with every address free but the gateways'.
    pub fn new(netlink: HostNetlink, networks: BTreeMap<InterfaceName, InterfaceNetwork>) -> Self {
        let pools = networks.iter().map(|(name, network)| {
            let mut pool = AddressPool::new(network.range);
            if let Some(gateway) = network.gateway {
                pool.adopt("gateway", gateway);
            }
            (name.clone(), pool)
        });
        Self {
            netlink,
            pools: Mutex::new(pools.collect()),
            networks,
        }
    }

    /// Takes an address for an owner's link. Fails if the host has no such interface. Blocks until the kernel has
    /// answered.
    pub fn take(&self, to: &LinkTarget, owner: &str) -> Result<Ipv4Addr, InterfaceError> {
        let interface = to.interface();
        let not_configured = || InterfaceError::NotConfigured(interface.clone());
        if !self.networks.contains_key(interface) {
            return Err(not_configured());
        }
        check_interface(&self.netlink, interface)?;
        let mut pools = self.pools();
        let pool = pools.get_mut(interface).ok_or_else(not_configured)?;
        let taken = pool.take(owner);
        let taken = taken.map_err(|_| InterfaceError::Exhausted(interface.clone()))?;
        Ok(taken.v4)
    }

    /// Keeps the address of an owner that has lived longer than these pools.
    pub fn adopt(&self, to: &LinkTarget, owner: &str, address: Ipv4Addr) {
        if let Some(pool) = self.pools().get_mut(to.interface()) {
            pool.adopt(owner, address);
        }
    }

    /// The owner has ended. Does nothing if it has left before.
    pub fn leave(&self, to: &LinkTarget, owner: &str, address: Ipv4Addr) {
        if let Some(pool) = self.pools().get_mut(to.interface())
            && pool.leave(owner, address)
        {
            pool.link_is_gone(link_index(address));
        }
    }

    /// Makes the link with an address that was taken. Blocks for as long as the kernel takes.
    pub fn make(
        &self,
        to: &LinkTarget,
        address: Ipv4Addr,
        bandwidth: Bandwidth,
        namespace: Namespace,
    ) -> Result<(), InterfaceError> {
        let link = NewLink {
            bandwidth,
            ..self.link(to, address)?
        };
        attached::make(&self.netlink, &link, namespace)?;
        Ok(())
    }

    /// The link with an address that was taken.
    pub fn link(&self, to: &LinkTarget, address: Ipv4Addr) -> Result<NewLink, InterfaceError> {
        let interface = to.interface();
        let network = self.networks.get(interface);
        let network = network.ok_or_else(|| InterfaceError::NotConfigured(interface.clone()))?;
        let net = Ipv4Net::new(address, network.subnet.prefix_len());
        let default_route = network.gateway.map(|gateway| NewRoute {
            destination: IpNet::V4(Ipv4Net::default()),
            gateway: Some(gateway.into()),
        });
        Ok(NewLink {
            to: to.clone(),
            name: Some(SESSION_LINK.to_owned()),
            addresses: net.into_iter().map(IpNet::V4).collect(),
            routes: default_route.into_iter().collect(),
            sole: Some(address),
            bandwidth: Bandwidth::default(),
        })
    }

    fn pools(&self) -> MutexGuard<'_, BTreeMap<InterfaceName, AddressPool>> {
        // A panic while the lock is held cannot leave half a change: each is one map operation.
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
