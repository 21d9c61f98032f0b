//! What a client orders to be done with a container's files, and the replies.

use conman_proto::FileEntry;
use serde::{Deserialize, Serialize};

/// Something to do with a container's files. Paths are absolute or relative to `/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesOrder {
    /// Describes a file.
    Stat { path: String },
    /// Returns a file's content.
    Read {
        path: String,
        range: Option<ByteRange>,
    },
    /// Returns a directory's entries as a `FileList`.
    List { path: String },
    /// Returns the changes in a directory, or of a file, as they happen: a `FileChange` a line.
    Watch { path: String },
    /// Returns a directory's content as a tar archive.
    Pack { path: String },
    /// Replaces a file by the input, once all of it has arrived.
    Write {
        path: String,
        parents: bool,
        mode: Option<u32>,
    },
    /// Unpacks a tar archive into a directory.
    Unpack { path: String, parents: bool },
    /// Makes a directory.
    MakeDirectory { path: String, parents: bool },
    /// Renames.
    Move {
        from: String,
        to: String,
        overwrite: bool,
    },
    /// Removes a file, a link or an empty directory.
    Remove { path: String, recursive: bool },
}

impl FilesOrder {
    /// Whether it reads input.
    #[must_use]
    pub fn has_input(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Unpack { .. })
    }
}

/// Bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ByteRange {
    /// From the first to the last, or to the end.
    From { first: u64, last: Option<u64> },
    /// The last ones.
    Suffix { bytes: u64 },
}

/// The result of a [`FilesOrder`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesReply {
    /// A file; `length` bytes of its content from `start` on follow.
    File {
        entry: FileEntry,
        start: u64,
        length: u64,
    },
    /// The content follows.
    Content,
    Unpacked {
        entries: u64,
        skipped: u64,
    },
    Done,
    Failed {
        failure: FilesFailure,
        detail: String,
    },
}

/// Why an order was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesFailure {
    Missing,
    IsDirectory,
    /// The path holds something that the order does not apply to.
    Conflict,
    Refused,
    Range,
    /// Not a tar archive, or one with an entry that cannot be written.
    Archive,
    /// The disk is full, or a limit of it is met.
    Full,
    /// The input ended early.
    Interrupted,
    Other,
}
