//! Checks the `Host` of requests: a page whose name resolves to this host's address (DNS rebinding)
//! must not count as a page of this host.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;
use http::{Uri, Version};

use conman_proto::{Problem, ProblemKind};

/// The host names that one listener serves.
///
/// Always served: loopback addresses, `localhost` and the names below it, and the address the
/// listener is bound to. A listener on all addresses serves every address literal, because no
/// foreign name is involved in it. Other names must be configured.
#[derive(Debug, Clone)]
pub struct HostRules {
    listen: IpAddr,
    names: BTreeSet<String>,
    domain: Option<String>,
}

/// A configured name that is not valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMistake {
    /// Position in the list.
    pub index: usize,
    pub message: String,
}

/// The host and port that a request is addressed to, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPort {
    pub(crate) host: String,
    pub(crate) port: Option<u16>,
}

impl fmt::Display for HostPort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.host)?;
        self.port
            .map_or(Ok(()), |port| write!(formatter, ":{port}"))
    }
}

impl HostRules {
    /// Rules for the listener on `listen`. `hosts` are further names of this host. `domain` is
    /// served with one label before it or none.
    ///
    /// # Errors
    /// Every entry of `hosts` that is not a host name.
    pub fn new(
        listen: SocketAddr,
        hosts: &[String],
        domain: Option<&str>,
    ) -> Result<Self, Vec<HostMistake>> {
        let mut names = BTreeSet::new();
        let mut mistakes = Vec::new();
        for (index, host) in hosts.iter().enumerate() {
            if is_host_name(host) || host.parse::<IpAddr>().is_ok() {
                let address = host.parse::<IpAddr>().ok();
                names.insert(match address {
                    Some(IpAddr::V6(address)) => format!("[{address}]"),
                    _ => host.to_ascii_lowercase(),
                });
            } else {
                let message = format!(
                    "`{}` is not a host name: write it without scheme, port and wildcard",
                    quoted(host.as_bytes())
                );
                mistakes.push(HostMistake { index, message });
            }
        }
        if mistakes.is_empty() {
            let domain = domain.map(str::to_ascii_lowercase);
            Ok(Self {
                listen: listen.ip().to_canonical(),
                names,
                domain,
            })
        } else {
            Err(mistakes)
        }
    }

    /// The host and port of a request, if they are served; `None` for a request of HTTP/1.0 without
    /// a `Host`, which browsers never send.
    pub(crate) fn check(&self, parts: &Parts) -> Result<Option<HostPort>, Box<Problem>> {
        let mut values = parts.headers.get_all(HOST).iter();
        let (value, second) = (values.next(), values.next());
        if second.is_some() {
            return Err(ProblemKind::BAD_REQUEST.problem("the request has more than one Host"));
        }
        let Some(value) = value else {
            return if parts.version <= Version::HTTP_10 {
                Ok(None)
            } else {
                Err(ProblemKind::BAD_REQUEST.problem("the request has no Host"))
            };
        };
        let host = HostPort::parse(value.as_bytes()).ok_or_else(|| {
            let given = quoted(value.as_bytes());
            ProblemKind::BAD_REQUEST
                .problem(format!("the Host `{given}` is not a host name or address"))
        })?;
        if let Some(other) = other_authority(&parts.uri, &host) {
            return Err(ProblemKind::BAD_REQUEST.problem(format!(
                "the request is for `{other}` by its target and for `{host}` by its Host"
            )));
        }
        if self.serves(&host.host) {
            Ok(Some(host))
        } else {
            Err(self.refusal(&host))
        }
    }

    fn serves(&self, host: &str) -> bool {
        if host == "localhost" || host.ends_with(".localhost") || self.names.contains(host) {
            return true;
        }
        if let Some(address) = address(host) {
            return address.is_loopback() || self.listen.is_unspecified() || address == self.listen;
        }
        self.domain.as_deref().is_some_and(|domain| {
            let label = host
                .strip_suffix(domain)
                .map(|label| label.strip_suffix('.'));
            match label {
                Some(Some(label)) => !label.is_empty() && !label.contains('.'),
                Some(None) => host == domain,
                None => false,
            }
        })
    }

    fn refusal(&self, host: &HostPort) -> Box<Problem> {
        ProblemKind::HOST_REFUSED.problem(format!(
            "requests for `{}` are not served here; if that is a name of this host, add it to \
             `hosts` under [listen] in the configuration",
            quoted(host.host.as_bytes())
        ))
    }
}

impl HostPort {
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (address, rest) = rest.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            (&text[..address.len() + 2], rest)
        } else {
            let end = text.find(':').unwrap_or(text.len());
            let host = &text[..end];
            if !is_host_name(host) {
                return None;
            }
            (host, &text[end..])
        };
        let port = match port {
            "" => None,
            port => {
                let digits = port.strip_prefix(':')?;
                let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
                Some(digits.parse().ok().filter(|_| is_number)?)
            }
        };
        Some(Self {
            host: host.to_ascii_lowercase(),
            port,
        })
    }
}

/// The authority of an absolute target that differs from `host`.
fn other_authority(uri: &Uri, host: &HostPort) -> Option<String> {
    let authority = uri.authority().map(Authority::as_str)?;
    let same = HostPort::parse(authority.as_bytes()).is_some_and(|other| other == *host);
    (!same).then(|| quoted(authority.as_bytes()))
}

fn address(host: &str) -> Option<IpAddr> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    bare.parse::<IpAddr>()
        .ok()
        .map(|address| address.to_canonical())
}

