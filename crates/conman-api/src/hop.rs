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

mod another;
mod caller;
mod placement_request;
mod send;
mod until_gone;
mod visit;

use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_auth::Caller;
use conman_fleet::FleetMap;
use conman_node::Node;
use conman_proto::{Generation, SessionId};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::problem::{ApiError, Kind};

pub(crate) use caller::of_peer;
pub(crate) use placement_request::{NODE_LABEL, labels_of};

/// The caller, according to the forwarding node: the scope, and the percent-encoded name.
const X_CONMAN_CALLER: HeaderName = HeaderName::from_static("x-conman-caller");
/// The generation of which the sender takes the other node for the owner.
const X_CONMAN_GENERATION: HeaderName = HeaderName::from_static("x-conman-generation");
/// `1`: the sender knows that the generation has ended, and requests exactly that one.
const X_CONMAN_ENDED: HeaderName = HeaderName::from_static("x-conman-ended");
/// On answers to nodes: the request belongs elsewhere, and nothing was done.
pub(crate) const X_CONMAN_TURNED: HeaderName = HeaderName::from_static("x-conman-turned");
/// On streamed answers to nodes: this node's name.
pub(crate) const X_CONMAN_NODE: HeaderName = HeaderName::from_static("x-conman-node");
const NOT_OWNER: HeaderValue = HeaderValue::from_static("not-owner");

/// The header that names the caller to another node.
pub(crate) fn caller_header(caller: &Caller) -> (HeaderName, HeaderValue) {
    (X_CONMAN_CALLER, caller::to_header(caller))
}

/// The request came from another node, on behalf of a caller there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByPeer;

/// Most bytes of body that a route's handler reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimit(pub(crate) usize);

/// The state that forwarding needs.
#[derive(Debug, Clone)]
pub(crate) struct Hop {
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
    let Some(hop) = request.extensions().get::<Hop>().cloned() else {
        return next.run(request).await;
    };
    let Some(id) = parameter(&params).and_then(|id| id.parse::<SessionId>().ok()) else {
        // The handler reports what is wrong with it.
        return next.run(request).await;
    };
    if request.extensions().get::<ByPeer>().is_some() {
        if !hop.has(&id, request.method(), request.headers()) {
            return not_owner(hop.map.me(), &id).into_response();
        }
        let as_owner = request.headers().contains_key(X_CONMAN_GENERATION);
        let starts = request.method() == Method::PUT && as_owner;
        let mut response = next.run(request).await;
        if starts && !hop.node.sessions().is_live(&id) && another::wants_another(&response) {
            // It has ended here, and this node does not take it again.
            let headers = response.headers_mut();
            headers.insert(X_CONMAN_TURNED, NOT_OWNER);
        }
        return response;
    }
    // A request that starts or ends a session may find that another node was first.
    let decides = [Method::PUT, Method::DELETE].contains(request.method());
    if hop.node.sessions().owns(&id) && !decides {
        return next.run(request).await;
    }
    visit::Visit::begin(hop, id, (request, limit), next).await
}

/// The layer of routes for one node: lets that node answer.
pub(crate) async fn to_node(
    State(limit): State<BodyLimit>,
    params: PathParams,
    request: Request,
    next: Next,
) -> Response {
    let hop = request.extensions().get::<Hop>().cloned();
    let (Some(hop), Some(name)) = (hop, parameter(&params)) else {
        return next.run(request).await;
    };
    let mine = name == "self" || name == hop.map.me();
    let known = hop.map.fleet().peers().iter().any(|peer| peer.name == name);
    if mine || !known || request.extensions().get::<ByPeer>().is_some() {
        return next.run(request).await;
    }
    let node = match hop.map.node(name) {
        joining if joining.has_not_announced() => hop.map.announced(name).await,
        known => known,
    };
    let sent = match send::Parcel::pack(request, limit).await {
        Ok(parcel) => parcel.send(&hop, &node, None).await,
        Err(refusal) => return refusal.into_response(),
    };
    match sent {
        Ok(response) => response,
        Err(send::Unsent::Unreachable(why)) => unreachable(&why).into_response(),
        Err(send::Unsent::Unanswered(why)) => unanswered(&why).into_response(),
        Err(send::Unsent::Refused(error) | send::Unsent::Broken(error)) => error.into_response(),
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

impl Hop {
    /// Whether this node answers a forwarded request for the session.
    fn has(&self, id: &SessionId, method: &Method, headers: &HeaderMap) -> bool {
        if *method == Method::PUT {
            // With a generation, the session has an owner, which must be this node. Without one, the
            // forwarding node has found no owner, and the claim decides.
            return !headers.contains_key(X_CONMAN_GENERATION) || self.node.sessions().is_live(id);
        }
        let asked = headers
            .get(X_CONMAN_GENERATION)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .and_then(Generation::new);
        let ended = headers.contains_key(X_CONMAN_ENDED);
        match (self.node.sessions().get(id), asked) {
            (Some(session), Some(asked)) if session.state.is_ended() => {
                ended && session.generation == asked
            }
            (Some(session), Some(asked)) => session.generation >= asked,
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
        .header(X_CONMAN_TURNED, NOT_OWNER)
}

/// Marks an answer that leaves the request to another node.
pub(crate) fn turned(error: ApiError) -> ApiError {
    error.header(X_CONMAN_TURNED, NOT_OWNER)
}

/// For a request that is not repeated automatically.
fn unanswered(why: &str) -> ApiError {
    Kind::NODE_SILENT.because(format!(
        "{why}; the request may have been carried out: check before you repeat it"
    ))
}

fn unreachable(why: &str) -> ApiError {
    Kind::NODE_UNREACHABLE.because(format!(
        "{why}. If it stays so, other nodes take over its sessions; `conman nodes` \
         shows the state of the nodes"
    ))
}
