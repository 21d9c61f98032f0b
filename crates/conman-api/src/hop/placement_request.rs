//! The placement requirements of a PUT.

use std::collections::BTreeMap;

use conman_core::SpecPolicy;
use conman_fleet::PlacementRequest;
use conman_proto::{FieldError, SessionRequest};
use http::Uri;

use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::Query;

/// `key=value`: only a node with this label; repeated: with all of them.
pub(crate) const NODE_LABEL: &str = "node_label";

/// Reads the requirements. The handler reports other mistakes of the request; an unreadable body
/// has no requirements.
pub(super) fn of(
    uri: &Uri,
    body: &[u8],
    policy: &SpecPolicy,
) -> Result<PlacementRequest, ApiError> {
    let request: SessionRequest = serde_json::from_slice(body).unwrap_or_default();
    let template = request
        .template
        .as_ref()
        .and_then(|name| policy.templates.get(name));
    let memory_bytes = request
        .memory_bytes
        .or_else(|| template.and_then(|template| template.request.memory_bytes))
        .unwrap_or_default();
    let mut labels = template
        .and_then(|template| template.request.node_labels.clone())
        .unwrap_or_default();
    labels.extend(request.node_labels.unwrap_or_default());
    labels.extend(labels_of(uri)?);
    Ok(PlacementRequest {
        template: request.template,
        runtime: template.and_then(|template| template.runtime),
        labels,
        memory_bytes,
        anywhere: false,
    })
}

/// The labels in the query.
pub(crate) fn labels_of(uri: &Uri) -> Result<BTreeMap<String, String>, ApiError> {
    let mut labels = BTreeMap::new();
    for text in Query::of(uri).all(NODE_LABEL) {
        match text.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                labels.insert(name.to_owned(), value.to_owned());
            }
            _ => {
                return Err(Kind::BAD_QUERY.with_fields(vec![FieldError {
                    field: NODE_LABEL.to_owned(),
                    message: "must be `key=value`, as in `pool=gpu`".to_owned(),
                }]));
            }
        }
    }
    Ok(labels)
}
