//! What a session's program reports about itself.

use serde::{Deserialize, Serialize};

/// What a session's program says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    pub session: String,
    pub generation: u64,
    /// Where it was told that it runs.
    pub host: String,
    /// Random; another one for each process.
    pub life: String,
    /// CLOCK_MONOTONIC, which all hosts of one machine share, before the line was written.
    pub monotonic_ns: u64,
}
