//! The node: what it is, what it offers, and giving it up.

use axum::Json;
use axum::extract::{Extension, Request, State};
use conman_auth::{Caller, CallerOrigin};
use conman_proto::{FieldError, Node, NodeList, PreemptPlan, PreemptReport, PreemptRequest};
use http::Uri;
use utoipa::ToSchema;

use crate::json_body::{self, MAX_BODY_BYTES};
use crate::path_params::NodePath;
use crate::problem::{ApiError, Kind};
use crate::query::Query;
use crate::{ApiState, fleet_list};

const MAX_BUDGET_MS: u32 = 3_600_000;
const MAX_REASON_CHARS: usize = 500;

/// List nodes
#[utoipa::path(
    get, path = "/v1/nodes", tag = "nodes", operation_id = "list_nodes",
    responses((status = 200, description = "The nodes.", body = NodeList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    uri: Uri,
) -> Result<Json<NodeList>, ApiError> {
    Query::of(&uri).finish()?;
    let nodes = match state.others() {
        Some(map) => fleet_list::nodes(&state.node, map),
        None => vec![state.node.view()],
    };
    Ok(Json(NodeList { nodes }))
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
    uri: Uri,
) -> Result<Json<Node>, ApiError> {
    Query::of(&uri).finish()?;
    if let Some(map) = state.others()
        && let Some(view) = fleet_list::node(&state.node, map, node.name())
    {
        return Ok(Json(view));
    }
    let view = state.node.view();
    node.require(&view.name)?;
    Ok(Json(view))
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
/// The machine is going: no more sessions are admitted, all present ones are killed, and each is
/// released as it is proven dead. Answers with the report once that is done or the budget is
/// over; a second notice gets the first one's report.
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
    node: NodePath,
    uri: Uri,
    request: Request,
) -> Result<Json<PreemptAnswer>, ApiError> {
    Query::of(&uri).finish()?;
    let asked: PreemptRequest = json_body::read(request, MAX_BODY_BYTES).await?;
    check(&asked)?;
    node.require(&state.node.view().name)?;
    if asked.dry_run {
        return Ok(Json(PreemptAnswer::Plan(
            state.node.preempt_plan(asked.budget_ms),
        )));
    }
    let source = match caller.origin {
        CallerOrigin::AdminSocket { .. } => "admin",
        CallerOrigin::Token | CallerOrigin::Peer | CallerOrigin::Local => "api",
    };
    Ok(Json(PreemptAnswer::Report(
        state.node.preempt(&asked, source).await?,
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
    node: NodePath,
    uri: Uri,
) -> Result<Json<Node>, ApiError> {
    Query::of(&uri).finish()?;
    node.require(&state.node.view().name)?;
    state.node.readmit().await?;
    Ok(Json(state.node.view()))
}

fn check(request: &PreemptRequest) -> Result<(), ApiError> {
    let mut errors = Vec::new();
    let mut refuse = |field: &str, message: &str| {
        errors.push(FieldError {
            field: field.to_owned(),
            message: message.to_owned(),
        });
    };
    if request
        .budget_ms
        .is_some_and(|budget| budget > MAX_BUDGET_MS)
    {
        refuse("budget_ms", "must be at most 3600000");
    }
    if request.reason.as_ref().is_some_and(|reason| {
        reason.chars().count() > MAX_REASON_CHARS || reason.chars().any(char::is_control)
    }) {
        refuse(
            "reason",
            "must have at most 500 characters, none of them a control character",
        );
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(Kind::BAD_BODY.with_fields(errors))
    }
}
