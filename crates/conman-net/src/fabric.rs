//! The host's side of a fabric: sessions reach those of other nodes by routes over the wire (`host-gw`), or through
//! one VXLAN device.
//!
//! What is to exist follows from the other nodes' parts alone. [`Fabric::apply`] compares it with what the kernel
//! has, and changes only what differs; so it repairs what somebody has flushed.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use conman_core::ownership::Underlay;
use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};

use crate::fabric_routes::{FabricRoute, NextHop, changes};
use crate::fabric_watch::FabricWatch;
use crate::host_check::{self, HostError};
use crate::host_netlink::{HostNetlink, has_ipv6};
use crate::link_identity::LinkIdentity;
use crate::link_messages::{FoundLink, all_links, bring_up, delete_link, link_named};
use crate::pool::PoolNetworks;
use crate::vxlan::{self, Device, Entries, Entry, RecordFault};

/// Length of an Ethernet address.
const MAC_BYTES: usize = 6;

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
    /// Index of the interface towards the other nodes.
    below: u32,
    device: Option<Device>,
    underlay: Underlay,
}

impl Fabric {
    /// Checks the host, in the network namespace of the calling thread. Changes nothing.
    pub async fn open(options: FabricOptions, netlink: HostNetlink) -> Result<Self, FabricError> {
        let identity = LinkIdentity::new(&options.instance);
        let problems = host_check::problems(&netlink, &options.pool, &identity).await;
        if let Some(problem) = problems.into_iter().next() {
            return Err(problem.into());
        }
        let (below, v4, v6) = addresses_beside(&netlink, options.address).await?;
        let links = netlink.dump(all_links()).await?;
        let links = links.into_iter().filter_map(FoundLink::of);
        let address = options.address;
        let link = links.into_iter().find(|link| Some(link.index) == below);
        let link = link.ok_or(FabricError::NoInterface { address })?;
        let interface = link.name.clone();
        let overhead = match options.kind {
            FabricKind::HostGateway => 0,
            FabricKind::Vxlan { .. } => vxlan::overhead(address),
        };
        let most = link.mtu.saturating_sub(overhead);
        let mtu = options.mtu.unwrap_or(most);
        if mtu > most {
            return Err(FabricError::Mtu {
                mtu,
                interface,
                below: link.mtu,
                overhead,
                most,
            });
        }
        let (device, mac) = match options.kind {
            FabricKind::HostGateway => {
                let mac = <[u8; MAC_BYTES]>::try_from(&link.mac[..]);
                let mac = mac.map_err(|_| FabricError::NotEthernet { interface })?;
                (None, mac)
            }
            FabricKind::Vxlan { vni, port } => {
                let mac = vxlan::device_mac(address);
                let device = Device {
                    name: identity.fabric_device(),
                    vni,
                    port,
                    local: address,
                    mac,
                    mtu,
                    below: link.index,
                };
                (Some(device), mac)
            }
        };
        // VXLAN needs the one address of this family only.
        let (v4, v6) = match (&device, address) {
            (Some(_), IpAddr::V4(v4)) => (Some(v4), None),
            (Some(_), IpAddr::V6(v6)) => (None, Some(v6)),
            (None, _) => (v4, v6),
        };
        let underlay = Underlay { v4, v6, mac, mtu };
        Ok(Self {
            watch: FabricWatch::open()?,
            below: link.index,
            options,
            netlink,
            device,
            underlay,
        })
    }

    /// How other nodes reach this one.
    pub fn underlay(&self) -> &Underlay {
        &self.underlay
    }

