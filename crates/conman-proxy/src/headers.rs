use conman_proto::{Generation, SessionId};
use http::Uri;
use http::header::{
    self, CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::PathAndQuery;

use crate::PortRequest;

/// Prefix of the fields that only conman may set.
const RESERVED_PREFIX: &str = "x-conman-";

pub(crate) static X_CONMAN_SESSION: HeaderName = HeaderName::from_static("x-conman-session");
pub(crate) static X_CONMAN_GENERATION: HeaderName = HeaderName::from_static("x-conman-generation");
/// For the session's node: the port that the client named.
static X_CONMAN_PORT: HeaderName = HeaderName::from_static("x-conman-port");
/// Value after the port if the caller has no token.
const PUBLIC_ONLY: &str = " public";
static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
pub(crate) static X_FORWARDED_PREFIX: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// Fields of one connection (RFC 9110, section 7.6.1), including those of older practice.
/// `Trailer` stays: it announces what is forwarded too.
static HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Removes the fields that end at this hop, including those that `Connection` names.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
        // A client must not be able to remove a request's target or length.
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Whether `Connection` of these fields has the token.
pub(crate) fn connection_has(headers: &HeaderMap, wanted: &str) -> bool {
    tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(wanted))
}

/// Whether the sender of these fields understands trailers.
pub(crate) fn accepts_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"))
}

fn tokens<'map>(
    headers: &'map HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'map str> + use<'map> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|token| token.trim_matches([' ', '\t']))
        .filter(|token| !token.is_empty())
}

/// Removes fields by which a peer could make statements about itself or in conman's name.
///
/// Programs behind CGI-like interfaces cannot distinguish `X_Conman_Session` from
/// `X-Conman-Session`, so an underscore counts as a hyphen here.
pub(crate) fn strip_forged(headers: &mut HeaderMap, trust_forwarded: bool) {
    let forged: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_forged(name.as_str(), trust_forwarded))
        .cloned()
        .collect();
    for name in forged {
        headers.remove(name);
    }
}

fn is_forged(name: &str, trust_forwarded: bool) -> bool {
    if !name.starts_with(['x', 'f']) {
        return false;
    }
    let folded = name.replace('_', "-");
    if folded.starts_with(RESERVED_PREFIX) {
        return true;
    }
    let tells_of_client = folded.starts_with("x-forwarded-")
        || folded.starts_with("x-original-")
        || folded == "x-real-ip"
        || folded == "forwarded";
    tells_of_client && (!trust_forwarded || folded != name)
}

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
    /// Puts it into the request's fields, which [`strip_forged`] has processed.
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
        headers.insert(X_CONMAN_SESSION.clone(), session);
    }
    headers.insert(
        X_CONMAN_GENERATION.clone(),
        HeaderValue::from(generation.get()),
    );
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

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn fields_of_the_hop_and_those_that_connection_names_end_here() {
        let mut headers = map(&[
            ("Connection", "keep-alive, X-Hop"),
            (
                "Connection",
                "close,x-other , Host, Content-Length, not a token",
            ),
            ("Keep-Alive", "timeout=5"),
            ("Proxy-Authorization", "Basic eA=="),
            ("Proxy-Connection", "keep-alive"),
            ("TE", "trailers"),
            ("Transfer-Encoding", "chunked"),
            ("Upgrade", "h2c"),
            ("HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"),
            ("X-Hop", "1"),
            ("X-Other", "1"),
            ("Trailer", "X-Sum"),
            ("Host", "a"),
            ("Content-Length", "5"),
            ("Cookie", "a=b"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(
            names(&headers),
            ["content-length", "cookie", "host", "trailer"]
        );
    }

    #[test]
    fn a_client_cannot_speak_in_conmans_name_not_even_with_underscores() {
        let fields = [
            ("X-Conman-Session", "b"),
            ("X_Conman-Generation", "9"),
            ("x_conman_anything", "9"),
            ("X-Forwarded-For", "1.2.3.4"),
            ("X_Forwarded_For", "1.2.3.4"),
            ("X-Forwarded-Port", "1"),
            ("X-Real-IP", "1.2.3.4"),
            ("X-Original-URL", "/admin"),
            ("Forwarded", "for=1.2.3.4"),
            ("X-Conmanager", "kept"),
            ("From", "kept"),
        ];
        let mut headers = map(&fields);
        strip_forged(&mut headers, false);
        assert_eq!(names(&headers), ["from", "x-conmanager"]);
        let mut trusted = map(&fields);
        strip_forged(&mut trusted, true);
        assert_eq!(
            names(&trusted),
            [
                "forwarded",
                "from",
                "x-conmanager",
                "x-forwarded-for",
                "x-forwarded-port",
                "x-original-url",
                "x-real-ip"
            ]
        );
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
