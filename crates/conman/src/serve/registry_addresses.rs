//! The addresses of etcd endpoints that the configuration names by host name. Like those given as addresses, they
//! are out of reach of sessions.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use conman_core::egress::TargetHost;
use ipnet::IpNet;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::Config;

/// Bound on resolving the names: a start does not wait longer for name servers.
const LOOKUP: Duration = Duration::from_secs(2);

/// Adds the addresses to the special ones. A name that cannot be resolved is logged: etcd may be reached by its other
/// endpoints.
pub(super) async fn add(config: &mut Config) {
    let Some(shared) = &config.shared else {
        return;
    };
    let mut lookups = JoinSet::new();
    for name in shared
        .endpoints
        .iter()
        .filter_map(|endpoint| named(endpoint))
    {
        lookups.spawn(async move {
            let found = timeout(LOOKUP, tokio::net::lookup_host((name.as_str(), 0))).await;
            let addresses: Option<Vec<IpAddr>> = found.ok().and_then(Result::ok).map(|found| {
                let addresses = found.map(|address: SocketAddr| address.ip().to_canonical());
                addresses.collect()
            });
            (name, addresses.unwrap_or_default())
        });
    }
    let mut found = BTreeSet::new();
    for (name, addresses) in lookups.join_all().await {
        if addresses.is_empty() {
            tracing::warn!(
                name,
                "cannot resolve an endpoint of `registry.endpoints`; until the next start, its address is not \
                 refused to sessions whose `egress` allows it"
            );
        }
        found.extend(addresses);
    }
    let special = &mut config.net.egress.special.more;
    special.extend(found.into_iter().map(IpNet::from));
}

/// The host name of an endpoint; `None` if it is an address.
fn named(endpoint: &str) -> Option<String> {
    let uri: http::Uri = endpoint.parse().ok()?;
    match TargetHost::parse(uri.host()?) {
        Ok(TargetHost::Name(name)) => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::accepted;

    #[tokio::test]
    async fn an_endpoint_given_by_name_is_a_special_address() {
        let endpoints = r#"["http://localhost:2379", "http://10.0.0.1:2379"]"#;
        let mut config = accepted(&format!(
            "[registry]\nkind = \"etcd\"\nendpoints = {endpoints}\n\
             [listen]\npeers = \"127.0.0.1:7702\"\n[fleet]\nsecret_file = \"/etc/conman/fleet.key\"\n"
        ));
        add(&mut config).await;
        let special = &config.net.egress.special.more;
        for address in ["127.0.0.1", "10.0.0.1"] {
            let address: IpAddr = address.parse().expect("an address");
            assert!(special.contains(&address.into()), "{address}: {special:?}");
        }
    }
}
