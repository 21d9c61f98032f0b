//! Connect tokens.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/sessions/{id}/token`; may be empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ConnectTokenRequest {
    /// How long a connection may be opened with it, in seconds: 1 to 86,400; 300 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub ttl_s: Option<u32>,
}

/// A short-lived token that opens connections to one session and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectToken {
    pub token: String,
    #[schema(value_type = String, format = DateTime)]
    pub expires_at: Timestamp,
    /// The session's URL with the token in it, for a browser's first visit; null without a port.
    pub url: Option<String>,
}
