//! Reads which session and port a request addresses, by its host or its path.

use conman_proto::SessionId;
use http::Uri;
use http::uri::{Authority, PathAndQuery};

/// Prefix of the path form.
const PATH_PREFIX: &str = "/s/";

/// The target of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A resource of a session.
    Session {
        id: SessionId,
        /// The port that the address names.
        port: Option<u16>,
        /// `/s/{id}` or `/s/{id}:{port}`, or empty if the host names the session.
        prefix: String,
        /// Path and query for the session: byte for byte those of the request, without the prefix.
        target: PathAndQuery,
    },
    /// `/s/{id}` without the slash that relative links need.
    AddSlash {
        /// The path with the slash.
        location: String,
    },
}

/// Why a request has no valid target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressError {
    /// Neither of the two forms.
    Unknown,
    /// A request-target that no origin server serves: authority or asterisk form, or a scheme other
    /// than HTTP's.
    Target,
    /// A `Host` or authority that is not a host name.
    Host,
}

/// Reads a request's target and host.
///
/// Nothing is decoded or normalised, so nothing can change its meaning on the way: an id is
/// compared literally, and the session interprets `..` or `%2e` after the prefix.
pub(crate) fn read(uri: &Uri, host: &str, domain: Option<&str>) -> Result<Address, AddressError> {
    let origin_form = uri.scheme().is_none() && uri.authority().is_none();
    let http_form = matches!(uri.scheme_str(), Some("http" | "https" | "ws" | "wss"));
    if !origin_form && !http_form {
        return Err(AddressError::Target);
    }
    let target = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    // An absolute form may have a query after an empty path.
    let target = if target.starts_with('?') && http_form {
        &format!("/{target}")
    } else {
        target
    };
    if !target.starts_with('/') {
        return Err(AddressError::Target);
    }
    if let Some(domain) = domain {
        match session_of_host(host_name(host)?, domain) {
            HostForm::Session(id, port) => {
                let target = target.parse().map_err(|_| AddressError::Target)?;
                return Ok(Address::Session {
                    id,
                    port,
                    prefix: String::new(),
                    target,
                });
            }
            HostForm::Below => return Err(AddressError::Unknown),
            HostForm::Elsewhere => {}
        }
    } else {
        host_name(host)?;
    }
    read_path_form(target)
}

fn read_path_form(target: &str) -> Result<Address, AddressError> {
    let named = target
        .strip_prefix(PATH_PREFIX)
        .ok_or(AddressError::Unknown)?;
    let end = named.find(['/', '?']).unwrap_or(named.len());
    let (name, rest) = named.split_at(end);
    let (name, port) = match name.split_once(':') {
        Some((name, port)) => (name, Some(read_port(port).ok_or(AddressError::Unknown)?)),
        None => (name, None),
    };
    let id: SessionId = name.parse().map_err(|_| AddressError::Unknown)?;
    let prefix = path_prefix(&id, port);
    if rest.starts_with('/') {
        let target = rest.parse().map_err(|_| AddressError::Target)?;
        Ok(Address::Session {
            id,
            port,
            prefix,
            target,
        })
    } else {
        Ok(Address::AddSlash {
            location: format!("{prefix}/{rest}"),
        })
    }
}

/// `/s/{id}` or `/s/{id}:{port}`.
pub(crate) fn path_prefix(id: &SessionId, port: Option<u16>) -> String {
    match port {
        Some(port) => format!("{PATH_PREFIX}{id}:{port}"),
        None => format!("{PATH_PREFIX}{id}"),
    }
}

/// The label of a session's host: `{id}` or `{port}-{id}`. `None` for a port of a session whose id leaves
/// no room for it.
pub(crate) fn host_label(id: &SessionId, port: Option<u16>) -> Option<String> {
    match port {
        Some(_) if id.as_str().len() > SessionId::MAX_WITH_PORT => None,
        Some(port) => Some(format!("{port}-{id}")),
        None => Some(id.to_string()),
    }
}

/// A port as it is written in an address: without leading zeros, so that it has one form.
fn read_port(text: &str) -> Option<u16> {
    let port = text.parse::<u16>().ok()?;
    (port > 0 && port.to_string() == text).then_some(port)
}

