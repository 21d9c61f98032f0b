//! Reads `[fleet]` of the configuration.

use std::net::SocketAddr;

use conman_auth::FleetTlsFiles;

use super::Fleet;
use super::reader::Section;
use conman_peer::PeerAddress;

/// Reads `[fleet]`; `peers` is the listen address for other nodes.
pub(super) fn fleet(section: &Section<'_, '_>, peers: Option<SocketAddr>) -> Fleet {
    let secret_file = section.path("secret_file");
    let tls_section = section.section("tls");
    let files = ["ca", "cert", "key"].map(|field| tls_section.path(field));
    let tls = match files {
        [Some(ca), Some(cert), Some(key)] => Some(FleetTlsFiles { ca, cert, key }),
        [None, None, None] => None,
        [ca, cert, key] => {
            for (name, file) in [("ca", ca), ("cert", cert), ("key", key)] {
                if file.is_none() {
                    tls_section.mistake(name, "is missing: `ca`, `cert` and `key` go together");
                }
            }
            None
        }
    };
    tls_section.finish();
    let labels = section.string_map("labels").unwrap_or_default();
    let peer_url = section.parsed("peer_url", |url| {
        PeerAddress::new("", url)
            .ok()
            .filter(PeerAddress::is_tls)
            .map(|_| url.to_owned())
            .ok_or_else(|| "must be like \"https://10.0.0.1:7702\": nodes use TLS".to_owned())
    });
    let fleet = Fleet {
        peer_url: peer_url.or_else(|| own_url(peers?)),
        secret_file,
        tls,
        labels,
    };
    if let Some(peers) = peers {
        check(section, &fleet, peers);
    }
    section.finish();
    fleet
}

fn own_url(peers: SocketAddr) -> Option<String> {
    (!peers.ip().is_unspecified()).then(|| format!("https://{peers}"))
}

fn check(section: &Section<'_, '_>, fleet: &Fleet, peers: SocketAddr) {
    if fleet.secret_file.is_none() && fleet.tls.is_none() {
        section.mistake(
            "secret_file",
            "is missing, and so is `fleet.tls`: nodes must know each other. Make a secret with \
             `head -c 32 /dev/urandom | base64 > /etc/conman/fleet.key; chmod 600 \
             /etc/conman/fleet.key`, and give it to every node",
        );
    }
    if fleet.peer_url.is_none() {
        section.mistake(
            "peer_url",
            format_args!("is missing: other nodes cannot connect to {peers}; name an address"),
        );
    }
}
