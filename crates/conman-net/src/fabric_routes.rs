//! The routes to other nodes' parts of a fabric's pool, as data: what is to exist, and what has to change.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
    RouteProtocol, RouteType, RouteVia,
};

use crate::link_messages::{family, route, route_address};
use crate::netlink::Change;

/// Marks the fabric's routes. No program of linux/rtnetlink.h has this number.
pub(crate) const PROTOCOL: u8 = 119;

/// A route to a part, or to all of the pool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FabricRoute {
    pub(crate) to: IpNet,
    /// `None`: what no node holds is unreachable, instead of leaving by the default route.
    pub(crate) via: Option<NextHop>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NextHop {
    pub(crate) gateway: IpAddr,
    pub(crate) index: u32,
    /// The gateway is in no network of the interface, as on VXLAN. Otherwise the kernel refuses it.
    pub(crate) onlink: bool,
    /// Larger packets than this the other node does not take.
    pub(crate) mtu: Option<u32>,
}

impl FabricRoute {
    /// The route of a message, if it is one of a fabric's.
    pub(crate) fn of(message: &RouteNetlinkMessage) -> Option<Self> {
        let RouteNetlinkMessage::NewRoute(message) = message else {
            return None;
        };
        let header = &message.header;
        if u8::from(header.protocol) != PROTOCOL || header.table != RouteHeader::RT_TABLE_MAIN {
            return None;
        }
        let (mut to, mut gateway, mut index, mut mtu) = (None, None, None, None);
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Destination(address) => to = ip(address),
                RouteAttribute::Gateway(address) => gateway = ip(address),
                RouteAttribute::Via(RouteVia::Inet6(address)) => {
                    gateway = Some(IpAddr::V6(*address));
                }
                RouteAttribute::Oif(oif) => index = Some(*oif),
                RouteAttribute::Metrics(metrics) => {
                    mtu = metrics.iter().find_map(|metric| match metric {
                        RouteMetric::Mtu(mtu) => Some(*mtu),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        let to = IpNet::new(to?, header.destination_prefix_length).ok()?;
        let via = match header.kind {
            RouteType::Unreachable => None,
            _ => Some(NextHop {
                gateway: gateway?,
                index: index?,
                onlink: header.flags.contains(RouteFlags::Onlink),
                mtu,
            }),
        };
        Some(Self { to, via })
    }

    fn message(&self) -> RouteMessage {
        let index = self.via.as_ref().map_or(0, |via| via.index);
        let mut message = route(self.to, index);
        message.header.protocol = RouteProtocol::from(PROTOCOL);
        let Some(via) = &self.via else {
            message.header.kind = RouteType::Unreachable;
            message
                .attributes
                .retain(|attribute| !matches!(attribute, RouteAttribute::Oif(_)));
            return message;
        };
        if via.onlink {
            message.header.flags = RouteFlags::Onlink;
        }
        message.attributes.push(match (self.to, via.gateway) {
            (IpNet::V4(_), IpAddr::V6(gateway)) => RouteAttribute::Via(RouteVia::Inet6(gateway)),
            (_, gateway) => RouteAttribute::Gateway(route_address(gateway)),
        });
        let mtu = via.mtu.map(RouteMetric::Mtu);
        message
            .attributes
            .extend(mtu.map(|mtu| RouteAttribute::Metrics(vec![mtu])));
        message
    }

    pub(crate) fn add(&self) -> Change {
        Change::Replace(RouteNetlinkMessage::NewRoute(self.message()))
    }

    pub(crate) fn delete(&self) -> Change {
        Change::Apply(RouteNetlinkMessage::DelRoute(self.message()))
    }

    /// The request for all routes of a family.
    pub(crate) fn all(of: IpAddr) -> RouteNetlinkMessage {
        let mut request = RouteMessage::default();
        request.header.address_family = family(of);
        RouteNetlinkMessage::GetRoute(request)
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

/// What has to be deleted, and then created, so that exactly `wanted` exists. What a new one replaces is not
/// deleted: packets pass all the time.
pub(crate) fn changes<T: Ord + Clone>(
    wanted: &BTreeSet<T>,
    present: &BTreeSet<T>,
    replaces: impl Fn(&T, &T) -> bool,
) -> (Vec<T>, Vec<T>) {
    let missing: Vec<T> = wanted.difference(present).cloned().collect();
    let extra = present.difference(wanted);
    let extra = extra.filter(|old| !missing.iter().any(|new| replaces(new, old)));
    (extra.cloned().collect(), missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(text: &str, via: Option<&str>) -> FabricRoute {
        FabricRoute {
            to: text.parse().expect("a network"),
            via: via.map(|gateway| NextHop {
                gateway: gateway.parse().expect("an address"),
                index: 7,
                onlink: false,
                mtu: Some(1_450),
            }),
        }
    }

    #[test]
    fn a_route_is_read_back_as_it_was_written() {
        for route in [
            hop("10.96.0.0/12", None),
            hop("10.96.1.0/24", Some("10.0.0.2")),
            hop("10.96.1.0/24", Some("fe80::1")),
            hop("fd00:96::100/120", Some("fd00::2")),
        ] {
            let message = RouteNetlinkMessage::NewRoute(route.message());
            assert_eq!(FabricRoute::of(&message), Some(route));
        }
        let other = route("10.96.1.0/24".parse().expect("a network"), 7);
        let other = RouteNetlinkMessage::NewRoute(other);
        assert_eq!(FabricRoute::of(&other), None, "of an operator");
    }

    #[test]
    fn only_what_differs_is_changed_and_nothing_is_deleted_that_is_replaced() {
        let [moved, same, lost] = ["10.96.1.0/24", "10.96.2.0/24", "10.96.3.0/24"]
            .map(|network| hop(network, Some("10.0.0.2")));
        let new = hop("10.96.1.0/24", Some("10.0.0.3"));
        let (deleted, created) = changes(
            &[new.clone(), same.clone()].into(),
            &[moved, same, lost.clone()].into(),
            |new, old| new.to == old.to,
        );
        assert_eq!((deleted, created), (vec![lost], vec![new]));
    }
}
