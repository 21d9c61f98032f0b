//! Confines a session's answers, so that they do not affect other sessions in the same browser.

use http::HeaderMap;
use http::header::{
    ALT_SVC, COOKIE, HeaderName, HeaderValue, ORIGIN, SET_COOKIE, STRICT_TRANSPORT_SECURITY,
    UPGRADE_INSECURE_REQUESTS,
};

/// Prefix of conman's cookie names, in any case.
const OWN_COOKIES: &[u8] = b"conman_";

/// Deletes cookies of the whole registrable domain, including other sessions'.
static CLEAR_SITE_DATA: HeaderName = HeaderName::from_static("clear-site-data");

/// Fields that a browser applies to the whole origin.
static OF_THE_ORIGIN: [HeaderName; 5] = [
    HeaderName::from_static("service-worker-allowed"),
    STRICT_TRANSPORT_SECURITY,
    ALT_SVC,
    HeaderName::from_static("report-to"),
    HeaderName::from_static("nel"),
];

/// Beginnings of fields by which a server behind a web server or a cache gives that server orders: send a file
/// of its disk, send the client's request elsewhere, keep or discard what it caches, take a backend out.
static SERVER_ORDERS: [&str; 8] = [
    "x-accel-",
    "x-sendfile",
    "x-send-file",
    "x-lighttpd-",
    "x-litespeed-",
    "x-reproxy-",
    "x-envoy-",
    "surrogate-",
];

/// Whether a field is an order to the web server or cache in front of conman (nginx, lighttpd, LiteSpeed, H2O,
/// Envoy, Varnish and others). An underscore counts as a hyphen, as some of these servers read it.
#[must_use]
pub fn is_server_order(name: &HeaderName) -> bool {
    let name = name.as_str();
    if !name.starts_with(['x', 's']) {
        return false;
    }
    let folded = name.replace('_', "-");
    SERVER_ORDERS.iter().any(|begin| folded.starts_with(begin))
}

/// Removes orders to the server in front of conman, which would obey a session as if it were the operator.
/// `trusted` names those that stay.
pub(crate) fn strip_server_orders(headers: &mut HeaderMap, trusted: &[HeaderName]) {
    let orders: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_server_order(name) && !trusted.contains(name))
        .cloned()
        .collect();
    for name in orders {
        headers.remove(name);
    }
}

/// Confines an answer's fields to the session. `scope` is the session's path in the browser,
/// without its final slash, and empty if the session has a separate host.
///
/// A cookie loses its `Domain`, so that only this host gets it, and its `Path` is moved below
/// `scope`. Cookies with conman's names are dropped. `Clear-Site-Data` is dropped; if sessions
/// share an origin, so is every other field of [`OF_THE_ORIGIN`]. On a session's separate host
/// `Strict-Transport-Security` and `Alt-Svc` stay: they apply to that host and names below it,
/// which lead to no other session.
pub(crate) fn confine(headers: &mut HeaderMap, scope: &[u8]) {
    headers.remove(&CLEAR_SITE_DATA);
    if !scope.is_empty() {
        for name in &OF_THE_ORIGIN {
            headers.remove(name);
        }
    }
    let cookies = headers.get_all(SET_COOKIE).iter();
    let cookies: Vec<HeaderValue> = cookies
        .filter_map(|cookie| confined(cookie.as_bytes(), scope))
        .collect();
    headers.remove(SET_COOKIE);
    for cookie in cookies {
        headers.append(SET_COOKIE, cookie);
    }
}

/// A `Set-Cookie` as a browser may have it; `None` for one of conman's.
fn confined(cookie: &[u8], scope: &[u8]) -> Option<HeaderValue> {
    let mut parts = cookie.split(|&byte| byte == b';');
    let pair = parts.next()?;
    if is_own(pair) {
        return None;
    }
    let mut confined = pair.to_vec();
    for part in parts {
        let (name, value) = match part.iter().position(|&byte| byte == b'=') {
            Some(equals) => (&part[..equals], part[equals + 1..].trim_ascii()),
            None => (part, &b""[..]),
        };
        let name = name.trim_ascii();
        if name.eq_ignore_ascii_case(b"domain") {
            continue;
        }
        confined.push(b';');
        if name.eq_ignore_ascii_case(b"path") && value.starts_with(b"/") && !is_in(value, scope) {
            confined.extend_from_slice(b" Path=");
            confined.extend_from_slice(scope);
            confined.extend_from_slice(value);
        } else {
            confined.extend_from_slice(part);
        }
    }
    HeaderValue::from_bytes(&confined).ok()
}

