//! Drains a node.

use axum::Json;
use axum::extract::State;
use conman_node::MAX_DRAIN_PARALLEL;
use conman_proto::{DrainPlan, DrainReport, DrainRequest, Node, RebalanceReport, RebalanceRequest};
use http::StatusCode;
use utoipa::ToSchema;

use crate::ApiState;
use crate::body_mistakes::BodyMistakes;
use crate::json_body::JsonBody;
use crate::path_params::OwnNode;
use crate::problem::{ApiError, IntoApiError as _, Kind};

const MAX_GRACE_MS: u32 = 3_600_000;

/// Answer to a drain: how it stands, or with `dry_run` what it would do.
#[derive(Debug, serde::Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum DrainAnswer {
    Report(DrainReport),
    Plan(DrainPlan),
}

/// Drain a node
///
/// The node takes no new sessions from now on, and moves the present ones away, a few at a time:
/// idle ones first, then the lighter before the heavier. Answers once that has begun; a drain that
/// is under way or over is left as it is, and told. It outlives a restart of the daemon.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/drain", tag = "nodes", operation_id = "drain_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    request_body = DrainRequest,
    responses(
        (status = 200, description = "What would be done.", body = DrainAnswer),
        (status = 202, description = "How the drain stands.", body = DrainAnswer),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn drain(
    State(state): State<ApiState>,
    _: OwnNode,
    JsonBody(mut asked): JsonBody<DrainRequest>,
) -> Result<(StatusCode, Json<DrainAnswer>), ApiError> {
    check(&mut asked)?;
    if asked.dry_run {
        let plan = state.node.drain().plan(&asked);
        return Ok((StatusCode::OK, Json(DrainAnswer::Plan(plan))));
    }
    let report = state.node.drain().begin(&asked).await?;
    Ok((StatusCode::ACCEPTED, Json(DrainAnswer::Report(report))))
}

/// Show a drain
#[utoipa::path(
    get, path = "/v1/nodes/{id}/drain", tag = "nodes", operation_id = "get_drain",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "How it stands.", body = DrainReport),
        (status = 404, description = "no-such-node, or not-draining"),
    )
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<DrainReport>, ApiError> {
    let report = state.node.drain().report();
    report.map(Json).ok_or_else(|| {
        Kind::NOT_DRAINING.because("this node is not being drained, or its drain was cancelled")
    })
}

/// Take a drain back
///
/// The node admits sessions again. Those that have not had their turn stay; without a drain
/// nothing changes.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/undrain", tag = "nodes", operation_id = "undrain_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node.", body = Node),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn undrain(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<Node>, ApiError> {
    state.node.drain().cancel().await?;
    Ok(Json(state.node.status().view()))
}

/// Move what a node has beyond its share
///
/// If the node has more sessions than its share of the fleet's, in proportion to `max_sessions`, it moves the
/// excess away: idle sessions first, one at a time, at most ten a second, and none that no other node could run.
/// Sessions with `on_node_loss = "restart"` start on other nodes at once, the others when a client connects.
/// The node admits sessions meanwhile. A further order is refused while an earlier one is carried out, and for
/// six seconds afterwards. A restart of the daemon ends it.
#[utoipa::path(
    post, path = "/v1/nodes/{id}/rebalance", tag = "nodes", operation_id = "rebalance_node",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    request_body = RebalanceRequest,
    responses(
        (status = 200, description = "What would be done.", body = DrainPlan),
        (status = 202, description = "What will be done; GET shows what was done, and the event `rebalance_finished` reports the end.", body = DrainPlan),
        (status = 404, description = "no-such-node"),
        (status = 409, description = "rebalancing"),
    )
)]
pub(crate) async fn rebalance(
    State(state): State<ApiState>,
    _: OwnNode,
    JsonBody(asked): JsonBody<RebalanceRequest>,
) -> Result<(StatusCode, Json<DrainPlan>), ApiError> {
    let RebalanceRequest { dry_run } = asked;
    // A node that is alone has no excess.
    let excess = state.fleet.as_ref().map_or(0, |map| map.excess());
    let plan = state.node.drain().rebalance_plan(excess);
    if dry_run {
        return Ok((StatusCode::OK, Json(plan)));
    }
    if !state.node.drain().rebalance(excess) {
        return Err(Kind::REBALANCING.because(
            "an earlier order is carried out, or ended less than 6 s ago; order it again after the event \
             rebalance_finished",
        ));
    }
    Ok((StatusCode::ACCEPTED, Json(plan)))
}

/// Show what a rebalance has done
///
/// How many sessions the latest one has moved, and how many it could not move.
#[utoipa::path(
    get, path = "/v1/nodes/{id}/rebalance", tag = "nodes", operation_id = "get_rebalance",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "How it stands.", body = RebalanceReport),
        (status = 404, description = "no-such-node, or not-rebalanced"),
    )
)]
pub(crate) async fn get_rebalance(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<RebalanceReport>, ApiError> {
    let report = state.node.drain().rebalance_report();
    report.map(Json).ok_or_else(|| {
        Kind::NOT_REBALANCED.because("this node has moved nothing since its daemon started")
    })
}

/// Refuses values that are out of bounds, and expands the signal's name.
fn check(request: &mut DrainRequest) -> Result<(), ApiError> {
    let mut mistakes = BodyMistakes::default();
    if let Some(parallel) = request.parallel
        && !(1..=MAX_DRAIN_PARALLEL).contains(&parallel)
    {
        mistakes.add("parallel", format!("must be 1 to {MAX_DRAIN_PARALLEL}"));
    }
    if let Some(signal) = &request.signal {
        match conman_core::canonical_signal(signal) {
            Some(name) => request.signal = Some(name),
            None => mistakes.add(
                "signal",
                format!("must be one of {}", conman_core::allowed_signals()),
            ),
        }
    }
    if request.grace_ms.is_some_and(|grace| grace > MAX_GRACE_MS) {
        mistakes.add("grace_ms", format!("must be at most {MAX_GRACE_MS}"));
    }
    mistakes.reason(request.reason.as_deref());
    mistakes.into_result()
}
