//! The section `[net]`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use conman_core::SpecPolicy;
use conman_core::egress::{SpecialAddresses, TargetHost};
use conman_net::egress::EgressOptions;
use conman_net::{PoolNetworks, class_of};
use conman_proto::Network;
use ipnet::IpNet;

use super::reader::{Reader, Section};
use super::{Net, SharedRegistry};

const DNS_PORT: u16 = 53;

/// Reads `[net]`. The addresses of etcd are out of reach of sessions.
pub(super) fn net(section: &Section<'_, '_>, shared: Option<&SharedRegistry>) -> Net {
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
    section.finish();
    let endpoints = shared.map(|shared| shared.endpoints.as_slice());
    let endpoints = endpoints.unwrap_or_default().iter();
    let sessions = pool.iter().flat_map(|pool| {
        let v6 = pool.v6().map(IpNet::V6);
        [IpNet::V4(pool.v4())].into_iter().chain(v6)
    });
    let more = endpoints
        .filter_map(|endpoint| host_of(endpoint))
        .chain(sessions);
    let special = SpecialAddresses {
        more: more.collect(),
        allowed,
    };
    Net {
        pool,
        mtu,
        egress: EgressOptions { dns, special },
    }
}

/// What templates with the network `routed` need.
pub(super) fn template_mistakes(reader: &Reader<'_>, net: &Net, policy: &SpecPolicy) {
    let mut classes = BTreeMap::new();
    for (name, template) in &policy.templates {
        if template.request.network != Some(Network::Routed) {
            continue;
        }
        let field = format!("templates.{name}.network");
        if net.pool.is_none() {
            let text = "is `routed`, for which `net.pool` is missing: the addresses of sessions, for \
                        example [\"10.88.0.0/16\"]";
            reader.mistake(&field, text);
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
