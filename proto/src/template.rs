//! Templates of the node's configuration.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{RuntimeKind, SessionRequest};

/// A template of the node's configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Template {
    pub name: String,
    /// The runtime that its sessions use; the node's default when null.
    pub runtime: Option<RuntimeKind>,
    /// Whether a connection to a session that names no other template may start it.
    pub start_on_connect: bool,
    /// Whether a connection, command or attached client resumes a session that an order has paused.
    #[serde(default)]
    pub resume_on_connect: bool,
    /// What a request that names the template starts from.
    pub spec: SessionRequest,
}

/// The templates of a node, ordered by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TemplateList {
    pub templates: Vec<Template>,
}
