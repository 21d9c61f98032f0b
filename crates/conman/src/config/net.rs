//! The section `[net]`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use conman_core::SpecPolicy;
use conman_core::egress::{SpecialAddresses, TargetHost};
use conman_net::egress::EgressOptions;
use conman_net::{InterfaceNetwork, PoolNetworks, class_of};
use conman_proto::{InterfaceName, Network};
use ipnet::IpNet;

use super::reader::{Reader, Section};
use super::{Net, SharedRegistry, fabric};

const DNS_PORT: u16 = 53;

/// Reads `[net]`. The addresses of etcd are out of reach of sessions.
pub(super) fn net(
    section: &Section<'_, '_>,
    shared: Option<&SharedRegistry>,
    buffer_bytes: u64,
) -> Net {
    let dns = list(section, "dns", |text| {
        let address = text.parse::<IpAddr>();
        address
            .map(|address| SocketAddr::new(address, DNS_PORT))
            .or_else(|_| text.parse())
            .map_err(|_| "must be ADDRESS or ADDRESS:PORT of a name server")
    });
    let allowed = list(section, "allow_addresses", |text| {
        let network = text.parse::<IpAddr>().map(IpNet::from);
        network
            .or_else(|_| text.parse())
            .map_err(|_| "must be an address or a network, for example \"10.1.0.0/16\"")
    });
    let pool = section.strings("pool").and_then(|texts| {
        let pool = PoolNetworks::parse(&texts);
        pool.map_err(|error| section.mistake("pool", error)).ok()
    });
    let mtu = section.integer("mtu", 1_280..=65_535).unwrap_or(1_500);
    let interfaces: BTreeMap<_, _> = section
        .section("interfaces")
        .sections()
        .iter()
        .filter_map(|(name, section)| interface(name, section))
        .collect();
    let fabric = section.section("fabric");
    let fabric = fabric::fabric(&fabric, pool.as_ref(), shared);
    section.finish();
    let endpoints = shared.map(|shared| shared.endpoints.as_slice());
    let endpoints = endpoints.unwrap_or_default().iter();
    let fabrics = fabric.iter().map(|fabric| &fabric.pool);
    let sessions = pool.iter().chain(fabrics).flat_map(PoolNetworks::networks);
    let ranges = interfaces.values().map(|network| network.range.v4().into());
    let more = endpoints
        .filter_map(|endpoint| host_of(endpoint))
        .chain(sessions)
        .chain(ranges);
    let special = SpecialAddresses {
        more: more.collect(),
        allowed,
    };
    Net {
        pool,
        mtu,
        interfaces,
        fabric,
        egress: EgressOptions {
            dns,
            special,
            buffer_bytes,
            talk: None,
        },
    }
}

/// Reads `[net.interfaces.<interface>]`.
fn interface(name: &str, section: &Section<'_, '_>) -> Option<(InterfaceName, InterfaceNetwork)> {
    let network = |text: &str| PoolNetworks::parse(&[text]).map_err(|error| error.to_string());
    let subnet = section.parsed("subnet", network);
    let range = section.parsed("range", network).or(subnet);
    let gateway = section.parsed("gateway", |text| {
        let address = text.parse::<Ipv4Addr>();
        address.map_err(|_| "must be an IPv4 address".to_owned())
    });
    section.finish();
    let name = name.parse::<InterfaceName>();
    if let Err(error) = &name {
        section.mistake(
            "subnet",
            format_args!("cannot be of this interface: {error}"),
        );
    }
    if section.string("subnet").is_none() {
        let text = "is missing: the network behind the interface, for example \"192.168.7.0/24\"";
        section.mistake("subnet", text);
    }
    let (subnet, range) = (subnet?.v4(), range?);
    if !subnet.contains(&range.v4()) {
        section.mistake("range", format_args!("must lie within {subnet}"));
    }
    if gateway.is_some_and(|gateway| !subnet.contains(&gateway)) {
        section.mistake("gateway", format_args!("must lie within {subnet}"));
    }
    let network = InterfaceNetwork {
        subnet,
        range,
        gateway,
    };
    Some((name.ok()?, network))
}

/// What the networks of templates need.
pub(super) fn template_mistakes(
    reader: &Reader<'_>,
    net: &Net,
    policy: &SpecPolicy,
    has_tokens: bool,
) {
    let mut classes = BTreeMap::new();
    for (name, template) in &policy.templates {
        let field = format!("templates.{name}.network");
        let network = template.request.network.as_ref();
        let traits = network.map(Network::traits).unwrap_or_default();
        if let Some(link) = network.and_then(Network::link)
            && !net.interfaces.contains_key(link.interface())
        {
            let text = format!(
                "is `{link}`, for which `net.interfaces.{}.subnet` is missing: the network behind that \
                 interface, for example \"192.168.7.0/24\"",
                link.interface()
            );
            reader.mistake(&field, text);
        }
        if traits.shares_host && !has_tokens {
            let text = "is `host`: its sessions reach the API of this node, so that `auth.tokens_file` must \
                        protect it";
            reader.mistake(&field, text);
        }
        if traits.shares_host
            && template
                .request
                .ports
                .as_ref()
                .is_some_and(|ports| !ports.is_empty())
        {
            let text = "cannot be given with `network = \"host\"`: only `port` is kept free of other programs";
            reader.mistake(&format!("templates.{name}.ports"), text);
        }
        if !traits.routed {
            continue;
        }
        if net.pool.is_none() {
            let text = "is `routed`, for which `net.pool` is missing: the addresses of sessions, for \
                        example [\"10.88.0.0/16\"]";
            reader.mistake(&field, text);
        }
        let talks = template.request.talk.as_ref();
        if talks.is_some_and(|groups| !groups.is_empty()) && net.fabric.is_none() {
            let text =
                "needs `net.fabric`: how sessions reach those of other nodes, and their addresses";
            reader.mistake(&format!("templates.{name}.talk"), text);
        }
        if let Some(other) = classes.insert(class_of(name), name) {
            let text =
                format!("has the same number as that of template `{other}`; rename one of them");
            reader.mistake(&field, text);
        }
    }
}

/// The address of an endpoint that is named by its address.
fn host_of(endpoint: &str) -> Option<IpNet> {
    let uri: http::Uri = endpoint.parse().ok()?;
    match TargetHost::parse(uri.host()?) {
        Ok(TargetHost::Address(address)) => Some(address.into()),
        _ => None,
    }
}

fn list<T>(
    section: &Section<'_, '_>,
    field: &str,
    parse: impl Fn(&str) -> Result<T, &'static str>,
) -> Vec<T> {
    let texts = section.strings(field).unwrap_or_default();
    let mut parsed = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        match parse(text) {
            Ok(value) => parsed.push(value),
            Err(rule) => section.mistake(&format!("{field}[{index}]"), rule),
        }
    }
    parsed
}
