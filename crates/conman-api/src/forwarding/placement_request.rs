//! The placement requirements of a PUT.

use std::collections::BTreeMap;

use conman_core::SpecPolicy;
use conman_fleet::PlacementRequest;
use conman_proto::SessionRequest;
use http::Uri;

use crate::query::Query;

/// `key=value`: only a node with this label; repeated: with all of them.
const NODE_LABEL: &str = "node_label";

/// Reads the requirements. The handler reports mistakes of the request; an unreadable body has no
/// requirements.
pub(super) fn of(uri: &Uri, body: &[u8], policy: &SpecPolicy) -> PlacementRequest {
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
    labels.extend(labels_of(&mut Query::of(uri)));
    PlacementRequest {
        template: request.template,
        runtime: template.and_then(|template| template.runtime),
        labels,
        memory_bytes,
        anywhere: false,
    }
}

/// Whether the body has no field.
pub(super) fn is_empty(body: &[u8]) -> bool {
    serde_json::from_slice(body)
        .is_ok_and(|request: SessionRequest| request == SessionRequest::default())
}

/// The labels in the query.
pub(crate) fn labels_of(query: &mut Query) -> BTreeMap<String, String> {
    let labels = query.each(NODE_LABEL, |text| match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be `key=value`, as in `pool=gpu`"),
    });
    labels.into_iter().collect()
}
