//! The host's side of a fabric: sessions reach those of other nodes by routes over the wire (`host-gw`), or through
//! one VXLAN device.
//!
//! What is to exist follows from the other nodes' parts alone. [`Fabric::apply`] compares it with what the kernel
//! has, and changes only what differs; so it repairs what somebody has flushed.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_core::ownership::Underlay;
use ipnet::IpNet;

use crate::fabric_routes::{FabricRoute, NextHop, changes};
use crate::fabric_watch::FabricWatch;
use crate::fabric_way::{Way, check_port, way};
use crate::host_check::{self, HostError};
use crate::host_netlink::{HostNetlink, has_ipv6};
use crate::link_identity::LinkIdentity;
use crate::link_messages::{bring_up, delete_link, link_named};
use crate::pool::PoolNetworks;
use crate::vxlan::{self, Device, Entries, Entry, RecordFault};

/// How packets get from node to node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricKind {
    /// By routes: all nodes are in one Ethernet network.
    HostGateway,
    /// Inside UDP packets to this port, with this network identifier.
    Vxlan { vni: u32, port: u16 },
}

/// Settings of a fabric.
#[derive(Debug, Clone)]
pub struct FabricOptions {
    /// Eight hexadecimal digits.
    pub instance: String,
    pub kind: FabricKind,
    pub pool: PoolNetworks,
    /// Prefix length of a part.
    pub part: u8,
    /// Largest packet of a session in bytes; what the interface allows if absent.
    pub mtu: Option<u32>,
    /// This node's address towards the others.
    pub address: IpAddr,
}

/// Why a host cannot have a fabric.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    #[error(
        "no interface has the address {address}, by which other nodes would reach this one; set \
         `net.fabric.address`"
    )]
    NoInterface { address: IpAddr },
    #[error(
        "`net.fabric.kind = \"host-gw\"` needs an Ethernet interface, and `{interface}` is none; use \"vxlan\""
    )]
    NotEthernet { interface: String },
    #[error(
        "`net.fabric.mtu` = {mtu} does not fit into packets of {below} bytes of `{interface}`, of which the fabric \
         needs {overhead}; set at most {most}"
    )]
    Mtu {
        mtu: u32,
        interface: String,
        below: u32,
        overhead: u32,
        most: u32,
    },
    #[error("cannot create a VXLAN device; Linux must have the module vxlan")]
    NoVxlan(#[source] io::Error),
    #[error(
        "another program uses the UDP port {port}; set another `net.fabric.port` on every node"
    )]
    Port {
        port: u16,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("cannot use netlink")]
    Netlink(#[from] io::Error),
}

/// A part of another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePart {
    pub networks: PoolNetworks,
    pub underlay: Underlay,
}

/// What is wrong with the way to a node. All others are reached.
#[derive(Debug, thiserror::Error)]
pub enum Unroutable {
    #[error(
        "cannot route {to} by {gateway}: the node is not in a network of this node's interface"
    )]
    Gateway {
        to: IpNet,
        gateway: IpAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot reach {to} through VXLAN: the record of its node {fault}")]
    Record { to: IpNet, fault: RecordFault },
    #[error("the VXLAN device refuses {entry}")]
    Entry {
        entry: Entry,
        #[source]
        source: io::Error,
    },
}

/// One instance's fabric on a host.
#[derive(Debug)]
pub struct Fabric {
    options: FabricOptions,
    netlink: HostNetlink,
    watch: FabricWatch,
    way: Mutex<Way>,
}

impl Fabric {
    /// Checks the host, in the network namespace of the calling thread. Changes nothing.
    pub async fn open(options: FabricOptions, netlink: HostNetlink) -> Result<Self, FabricError> {
        let identity = LinkIdentity::new(&options.instance);
        let problems = host_check::problems(&netlink, &options.pool, &identity).await;
        if let Some(problem) = problems.into_iter().next() {
            return Err(problem.into());
        }
        let way = way(&options, &netlink).await?;
        if let FabricKind::Vxlan { port, .. } = options.kind {
            check_port(&netlink, options.address, port).await?;
        }
        Ok(Self {
            watch: FabricWatch::open()?,
            options,
            netlink,
            way: Mutex::new(way),
        })
    }

