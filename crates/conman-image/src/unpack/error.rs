//! Errors of unpacking a layer.

use std::fmt;
use std::io;

use crate::digest::Digest;
use crate::meter::Limit;

/// Why a layer was not unpacked. Nothing of it remains in the store.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    #[error("entry {entry} is refused: {why}")]
    Refused { entry: EntryName, why: Refusal },

    #[error("the archive is refused: {0}")]
    Limit(Limit),

    #[error("the archive is cut off after {bytes} bytes")]
    Truncated { bytes: u64 },

    #[error("the archive is damaged near byte {bytes}")]
    Corrupt {
        bytes: u64,
        #[source]
        source: io::Error,
    },

    #[error("the unpacked layer has the digest {actual}, but {expected} was expected")]
    DigestMismatch { expected: Digest, actual: Digest },

    #[error("cannot read the archive")]
    Read(#[source] io::Error),

    #[error("cannot {action} {entry} in the store")]
    Write {
        action: &'static str,
        entry: EntryName,
        #[source]
        source: io::Error,
    },
}

/// The problem of an entry.
#[derive(thiserror::Error, Debug, PartialEq, Eq)]
pub enum Refusal {
    #[error("it has no name")]
    EmptyPath,
    #[error("its path contains ..")]
    ParentReference,
    #[error("its path contains a NUL byte")]
    NulByte,
    #[error("a name in its path is longer than 255 bytes")]
    NameTooLong,
    #[error("its path is longer than {0} bytes")]
    PathTooLong(usize),
    #[error("its path is deeper than {0} directories")]
    TooDeep(usize),
    /// A directory of its path is a symbolic link in this archive.
    #[error("its path leads through a symbolic link")]
    ThroughSymlink,
    /// A directory of its path is another kind of file in this archive.
    #[error("its path leads through something that is not a directory")]
    ThroughFile,
    /// Kinds of entries without a file: volumes, multi-volume continuations.
    #[error("its type ({:?}) is not supported", char::from(*.0))]
    UnknownKind(u8),
    /// Sparse files in a form that would be unpacked incorrectly.
    #[error(
        "it is a sparse file in PAX form, which is not supported; pack with --format=gnu or without --sparse"
    )]
    PaxSparse,
    /// A PAX record that does not parse.
    #[error("its PAX header is malformed")]
    PaxRecord,
    /// A number in the header that does not parse or is out of range.
    #[error("the {0} in its header is out of range")]
    BadHeader(&'static str),
    #[error("it is a hard link, and its target is invalid: {0}")]
    LinkTarget(Box<Refusal>),
    #[error("it is a hard link to a file that this layer lacks")]
    LinkTargetMissing,
    #[error("it is a hard link to a directory")]
    LinkToDirectory,
    #[error("it is a hard link to a whiteout")]
    LinkToWhiteout,
    /// A link to itself, a link without a target, or one that is too long for the kernel.
    #[error("its link target is empty, itself, or too long")]
    BadLink,
    #[error("it is a whiteout of an invalid name")]
    WhiteoutName,
    #[error("it replaces a directory of the same layer")]
    ReplacesDirectory,
    /// The layer's root as something other than a directory.
    #[error("it replaces the layer's root")]
    RootNotDirectory,
    #[error("its file capabilities are malformed")]
    BadCapability,
}

/// An entry's path in error messages: escaped and shortened.
#[derive(Clone, PartialEq, Eq)]
pub struct EntryName(String);

/// Most characters of a path in an error.
const SHOWN_CHARS: usize = 200;

impl EntryName {
    pub(crate) fn new(raw: &[u8]) -> Self {
        // A lossy character stands for at least one byte, so this bounds the work as well.
        let cut = &raw[..raw.len().min(SHOWN_CHARS * 4)];
        let text = String::from_utf8_lossy(cut);
        let mut shown: String = text.chars().take(SHOWN_CHARS).collect();
        if shown.len() < text.len() || cut.len() < raw.len() {
            shown.push('…');
        }
        Self(shown)
    }
}

impl fmt::Display for EntryName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", self.0)
    }
}

impl fmt::Debug for EntryName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}
