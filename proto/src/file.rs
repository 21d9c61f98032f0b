//! Files of a session.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a path in a session holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileType {
    File,
    Directory,
    Link,
    /// A FIFO, a socket or a device.
    Other,
}

/// One entry of a directory of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Without its directory. Bytes that are not UTF-8 are replaced by U+FFFD.
    pub name: String,
    #[serde(rename = "type")]
    pub kind: FileType,
    /// In bytes.
    pub size: u64,
    /// Permissions in octal digits, for example `0644`.
    pub mode: String,
    /// The owner's numbers inside the session.
    pub uid: u32,
    pub gid: u32,
    #[schema(value_type = String, format = DateTime)]
    pub modified_at: Timestamp,
    #[schema(value_type = String, format = DateTime)]
    pub accessed_at: Timestamp,
    /// When its content or metadata last changed.
    #[schema(value_type = String, format = DateTime)]
    pub changed_at: Timestamp,
    /// Where a link points to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
}

/// The answer to `GET /v1/sessions/{id}/files/list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileList {
    /// In the directory's order.
    pub entries: Vec<FileEntry>,
}

/// What has happened to a file or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    Created,
    /// Its content has changed.
    Modified,
    /// Its permissions, owner or times have changed.
    Attributes,
    Removed,
    /// It was renamed; its new name follows as `moved_to` if that is watched, too.
    MovedFrom,
    MovedTo,
    /// Changes were lost, since they came faster than they were read: list the directory.
    Overflow,
    /// The watched directory was removed or renamed. Nothing follows.
    Gone,
}

impl FileChangeKind {
    /// As in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Modified => "modified",
            Self::Attributes => "attributes",
            Self::Removed => "removed",
            Self::MovedFrom => "moved_from",
            Self::MovedTo => "moved_to",
            Self::Overflow => "overflow",
            Self::Gone => "gone",
        }
    }
}

/// One change in a watched directory, an event of `GET /v1/sessions/{id}/files/watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    pub kind: FileChangeKind,
    /// In the directory; absent for the directory itself. Bytes that are not UTF-8 are replaced by U+FFFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether that is a directory.
    pub directory: bool,
    /// The same for both names of a renamed file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cookie: Option<u32>,
}

/// The answer to `PUT /v1/sessions/{id}/files?archive=tar`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnpackReport {
    /// Files, directories and links that were written.
    pub entries: u64,
    /// Devices, FIFOs, sockets and entries of unknown types, which are not written.
    pub skipped: u64,
}

/// The body of `POST /v1/sessions/{id}/files/move`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    #[schema(max_length = 4_095, min_length = 1, pattern = r"^[^\u0000]+$")]
    pub from: String,
    /// The new path itself, not a directory to move it into.
    #[schema(max_length = 4_095, min_length = 1, pattern = r"^[^\u0000]+$")]
    pub to: String,
    /// Replace a file or an empty directory at `to`.
    #[serde(default)]
    pub overwrite: bool,
    /// User name or uid that does it; the session's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256, pattern = r"^[^\u0000-\u001f\u007f-\u009f]+$")]
    pub user: Option<String>,
}

/// The body of `POST /v1/sessions/{id}/files/mkdir`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeDirectoryRequest {
    #[schema(max_length = 4_095, min_length = 1, pattern = r"^[^\u0000]+$")]
    pub path: String,
    /// Make missing parents too, and accept a directory that exists.
    #[serde(default)]
    pub parents: bool,
    /// User name or uid that does it; the session's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256, pattern = r"^[^\u0000-\u001f\u007f-\u009f]+$")]
    pub user: Option<String>,
}
