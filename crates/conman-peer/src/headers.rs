//! Which header fields end at a connection, which ones only conman may set, and those that nodes add for
//! each other.

use http::header::{
    self, CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, TE, TRANSFER_ENCODING, UPGRADE,
};

/// Prefix of the fields that only conman may set.
const RESERVED_PREFIX: &str = "x-conman-";

/// The session that a request is for.
pub const X_CONMAN_SESSION: HeaderName = HeaderName::from_static("x-conman-session");
/// The generation that the sender takes for the session's present one.
pub const X_CONMAN_GENERATION: HeaderName = HeaderName::from_static("x-conman-generation");
/// Why a node refused another one's request as misdirected, only on answers to nodes: nothing was
/// done.
pub const X_CONMAN_MISDIRECTED: HeaderName = HeaderName::from_static("x-conman-misdirected");

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
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
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
pub fn connection_has(headers: &HeaderMap, wanted: &str) -> bool {
    tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(wanted))
}

/// Whether the sender of these fields understands trailers.
pub fn accepts_trailers(headers: &HeaderMap) -> bool {
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
pub fn strip_forged(headers: &mut HeaderMap, trust_forwarded: bool) {
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

#[cfg(test)]
mod tests {
    use http::HeaderValue;

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
}
