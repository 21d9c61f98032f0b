//! Errors as RFC 9457 problem details: the kinds of error of this API, and their conversion to
//! responses.
//!
//! A handler's error travels as a [`Problem`] in the response's extensions, and the outermost
//! layer writes it out. So the request's path and id are added in one place, and no plain-text
//! error of axum or a layer reaches a client.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use conman_proto::{FieldError, LimitMet, PROBLEM_CONTENT_TYPE, Problem};
use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// A kind of error: the fields that all its occurrences share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) slug: &'static str,
    pub(crate) title: &'static str,
    pub(crate) status: StatusCode,
    pub(crate) retryable: bool,
}

impl Kind {
    const fn lasting(slug: &'static str, title: &'static str, status: StatusCode) -> Self {
        Self {
            slug,
            title,
            status,
            retryable: false,
        }
    }

    const fn passing(slug: &'static str, title: &'static str, status: StatusCode) -> Self {
        Self {
            slug,
            title,
            status,
            retryable: true,
        }
    }

    /// An occurrence of this kind.
    pub(crate) fn because(self, detail: impl Into<String>) -> ApiError {
        let mut problem = Problem::new(self.slug, self.title, self.status.as_u16(), detail);
        problem.retryable = self.retryable;
        ApiError::from(Box::new(problem))
    }

    /// An occurrence with every mistake in the request; the detail lists them.
    pub(crate) fn with_fields(self, errors: Vec<FieldError>) -> ApiError {
        let detail = errors
            .iter()
            .map(|error| format!("{}: {}", error.field, error.message))
            .collect::<Vec<_>>()
            .join("; ");
        let mut error = self.because(detail);
        error.problem.errors = errors;
        error
    }
}

macro_rules! kinds {
    ($($name:ident = $how:ident($slug:literal, $title:literal, $status:ident);)*) => {
        impl Kind {
            $(pub(crate) const $name: Self = Self::$how($slug, $title, StatusCode::$status);)*
        }
        #[cfg(test)]
        const ALL: &[Kind] = &[$(Kind::$name),*];
    };
}

