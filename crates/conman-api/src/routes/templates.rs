//! The templates of the node's configuration.

use axum::Json;
use axum::extract::{Extension, State};
use conman_auth::Caller;
use conman_proto::{Template, TemplateList};

use crate::problem::ApiError;
use crate::query::NoQuery;
use crate::{ApiState, hidden_env};

/// List templates
///
/// Callers of scope `read` get `***` for the values of `env`.
#[utoipa::path(
    get, path = "/v1/templates", tag = "nodes", operation_id = "list_templates",
    responses((status = 200, description = "The node's templates.", body = TemplateList))
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    Extension(caller): Extension<Caller>,
    _: NoQuery,
) -> Result<Json<TemplateList>, ApiError> {
    let policy = state.node.policy();
    let templates = policy.templates.iter().map(|(name, template)| {
        let template = Template {
            name: name.clone(),
            runtime: template.runtime,
            start_on_connect: template.start_on_connect,
            resume_on_connect: template.resume_on_connect,
            spec: template.request.clone(),
        };
        hidden_env::of_template(&caller, template)
    });
    Ok(Json(TemplateList {
        templates: templates.collect(),
    }))
}
