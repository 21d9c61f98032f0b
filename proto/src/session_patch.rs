//! Changes of a session while it runs.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::PortRange;
use crate::spec::present_or_null;

/// What to change of a session while it runs. Fields that are absent stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SessionPatch {
    /// Labels to set; null removes a label, and those that are absent stay.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Stop or pause the session after so many seconds without a tunnel or request, counted from now; 0
    /// for never.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<i64>, minimum = 0, maximum = 4_294_967_295_i64)]
    pub idle_timeout_s: Option<u32>,
    /// The ports besides `port` that connections may name from now on, instead of the present ones; connections
    /// that are open stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<crate::PortEntry>>, max_items = 64)]
    pub ports: Option<Vec<PortRange>>,
    /// When to stop the session, whatever it does; null for what its `max_lifetime_s` says.
    #[serde(skip_serializing_if = "Option::is_none", with = "present_or_null")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub expires_at: Option<Option<Timestamp>>,
}
