//! The refusals of this crate as problem details; each kind has one slug and one status.

use conman_proto::Problem;

/// 401: no credential, or one that is not valid.
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

/// 403: the `Host` names nothing that is served here.
pub(crate) fn host_refused(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "host-refused",
        "The Host is not served here",
        403,
        detail,
    ))
}

/// 403: a browser asks on behalf of a page that may not.
pub(crate) fn origin_refused(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "origin-refused",
        "Pages of this origin may not ask this",
        403,
        detail,
    ))
}

/// 400: the request's head cannot be judged.
pub(crate) fn bad_request(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "bad-request",
        "The request is not valid",
        400,
        detail,
    ))
}

/// Text of a client's for a detail: cut to a length and without control characters.
pub(crate) fn quoted(bytes: &[u8]) -> String {
    const LONGEST: usize = 100;
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST)]);
    text.escape_debug().collect()
}
