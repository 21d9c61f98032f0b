//! The addresses that are special on every node.

use std::sync::LazyLock;

use ipnet::IpNet;

/// IANA's special-purpose registries for IPv4 and IPv6, and metadata services of clouds outside of
/// link-local ranges. Of IPv6 only 2000::/3 is global unicast; the rest is special as a whole, with the
/// parts that an operator may list by themselves.
const NETWORKS: &[&str] = &[
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    // Alibaba Cloud's metadata.
    "100.100.100.200/32",
    "127.0.0.0/8",
    // Azure's platform services.
    "168.63.129.16/32",
    // Link-local, with most clouds' metadata.
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "::/3",
    "::/128",
    "::1/128",
    // Translated forms of IPv4: NAT64, Teredo, 6to4.
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2001::/23",
    "2002::/16",
    "2001:db8::/32",
    "3fff::/20",
    "4000::/2",
    "8000::/1",
    "fc00::/7",
    // Metadata of Amazon and of Google.
    "fd00:ec2::254/128",
    "fd20:ce::254/128",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
];

/// The networks whose addresses are special on every node.
#[must_use]
pub fn networks() -> &'static [IpNet] {
    static PARSED: LazyLock<Vec<IpNet>> = LazyLock::new(|| {
        let parsed = NETWORKS.iter().map(|text| text.parse());
        parsed
            .collect::<Result<_, _>>()
            .expect("constant networks parse")
    });
    &PARSED
}
