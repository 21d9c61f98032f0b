//! Lines of a session's log.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which output of a session's program a line comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    Stdout,
    Stderr,
}

/// One line of `GET /v1/sessions/{id}/logs?format=json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    pub stream: LogStream,
    /// When it was written; only with `?timestamps=true`, and where the runtime records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub at: Option<Timestamp>,
    /// Without its newline. Bytes that are not UTF-8 are replaced by U+FFFD; a line longer than
    /// 64 KiB comes in pieces.
    pub text: String,
}
