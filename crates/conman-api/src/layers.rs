//! The layers around every request, outermost first: an id and a log line, security headers,
//! problems written out, panics caught. Time limits are set for each route.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use http::{HeaderName, HeaderValue, StatusCode};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::problem::{self, IntoApiError as _, Kind};
use crate::server::Peer;

/// Answers have the id of their request's log line.
pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest time for a route that only reads or stores something.
const QUICK: Duration = Duration::from_secs(30);

/// Counts requests of this process; unique within its log.
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(1);

/// The outermost layer. It logs method and path, never the query (it may contain commands and
/// their environment) or headers.
pub(crate) async fn outermost(request: Request, next: Next) -> Response {
    let id = format!("{:08x}", NEXT_REQUEST.fetch_add(1, Ordering::Relaxed));
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let peer = request.extensions().get::<Peer>().copied();
    let cut = crate::field_errors::cut(&path);
    let caller = tracing::field::Empty;
    let span = tracing::info_span!("request", id, %method, path = cut, caller);
    let started = Instant::now();
    async move {
        let mut response = problem::write_out(next.run(request).await, &path);
        let route = response.extensions_mut().remove::<MatchedPath>();
        let route = route
            .as_ref()
            .map_or("none", MatchedPath::as_str)
            .to_owned();
        set_headers(&mut response, &id);
        let status = response.status().as_u16();
        let peer = peer.map(tracing::field::display);
        let took_ms = started.elapsed().as_secs_f64() * 1_000.0;
        // Other failures are the runtime's or a program's and are in the journal. Logging each one
        // would flood the log while Docker is down.
        if response.status() == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::warn!(status, took_ms, peer, "answered");
        } else {
            tracing::debug!(status, took_ms, peer, "answered");
        }
        metrics::counter!(
            "conman_api_requests_total",
            "method" => known_method(&method),
            "route" => route,
            "status" => status.to_string()
        )
        .increment(1);
        response
    }
    .instrument(span)
    .await
}

/// Reports to the outermost layer which route answers.
pub(crate) async fn note_route(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = next.run(request).await;
    if let Some(route) = route {
        response.extensions_mut().insert(route);
    }
    response
}

/// Bounds the time of a route that has no other bound.
pub(crate) async fn quick(request: Request, next: Next) -> Response {
    let Ok(response) = tokio::time::timeout(QUICK, next.run(request)).await else {
        let bound = QUICK.as_secs();
        return Kind::TIMED_OUT
            .because(format!(
                "the request was given up after {bound} s; try again"
            ))
            .into_response();
    };
    response
}

/// A panic becomes the request's 500, with its message only in the log.
pub(crate) fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    tracing::error!(panic = message, "a request panicked");
    Kind::INTERNAL
        .because("the request met a bug in conman; its log has the details under x-request-id")
        .into_response()
}

fn set_headers(response: &mut Response, id: &str) {
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(X_REQUEST_ID, id);
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers
        .entry(CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static(
            "default-src 'none'; frame-ancestors 'none'",
        ));
    headers
        .entry(CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
}

/// Clients may send any method; the metric's labels stay few.
fn known_method(method: &http::Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "PUT" => "PUT",
        "POST" => "POST",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "HEAD" => "HEAD",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::middleware::from_fn;
    use axum::routing::get;
    use conman_proto::Problem;
    use tower::ServiceExt as _;
    use tower_http::catch_panic::CatchPanicLayer;

    use super::*;

    async fn problem(router: Router) -> Problem {
        let router = router
            .layer(CatchPanicLayer::custom(panicked))
            .layer(from_fn(outermost));
        let request = Request::get("/x?secret=1").body(Body::empty());
        let response = router
            .oneshot(request.expect("a request"))
            .await
            .expect("an answer");
        assert!(response.headers().contains_key(X_REQUEST_ID));
        assert_eq!(response.headers()[X_CONTENT_TYPE_OPTIONS], "nosniff");
        let body = to_bytes(response.into_body(), 10_000)
            .await
            .expect("a body");
        serde_json::from_slice(&body).expect("a problem")
    }

    #[tokio::test]
    async fn a_panic_is_a_problem_that_keeps_its_message_to_the_log() {
        async fn panics() -> &'static str {
            panic!("with a secret")
        }
        let problem = problem(Router::new().route("/x", get(panics))).await;
        assert_eq!((problem.status, problem.slug()), (500, "internal"));
        assert!(!problem.detail.contains("secret"));
        assert_eq!(problem.instance.as_deref(), Some("/x"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_route_that_hangs_is_given_up_and_may_be_asked_again() {
        async fn hangs() -> &'static str {
            std::future::pending().await
        }
        let router = Router::new().route("/x", get(hangs)).layer(from_fn(quick));
        let problem = problem(router).await;
        assert_eq!((problem.status, problem.slug()), (503, "timed-out"));
        assert!(problem.retryable);
    }
}
