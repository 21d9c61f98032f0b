//! Links that connect a network namespace to an interface of the host: a macvlan or IPoIB link on it, or a veth
//! pair with one end in a bridge.
//!
//! One message creates a link inside the namespace, in the group of unfinished links; the last one moves it to
//! that of finished links. So the host's namespace holds nothing of it but the port of a bridge, which
//! disappears with the other end, and a crash in between leaves an unfinished link, which [`sweep`] deletes.
//!
//! All functions block for as long as the kernel takes.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use conman_proto::{Bandwidth, FieldError, InterfaceName, LinkRequest, LinkTarget, SessionLink};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoMacVlan, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
    MacVlanMode,
};
use rustix::io::Errno;

pub use crate::bandwidth::LimitError;
use crate::bandwidth::{explained, lift_arriving, limit_arriving, limit_sending};
use crate::host_netlink::{HostNetlink, Namespace, has_ipv6};
use crate::link_identity::link_mac;
use crate::link_messages::{
    FoundLink, add_route, address, all_links, bring_up, delete_link, link_named, link_or_none,
};
use crate::netlink::{Change, RouteSocket};

#[cfg(test)]
mod tests;

/// Groups of links inside sessions' namespaces.
const UNFINISHED: u32 = 0x4343_0000;
const FINISHED: u32 = 0x4343_0001;

/// Name of a bridge's port; the kernel chooses the number.
const PORT: &str = "cmlink%d";

/// Most addresses and routes of a link.
const MAX_ENTRIES: usize = 16;

/// Highest number of a name that is chosen here.
const MAX_NUMBER: u32 = 16;

/// A link that is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewLink {
    pub to: LinkTarget,
    /// Inside the namespace; the first free one of `eth1`, `eth2`, … if there is none.
    pub name: Option<String>,
    pub addresses: Vec<IpNet>,
    pub routes: Vec<NewRoute>,
    /// The address that no other link on the same interface may have. A macvlan link gets its hardware address
    /// from it, and the kernel brings no second one with the same up. It reaches no other link on the interface.
    pub sole: Option<Ipv4Addr>,
    pub bandwidth: Bandwidth,
}

/// A route through a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewRoute {
    pub destination: IpNet,
    pub gateway: Option<IpAddr>,
}

/// Why a link is not made, listed or deleted.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("this node has no interface `{0}`; `ip link` lists those that it has")]
    NoInterface(InterfaceName),
    #[error("interface `{0}` of this node is no bridge; use `macvlan:{0}`, or make a bridge of it")]
    NoBridge(InterfaceName),
    #[error("the session has an interface `{0}` already; choose another name")]
    NameTaken(String),
    #[error("the session has no attached interface `{0}`")]
    NoLink(String),
    #[error("this kernel makes no link `{0}`; load the module of that name")]
    Unsupported(&'static str),
    #[error(
        "another link on interface `{0}` has the same address; wait for its end, or choose another"
    )]
    AddressTaken(InterfaceName),
    #[error("cannot limit the bandwidth of the link")]
    Limit(#[source] LimitError),
    #[error("cannot enter the session's network namespace")]
    Namespace(#[source] io::Error),
    #[error("cannot {action} `{name}`")]
    Netlink {
        action: &'static str,
        name: String,
        #[source]
        source: io::Error,
    },
}

/// Makes a link in a namespace. If it fails, nothing is left of it.
pub fn make(
    netlink: &HostNetlink,
    link: &NewLink,
    namespace: Namespace,
) -> Result<SessionLink, LinkError> {
    let failed = |action| move |source| LinkError::netlink(action, &link.to, source);
    let parent = netlink.wait(netlink.find(link.to.interface().as_str()));
    let parent = parent
        .map_err(failed("find the interface of"))?
        .ok_or_else(|| LinkError::NoInterface(link.to.interface().clone()))?;
    if matches!(link.to, LinkTarget::Bridge(_)) && parent.kind != Some(InfoKind::Bridge) {
        return Err(LinkError::NoBridge(link.to.interface().clone()));
    }
    let mut inside = RouteSocket::from_fd(namespace.socket).map_err(failed("open netlink for"))?;
    let name = link.free_name(&mut inside)?;
    let creation = link.creation(&name, &parent, namespace.file.as_raw_fd());
    let own = namespace.file.try_clone().map_err(LinkError::Namespace)?;
    netlink
        .wait(netlink.change_with(Change::Create(creation), namespace.file))
        .map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::OPNOTSUPP) => LinkError::Unsupported(link.module()),
            Some(Errno::EXIST) => LinkError::NameTaken(name.clone()),
            _ => LinkError::netlink("create", &link.to, source),
        })?;
    let created = find(&mut inside, &name)?.ok_or_else(|| LinkError::NoLink(name.clone()))?;
    let configured = link.configure(&created, &mut inside, own.as_fd());
    if configured.is_err()
        && let Err(error) = remove(created.index, &mut inside, own.as_fd())
    {
        tracing::warn!(link = %link.to, %error, "cannot remove a link that was not configured");
    }
    configured?;
    Ok(SessionLink {
        name,
        to: link.to.clone(),
        addresses: link.addresses.iter().map(IpNet::to_string).collect(),
    })
}

