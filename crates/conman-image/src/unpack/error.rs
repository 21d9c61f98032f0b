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

    #[error("{what} has the digest {actual}, but {expected} was expected")]
    DigestMismatch {
        what: &'static str,
        expected: Digest,
        actual: Digest,
    },

    #[error("the blob has {actual} bytes, but {expected} were expected")]
    SizeMismatch { expected: u64, actual: u64 },

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
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    EmptyPath,
    AbsolutePath,
    ParentReference,
    NulByte,
    NameTooLong,
    PathTooLong(usize),
    TooDeep(usize),
    /// A directory of its path is a symbolic link in this archive.
    ThroughSymlink,
    /// A directory of its path is another kind of file in this archive.
    ThroughFile,
    /// Kinds of entries without a file: volumes, multi-volume continuations.
    UnknownKind(u8),
    /// Sparse files in a form that would be unpacked incorrectly.
    PaxSparse,
    /// A PAX record that does not parse.
    PaxRecord,
    /// A number in the header that does not parse or is out of range.
    BadHeader(&'static str),
    LinkTarget(Box<Refusal>),
    LinkTargetMissing,
    LinkToDirectory,
    LinkToWhiteout,
    /// A link to itself, a link without a target, or one that is too long for the kernel.
    BadLink,
    WhiteoutName,
    ReplacesDirectory,
    /// The layer's root as something other than a directory.
    RootNotDirectory,
    BadCapability,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::EmptyPath => "it has no name",
            Self::AbsolutePath => "its path is absolute",
            Self::ParentReference => "its path contains ..",
            Self::NulByte => "its path contains a NUL byte",
            Self::NameTooLong => "a name in its path is longer than 255 bytes",
            Self::PathTooLong(limit) => {
                return write!(formatter, "its path is longer than {limit} bytes");
            }
            Self::TooDeep(limit) => {
                return write!(formatter, "its path is deeper than {limit} directories");
            }
            Self::ThroughSymlink => "its path leads through a symbolic link",
            Self::ThroughFile => "its path leads through something that is not a directory",
            Self::UnknownKind(byte) => {
                return write!(
                    formatter,
                    "its type ({:?}) is not supported",
                    char::from(*byte)
                );
            }
            Self::PaxSparse => {
                "it is a sparse file in PAX form, which is not supported; pack with --format=gnu \
                 or without --sparse"
            }
            Self::PaxRecord => "its PAX header is malformed",
            Self::BadHeader(field) => {
                return write!(formatter, "the {field} in its header is out of range");
            }
            Self::LinkTarget(why) => {
                return write!(
                    formatter,
                    "it is a hard link, and its target is invalid: {why}"
                );
            }
            Self::LinkTargetMissing => "it is a hard link to a file that this layer lacks",
            Self::LinkToDirectory => "it is a hard link to a directory",
            Self::LinkToWhiteout => "it is a hard link to a whiteout",
            Self::BadLink => "its link target is empty, itself, or too long",
            Self::WhiteoutName => "it is a whiteout of an invalid name",
            Self::ReplacesDirectory => "it replaces a directory of the same layer",
            Self::RootNotDirectory => "it replaces the layer's root",
            Self::BadCapability => "its file capabilities are malformed",
        };
        formatter.write_str(text)
    }
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
