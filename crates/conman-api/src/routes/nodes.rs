//! Nodes: list, show, forget and preempt.

use axum::Json;
use axum::extract::{Extension, State};
use conman_auth::{Caller, CallerOrigin};
use conman_proto::{Node, NodeList, NodeRemoval, PreemptPlan, PreemptReport, PreemptRequest};
use conman_registry::ForgetError;
use utoipa::ToSchema;

use crate::body_mistakes::BodyMistakes;
use crate::json_body::JsonBody;
use crate::node_errors::chain;
use crate::path_params::{NodePath, OwnNode};
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::NoQuery;
use crate::{ApiState, fleet_list};

const MAX_BUDGET_MS: u32 = 3_600_000;

/// List nodes
#[utoipa::path(
    get, path = "/v1/nodes", tag = "nodes", operation_id = "list_nodes",
    responses((status = 200, description = "The nodes.", body = NodeList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    _: NoQuery,
) -> Result<Json<NodeList>, ApiError> {
    let status = state.node.status();
    let (nodes, warnings) = match state.others() {
        Some(map) => (fleet_list::nodes(status, map), fleet_list::warnings(map)),
        None => (vec![status.view()], Vec::new()),
    };
    Ok(Json(NodeList { nodes, warnings }))
}

/// Show a node
#[utoipa::path(
    get, path = "/v1/nodes/{id}", tag = "nodes", operation_id = "get_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node.", body = Node),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    node: NodePath,
    _: NoQuery,
) -> Result<Json<Node>, ApiError> {
    if let Some(map) = state.others()
        && let Some(view) = fleet_list::node(state.node.status(), map, node.name())
    {
        return Ok(Json(view));
    }
    let view = state.node.status().view();
    node.require(&view.name)?;
    Ok(Json(view))
}

/// Forget a node that is gone
///
/// Takes a node that is fenced, and owns no session any more, out of what is shown and watched of
/// the fleet. The nodes do so by themselves with one that has been gone for a day. One that comes
/// back by that name joins as any other does.
#[utoipa::path(
    delete, path = "/v1/nodes/{id}", tag = "nodes", operation_id = "remove_node",
    params(("id" = String, Path, description = "The node's name.")),
    responses(
        (status = 200, description = "It is forgotten.", body = NodeRemoval),
        (status = 404, description = "no-such-node"),
        (status = 409, description = "node-not-lost or node-owns-sessions"),
        (status = 503, description = "registry-failed"),
    )
)]
pub(crate) async fn remove(
    State(state): State<ApiState>,
    node: NodePath,
    _: NoQuery,
) -> Result<Json<NodeRemoval>, ApiError> {
    let name = match node.name() {
        "self" => state.node.name(),
        name => name,
    };
    let forgotten = match state.others() {
        Some(map) => map.fleet().forget_node(name).await,
        None => {
            node.require(state.node.name())?;
            let node = name.to_owned();
            Err(ForgetError::Alive { node })
        }
    };
    match forgotten {
        Ok(()) => Ok(Json(NodeRemoval {
            name: name.to_owned(),
        })),
        Err(error) => Err(match &error {
            ForgetError::Unknown { .. } => Kind::NO_SUCH_NODE,
            ForgetError::Alive { .. } => Kind::NODE_NOT_LOST,
            ForgetError::Owns { .. } => Kind::NODE_OWNS,
            ForgetError::Registry(_) => Kind::NO_REGISTRY,
        }
        .because(chain(&error))),
    }
}

/// Answer to a preemption: what it did, or with `dry_run` what it would do.
#[derive(Debug, serde::Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum PreemptAnswer {
    Report(PreemptReport),
    Plan(PreemptPlan),
}

/// Give up a node
///
/// The machine is being preempted: no more sessions are admitted, all present ones are killed, and
/// each is released as soon as it is proven dead. Answers with the report once that is done, load balancers have
/// had time to notice, and nothing passes through, or the budget is over; a second notice gets the first one's
/// report.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/preempt", tag = "nodes", operation_id = "preempt_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    request_body = PreemptRequest,
    responses(
        (status = 200, description = "What was done, or would be.", body = PreemptAnswer),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn preempt(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    _: OwnNode,
    JsonBody(asked): JsonBody<PreemptRequest>,
) -> Result<Json<PreemptAnswer>, ApiError> {
    check(&asked)?;
    if asked.dry_run {
        return Ok(Json(PreemptAnswer::Plan(
            state.node.preemption().plan(asked.budget_ms),
        )));
    }
    let source = match caller.origin {
        CallerOrigin::AdminSocket { .. } => "admin",
        CallerOrigin::Token | CallerOrigin::Peer | CallerOrigin::Local => "api",
    };
    Ok(Json(PreemptAnswer::Report(
        state.node.preemption().preempt(&asked, source).await?,
    )))
}

/// Admit sessions again
///
/// Takes back a preemption notice; what was killed stays dead.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/readmit", tag = "nodes", operation_id = "readmit_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node.", body = Node),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn readmit(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<Node>, ApiError> {
    state.node.preemption().readmit().await?;
    Ok(Json(state.node.status().view()))
}

/// Keep new sessions away from a node
///
/// The sessions that are there stay and are served, and load balancers that ask the sessions listener
/// send no new clients. It outlives a restart of the daemon.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/cordon", tag = "nodes", operation_id = "cordon_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node.", body = Node),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn cordon(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<Node>, ApiError> {
    state.node.cordon().await;
    Ok(Json(state.node.status().view()))
}

/// Take a cordon back
///
/// The node admits sessions again; without a cordon nothing changes.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/uncordon", tag = "nodes", operation_id = "uncordon_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node.", body = Node),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn uncordon(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<Node>, ApiError> {
    state.node.uncordon().await?;
    Ok(Json(state.node.status().view()))
}

fn check(request: &PreemptRequest) -> Result<(), ApiError> {
    let mut mistakes = BodyMistakes::default();
    mistakes.unless(
        request
            .budget_ms
            .is_none_or(|budget| budget <= MAX_BUDGET_MS),
        "budget_ms",
        format!("must be at most {MAX_BUDGET_MS}"),
    );
    mistakes.reason(request.reason.as_deref());
    mistakes.into_result()
}
