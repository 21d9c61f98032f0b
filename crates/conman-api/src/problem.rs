//! Errors as RFC 9457 problem details, and their conversion to responses.
//!
//! A handler's error travels as a [`Problem`] in the response's extensions, and the outermost
//! layer writes it out. So the request's path and id are added in one place, and no plain-text
//! error of axum or a layer reaches a client.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
pub(crate) use conman_proto::ProblemKind as Kind;
use conman_proto::{ExecOutput, FieldError, LimitMet, PROBLEM_CONTENT_TYPE, Problem};
use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// Makes the kinds of the table a handler's errors.
pub(crate) trait IntoApiError {
    /// An occurrence of this kind.
    fn because(self, detail: impl Into<String>) -> ApiError;

    /// An occurrence with every mistake in the request; the detail lists them.
    fn with_fields(self, errors: Vec<FieldError>) -> ApiError;

    /// An occurrence with the one mistake in the request.
    fn in_field(self, field: &str, message: impl Into<String>) -> ApiError;
}

impl IntoApiError for Kind {
    fn because(self, detail: impl Into<String>) -> ApiError {
        self.problem(detail).into()
    }

    fn with_fields(self, errors: Vec<FieldError>) -> ApiError {
        let detail = errors
            .iter()
            .map(|error| format!("{}: {}", error.field, error.message))
            .collect::<Vec<_>>()
            .join("; ");
        let mut error = self.because(detail);
        error.problem.errors = errors;
        error
    }

    fn in_field(self, field: &str, message: impl Into<String>) -> ApiError {
        let (field, message) = (field.to_owned(), message.into());
        self.with_fields(vec![FieldError { field, message }])
    }
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

    /// Adds what a command had printed.
    pub(crate) fn output(mut self, output: ExecOutput) -> Self {
        self.problem.output = Some(Box::new(output));
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
    problem.remedy = crate::remedies::remedy(problem.slug(), path);
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
    use super::*;

    #[test]
    fn an_unavailable_service_says_when_to_try_again() {
        for kind in Kind::ALL.iter().filter(|kind| kind.status == 503) {
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