/// Lists the finished links of a namespace.
pub fn list(namespace: Namespace) -> Result<Vec<SessionLink>, LinkError> {
    let failed = |source| LinkError::netlink("list the links of", &"the session", source);
    let mut inside = RouteSocket::from_fd(namespace.socket).map_err(failed)?;
    let links = inside.dump(&all_links()).map_err(failed)?;
    let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let addresses = inside.dump(&addresses).map_err(failed)?;
    let links = links.into_iter().filter_map(FoundLink::of);
    let finished = links.filter(|link| link.group == FINISHED);
    let listed = finished.filter_map(|link| {
        Some(SessionLink {
            name: link.name.parse().ok()?,
            to: link.alias.parse().ok()?,
            addresses: addresses
                .iter()
                .filter_map(|message| address_of(message, link.index))
                .collect(),
        })
    });
    Ok(listed.collect())
}

/// Deletes a finished link of a namespace.
pub fn delete(name: &str, namespace: Namespace) -> Result<(), LinkError> {
    let failed = |source| LinkError::netlink("delete", &name, source);
    let mut inside = RouteSocket::from_fd(namespace.socket).map_err(failed)?;
    let found = find(&mut inside, name)?.filter(|link| link.group == FINISHED);
    let found = found.ok_or_else(|| LinkError::NoLink(name.to_owned()))?;
    remove(found.index, &mut inside, namespace.file.as_fd()).map_err(failed)
}

/// Deletes a link of a namespace, and then the limit of what arrives through it.
fn remove(index: u32, inside: &mut RouteSocket, namespace: BorrowedFd<'_>) -> io::Result<()> {
    inside.change_all(&[delete_link(index)])?;
    // Without its link it matches nothing.
    if let Err(error) = lift_arriving(namespace, index) {
        tracing::warn!(index, %error, "cannot remove the limit of a deleted link");
    }
    Ok(())
}

/// Deletes the unfinished links of a namespace, which a crash has left. Returns their number.
pub fn sweep(namespace: Namespace) -> io::Result<usize> {
    let mut inside = RouteSocket::from_fd(namespace.socket)?;
    let links = inside.dump(&all_links())?.into_iter();
    let unfinished = links
        .filter_map(FoundLink::of)
        .filter(|link| link.group == UNFINISHED);
    let changes: Vec<Change> = unfinished.map(|link| delete_link(link.index)).collect();
    inside.change_all(&changes)?;
    Ok(changes.len())
}