    /// Everything for which this host cannot have the fabric. Changes nothing.
    pub async fn problems(options: FabricOptions) -> Vec<FabricError> {
        let kind = options.kind;
        let opened = Self::open(options, HostNetlink::default()).await;
        let vxlan = match kind {
            FabricKind::HostGateway => Ok(()),
            FabricKind::Vxlan { .. } => host_check::try_vxlan().await,
        };
        let vxlan = vxlan.map_err(FabricError::NoVxlan);
        opened.err().into_iter().chain(vxlan.err()).collect()
    }

    /// Looks for the interface again. Returns whether other nodes reach this one in another way than before.
    pub async fn refresh(&self) -> Result<bool, FabricError> {
        let way = way(&self.options, &self.netlink).await?;
        let before = std::mem::replace(&mut *self.lock(), way.clone());
        Ok(before.underlay != way.underlay)
    }

    /// How other nodes reach this one.
    pub fn underlay(&self) -> Underlay {
        self.lock().underlay.clone()
    }

    fn way(&self) -> Way {
        self.lock().clone()
    }

    /// Every change is one assignment, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the kernel's routes and entries those for these parts. Returns the parts that cannot be reached.
    pub async fn apply(&self, parts: &[RemotePart]) -> Result<Vec<Unroutable>, FabricError> {
        let way = self.way();
        let index = match &way.device {
            Some(device) => self.keep_device(device).await?,
            None => way.below,
        };
        let mut routes = BTreeSet::new();
        let mut entries = Entries::default();
        let mut unroutable = Vec::new();
        for part in parts {
            for network in part.networks.networks() {
                let mtu = way.smaller_mtu(part);
                let Some(device) = &way.device else {
                    routes.extend(by_gateway(network, part, index, mtu));
                    continue;
                };
                match entries.add(network, &part.underlay, device.local) {
                    Ok(()) => {
                        routes.insert(through_device(network, index, mtu));
                    }
                    Err(fault) => unroutable.push(Unroutable::Record { to: network, fault }),
                }
            }
        }
        // What no node holds stays inside the fleet.
        routes.extend(
            self.options
                .pool
                .networks()
                .map(|to| FabricRoute { to, via: None }),
        );
        if way.device.is_some() {
            unroutable.extend(self.change_entries(&entries.all, index).await?);
        }
        unroutable.extend(self.change_routes(&routes).await?);
        Ok(unroutable)
    }

    /// Waits until somebody else may have changed something of the fabric.
    pub async fn changed(&self) {
        let way = self.way();
        let device = match &way.device {
            Some(device) => self.netlink.find(&device.name).await.ok().flatten(),
            None => None,
        };
        let devices = [Some(way.below), device.map(|link| link.index)];
        let devices: Vec<u32> = devices.into_iter().flatten().collect();
        self.watch.changed(&devices).await;
    }

    /// Removes everything of the fabric from the host.
    pub async fn remove(&self) -> io::Result<()> {
        let present = self.present_routes().await?;
        let deleted = present.iter().map(FabricRoute::delete).collect();
        self.netlink.change(deleted).await?;
        if let Some(device) = self.way().device
            && let Some(link) = self.netlink.find(&device.name).await?
        {
            self.netlink
                .change_all(vec![delete_link(link.index)])
                .await?;
        }
        Ok(())
    }

    async fn present_routes(&self) -> io::Result<BTreeSet<FabricRoute>> {
        let mut present = BTreeSet::new();
        for network in self.options.pool.networks() {
            let found = self.netlink.dump(FabricRoute::all(network.addr())).await?;
            let routes = found.iter().filter_map(FabricRoute::of);
            present.extend(routes.filter(|route| network.contains(&route.to)));
        }
        Ok(present)
    }

