use std::net::{IpAddr, SocketAddr};

use conman_core::egress::{SpecialAddresses, TargetHost};
use conman_net::egress::EgressOptions;
use ipnet::IpNet;

use super::SharedRegistry;
use super::reader::Section;

const DNS_PORT: u16 = 53;

/// Reads `[net]`. The addresses of etcd are out of reach of sessions.
pub(super) fn net(section: &Section<'_, '_>, shared: Option<&SharedRegistry>) -> EgressOptions {
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
    section.finish();
    let endpoints = shared.map(|shared| shared.endpoints.as_slice());
    let more = endpoints
        .unwrap_or_default()
        .iter()
        .filter_map(|endpoint| host_of(endpoint));
    EgressOptions {
        dns,
        special: SpecialAddresses {
            more: more.collect(),
            allowed,
        },
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