/// Fails if this host has no such interface.
pub(crate) fn check_interface(
    netlink: &HostNetlink,
    name: &InterfaceName,
) -> Result<(), LinkError> {
    let found = netlink.wait(netlink.find(name.as_str()));
    match found.map_err(|source| LinkError::netlink("find", name, source))? {
        Some(_) => Ok(()),
        None => Err(LinkError::NoInterface(name.clone())),
    }
}

impl LinkError {
    fn netlink(action: &'static str, name: &dyn std::fmt::Display, source: io::Error) -> Self {
        let name = name.to_string();
        Self::Netlink {
            action,
            name,
            source,
        }
    }
}

impl NewLink {
    /// Reads a client's request.
    pub fn parse(request: &LinkRequest) -> Result<Self, FieldError> {
        let entries = [
            ("addresses", &request.addresses),
            ("routes", &request.routes),
        ];
        if let Some((field, _)) = entries.iter().find(|(_, list)| list.len() > MAX_ENTRIES) {
            return Err(mistake(
                *field,
                format!("has more than {MAX_ENTRIES} entries"),
            ));
        }
        let parsed = request.addresses.iter().enumerate().map(|(index, text)| {
            let rule = "must be an address with its prefix length, such as 192.168.7.5/24";
            text.parse()
                .map_err(|_| mistake(format!("addresses[{index}]"), rule.to_owned()))
        });
        let addresses = parsed.collect::<Result<_, _>>()?;
        let parsed = request.routes.iter().enumerate().map(|(index, text)| {
            let rule =
                "must be a route such as `10.0.0.0/8 via 192.168.7.1` or `default via 192.168.7.1`";
            parse_route(text).ok_or_else(|| mistake(format!("routes[{index}]"), rule.to_owned()))
        });
        Ok(Self {
            to: request.to.clone(),
            name: request.name.as_ref().map(ToString::to_string),
            addresses,
            routes: parsed.collect::<Result<_, _>>()?,
            sole: None,
            bandwidth: Bandwidth::default(),
        })
    }

    fn free_name(&self, inside: &mut RouteSocket) -> Result<String, LinkError> {
        if let Some(name) = &self.name {
            return match find(inside, name)? {
                Some(_) => Err(LinkError::NameTaken(name.clone())),
                None => Ok(name.clone()),
            };
        }
        for number in 1..=MAX_NUMBER {
            let name = format!("eth{number}");
            if find(inside, &name)?.is_none() {
                return Ok(name);
            }
        }
        Err(LinkError::NameTaken(format!("eth{MAX_NUMBER}")))
    }