    /// Makes the kernel's routes and entries those for these parts. Returns the parts that cannot be reached.
    pub async fn apply(&self, parts: &[RemotePart]) -> Result<Vec<Unroutable>, FabricError> {
        let index = match &self.device {
            Some(device) => self.keep_device(device).await?,
            None => self.below,
        };
        let mut routes = BTreeSet::new();
        let mut entries = Entries::default();
        let mut unroutable = Vec::new();
        for part in parts {
            for network in part.networks.networks() {
                let Some(device) = &self.device else {
                    routes.extend(self.by_gateway(network, part, index));
                    continue;
                };
                match entries.add(network, &part.underlay, device.local) {
                    Ok(()) => {
                        routes.insert(self.through_device(network, part, index));
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
        if self.device.is_some() {
            unroutable.extend(self.change_entries(&entries.all, index).await?);
        }
        unroutable.extend(self.change_routes(&routes).await?);
        Ok(unroutable)
    }

    /// Waits until somebody else may have changed something of the fabric.
    pub async fn changed(&self) {
        let device = match &self.device {
            Some(device) => self.netlink.find(&device.name).await.ok().flatten(),
            None => None,
        };
        let devices = [Some(self.below), device.map(|link| link.index)];
        let devices: Vec<u32> = devices.into_iter().flatten().collect();
        self.watch.changed(&devices).await;
    }

    /// Removes everything of the fabric from the host.
    pub async fn remove(&self) -> io::Result<()> {
        let present = self.present_routes().await?;
        let deleted = present.iter().map(FabricRoute::delete).collect();
        self.netlink.change(deleted).await?;
        if let Some(device) = &self.device
            && let Some(link) = self.netlink.find(&device.name).await?
        {
            self.netlink
                .change_all(vec![delete_link(link.index)])
                .await?;
        }
        Ok(())
    }

    fn by_gateway(&self, to: IpNet, part: &RemotePart, index: u32) -> Option<FabricRoute> {
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
            mtu: self.smaller_mtu(part),
        };
        Some(FabricRoute { to, via: Some(via) })
    }

    fn through_device(&self, to: IpNet, part: &RemotePart, index: u32) -> FabricRoute {
        let via = NextHop {
            gateway: to.network(),
            index,
            onlink: true,
            mtu: self.smaller_mtu(part),
        };
        FabricRoute { to, via: Some(via) }
    }

    /// The largest packet of a node that takes only smaller ones than this node; the kernel reports it to senders.
    fn smaller_mtu(&self, part: &RemotePart) -> Option<u32> {
        let mtu = part.underlay.mtu;
        (mtu < self.underlay.mtu).then_some(mtu)
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

/// The interface with this address, and its addresses of both families.
async fn addresses_beside(
    netlink: &HostNetlink,
    address: IpAddr,
) -> io::Result<(Option<u32>, Option<Ipv4Addr>, Option<Ipv6Addr>)> {
    let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let found = netlink.dump(request).await?;
    let addresses: Vec<(u32, AddressScope, IpAddr)> = found
        .into_iter()
        .filter_map(|message| match message {
            RouteNetlinkMessage::NewAddress(message) => Some(message),
            _ => None,
        })
        .flat_map(|message| {
            let (index, scope) = (message.header.index, message.header.scope);
            let of = move |attribute| match attribute {
                AddressAttribute::Local(address) | AddressAttribute::Address(address) => {
                    Some((index, scope, address))
                }
                _ => None,
            };
            message.attributes.into_iter().filter_map(of)
        })
        .collect();
    let index = addresses.iter().find(|(.., found)| *found == address);
    let index = index.map(|(index, ..)| *index);
    let beside = addresses.iter().filter(|(found, ..)| Some(*found) == index);
    let (mut v4, mut v6) = (None, None);
    for (_, scope, found) in beside {
        match found {
            IpAddr::V4(found) => v4 = v4.or(Some(*found)),
            // One that is valid beyond the link rather than one of the link.
            IpAddr::V6(found) if *scope == AddressScope::Universe => v6 = Some(*found),
            IpAddr::V6(found) => v6 = v6.or(Some(*found)),
        }
    }
    match address {
        IpAddr::V4(address) => v4 = Some(address),
        IpAddr::V6(address) => v6 = Some(address),
    }
    Ok((index, v4, v6))
}
