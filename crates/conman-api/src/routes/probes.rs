//! Probes, metrics, the description of the API, and an index for people.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use conman_proto::{NodeState, Readiness};
use conman_registry::Standing;
use http::header::CONTENT_TYPE;
use serde_json::{Value, json};

use crate::ApiState;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::NoQuery;

/// Content type of the Prometheus text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether the daemon answers
#[utoipa::path(
    get, path = "/healthz", tag = "probes", operation_id = "healthz",
    responses((status = 200, description = "It does.", body = String))
)]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether the node takes requests
///
/// A runtime that does not answer is only a warning: running sessions are still served.
#[utoipa::path(
    get, path = "/readyz", tag = "probes", operation_id = "readyz",
    responses(
        (status = 200, description = "It does.", body = Readiness),
        (status = 503, description = "node-not-ready, with the reason"),
    )
)]
pub(crate) async fn readyz(State(state): State<ApiState>) -> Result<Json<Readiness>, ApiError> {
    let node = state.node.status().state();
    let standing = state.node.status().standing();
    if !standing.is_ready() {
        let fleet = state.fleet.as_ref();
        let why = fleet.and_then(|map| map.fleet().why_late());
        return Err(not_joined(&standing, why.as_deref()));
    }
    match node {
        NodeState::Live => {}
        NodeState::Recovering => {
            return Err(Kind::NOT_READY.because(
                "the node still adopts the sessions of an earlier daemon; adopted ones are served",
            ));
        }
        NodeState::Cordoned => {
            return Err(Kind::NOT_READY.because(
                "the node is cordoned and takes no new sessions; POST /v1/nodes/self/uncordon \
                 cancels that",
            ));
        }
        NodeState::Stopping => {
            return Err(Kind::NOT_READY.because("the daemon is stopping"));
        }
        NodeState::Draining => {
            return Err(Kind::NOT_READY.because(
                "the node is being drained and takes no new sessions; POST \
                 /v1/nodes/self/undrain cancels that",
            ));
        }
        NodeState::Preempted => {
            return Err(Kind::NOT_READY.because(
                "the node is preempted and takes no more sessions; POST /v1/nodes/self/readmit \
                 cancels that",
            ));
        }
    }
    if let Some(unreached) = state.node.status().cut_off() {
        return Err(Kind::NOT_READY.because(format!(
            "the node does not reach {}, while most other nodes reach each other, and gets no new \
             sessions; look for a firewall or a broken link at `listen.peers`",
            unreached.join(", ")
        )));
    }
    if state.closing.is_cancelled() {
        return Err(Kind::NOT_READY.because("the daemon is stopping"));
    }
    Ok(Json(Readiness {
        state: node,
        warnings: state.node.status().warnings(),
    }))
}

/// Why a node of a fleet takes no requests, with the reason of its delay, if it is known.
pub(crate) fn not_joined(standing: &Standing, why_late: Option<&str>) -> ApiError {
    let because = why_late.map_or_else(String::new, |why| format!(": {why}"));
    let detail = match standing {
        Standing::Alone | Standing::Live => "the node is about to serve".to_owned(),
        Standing::Joining { reason } => format!("the node has not joined its fleet: {reason}"),
        Standing::Late => {
            format!("the node could not renew its ownership in time, and tries again{because}")
        }
        Standing::Fenced => format!(
            "the node's ownership has lapsed, and everything on it is frozen until it is \
             renewed{because}"
        ),
    };
    Kind::NOT_READY.because(detail)
}

/// Prometheus metrics
#[utoipa::path(
    get, path = "/metrics", tag = "probes", operation_id = "metrics",
    responses((status = 200, description = "The text format.", body = String))
)]
pub(crate) async fn metrics(State(state): State<ApiState>) -> Response {
    state.node.status().measure();
    if let Some(map) = &state.fleet {
        map.measure();
    }
    ([(CONTENT_TYPE, PROMETHEUS)], state.metrics.render()).into_response()
}

/// This description
#[utoipa::path(
    get, path = "/v1/openapi.json", tag = "probes", operation_id = "get_openapi",
    responses((status = 200, description = "OpenAPI 3.1.", body = Object))
)]
pub(crate) async fn description(_: NoQuery) -> Result<Response, ApiError> {
    Ok(([(CONTENT_TYPE, "application/json")], crate::openapi_json()).into_response())
}

/// Where to go from here
#[utoipa::path(
    get, path = "/", tag = "probes", operation_id = "index",
    responses((status = 200, description = "Names and paths.", body = Object))
)]
pub(crate) async fn index(State(state): State<ApiState>) -> Json<Value> {
    let node = state.node.status().view();
    Json(json!({
        "name": "conman",
        "version": node.version,
        "node": node.name,
        "description": "/v1/openapi.json",
        "sessions": "/v1/sessions",
        "nodes": "/v1/nodes",
        "templates": "/v1/templates",
        "events": "/v1/events",
        "health": "/healthz",
        "readiness": "/readyz",
        "metrics": "/metrics",
    }))
}
