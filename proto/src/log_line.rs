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
    /// Without its end. Bytes that are not UTF-8 are replaced by U+FFFD; a line longer than
    /// 64 KiB comes in pieces.
    pub text: String,
    /// The bytes of `text`, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// The line's end if it is not a newline: `\r\n`, or nothing for a piece of a long line and for output
    /// that ends without a newline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// Bytes of the same output before this line that were discarded before they could be read: a log is
    /// bounded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Media type of `GET /v1/sessions/{id}/logs?format=frames`.
///
/// The bytes of both outputs, as Docker's API has them: each piece is preceded by one byte for its output (1 or 2,
/// or [`LOG_FRAME_NOTE`]), three zero bytes, and its length as four bytes, the greatest first.
pub const LOG_FRAMES: &str = "application/vnd.docker.multiplexed-stream";

/// The output of a frame that has no bytes of the program: its text says what was lost.
pub const LOG_FRAME_NOTE: u8 = 3;
