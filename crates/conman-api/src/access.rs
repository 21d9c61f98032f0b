//! Authenticates callers and checks their scope.
//!
//! There are two layers. The outer one rejects every caller that the guard does not know,
//! whatever the path, except for probes. The inner one, around each group of routes, requires the
//! group's scope. So a route without a group is closed, not open.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_auth::{Caller, CallerOrigin, Scope};
use conman_listen::Place;

use crate::forwarding::{ByPeer, Forwarder};
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::server::Peer;
use crate::{ApiState, Listener};
use conman_peer::remote_caller;

/// Paths that need no credential; the guard still checks the origin of the request.
const OPEN: [&str; 2] = ["/healthz", "/readyz"];

/// The access that a route requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needed {
    /// Nothing: a probe.
    Nothing,
    Scope(Scope),
}

/// Authenticates the caller and passes it to the handlers.
pub(crate) async fn authenticate(
    State((state, listener)): State<(ApiState, Listener)>,
    request: Request,
    next: Next,
) -> Response {
    let (mut parts, body) = request.into_parts();
    if let Some(map) = state.others() {
        parts.extensions.insert(Forwarder {
            node: Arc::clone(&state.node),
            map: Arc::clone(map),
        });
    }
    if listener == Listener::Peers {
        // The listener accepts only nodes.
        return match remote_caller(&parts.headers) {
            Some(caller) => {
                tracing::Span::current().record("caller", caller.name.as_str());
                parts.extensions.insert(caller);
                parts.extensions.insert(ByPeer);
                next.run(Request::from_parts(parts, body)).await
            }
            None => Kind::BAD_REQUEST
                .because("the request of the other node does not name its caller")
                .into_response(),
        };
    }
    let judged = peer(parts.extensions.get::<Peer>(), listener).and_then(|peer| {
        if OPEN.contains(&parts.uri.path()) {
            state
                .guard
                .check_source(&parts, peer)
                .map(|()| None)
                .map_err(ApiError::from)
        } else {
            state
                .guard
                .authenticate(&parts, peer)
                .map(Some)
                .map_err(ApiError::from)
        }
    });
    match judged {
        Ok(caller) => {
            if let Some(caller) = caller {
                if let Some(place) = parts.extensions.remove::<Arc<Place>>() {
                    place.known();
                }
                tracing::Span::current().record("caller", caller.name.as_str());
                parts.extensions.insert(caller);
            }
            next.run(Request::from_parts(parts, body)).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

/// Requires a scope of the caller.
pub(crate) async fn require(
    State(needed): State<Needed>,
    request: Request,
    next: Next,
) -> Response {
    let allowed = match needed {
        Needed::Nothing => Ok(()),
        Needed::Scope(scope) => match request.extensions().get::<Caller>() {
            Some(caller) => caller.require(scope).map_err(ApiError::from),
            None => Err(Kind::INTERNAL.because("the caller was not authenticated")),
        },
    };
    match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) => ApiError::into_response(refusal),
    }
}

/// The caller as text for a session's reason and the journal.
pub(crate) fn in_words(caller: &Caller) -> String {
    match caller.origin {
        CallerOrigin::AdminSocket { uid } => format!("uid {uid} on the admin socket"),
        CallerOrigin::Token => format!("the holder of token `{}`", caller.name),
        CallerOrigin::Peer => format!("`{}`, by way of another node", caller.name),
        CallerOrigin::Local => "the API".to_owned(),
    }
}

/// The peer of the connection, in the guard's terms.
pub(crate) fn peer(peer: Option<&Peer>, listener: Listener) -> Result<conman_auth::Peer, ApiError> {
    match (peer, listener) {
        (Some(Peer::Tcp(address)), Listener::Tcp) => Ok(conman_auth::Peer::Tcp(*address)),
        (Some(Peer::Unix { uid, .. }), Listener::Admin) => {
            Ok(conman_auth::Peer::AdminSocket { uid: *uid })
        }
        (Some(Peer::Tcp(_)), Listener::Admin)
        | (Some(Peer::Unix { .. }), Listener::Tcp)
        | (Some(Peer::Node) | None, _)
        | (_, Listener::Peers) => {
            Err(Kind::INTERNAL.because("the router is served on the wrong listener"))
        }
    }
}
