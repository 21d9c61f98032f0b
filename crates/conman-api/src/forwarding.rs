//! Forwards requests about another node's sessions to that node, on behalf of the caller.
//!
//! ```text
//! caller ─> known, scope checked ─> here, when this node has the session
//!                                └> the owner's listener for nodes, with the caller's name and
//!                                   scope ─> the same routes, which serve or turn it away
//! ```
//!
//! A forwarded request is never forwarded again. A node that does not have the session refuses it
//! (421) before it has done anything; then the registry is read, and the request goes where the
//! session is. A PUT for a session without an owner goes to the nodes that placement names, in
//! turn. The first node that claims the session has it, and the others send their callers there.

mod forwarded_request;
mod lost_session;
mod placement_request;
mod put_start;
mod start_answer;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use conman_auth::Caller;
use conman_core::error_chain;
use conman_fleet::{
    BufferedRequest, CallError, ExpectedGeneration, FleetMap, SessionLocation, X_CONMAN_ENDED,
};
use conman_node::Node;
use conman_peer::headers::{X_CONMAN_GENERATION, X_CONMAN_MISDIRECTED};
use conman_proto::{Generation, SessionId};
use http::header::LOCATION;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use crate::json_body;
use crate::problem::{ApiError, IntoApiError as _, Kind};

pub(crate) use placement_request::labels_of;

/// On pages of events for nodes: this node's name.
pub(crate) const X_CONMAN_NODE: HeaderName = HeaderName::from_static("x-conman-node");
const NOT_OWNER: HeaderValue = HeaderValue::from_static("not-owner");

/// The request came from another node, on behalf of a caller there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByPeer;

/// Most bytes of body that a route's handler reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimit(pub(crate) usize);

/// The state that forwarding needs.
#[derive(Debug, Clone)]
pub(crate) struct Forwarder {
    pub(crate) node: Arc<Node>,
    pub(crate) map: Arc<FleetMap>,
}

/// The layer of routes for one session: lets its node answer.
pub(crate) async fn to_owner(
    State(limit): State<BodyLimit>,
    params: PathParams,
    request: Request,
    next: Next,
) -> Response {
    let Some(forwarder) = request.extensions().get::<Forwarder>().cloned() else {
        return next.run(request).await;
    };
    let Some(id) = parameter(&params).and_then(|id| id.parse::<SessionId>().ok()) else {
        // The handler reports what is wrong with it.
        return next.run(request).await;
    };
    if request.extensions().get::<ByPeer>().is_some() {
        if !forwarder.has(&id, request.method(), request.headers()) {
            return not_owner(forwarder.map.me(), &id).into_response();
        }
        let as_owner = request.headers().contains_key(X_CONMAN_GENERATION);
        let starts = request.method() == Method::PUT && as_owner;
        let mut response = next.run(request).await;
        if starts
            && !forwarder.node.sessions().is_live(&id)
            && start_answer::wants_another(&response)
        {
            // It has ended here, and this node does not take it again.
            let headers = response.headers_mut();
            headers.insert(&X_CONMAN_MISDIRECTED, NOT_OWNER);
        }
        return response;
    }
    // A request that starts or ends a session may find that another node was first.
    let decides = [Method::PUT, Method::DELETE].contains(request.method());
    if forwarder.node.sessions().owns(&id) && !decides {
        return next.run(request).await;
    }
    forwarded_request::ForwardedRequest::begin(forwarder, id, (request, limit), next).await
}

/// The layer of the route that starts a session without a given name: generates one, and continues as
/// with a PUT of it.
pub(crate) async fn with_generated_id(
    State(limit): State<BodyLimit>,
    mut request: Request,
    next: Next,
) -> Response {
    let Ok(random) = getrandom::u64() else {
        let why = "the kernel gave no random number for the session's name";
        return Kind::HOST_FAILED.because(why).into_response();
    };
    let id = SessionId::generated(random);
    let path = format!("/v1/sessions/{id}");
    let query = request.uri().query();
    let target = query.map_or_else(|| path.clone(), |query| format!("{path}?{query}"));
    let (Ok(target), Ok(location)) = (target.parse(), HeaderValue::from_str(&path)) else {
        return Kind::BAD_REQUEST
            .because("the query is not valid")
            .into_response();
    };
    *request.uri_mut() = target;
    *request.method_mut() = Method::PUT;
    request.extensions_mut().insert(id.clone());
    let mut response = match request.extensions().get::<Forwarder>().cloned() {
        Some(forwarder) => {
            forwarded_request::ForwardedRequest::begin(forwarder, id, (request, limit), next).await
        }
        None => next.run(request).await,
    };
    if response.status() == StatusCode::OK {
        *response.status_mut() = StatusCode::CREATED;
    }
    if response.status().is_success() {
        response.headers_mut().insert(LOCATION, location);
    }
    response
}

