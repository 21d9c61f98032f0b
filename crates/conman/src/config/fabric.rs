//! The section `[net.fabric]`.

use std::net::{IpAddr, Ipv4Addr};

use conman_net::{FabricKind, PoolNetworks};
use ipnet::Ipv4Net;

use super::reader::Section;
use super::{NetFabric, SharedRegistry};

/// Prefix length of parts: 254 addresses.
const PART: u8 = 24;
/// Greatest prefix length: two addresses.
const SMALLEST_PART: u64 = 30;
/// Next to conman's other ports, so that rules for it concern no other VXLAN of the host.
const PORT: u16 = 7_704;
const VNI: u32 = 7_704;
/// Greatest identifier of a VXLAN network.
const MAX_VNI: u64 = (1 << 24) - 1;

/// Reads `[net.fabric]`; `None` without a fabric. `own` is `net.pool`.
pub(super) fn fabric(
    section: &Section<'_, '_>,
    own: Option<&PoolNetworks>,
    shared: Option<&SharedRegistry>,
) -> Option<NetFabric> {
    let kind = section.parsed("kind", |kind| match kind {
        "none" | "host-gw" | "vxlan" => Ok(kind.to_owned()),
        _ => Err("must be \"none\", \"host-gw\" or \"vxlan\"".to_owned()),
    });
    let texts = section.strings("pool");
    let pool = texts.as_ref().and_then(|texts| {
        let pool = PoolNetworks::parse(texts);
        pool.map_err(|error| section.mistake("pool", error)).ok()
    });
    let part = section.integer("part", 9..=SMALLEST_PART).unwrap_or(PART);
    let mtu = section.integer("mtu", 1_280..=65_535);
    let address = section.parsed("address", |text| {
        let address = text.parse::<IpAddr>();
        address.map_err(|_| "must be an IP address of this node".to_owned())
    });
    let vni = section.integer("vni", 1..=MAX_VNI).unwrap_or(VNI);
    let port = section.integer("port", 1..=65_535).unwrap_or(PORT);
    section.finish();
    let kind = match kind.as_deref() {
        Some("host-gw") => FabricKind::HostGateway,
        Some("vxlan") => FabricKind::Vxlan { vni, port },
        _ => return None,
    };
    if shared.is_none() {
        let text = "needs `registry.kind = \"etcd\"`: without it there are no other nodes";
        section.mistake("kind", text);
    }
    if texts.is_none() {
        let text = "is missing: the addresses of sessions that talk to others, the same on every node, for \
                    example [\"10.96.0.0/12\"]";
        section.mistake("pool", text);
    }
    let pool = pool?;
    if pool.v4().prefix_len() >= part {
        let text = format!("must be longer than the prefix of the pool {}", pool.v4());
        section.mistake("part", text);
    }
    let overlapping = |own: &&PoolNetworks| {
        let four = (folded(own.v4()), folded(pool.v4()));
        let six = own.v6().zip(pool.v6());
        four.0.contains(&four.1)
            || four.1.contains(&four.0)
            || six.is_some_and(|(own, pool)| own.contains(&pool) || pool.contains(&own))
    };
    if let Some(own) = own.filter(overlapping) {
        let own: Vec<_> = own.networks().map(|network| network.to_string()).collect();
        let own = own.join(", ");
        let text = format!("overlaps `net.pool`, {own}, which each node has to itself");
        section.mistake("pool", text);
    }
    Some(NetFabric {
        kind,
        pool,
        part,
        mtu,
        address,
    })
}

/// Links are numbered by the lower 30 bits of their addresses, so these must differ.
fn folded(network: Ipv4Net) -> Ipv4Net {
    let bits = network.network().to_bits() & (u32::MAX >> 2);
    Ipv4Net::new_assert(Ipv4Addr::from_bits(bits), network.prefix_len())
}
