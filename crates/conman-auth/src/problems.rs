//! The refusals of this crate as problem details; each kind has one slug and one status.

use conman_proto::Problem;

/// 401: no credential, or an invalid one.
pub(crate) fn unauthenticated(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "unauthenticated",
        "A valid token is needed",
        401,
        detail,
    ))
}

/// 403: a valid credential that does not allow this.
pub(crate) fn forbidden(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "forbidden",
        "The token does not allow this",
        403,
        detail,
    ))
}

/// 403: the `Host` is not served here.
pub(crate) fn host_refused(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "host-refused",
        "The Host is not served here",
        403,
        detail,
    ))
}

/// 403: a request from a page of an origin that is not allowed.
pub(crate) fn origin_refused(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "origin-refused",
        "Requests from pages of this origin are refused",
        403,
        detail,
    ))
}

/// 400: the request's head is ambiguous or invalid.
pub(crate) fn bad_request(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "bad-request",
        "The request is not valid",
        400,
        detail,
    ))
}

/// A client's text for a detail: truncated and without control characters.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const LONGEST: usize = 100;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST)]);
    text.escape_debug().collect()
}
