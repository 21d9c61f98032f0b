//! The templates of the node's configuration.

use axum::Json;
use axum::extract::State;
use conman_proto::{Template, TemplateList};

use crate::ApiState;
use crate::problem::ApiError;
use crate::query::NoQuery;

/// List templates
#[utoipa::path(
    get, path = "/v1/templates", tag = "nodes", operation_id = "list_templates",
    responses((status = 200, description = "The node's templates.", body = TemplateList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    _: NoQuery,
) -> Result<Json<TemplateList>, ApiError> {
    let policy = state.node.policy();
    let templates = policy.templates.iter().map(|(name, template)| Template {
        name: name.clone(),
        runtime: template.runtime,
        start_on_connect: template.start_on_connect,
        spec: template.request.clone(),
    });
    Ok(Json(TemplateList {
        templates: templates.collect(),
    }))
}