    /// The message to the host that creates the link inside the namespace.
    fn creation(&self, name: &str, parent: &FoundLink, namespace: RawFd) -> RouteNetlinkMessage {
        let mut inside = LinkMessage::default();
        inside.attributes = vec![
            LinkAttribute::NetNsFd(namespace),
            LinkAttribute::Group(UNFINISHED),
        ];
        let name = LinkAttribute::IfName(name.to_owned());
        if let LinkTarget::Bridge(_) = self.to {
            inside
                .attributes
                .extend([name, LinkAttribute::Mtu(parent.mtu)]);
            let mut port = LinkMessage::default();
            port.header.flags = LinkFlags::Up;
            port.header.change_mask = LinkFlags::Up;
            port.attributes = vec![
                LinkAttribute::IfName(PORT.to_owned()),
                LinkAttribute::Mtu(parent.mtu),
                LinkAttribute::Controller(parent.index),
                LinkAttribute::LinkInfo(vec![
                    LinkInfo::Kind(InfoKind::Veth),
                    LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(inside))),
                ]),
            ];
            return RouteNetlinkMessage::NewLink(port);
        }
        let mut info = vec![LinkInfo::Kind(InfoKind::Ipoib)];
        if let LinkTarget::Macvlan(_) = self.to {
            let mac = self.sole.map(|address| link_mac(address).to_vec());
            inside.attributes.extend(mac.map(LinkAttribute::Address));
            let mode = match self.sole {
                Some(_) => MacVlanMode::Private,
                None => MacVlanMode::Bridge,
            };
            info = vec![
                LinkInfo::Kind(InfoKind::MacVlan),
                LinkInfo::Data(InfoData::MacVlan(vec![InfoMacVlan::Mode(mode)])),
            ];
        }
        inside.attributes.extend([
            LinkAttribute::Link(parent.index),
            name,
            LinkAttribute::LinkInfo(info),
        ]);
        RouteNetlinkMessage::NewLink(inside)
    }

    /// Limits the link before it can carry anything, and then configures it.
    fn configure(
        &self,
        created: &FoundLink,
        inside: &mut RouteSocket,
        namespace: BorrowedFd<'_>,
    ) -> Result<(), LinkError> {
        let (index, mtu) = (created.index, created.mtu);
        if let Some(rate) = self.bandwidth.outward {
            let limited = inside.change_all(&[limit_sending(index, mtu, rate)]);
            let limited = limited.map_err(explained);
            limited.map_err(|source| LinkError::netlink("limit", &self.to, source))?;
        }
        if let Some(rate) = self.bandwidth.inward {
            limit_arriving(namespace, index, mtu, rate).map_err(LinkError::Limit)?;
        }
        let configured = inside.change_all(&self.configuration(index));
        configured.map_err(|source| match Errno::from_io_error(&source) {
            Some(Errno::ADDRINUSE) => LinkError::AddressTaken(self.to.interface().clone()),
            _ => LinkError::netlink("configure", &self.to, source),
        })
    }

    /// The changes inside the namespace, of which the last one finishes the link.
    fn configuration(&self, index: u32) -> Vec<Change> {
        let mut changes = bring_up(index, has_ipv6());
        changes.extend(self.addresses.iter().map(|net| address(*net, index)));
        let routes = self.routes.iter();
        changes.extend(routes.map(|route| add_route(route.destination, route.gateway, index)));
        let mut finished = LinkMessage::default();
        finished.header.index = index;
        finished.attributes = vec![
            LinkAttribute::IfAlias(self.to.to_string()),
            LinkAttribute::Group(FINISHED),
        ];
        changes.push(Change::Apply(RouteNetlinkMessage::SetLink(finished)));
        changes
    }

    fn module(&self) -> &'static str {
        match self.to {
            LinkTarget::Macvlan(_) => "macvlan",
            LinkTarget::Ipoib(_) => "ib_ipoib",
            LinkTarget::Bridge(_) => "veth",
        }
    }
}

/// `DESTINATION [via GATEWAY]`
fn parse_route(text: &str) -> Option<NewRoute> {
    let (destination, gateway) = match text.split_once(" via ") {
        Some((destination, gateway)) => (destination, Some(gateway.parse::<IpAddr>().ok()?)),
        None => (text, None),
    };
    let everything = match gateway {
        Some(IpAddr::V6(_)) => IpNet::V6(Ipv6Net::default()),
        _ => IpNet::V4(Ipv4Net::default()),
    };
    let destination = match destination {
        "default" => everything,
        net => net
            .parse()
            .or_else(|_| net.parse().map(IpAddr::into))
            .ok()?,
    };
    Some(NewRoute {
        destination,
        gateway,
    })
}

fn mistake(field: impl Into<String>, message: String) -> FieldError {
    FieldError {
        field: field.into(),
        message,
    }
}

fn find(socket: &mut RouteSocket, name: &str) -> Result<Option<FoundLink>, LinkError> {
    let found = link_or_none(socket.get(&link_named(name)));
    found.map_err(|source| LinkError::netlink("find", &name, source))
}

/// An address of the link with this index.
fn address_of(message: &RouteNetlinkMessage, index: u32) -> Option<String> {
    let RouteNetlinkMessage::NewAddress(message) = message else {
        return None;
    };
    let address = message.attributes.iter().find_map(|one| match one {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    })?;
    let net = IpNet::new(address, message.header.prefix_len).ok()?;
    (message.header.index == index).then(|| net.to_string())
}
