//! The fields that conman adds to a request for a session.

use conman_peer::headers::{X_CONMAN_GENERATION, X_CONMAN_SESSION};
use conman_proto::{Generation, SessionId};
use http::Uri;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;

use crate::PortRequest;

/// For the session's node: the port that the client named.
static X_CONMAN_PORT: HeaderName = HeaderName::from_static("x-conman-port");
/// Value after the port if the caller has no token.
const PUBLIC_ONLY: &str = " public";
static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub(crate) static X_FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// The proxy's statements about a request to a session.
pub(crate) struct Provenance<'request> {
    /// The address of the client.
    pub(crate) peer: &'request HeaderValue,
    /// The requested host.
    pub(crate) host: &'request HeaderValue,
    /// The prefix that was removed from the path; empty if none was.
    pub(crate) prefix: &'request str,
    pub(crate) session: &'request SessionId,
    pub(crate) generation: Generation,
}

impl Provenance<'_> {
    /// Puts it into the request's fields, which `strip_forged` has processed.
    pub(crate) fn apply(&self, headers: &mut HeaderMap) {
        let chain = joined(headers, &X_FORWARDED_FOR, self.peer);
        headers.insert(X_FORWARDED_FOR.clone(), chain);
        // A trusted proxy's host and scheme stay; those of an untrusted one have been removed.
        headers
            .entry(&X_FORWARDED_HOST)
            .or_insert_with(|| self.host.clone());
        headers
            .entry(&X_FORWARDED_PROTO)
            .or_insert_with(|| HeaderValue::from_static("http"));
        if !self.prefix.is_empty() {
            let outer = headers
                .get(&X_FORWARDED_PREFIX)
                .map_or(&b""[..], HeaderValue::as_bytes);
            let prefix = [outer, self.prefix.as_bytes()].concat();
            if let Ok(prefix) = HeaderValue::from_bytes(&prefix) {
                headers.insert(X_FORWARDED_PREFIX.clone(), prefix);
            }
        }
        name_session(headers, self.session, self.generation);
    }
}

/// Adds the session that a request is for.
pub(crate) fn name_session(headers: &mut HeaderMap, session: &SessionId, generation: Generation) {
    // An id and a number are always field values.
    if let Ok(session) = HeaderValue::from_str(session.as_str()) {
        headers.insert(X_CONMAN_SESSION, session);
    }
    headers.insert(X_CONMAN_GENERATION, HeaderValue::from(generation.get()));
}

/// Adds the port for the session's node; removes it for the session.
pub(crate) fn name_port(headers: &mut HeaderMap, port: Option<PortRequest>) {
    let Some(PortRequest { port, public_only }) = port else {
        headers.remove(&X_CONMAN_PORT);
        return;
    };
    let note = if public_only { PUBLIC_ONLY } else { "" };
    if let Ok(value) = HeaderValue::from_str(&format!("{port}{note}")) {
        headers.insert(&X_CONMAN_PORT, value);
    }
}

/// The port that another node names; `Err` for a field that no node sends.
pub(crate) fn named_port(headers: &HeaderMap) -> Result<Option<PortRequest>, ()> {
    let Some(value) = headers.get(&X_CONMAN_PORT) else {
        return Ok(None);
    };
    let text = value.to_str().map_err(|_| ())?;
    let (port, public_only) = match text.strip_suffix(PUBLIC_ONLY) {
        Some(port) => (port, true),
        None => (text, false),
    };
    let port = port.parse().map_err(|_| ())?;
    Ok(Some(PortRequest { port, public_only }))
}

/// Puts `own` back before the path of a request from which it was removed, for a program that serves its
/// pages below it. `X-Forwarded-Prefix` then names only what a trusted proxy removed.
pub(crate) fn restore_prefix(parts: &mut Parts, own: &str) {
    let removed = parts.headers.get(&X_FORWARDED_PREFIX);
    let Some(outer) = removed.and_then(|all| all.as_bytes().strip_suffix(own.as_bytes())) else {
        return;
    };
    let outer = HeaderValue::from_bytes(outer);
    let rest = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    // Fails only for a path that is too long, which stays as it is.
    let (Ok(outer), Ok(target)) = (outer, format!("{own}{rest}").parse::<PathAndQuery>()) else {
        return;
    };
    parts.uri = Uri::from(target);
    if outer.is_empty() {
        parts.headers.remove(&X_FORWARDED_PREFIX);
    } else {
        parts.headers.insert(&X_FORWARDED_PREFIX, outer);
    }
}

/// The values of a field as one list with one more entry.
fn joined(headers: &HeaderMap, name: &HeaderName, last: &HeaderValue) -> HeaderValue {
    let mut list = Vec::new();
    for value in headers.get_all(name) {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(last.as_bytes());
    HeaderValue::from_bytes(&list).unwrap_or_else(|_| last.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            let name = HeaderName::from_bytes(name.as_bytes()).expect(name);
            headers.append(name, HeaderValue::from_str(value).expect(value));
        }
        headers
    }

    fn provenance(headers: &mut HeaderMap, prefix: &str) {
        let session: SessionId = "alice".parse().expect("an id");
        Provenance {
            peer: &HeaderValue::from_static("192.0.2.7"),
            host: &HeaderValue::from_static("alice.localhost:7701"),
            prefix,
            session: &session,
            generation: Generation::new(7).expect("not zero"),
        }
        .apply(headers);
    }

    #[test]
    fn a_session_learns_where_a_request_came_from() {
        let mut headers = HeaderMap::new();
        provenance(&mut headers, "/s/alice");
        assert_eq!(
            headers,
            map(&[
                ("X-Forwarded-For", "192.0.2.7"),
                ("X-Forwarded-Host", "alice.localhost:7701"),
                ("X-Forwarded-Proto", "http"),
                ("X-Forwarded-Prefix", "/s/alice"),
                ("X-Conman-Session", "alice"),
                ("X-Conman-Generation", "7"),
            ])
        );
    }

    #[test]
    fn what_a_trusted_proxy_said_is_extended() {
        let mut headers = map(&[
            ("X-Forwarded-For", "198.51.100.1"),
            ("X-Forwarded-For", "198.51.100.2"),
            ("X-Forwarded-Host", "public.example"),
            ("X-Forwarded-Proto", "https"),
            ("X-Forwarded-Prefix", "/tools"),
        ]);
        provenance(&mut headers, "/s/alice");
        assert_eq!(
            headers["x-forwarded-for"],
            "198.51.100.1, 198.51.100.2, 192.0.2.7"
        );
        assert_eq!(headers["x-forwarded-host"], "public.example");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-prefix"], "/tools/s/alice");
    }

    #[test]
    fn a_removed_prefix_is_put_back_and_no_longer_named() {
        for (named, target, outer) in [
            (Some("/s/a"), "/s/a/x?y=1", None),
            (Some("/outer/s/a"), "/s/a/x?y=1", Some("/outer")),
            (Some("/s/ab"), "/x?y=1", Some("/s/ab")),
            (None, "/x?y=1", None),
        ] {
            let request = http::Request::get("/x?y=1").body(()).expect("a request");
            let mut parts = request.into_parts().0;
            if let Some(named) = named {
                let value = HeaderValue::from_static(named);
                parts.headers.insert(&X_FORWARDED_PREFIX, value);
            }
            // Twice is the same as once.
            for _ in 0..2 {
                restore_prefix(&mut parts, "/s/a");
                assert_eq!(parts.uri.to_string(), target);
                let left = parts.headers.get(&X_FORWARDED_PREFIX);
                assert_eq!(left.and_then(|left| left.to_str().ok()), outer, "{named:?}");
            }
        }
    }
}
