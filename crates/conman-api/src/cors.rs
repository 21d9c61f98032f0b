//! Lets pages of the configured origins read the API's answers (CORS).
//!
//! A page sends its token in `Authorization`. The browser's credentials are not used: the API has
//! no cookies, so an answer never allows them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_auth::ApiGuard;
use http::header::{
    ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION, CONTENT_TYPE, LOCATION, ORIGIN, RETRY_AFTER,
};
use http::{HeaderName, Method};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_http::cors::{AllowOrigin, CorsLayer};

use crate::access;
use crate::layers::X_REQUEST_ID;
use crate::problem::ApiError;
use crate::server::Peer;
use crate::{ApiState, Listener};

/// A page resumes the stream of events with it.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// How long a browser may cache the answer to a preflight. The rules change only when the daemon
/// restarts, and browsers cache it for two hours at most.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The headers that a page may send, and those that it may read besides the ones always readable.
pub(crate) fn layer(guard: Arc<ApiGuard>) -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(move |_, parts| {
            guard.allows_page(&parts.headers)
        }))
        .allow_methods([
            Method::GET,
            Method::PUT,
            Method::POST,
            Method::PATCH,
            Method::DELETE,
        ])
        .allow_headers([AUTHORIZATION, CONTENT_TYPE, LAST_EVENT_ID])
        .expose_headers([LOCATION, RETRY_AFTER, X_REQUEST_ID])
        .max_age(MAX_AGE)
}

/// Answers preflights, which have no token, and adds the headers for the page to every other
/// answer. A refusal has them too, so that the page can read the reason.
pub(crate) async fn share(
    State((state, cors)): State<(ApiState, CorsLayer)>,
    request: Request,
    next: Next,
) -> Response {
    let preflight = is_preflight(&request);
    // The layer takes every OPTIONS for a preflight; others are handled like any request.
    if request.method() == Method::OPTIONS && !preflight {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    if preflight {
        let checked =
            access::peer(parts.extensions.get::<Peer>(), Listener::Tcp).and_then(|peer| {
                let checked = state.guard.check_source(&parts, peer);
                checked.map_err(ApiError::from)
            });
        if let Err(refusal) = checked {
            return refusal.into_response();
        }
    }
    let inner = service_fn(move |request| {
        let next = next.clone();
        async move { Ok::<_, Infallible>(next.run(request).await) }
    });
    let answered = cors
        .layer(inner)
        .oneshot(Request::from_parts(parts, body))
        .await;
    match answered {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(ORIGIN)
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}