/// RFC 1123 names, and underscores, which some private names have.
fn is_host_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=253).contains(&text.len())
        && text.split('.').all(|label| {
            (1..=63).contains(&label.len())
                && label.bytes().all(allowed)
                && !label.starts_with('-')
                && !label.ends_with('-')
        })
}

/// A client's text for a detail: truncated and without control characters.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const LONGEST: usize = 100;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST)]);
    text.escape_debug().collect()
}

#[cfg(test)]
mod tests {
    use http::Request;
    use proptest::prelude::*;

    use super::*;

    fn rules(listen: &str) -> HostRules {
        let hosts = [
            "Node1.Example".to_owned(),
            "10.9.9.9".to_owned(),
            "fd00::9".to_owned(),
        ];
        let listen = listen.parse().expect("an address");
        HostRules::new(listen, &hosts, Some("Sessions.Example")).expect("valid")
    }

    fn parts(hosts: &[&str]) -> Parts {
        let mut request = Request::get("/x");
        for host in hosts {
            request = request.header(HOST, *host);
        }
        request.body(()).expect("a request").into_parts().0
    }

    fn status(rules: &HostRules, host: &str) -> u16 {
        rules
            .check(&parts(&[host]))
            .map_or_else(|problem| problem.status, |_| 200)
    }

    #[test]
    fn names_of_this_host_are_served() {
        let rules = rules("127.0.0.1:7700");
        for host in [
            "127.0.0.1",
            "127.0.0.1:7700",
            "127.8.8.8:1",
            "[::1]",
            "[::1]:7700",
            "localhost",
            "LOCALHOST:7700",
            "a.localhost",
            "a.b.localhost:7701",
            "node1.example",
            "NODE1.example:443",
            "sessions.example",
            "alice.sessions.example:80",
            "10.9.9.9:1",
            "[fd00::9]:1",
            "[::ffff:127.0.0.1]:7700",
        ] {
            assert_eq!(status(&rules, host), 200, "{host}");
        }
    }

    #[test]
    fn every_other_name_is_refused_as_a_rebinding() {
        let rules = rules("127.0.0.1:7700");
        for host in [
            "evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.nip.io",
            "127.1",
            "0x7f.1",
            "2130706433",
            "0.0.0.0:7700",
            "10.0.0.5",
            "[::]",
            "[fe80::1]",
            "node1.example.evil",
            "xnode1.example",
            "a.node1.example",
            "a.b.sessions.example",
            "xsessions.example",
            "node1",
        ] {
            assert_eq!(status(&rules, host), 403, "{host}");
        }
    }

    #[test]
    fn what_is_no_host_is_a_bad_request() {
        let rules = rules("127.0.0.1:7700");
        for host in [
            "",
            "localhost:",
            "localhost:x",
            "localhost:99999",
            "localhost:+80",
            "a@localhost",
            "localhost.",
            ".localhost",
            "[::1",
            "::1",
            "[localhost]",
            "localhost/",
            "local host",
            "localhost,evil",
            "[::1]x",
            "[fe80::1%eth0]",
        ] {
            assert_eq!(status(&rules, host), 400, "{host:?}");
        }
    }

    #[test]
    fn a_listener_on_every_address_serves_every_address_literal_but_no_other_name() {
        for listen in ["0.0.0.0:7700", "[::]:7700"] {
            let rules = rules(listen);
            assert_eq!(status(&rules, "10.0.0.5:7700"), 200);
            assert_eq!(status(&rules, "[2001:db8::1]:7700"), 200);
            assert_eq!(status(&rules, "evil.example"), 403);
        }
        let rules = rules("10.0.0.5:7700");
        assert_eq!(status(&rules, "10.0.0.5"), 200);
        assert_eq!(status(&rules, "10.0.0.6"), 403);
    }

    #[test]
    fn one_host_is_needed_but_of_http_1_0() {
        let rules = rules("127.0.0.1:7700");
        let status = |parts: &Parts| rules.check(parts).map_err(|problem| problem.status);
        assert_eq!(status(&parts(&["localhost", "localhost"])), Err(400));
        let mut none = parts(&[]);
        assert_eq!(status(&none), Err(400));
        none.version = Version::HTTP_10;
        assert_eq!(status(&none), Ok(None));
    }

    #[test]
    fn a_target_and_a_host_that_differ_are_refused() {
        let rules = rules("127.0.0.1:7700");
        let mut parts = parts(&["localhost:7700"]);
        for (target, expected) in [
            ("http://localhost:7700/", 200),
            ("http://localhost/", 400),
            ("http://evil/", 400),
        ] {
            parts.uri = target.parse().expect("a target");
            let status = rules
                .check(&parts)
                .map_or_else(|problem| problem.status, |_| 200);
            assert_eq!(status, expected, "{target}");
        }
    }

    #[test]
    fn configured_names_with_more_than_a_name_are_mistakes() {
        let hosts = ["ok.example", "http://x", "x:80", "*.x", "", "a..b", "::1"].map(str::to_owned);
        let listen = "127.0.0.1:1".parse().expect("an address");
        let mistakes = HostRules::new(listen, &hosts, None).expect_err("mistakes");
        let places: Vec<usize> = mistakes.iter().map(|mistake| mistake.index).collect();
        assert_eq!(places, [1, 2, 3, 4, 5]);
    }

    proptest! {
        #[test]
        fn a_name_outside_the_rules_is_never_served(host in "[a-z0-9.-]{1,40}") {
            let known = host == "localhost" || host.ends_with(".localhost")
                || host == "node1.example" || host.ends_with("sessions.example")
                || host.starts_with("127.") || host.starts_with("10.9.9.9");
            prop_assume!(!known);
            prop_assert_ne!(status(&rules("127.0.0.1:7700"), &host), 200);
        }
    }
}
