use std::net::{IpAddr, SocketAddr};

use conman_auth::FleetTlsFiles;
use conman_fleet::PeerAddress;

use super::Fleet;
use super::load::absolute_path;
use super::reader::Section;

/// Reads `[fleet]`; `peers` is the listen address for other nodes.
pub(super) fn fleet(section: &Section<'_, '_>, peers: Option<SocketAddr>) -> Fleet {
    let path = |field: &str| section.parsed(field, absolute_path);
    let secret_file = path("secret_file");
    let tls_section = section.section("tls");
    let tls_path = |field: &str| tls_section.parsed(field, absolute_path);
    let tls = match (tls_path("ca"), tls_path("cert"), tls_path("key")) {
        (Some(ca), Some(cert), Some(key)) => Some(FleetTlsFiles { ca, cert, key }),
        (None, None, None) => None,
        (ca, cert, key) => {
            for (name, file) in [("ca", ca), ("cert", cert), ("key", key)] {
                if file.is_none() {
                    tls_section.mistake(name, "is missing: `ca`, `cert` and `key` go together");
                }
            }
            None
        }
    };
    tls_section.finish();
    let plain_anywhere = section.boolean("plain_anywhere").unwrap_or(false);
    let labels = section.string_map("labels").unwrap_or_default();
    let peer_url = section.parsed("peer_url", |url| {
        PeerAddress::new("", url)
            .map(|_| url.to_owned())
            .map_err(|_| "must be like \"https://10.0.0.1:7702\"".to_owned())
    });
    let fleet = Fleet {
        peer_url: peer_url.or_else(|| own_url(peers?, tls.is_some())),
        secret_file,
        tls,
        labels,
    };
    if let Some(peers) = peers {
        check(section, &fleet, peers, plain_anywhere);
    }
    section.finish();
    fleet
}

fn own_url(peers: SocketAddr, tls: bool) -> Option<String> {
    let scheme = if tls { "https" } else { "http" };
    (!peers.ip().is_unspecified()).then(|| format!("{scheme}://{peers}"))
}

fn check(section: &Section<'_, '_>, fleet: &Fleet, peers: SocketAddr, plain_anywhere: bool) {
    if fleet.secret_file.is_none() && fleet.tls.is_none() {
        section.mistake(
            "secret_file",
            "is missing, and so is `fleet.tls`: nodes must know each other. Make a secret with \
             `head -c 32 /dev/urandom | base64 > /etc/conman/fleet.key; chmod 600 \
             /etc/conman/fleet.key`, and give it to every node",
        );
    }
    if fleet.tls.is_none() && !plain_anywhere && !is_private(peers.ip()) {
        section.mistake(
            "tls",
            format_args!(
                "is missing, and `listen.peers` is {peers}, which may be reached from beyond a \
                 private network: what nodes send each other could be read and changed there. \
                 Configure `fleet.tls`, listen on a private address, or set `plain_anywhere = true`"
            ),
        );
    }
    if fleet.peer_url.is_none() {
        section.mistake(
            "peer_url",
            format_args!("is missing: other nodes cannot connect to {peers}; name an address"),
        );
    }
}

/// Whether only hosts of a private network can send to the address.
fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let [first, second, ..] = address.octets();
            // 100.64.0.0/10 is for providers' networks, and clouds use it internally.
            let shared = first == 100 && (64..128).contains(&second);
            address.is_loopback() || address.is_private() || address.is_link_local() || shared
        }
        IpAddr::V6(address) => {
            address.is_loopback() || address.is_unique_local() || address.is_unicast_link_local()
        }
    }
}