kinds! {
    // The request itself.
    BAD_PATH = lasting("bad-path", "The path names no resource", BAD_REQUEST);
    BAD_QUERY = lasting("bad-query", "The query parameters are not valid", BAD_REQUEST);
    BAD_JSON = lasting("bad-json", "The body is not JSON", BAD_REQUEST);
    BAD_BODY = lasting("bad-body", "The body does not fit this request", UNPROCESSABLE_ENTITY);
    BAD_REQUEST = lasting("bad-request", "The request is not valid", BAD_REQUEST);
    BODY_TOO_LARGE = lasting("body-too-large", "The body is too large", PAYLOAD_TOO_LARGE);
    BODY_TOO_SLOW = passing("body-too-slow", "The body did not arrive in time", REQUEST_TIMEOUT);
    MEDIA_TYPE = lasting("unsupported-media-type", "The body is of another type", UNSUPPORTED_MEDIA_TYPE);
    NO_SUCH_ROUTE = lasting("no-such-route", "There is nothing at this path", NOT_FOUND);
    METHOD = lasting("method-not-allowed", "The path knows other methods", METHOD_NOT_ALLOWED);
    UPGRADE = lasting("upgrade-required", "This is a WebSocket", UPGRADE_REQUIRED);
    // Sessions.
    NO_SUCH_SESSION = lasting("no-such-session", "There is no such session", NOT_FOUND);
    BAD_SPEC = lasting("bad-spec", "The session's spec is not valid", UNPROCESSABLE_ENTITY);
    NO_SUCH_RUNTIME = lasting("no-such-runtime", "The node lacks the runtime", UNPROCESSABLE_ENTITY);
    NO_SUCH_IMAGE = lasting("no-such-image", "The image is not on this node", UNPROCESSABLE_ENTITY);
    BAD_BIND = lasting("bind-refused", "A bind cannot be made", UNPROCESSABLE_ENTITY);
    REFUSED = lasting("start-refused", "The runtime refuses the session", UNPROCESSABLE_ENTITY);
    EXITED = lasting("start-exited", "The program ended before it was ready", BAD_GATEWAY);
    UNREADY = lasting("start-not-ready", "The program did not answer in time", GATEWAY_TIMEOUT);
    SLOW_START = passing("start-timed-out", "The start took too long", GATEWAY_TIMEOUT);
    INTERRUPTED = passing("start-interrupted", "The daemon restarted meanwhile", SERVICE_UNAVAILABLE);
    STOPPED = passing("session-stopped", "The session was stopped meanwhile", CONFLICT);
    ENDED = lasting("session-ended", "The session has ended", CONFLICT);
    NOT_RUNNING = passing("not-running", "The session is not running", CONFLICT);
    NOT_KEPT = lasting("log-not-kept", "The session's log is gone", NOT_FOUND);
    ENDING = passing("session-ending", "The session's former container is ending", CONFLICT);
    STUCK = passing("session-stuck", "The session could not be killed yet", CONFLICT);
    NO_PORT = lasting("no-port", "The session has no port", CONFLICT);
    NO_SUCH_COMMAND = lasting("no-such-command", "The command cannot be run", UNPROCESSABLE_ENTITY);
    EXEC_FAILED = lasting("exec-failed", "How the command ended is unknown", BAD_GATEWAY);
    EXEC_TIMED_OUT = lasting("exec-timed-out", "The command did not end in time", GATEWAY_TIMEOUT);
    NO_TERMINAL = lasting("no-terminal", "The session has no terminal", CONFLICT);
    NO_SUCH_EXEC = lasting("no-such-exec", "There is no such kept command", NOT_FOUND);
    TOO_MANY_TERMINALS = passing("too-many-terminals", "There is no room for more terminals", CONFLICT);
    UNSUPPORTED = lasting("not-supported", "The session's runtime cannot do that", UNPROCESSABLE_ENTITY);
    // Images.
    NO_IMAGE = lasting("image-not-found", "There is no such image", NOT_FOUND);
    BAD_IMAGE = lasting("bad-image", "The image cannot be imported", UNPROCESSABLE_ENTITY);
    STORE_FULL = passing("image-store-full", "The image store has no room", INSUFFICIENT_STORAGE);
    STORE_READ_ONLY = lasting("image-store-read-only", "The image store cannot be written", INSUFFICIENT_STORAGE);
    IMAGES_BUSY = passing("too-many-images", "Too many images arrive at a time", SERVICE_UNAVAILABLE);
    NOT_IN_REGISTRY = lasting("not-in-registry", "The registry does not have the image", UNPROCESSABLE_ENTITY);
    NOT_FROM_THERE = lasting("registry-not-allowed", "This node does not pull from the registry", UNPROCESSABLE_ENTITY);
    REGISTRY_REFUSES = lasting("image-registry-refused", "The registry does not let conman in", BAD_GATEWAY);
    REGISTRY_TROUBLE = passing("image-registry-failed", "The registry did not answer as it should", BAD_GATEWAY);
    REGISTRY_SLOW = passing("image-registry-timed-out", "The registry took too long", GATEWAY_TIMEOUT);
    // The node.
    NO_SUCH_NODE = lasting("no-such-node", "There is no such node", NOT_FOUND);
    NO_ROOM = passing("host-full", "The host takes no more sessions", SERVICE_UNAVAILABLE);
    FULL = passing("node-full", "The node takes no more sessions", SERVICE_UNAVAILABLE);
    CROWDED = passing("too-many-waiting", "Too many connections wait", SERVICE_UNAVAILABLE);
    HELD_TOO_LONG = passing("hold-timed-out", "The session was not ready in time", GATEWAY_TIMEOUT);
    DRAINING = passing("node-draining", "The node is being drained", SERVICE_UNAVAILABLE);
    NOT_DRAINING = lasting("not-draining", "The node is not being drained", NOT_FOUND);
    PREEMPTED = passing("node-preempted", "The node is going away", SERVICE_UNAVAILABLE);
    ELSEWHERE = passing("session-elsewhere", "The session is on another node", MISDIRECTED_REQUEST);
    MOVES = passing("session-moves", "The session changes its node", SERVICE_UNAVAILABLE);
    NO_NODE = passing("no-node", "No node takes the session", SERVICE_UNAVAILABLE);
    TOO_MANY_STREAMS = passing("too-many-streams", "Too many streams of events are open", SERVICE_UNAVAILABLE);
    MANY_OWN_STREAMS = passing("too-many-own-streams", "The caller has too many streams of events open", TOO_MANY_REQUESTS);
    NODE_UNREACHABLE = passing("node-unreachable", "The session's node cannot be reached", SERVICE_UNAVAILABLE);
    NODE_SILENT = lasting("node-silent", "The session's node did not answer", BAD_GATEWAY);
    NODE_REFUSES = lasting("node-refuses", "The session's node does not know this one", BAD_GATEWAY);
    NODE_NOT_LOST = lasting("node-not-lost", "The node is not known to be dead", CONFLICT);
    NODE_OWNS = lasting("node-owns-sessions", "The node still owns sessions", CONFLICT);
    NODE_LOST = lasting("node-lost", "The session's node is gone", CONFLICT);
    NOT_READY = passing("node-not-ready", "The node is not ready", SERVICE_UNAVAILABLE);
    NO_RUNTIME = passing("runtime-unavailable", "The runtime does not answer", SERVICE_UNAVAILABLE);
    NO_REGISTRY = passing("registry-failed", "The registry failed", SERVICE_UNAVAILABLE);
    HOST_FAILED = passing("host-failed", "The host lacks something", SERVICE_UNAVAILABLE);
    TIMED_OUT = passing("timed-out", "The request took too long", SERVICE_UNAVAILABLE);
    SHUTTING_DOWN = passing("shutting-down", "conman is shutting down", SERVICE_UNAVAILABLE);
    INTERNAL = lasting("internal", "conman has a bug", INTERNAL_SERVER_ERROR);
}