fn is_in(path: &[u8], scope: &[u8]) -> bool {
    let rest = path.strip_prefix(scope);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// Whether a cookie's name is one of conman's. A cookie without a name is sent back as its value
/// only, so the value counts as the name.
fn is_own(pair: &[u8]) -> bool {
    let begin = pair
        .iter()
        .position(|byte| !matches!(byte, b' ' | b'\t' | b'='));
    let name = begin.map_or(&b""[..], |begin| &pair[begin..]);
    name.get(..OWN_COOKIES.len())
        .is_some_and(|begin| begin.eq_ignore_ascii_case(OWN_COOKIES))
}

/// Whether a request comes from a browser, as far as it shows: it names its page, has conman's
/// cookie, or opens a page by plain HTTP on another host.
pub(crate) fn is_browsers(headers: &HeaderMap) -> bool {
    let names = |name: &HeaderName| {
        *name == ORIGIN
            || *name == UPGRADE_INSECURE_REQUESTS
            || name.as_str().starts_with("sec-fetch-")
    };
    let mut cookies = headers
        .get_all(COOKIE)
        .iter()
        .flat_map(|value| value.as_bytes().split(|&byte| byte == b';'));
    headers.keys().any(names) || cookies.any(is_own)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cookie(given: &str, scope: &str) -> Option<String> {
        let confined = confined(given.as_bytes(), scope.as_bytes())?;
        Some(confined.to_str().expect("text").to_owned())
    }

    #[test]
    fn a_session_gives_no_orders_to_the_server_in_front() {
        let fields = [
            "x-accel-redirect",
            "x_accel-buffering",
            "x-accel-expires",
            "x-sendfile",
            "x-sendfile2",
            "x-send-file",
            "x-lighttpd-send-file",
            "x-litespeed-location",
            "x-reproxy-url",
            "x-envoy-immediate-health-check-fail",
            "surrogate-control",
            "surrogate_key",
            "x-accelerator",
            "x-request-id",
            "server",
        ];
        let mut headers = HeaderMap::new();
        for name in fields {
            headers.append(name, HeaderValue::from_static("1"));
        }
        let trusted = [HeaderName::from_static("x-accel-expires")];
        strip_server_orders(&mut headers, &trusted);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            ["server", "x-accel-expires", "x-accelerator", "x-request-id"]
        );
    }

    #[test]
    fn a_cookie_is_for_its_own_host_alone() {
        for (given, left) in [
            ("a=b", "a=b"),
            ("a=b; Path=/; HttpOnly", "a=b; Path=/; HttpOnly"),
            ("a=b; Domain=localhost; Path=/x", "a=b; Path=/x"),
            (
                "a=b;domain=.localhost;DOMAIN = localhost;Secure",
                "a=b;Secure",
            ),
            ("a=Domain; domain", "a=Domain"),
        ] {
            assert_eq!(cookie(given, "").as_deref(), Some(left), "{given}");
        }
    }

    #[test]
    fn a_cookie_stays_below_the_path_of_its_session() {
        for (given, left) in [
            ("a=b", "a=b"),
            ("a=b; Path=/", "a=b; Path=/s/alice/"),
            ("a=b; path = /x ;Secure", "a=b; Path=/s/alice/x;Secure"),
            ("a=b; Path=/s/bob/", "a=b; Path=/s/alice/s/bob/"),
            ("a=b; Path=/s/alice", "a=b; Path=/s/alice"),
            ("a=b; Path=/s/alice/x", "a=b; Path=/s/alice/x"),
            ("a=b; Path=/s/alicex", "a=b; Path=/s/alice/s/alicex"),
            ("a=b; Path=x", "a=b; Path=x"),
            (
                "a=b; Path=/s/alice; Path=/",
                "a=b; Path=/s/alice; Path=/s/alice/",
            ),
        ] {
            assert_eq!(cookie(given, "/s/alice").as_deref(), Some(left), "{given}");
        }
    }

    #[test]
    fn a_cookie_named_like_conmans_own_is_dropped() {
        for given in [
            "conman_session=x",
            " Conman_Session = x; Path=/",
            "=conman_session=x",
            " = =conman_session=x",
            "conman_session",
            "conman_",
        ] {
            assert_eq!(cookie(given, ""), None, "{given}");
        }
        for given in ["conman=x", "x=conman_session", "my_conman_session=x"] {
            assert_eq!(cookie(given, "").as_deref(), Some(given));
        }
    }

    #[test]
    fn a_request_shows_that_it_comes_from_a_browser() {
        let of = |name: &'static str, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.append("accept", HeaderValue::from_static("*/*"));
            headers.append(name, HeaderValue::from_static(value));
            is_browsers(&headers)
        };
        assert!(of("origin", "null") && of("sec-fetch-site", "none"));
        assert!(of("cookie", "a=b; conman_session=x") && of("upgrade-insecure-requests", "1"));
        assert!(!of("cookie", "a=conman_session") && !of("sec-websocket-version", "13"));
    }
}
