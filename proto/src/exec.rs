//! Commands in sessions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Array, ArrayBuilder, Object, ObjectBuilder, Type};

use crate::ProblemKind;

/// WebSocket subprotocol of interactive commands.
///
/// Every binary message is one channel byte ([`ExecChannel`]) and its payload. A client ends its
/// standard input with an empty `Stdin` message. The server's last message is `Status`.
pub const EXEC_PROTOCOL: &str = "conman.exec.v1";

/// WebSocket subprotocol of attached terminals and kept commands.
///
/// As [`EXEC_PROTOCOL`], with [`ExecChannel::Replay`] and [`ExecChannel::Position`] besides. Closing the
/// connection detaches.
pub const ATTACH_PROTOCOL: &str = "conman.attach.v1";

/// Subprotocol of a connection to one of a session's ports: binary messages are the bytes of a TCP
/// connection. An empty one ends the direction of its sender.
pub const PORT_PROTOCOL: &str = "conman.port.v1";

/// First byte of every message of [`EXEC_PROTOCOL`] and [`ATTACH_PROTOCOL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExecChannel {
    /// Client to server: bytes for the command; empty for end of input.
    Stdin = 0,
    /// Server to client; with a terminal, everything it prints.
    Stdout = 1,
    /// Server to client; never with a terminal.
    Stderr = 2,
    /// Server to client, last: an [`ExecStatus`] as JSON.
    Status = 3,
    /// Client to server: a [`TerminalSize`] as JSON.
    Resize = 4,
    /// Server to client, only when attached: what the terminal showed last. The client
    /// clears its screen and shows these bytes. It comes again when a slow client missed output.
    Replay = 5,
    /// Server to client, only when attached: an [`OutputPosition`] as JSON.
    Position = 6,
}

/// Where the output continues that an attached client gets. It comes first, and again when a slow client
/// missed output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputPosition {
    /// Offset of the next byte that the command wrote, counted over both outputs. A client that adds the
    /// bytes it gets knows with which offset to attach again.
    pub offset: u64,
    /// Bytes before it that are no longer kept, and that the client did not get.
    pub dropped: u64,
}

impl TryFrom<u8> for ExecChannel {
    type Error = u8;

    fn try_from(byte: u8) -> Result<Self, u8> {
        match byte {
            0 => Ok(Self::Stdin),
            1 => Ok(Self::Stdout),
            2 => Ok(Self::Stderr),
            3 => Ok(Self::Status),
            4 => Ok(Self::Resize),
            5 => Ok(Self::Replay),
            6 => Ok(Self::Position),
            other => Err(other),
        }
    }
}

/// A command to run inside a session: the body of `POST /v1/sessions/{id}/exec`, or the JSON in
/// the query parameter `request` of the WebSocket form.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments; looked up in the container's PATH.
    #[schema(schema_with = command_schema)]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(schema_with = env_schema)]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 4_096, pattern = r"^/[^\u0000-\u001f\u007f-\u009f]*$")]
    pub workdir: Option<String>,
    /// User name or uid, `user:group` allowed; the container's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256, pattern = r"^[^\u0000-\u001f\u007f-\u009f]+$")]
    pub user: Option<String>,
    /// Text for the command's standard input, at most 1 MiB; only with `POST …/exec`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1_048_576)]
    pub stdin: Option<String>,
    /// Likewise, for any bytes: base64 (RFC 4648, section 4) of at most 1 MiB, instead of `stdin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1_398_104)]
    pub stdin_base64: Option<String>,
    /// Keep standard input open for attached clients; only with `POST …/execs`. Otherwise a kept command
    /// without a terminal has no input.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open_stdin: bool,
    /// Give the command a terminal; not with `POST …/exec`.
    #[serde(default)]
    pub tty: bool,
    /// The terminal's size from the command's first moment on, 80 × 24 when absent; only with
    /// `tty`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal_size: Option<TerminalSize>,
    /// Bound on the command's run time in milliseconds. With `POST …/exec` 1 to 3,600,000,
    /// 60,000 when absent; otherwise 1 to 604,800,000 (a week), no bound when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 604_800_000)]
    pub timeout_ms: Option<u32>,
}

/// What the kernel takes as an argument: everything but NUL.
const ARGUMENT: &str = r"^[^\u0000]*$";

fn argument_schema() -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(ARGUMENT))
}

fn command_schema() -> Array {
    ArrayBuilder::new()
        .prefix_items([argument_schema().min_length(Some(1))])
        .items(argument_schema())
        .min_items(Some(1))
        .max_items(Some(256))
        .description(Some(
            "Program and arguments; looked up in the container's PATH.",
        ))
        .build()
}

fn env_schema() -> Object {
    let name = ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some(r"^[^=\u0000]+$"));
    ObjectBuilder::new()
        .property_names(Some(name))
        .additional_properties(Some(argument_schema()))
        .max_properties(Some(256))
        .description(Some("Environment variables on top of the container's own."))
        .build()
}

/// Result of a command that ran to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// 128 + N for a command ended by signal N, as shells have it.
    pub exit_code: i32,
    /// Bytes that are not UTF-8 are replaced by U+FFFD.
    pub stdout: String,
    pub stderr: String,
    /// The bytes of `stdout`, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// Likewise of `stderr`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// Whether output beyond the bound (1 MiB for each of the two) was dropped.
    pub truncated: bool,
    /// Whether SIGKILL ended it while the session's memory ran out.
    #[serde(default, skip_serializing_if = "crate::spec::is_false")]
    pub out_of_memory: bool,
}

/// What a command printed before its time was over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecOutput {
    /// Bytes that are not UTF-8 are replaced by U+FFFD.
    pub stdout: String,
    pub stderr: String,
    /// The bytes of `stdout`, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// Likewise of `stderr`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// Whether output beyond the bound (1 MiB for each of the two) was dropped.
    pub truncated: bool,
}

/// How an interactive command ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecStatus {
    /// Absent when the command could not run or its end is unknown; then `error` says why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Present when it never ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_run: Option<NotRun>,
    /// Whether SIGKILL ended it while the session's memory ran out.
    #[serde(default, skip_serializing_if = "crate::spec::is_false")]
    pub out_of_memory: bool,
}

/// What a command that never ran lacked: the slug of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NotRun {
    NoSuchCommand,
    NoSuchUser,
    NoSuchWorkdir,
}

impl NotRun {
    /// The problem that the collected form answers with.
    #[must_use]
    pub fn kind(self) -> ProblemKind {
        match self {
            Self::NoSuchCommand => ProblemKind::NO_SUCH_COMMAND,
            Self::NoSuchUser => ProblemKind::NO_SUCH_USER,
            Self::NoSuchWorkdir => ProblemKind::NO_SUCH_WORKDIR,
        }
    }
}

/// A terminal's size in character cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    #[schema(minimum = 1, maximum = 65_535)]
    pub columns: u16,
    #[schema(minimum = 1, maximum = 65_535)]
    pub rows: u16,
}