/// Seconds after which a client should try again if no better value is known.
const RETRY_AFTER_S: u32 = 1;

/// A handler's error.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    problem: Box<Problem>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl ApiError {
    /// Adds a response header.
    pub(crate) fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Sets whether the same request may succeed later, if the error knows it.
    pub(crate) fn retryable(mut self, retryable: bool) -> Self {
        self.problem.retryable = retryable;
        self
    }

    /// Names the limit that was met.
    pub(crate) fn limit(mut self, limit: Option<LimitMet>) -> Self {
        self.problem.limit = limit.map(Box::new);
        self
    }

    /// Without the headers.
    pub(crate) fn into_problem(self) -> Problem {
        *self.problem
    }

    #[cfg(test)]
    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }
}

impl From<Box<Problem>> for ApiError {
    fn from(problem: Box<Problem>) -> Self {
        Self {
            problem,
            headers: Vec::new(),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status =
            StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        for (name, value) in self.headers {
            response.headers_mut().insert(name, value);
        }
        if status == StatusCode::SERVICE_UNAVAILABLE
            && !response.headers().contains_key(RETRY_AFTER)
        {
            response
                .headers_mut()
                .insert(RETRY_AFTER, RETRY_AFTER_S.into());
        }
        if status == StatusCode::UNAUTHORIZED && !response.headers().contains_key(WWW_AUTHENTICATE)
        {
            let challenge = HeaderValue::from_static("Bearer realm=\"conman\"");
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response.extensions_mut().insert(*self.problem);
        response
    }
}

/// Writes out the problem that a response carries. An error response of a layer or of axum has
/// none and gets the problem of its status.
pub(crate) fn write_out(response: Response, path: &str) -> Response {
    let status = response.status();
    let (mut parts, body) = response.into_parts();
    let problem = match parts.extensions.remove::<Problem>() {
        Some(problem) => Some(problem),
        None if is_problem(&parts.headers) => None,
        None if status.is_client_error() || status.is_server_error() => {
            Some(for_bare_status(status, &parts.headers))
        }
        None => None,
    };
    let Some(mut problem) = problem else {
        return Response::from_parts(parts, body);
    };
    problem.instance = Some(path.to_owned());
    let body = serde_json::to_vec(&problem).unwrap_or_default();
    parts.headers.remove(CONTENT_LENGTH);
    parts
        .headers
        .insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_CONTENT_TYPE));
    parts
        .headers
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Response::from_parts(parts, Body::from(body))
}

fn is_problem(headers: &HeaderMap) -> bool {
    headers
        .get(CONTENT_TYPE)
        .is_some_and(|value| value == PROBLEM_CONTENT_TYPE)
}

fn for_bare_status(status: StatusCode, headers: &HeaderMap) -> Problem {
    let error = if status == StatusCode::METHOD_NOT_ALLOWED {
        let allowed = headers
            .get(ALLOW)
            .and_then(|value| value.to_str().ok())
            .unwrap_or("none");
        Kind::METHOD.because(format!("the methods of this path are {allowed}"))
    } else if status == StatusCode::NOT_FOUND {
        Kind::NO_SUCH_ROUTE.because("GET /v1/openapi.json describes every path")
    } else if status == StatusCode::PAYLOAD_TOO_LARGE {
        Kind::BODY_TOO_LARGE.because("the body is larger than this path takes")
    } else if status.is_client_error() {
        let mut error = Kind::BAD_REQUEST.because("the request cannot be understood");
        error.problem.status = status.as_u16();
        error
    } else {
        let mut error = Kind::INTERNAL.because("the request failed without a reason given");
        error.problem.status = status.as_u16();
        error
    };
    error.into_problem()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_kind_of_error_has_a_slug_of_its_own_and_an_error_status() {
        let slugs: BTreeSet<_> = ALL.iter().map(|kind| kind.slug).collect();
        assert_eq!(slugs.len(), ALL.len());
        for kind in ALL {
            assert!(
                kind.status.is_client_error() || kind.status.is_server_error(),
                "{kind:?}"
            );
        }
    }

    #[test]
    fn an_unavailable_service_says_when_to_try_again() {
        for kind in ALL
            .iter()
            .filter(|kind| kind.status == StatusCode::SERVICE_UNAVAILABLE)
        {
            let response = kind.because("x").into_response();
            assert!(response.headers().contains_key(RETRY_AFTER), "{kind:?}");
            assert!(kind.retryable, "{kind:?}");
        }
    }

    #[test]
    fn a_plain_text_error_of_a_layer_becomes_a_problem_that_keeps_its_headers() {
        let response = (StatusCode::METHOD_NOT_ALLOWED, [(ALLOW, "GET")], "no").into_response();
        let response = write_out(response, "/v1/sessions");
        assert!(is_problem(response.headers()));
        assert_eq!(response.headers()[ALLOW], "GET");
    }
}