/// The layer of routes for one running session with a body of any size, which is sent once: lets its node
/// answer.
pub(crate) async fn stream_to_owner(params: PathParams, request: Request, next: Next) -> Response {
    let forwarder = request.extensions().get::<Forwarder>().cloned();
    let id = parameter(&params).and_then(|id| id.parse::<SessionId>().ok());
    let (Some(forwarder), Some(id)) = (forwarder, id) else {
        return next.run(request).await;
    };
    if request.extensions().get::<ByPeer>().is_some() {
        return match forwarder.node.sessions().owns(&id) {
            true => next.run(request).await,
            false => not_owner(forwarder.map.me(), &id).into_response(),
        };
    }
    if forwarder.node.sessions().owns(&id) {
        return next.run(request).await;
    }
    let owner = match forwarder.map.locate_fresh(&id).await {
        Ok(SessionLocation::There(owner)) => owner,
        // The handler reports that it does not run.
        Ok(_) => return next.run(request).await,
        Err(error) => {
            return Kind::NO_REGISTRY
                .because(error_chain(&error))
                .into_response();
        }
    };
    let expected = ExpectedGeneration {
        generation: owner.generation,
        ended: false,
    };
    let (parts, body) = request.into_parts();
    let Some(caller) = parts.extensions.get::<Caller>() else {
        return Kind::INTERNAL
            .because("the caller was not authenticated")
            .into_response();
    };
    match forwarder
        .map
        .call_once(&owner.node, &parts, caller, body, expected)
        .await
    {
        Ok(response) => response.map(Body::new),
        Err(CallError::Misdirected { .. }) => Kind::MOVES
            .because(format!("session `{id}` has just left its node; try again"))
            .into_response(),
        Err(error) => ApiError::from(error).into_response(),
    }
}

/// The layer of routes for one node: lets that node answer.
pub(crate) async fn to_node(
    State(limit): State<BodyLimit>,
    params: PathParams,
    request: Request,
    next: Next,
) -> Response {
    let forwarder = request.extensions().get::<Forwarder>().cloned();
    let (Some(forwarder), Some(name)) = (forwarder, parameter(&params)) else {
        return next.run(request).await;
    };
    let mine = name == "self" || name == forwarder.map.me();
    let known = forwarder
        .map
        .fleet()
        .peers()
        .iter()
        .any(|peer| peer.name == name);
    if mine || !known || request.extensions().get::<ByPeer>().is_some() {
        return next.run(request).await;
    }
    let node = forwarder.map.node(name);
    let request = match buffer(request, limit).await {
        Ok(request) => request,
        Err(refusal) => return refusal.into_response(),
    };
    match forwarder.map.call(&node, &request, None).await {
        Ok(response) => response.map(Body::new),
        Err(error) => ApiError::from(error).into_response(),
    }
}

/// Reads the body, within the bounds of the route's handler; nothing for a method whose handlers
/// read none.
async fn buffer(request: Request, limit: BodyLimit) -> Result<BufferedRequest, ApiError> {
    let (parts, body) = request.into_parts();
    let caller = parts.extensions.get::<Caller>().cloned();
    let caller =
        caller.ok_or_else(|| Kind::INTERNAL.because("the caller was not authenticated"))?;
    let body = match parts.method {
        Method::PATCH | Method::POST | Method::PUT => {
            json_body::collect(&parts.headers, body, limit.0).await?
        }
        _ => Bytes::new(),
    };
    Ok(BufferedRequest {
        parts,
        body,
        caller,
    })
}

impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Misdirected { .. } => Kind::ELSEWHERE.because(error.to_string()),
            CallError::Unreachable { why } => unreachable(&why),
            CallError::Refused(refused) => Kind::NODE_REFUSES.because(refused.to_string()),
            CallError::Unanswered { why } => unanswered(&why),
        }
    }
}

/// A path that cannot be decoded is refused by the handler.
type PathParams = Result<RawPathParams, RawPathParamsRejection>;

fn parameter(params: &PathParams) -> Option<&str> {
    params
        .as_ref()
        .ok()?
        .iter()
        .find(|(name, _)| *name == "id")
        .map(|(_, value)| value)
}

impl Forwarder {
    /// Whether this node answers a forwarded request for the session.
    fn has(&self, id: &SessionId, method: &Method, headers: &HeaderMap) -> bool {
        if *method == Method::PUT {
            // With a generation, the session has an owner, which must be this node. Without one, the
            // forwarding node has found no owner, and the claim decides.
            return !headers.contains_key(X_CONMAN_GENERATION) || self.node.sessions().is_live(id);
        }
        let requested = headers
            .get(X_CONMAN_GENERATION)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .and_then(Generation::new);
        let ended = headers.contains_key(X_CONMAN_ENDED);
        match (self.node.sessions().get(id), requested) {
            (Some(session), Some(requested)) if session.state.is_ended() => {
                ended && session.generation == requested
            }
            (Some(session), Some(requested)) => session.generation >= requested,
            // Its start is not recorded yet.
            (None, Some(_)) => self.node.sessions().is_live(id),
            (_, None) => false,
        }
    }
}

/// 421: another node has the session.
pub(crate) fn not_owner(me: &str, id: &SessionId) -> ApiError {
    Kind::ELSEWHERE
        .because(format!(
            "node `{me}` does not own session `{id}`; ask again, any node knows who does"
        ))
        .header(X_CONMAN_MISDIRECTED.clone(), NOT_OWNER)
}

/// Marks an answer that leaves the request to another node.
pub(crate) fn misdirected(error: ApiError) -> ApiError {
    error.header(X_CONMAN_MISDIRECTED.clone(), NOT_OWNER)
}

/// For a request that is not repeated automatically.
fn unanswered(why: &str) -> ApiError {
    Kind::NODE_SILENT.because(format!(
        "{why}; the request may have been carried out: check before you repeat it"
    ))
}

fn unreachable(why: &str) -> ApiError {
    Kind::NODE_UNREACHABLE.because(format!(
        "{why}. If it stays so, other nodes take over its sessions"
    ))
}
