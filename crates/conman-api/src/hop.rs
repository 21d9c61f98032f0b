//! Requests for what another node has: brought to that node, on behalf of the caller here.
//!
//! ```text
//! caller ─> known, scope checked ─> here, when this node has the session
//!                                └> the owner's listener for nodes, with the caller's name and
//!                                   scope ─> the same routes, which serve or turn it away
//! ```
//!
//! A request that a node has brought is never sent on. The other node turns it away (421) before
//! it has done anything; then the registry is asked, and the request goes where the session is by
//! now. A PUT for a session that nobody owns goes to the nodes that placement names, in turn;
//! whoever of them claims the session first has it, and the others send their callers there.

mod another;
mod caller;
mod send;
mod until_gone;
mod visit;
mod wish;

use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_auth::Caller;
use conman_node::Node;
use conman_peer::FleetMap;
use conman_proto::{Generation, SessionId};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::problem::{ApiError, Kind};

pub(crate) use caller::of_peer;
pub(crate) use wish::{NODE_LABEL, labels_of};

/// Who asks, as the node that knows them says: the scope, and the name percent-encoded.
const X_CONMAN_CALLER: HeaderName = HeaderName::from_static("x-conman-caller");
/// The generation that the sender takes the other node for the owner of.
const X_CONMAN_GENERATION: HeaderName = HeaderName::from_static("x-conman-generation");
/// `1`: the sender knows that the generation has ended, and asks about just that one.
const X_CONMAN_ENDED: HeaderName = HeaderName::from_static("x-conman-ended");
/// On answers to nodes: the request belongs elsewhere, and nothing was done.
pub(crate) const X_CONMAN_TURNED: HeaderName = HeaderName::from_static("x-conman-turned");
/// On what a node tells of itself for as long as another reads: its name. An older one does not say.
pub(crate) const X_CONMAN_NODE: HeaderName = HeaderName::from_static("x-conman-node");
const NOT_OWNER: HeaderValue = HeaderValue::from_static("not-owner");

/// The field by which another node knows on whose behalf it is asked.
pub(crate) fn caller_header(caller: &Caller) -> (HeaderName, HeaderValue) {
    (X_CONMAN_CALLER, caller::to_header(caller))
}

/// The request came from another node, on behalf of a caller there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByPeer;

/// Most bytes of body that a route's handler reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BodyLimit(pub(crate) usize);

/// What a request may need to find its way.
#[derive(Debug, Clone)]
pub(crate) struct Hop {
    pub(crate) node: Arc<Node>,
    pub(crate) map: Arc<FleetMap>,
}

/// The layer of routes for one session: sees to it that its node answers.
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
        // The handler tells what is wrong with it.
        return next.run(request).await;
    };
    if request.extensions().get::<ByPeer>().is_some() {
        if !hop.has(&id, request.method(), request.headers()) {
            return not_owner(hop.map.me(), &id).into_response();
        }
        let as_owner = request.headers().contains_key(X_CONMAN_GENERATION);
        let starts = request.method() == Method::PUT && as_owner;
        let mut response = next.run(request).await;
        if starts && !hop.node.is_live(&id) && another::wants_another(&response) {
            // It has ended here, and this node does not take it again.
            let headers = response.headers_mut();
            headers.insert(X_CONMAN_TURNED, NOT_OWNER);
        }
        return response;
    }
    // What begins or ends here may come to find that another node was first.
    let decides = [Method::PUT, Method::DELETE].contains(request.method());
    if hop.node.owns(&id) && !decides {
        return next.run(request).await;
    }
    visit::Visit::begin(hop, id, (request, limit), next).await
}

/// The layer of routes for one node: sees to it that this node answers.
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

/// A path that cannot be decoded is the handler's to refuse.
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
    /// Whether this node answers what another one brings for the session.
    fn has(&self, id: &SessionId, method: &Method, headers: &HeaderMap) -> bool {
        if *method == Method::PUT {
            // Of a session that is somebody's, that one is asked; that nobody has it, and who shall,
            // the node that asks has to find out. Otherwise the claim decides.
            return !headers.contains_key(X_CONMAN_GENERATION) || self.node.is_live(id);
        }
        let asked = headers
            .get(X_CONMAN_GENERATION)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .and_then(Generation::new);
        let ended = headers.contains_key(X_CONMAN_ENDED);
        match (self.node.get(id), asked) {
            (Some(session), Some(asked)) if session.state.is_ended() => {
                ended && session.generation == asked
            }
            (Some(session), Some(asked)) => session.generation >= asked,
            // Its start is not recorded yet.
            (None, Some(_)) => self.node.is_live(id),
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

/// Of what is not repeated by itself.
fn unanswered(why: &str) -> ApiError {
    Kind::NODE_SILENT.because(format!(
        "{why}; the request may have been carried out: look before you repeat it"
    ))
}

fn unreachable(why: &str) -> ApiError {
    Kind::NODE_UNREACHABLE.because(format!(
        "{why}. When it stays so, its sessions are taken over by other nodes; `conman nodes` \
         shows how the nodes stand"
    ))
}