/// The name in a `Host` field or authority, without its port.
fn host_name(host: &str) -> Result<&str, AddressError> {
    // HTTP/1.0 has no Host, and an empty one is allowed if the target has no authority.
    if host.is_empty() {
        return Ok("");
    }
    let authority = host.parse::<Authority>().map_err(|_| AddressError::Host)?;
    if host.contains(['@', '%']) {
        return Err(AddressError::Host);
    }
    let name = &host[..authority.host().len()];
    let port = &host[name.len()..];
    let port_is_number = port.is_empty()
        || port
            .strip_prefix(':')
            .is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()));
    if port_is_number {
        Ok(name)
    } else {
        Err(AddressError::Host)
    }
}

enum HostForm {
    Session(SessionId, Option<u16>),
    /// Below the domain, but not a session's name.
    Below,
    /// The domain itself, an address, or any other name.
    Elsewhere,
}

fn session_of_host(name: &str, domain: &str) -> HostForm {
    let Some(split) = name.len().checked_sub(domain.len() + 1) else {
        return HostForm::Elsewhere;
    };
    let (Some(label), Some(tail)) = (name.get(..split), name.get(split..)) else {
        return HostForm::Elsewhere;
    };
    let below = tail
        .strip_prefix('.')
        .is_some_and(|tail| tail.eq_ignore_ascii_case(domain));
    if !below {
        return HostForm::Elsewhere;
    }
    let label = label.to_ascii_lowercase();
    if let Ok(id) = label.parse() {
        return HostForm::Session(id, None);
    }
    let with_port = label.split_once('-').and_then(|(port, id)| {
        let id = id.parse().ok()?;
        Some((id, read_port(port)?))
    });
    match with_port {
        Some((id, port)) if host_label(&id, Some(port)).is_some() => {
            HostForm::Session(id, Some(port))
        }
        _ => HostForm::Below,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(target: &str, host: &str) -> Result<Address, AddressError> {
        read(&target.parse().expect(target), host, Some("conman.test"))
    }

    fn session(id: &str, prefix: &str, target: &str) -> Result<Address, AddressError> {
        Ok(Address::Session {
            id: id.parse().expect(id),
            port: None,
            prefix: prefix.to_owned(),
            target: target.parse().expect(target),
        })
    }

    #[test]
    fn a_host_below_the_domain_names_a_session_in_any_case_and_with_any_port() {
        for host in ["a1.conman.test", "A1.Conman.TEST", "a1.conman.test:7701"] {
            assert_eq!(
                at("/x?y=/s/b/", host),
                session("a1", "", "/x?y=/s/b/"),
                "{host}"
            );
        }
    }

    #[test]
    fn a_path_below_a_session_host_is_the_sessions_own_whatever_it_looks_like() {
        assert_eq!(at("/s/b/c", "a.conman.test"), session("a", "", "/s/b/c"));
    }

    #[test]
    fn names_below_the_domain_that_are_no_session_do_not_fall_back_to_the_path() {
        for host in [
            "a.b.conman.test",
            ".conman.test",
            "-.conman.test",
            "a_b.conman.test",
        ] {
            assert_eq!(at("/s/b/", host), Err(AddressError::Unknown), "{host}");
        }
    }

    #[test]
    fn the_path_form_works_under_every_other_host() {
        for host in [
            "",
            "conman.test",
            "127.0.0.1:7701",
            "[::1]:7701",
            "xconman.test",
            "é.test",
        ] {
            let result = at("/s/a/x//y/../%2e%2e/?q=1&r=%2F", host);
            if host.is_ascii() {
                assert_eq!(
                    result,
                    session("a", "/s/a", "/x//y/../%2e%2e/?q=1&r=%2F"),
                    "{host}"
                );
            } else {
                assert_eq!(result, Err(AddressError::Host));
            }
        }
    }

    #[test]
    fn a_port_is_named_before_the_id_in_the_host_and_after_it_in_the_path() {
        let named = |target: &str, host: &str| match at(target, host) {
            Ok(Address::Session {
                id, port, prefix, ..
            }) => Some((id.to_string(), port, prefix)),
            _ => None,
        };
        let found =
            |id: &str, port, prefix: &str| Some((id.to_owned(), Some(port), prefix.to_owned()));
        let host = "3000-a-1.conman.test:7701";
        assert_eq!(named("/s/b/", host), found("a-1", 3_000, ""));
        let path = named("/s/a:65535/x", "conman.test");
        assert_eq!(path, found("a", 65_535, "/s/a:65535"));
        let location = "/s/a:80/?x".to_owned();
        let redirected = at("/s/a:80?x", "conman.test");
        assert_eq!(redirected, Ok(Address::AddSlash { location }));
        for host in [
            "0-a", "080-a", "65536-a", "80--a", "80-", "80-81-a", "+80-a",
        ] {
            let host = format!("{host}.conman.test");
            assert_eq!(named("/", &host), None, "{host}");
        }
        for path in [
            "/s/a:/",
            "/s/a:0/",
            "/s/a:x/",
            "/s/a:080/",
            "/s/a:1:2/",
            "/s/80-a/",
        ] {
            assert_eq!(named(path, "conman.test"), None, "{path}");
        }
        for (length, port) in [(57, Some(80)), (58, None)] {
            let host = format!("80-{}.conman.test", "a".repeat(length));
            assert_eq!(named("/", &host).and_then(|(_, port, _)| port), port);
        }
    }

    #[test]
    fn a_session_path_without_its_slash_is_redirected_with_its_query() {
        for (target, location) in [("/s/a", "/s/a/"), ("/s/a?x=1", "/s/a/?x=1")] {
            let location = location.to_owned();
            assert_eq!(
                at(target, "conman.test"),
                Ok(Address::AddSlash { location })
            );
        }
    }

    #[test]
    fn tricks_with_the_prefix_are_unknown() {
        for target in [
            "/",
            "/s",
            "/s/",
            "/s//a/",
            "/S/a/",
            "//s/a/",
            "/%73/a/",
            "/s%2fa/",
            "/s/%61/",
            "/s/a%2fb/",
            "/s/../s/a/",
            "/s/./a/",
            "/s/a;b/",
            "/s/A/",
            "/s/a.b/",
            "/./s/a/",
            "/s/a%00/",
        ] {
            assert_eq!(
                at(target, "conman.test"),
                Err(AddressError::Unknown),
                "{target}"
            );
        }
    }

    #[test]
    fn the_absolute_form_is_read_like_the_origin_form() {
        let absolute = "http://a.conman.test:7701/x?y";
        assert_eq!(at(absolute, "a.conman.test:7701"), session("a", "", "/x?y"));
        assert_eq!(
            at("http://a.conman.test", "a.conman.test"),
            session("a", "", "/")
        );
        assert_eq!(
            at("http://conman.test/s/a/x", "conman.test"),
            session("a", "/s/a", "/x")
        );
        assert_eq!(
            at("ftp://a.conman.test/", "a.conman.test"),
            Err(AddressError::Target)
        );
    }

    #[test]
    fn targets_of_other_forms_are_refused() {
        assert_eq!(at("*", "a.conman.test"), Err(AddressError::Target));
        assert_eq!(
            at("a.conman.test:80", "a.conman.test"),
            Err(AddressError::Target)
        );
    }

    #[test]
    fn hosts_that_are_no_host_names_are_refused() {
        for host in [
            "user@a.conman.test",
            "a.conman.test:x",
            "a.conman.test:80:90",
            "a b",
            "a/b",
            "%61.conman.test",
        ] {
            assert_eq!(at("/", host), Err(AddressError::Host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn what_a_session_sees_is_what_stood_behind_the_prefix(rest in "/[!-~&&[^#]]{0,40}") {
            let text = format!("/s/abc{rest}");
            let Ok(uri) = text.parse::<Uri>() else { return Ok(()) };
            match read(&uri, "127.0.0.1", Some("localhost")) {
                Ok(Address::Session { id, target, .. }) => {
                    prop_assert_eq!(id.as_str(), "abc");
                    prop_assert_eq!(target.as_str(), rest);
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