    async fn change_routes(
        &self,
        wanted: &BTreeSet<FabricRoute>,
    ) -> Result<Vec<Unroutable>, FabricError> {
        let present = self.present_routes().await?;
        let (deleted, added) = changes(wanted, &present, |new, old| new.to == old.to);
        // What is gone already cannot be deleted.
        let delete = deleted.iter().map(FabricRoute::delete).collect();
        self.netlink.change(delete).await?;
        let add = added.iter().map(FabricRoute::add).collect();
        let answers = self.netlink.change(add).await?;
        let mut unroutable = Vec::new();
        for (route, answer) in added.into_iter().zip(answers) {
            match (answer, route.via) {
                (Ok(()), _) => {}
                (Err(source), Some(via)) => unroutable.push(Unroutable::Gateway {
                    to: route.to,
                    gateway: via.gateway,
                    source,
                }),
                (Err(error), None) => return Err(error.into()),
            }
        }
        Ok(unroutable)
    }

    async fn change_entries(
        &self,
        wanted: &BTreeSet<Entry>,
        device: u32,
    ) -> io::Result<Vec<Unroutable>> {
        let mut present = BTreeSet::new();
        for request in Entry::all() {
            let found = self.netlink.dump(request).await?;
            present.extend(
                found
                    .iter()
                    .filter_map(|message| Entry::of(message, device)),
            );
        }
        let (deleted, added) = changes(wanted, &present, Entry::replaces);
        let delete = deleted.iter().map(|entry| entry.delete(device)).collect();
        self.netlink.change(delete).await?;
        let add = added.iter().map(|entry| entry.add(device)).collect();
        let answers = self.netlink.change(add).await?;
        let refused = added
            .into_iter()
            .zip(answers)
            .filter_map(|(entry, answer)| {
                let source = answer.err()?;
                Some(Unroutable::Entry { entry, source })
            });
        Ok(refused.collect())
    }

    /// The index of the VXLAN device, which is created again if it is not as it is to be.
    async fn keep_device(&self, device: &Device) -> Result<u32, FabricError> {
        let get = || self.netlink.get(link_named(&device.name));
        if let Some(found) = vxlan::found(get().await)? {
            match device.compare(&found) {
                Some(found) if found.is_same => {
                    if !found.is_up {
                        let up = bring_up(found.index, has_ipv6());
                        self.netlink.change_all(up).await?;
                    }
                    return Ok(found.index);
                }
                Some(found) => {
                    let delete = vec![delete_link(found.index)];
                    self.netlink.change_all(delete).await?;
                }
                None => {}
            }
        }
        let created = self.netlink.change_all(vec![device.create()]).await;
        created.map_err(FabricError::NoVxlan)?;
        let found = self.netlink.find(&device.name).await?;
        let index = found.map(|link| link.index).unwrap_or_default();
        self.netlink.change_all(bring_up(index, has_ipv6())).await?;
        Ok(index)
    }
}

fn by_gateway(to: IpNet, part: &RemotePart, index: u32, mtu: Option<u32>) -> Option<FabricRoute> {
    let Underlay { v4, v6, .. } = part.underlay;
    let gateway = match to {
        // Linux routes IPv4 by a gateway of IPv6, too.
        IpNet::V4(_) => v4.map(IpAddr::V4).or(v6.map(IpAddr::V6)),
        IpNet::V6(_) => v6.map(IpAddr::V6),
    };
    let via = NextHop {
        gateway: gateway?,
        index,
        onlink: false,
        mtu,
    };
    Some(FabricRoute { to, via: Some(via) })
}

fn through_device(to: IpNet, index: u32, mtu: Option<u32>) -> FabricRoute {
    let via = NextHop {
        gateway: to.network(),
        index,
        onlink: true,
        mtu,
    };
    FabricRoute { to, via: Some(via) }
}
