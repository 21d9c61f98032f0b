//! Directories as tar archives: [`pack()`] writes one, [`unpack()`] reads one. Both are used inside sessions, for
//! the archives of the API, and by `conman cp` on the operator's machine.
//!
//! Kept: regular files with their holes, hard links, directories, symbolic links, permissions, times in seconds,
//! and the extended attributes `user.*`. Sockets, FIFOs, devices and procfs are skipped and counted. Owners are
//! written, and ignored when an archive is read.
//!
//! No link is followed, also while a hostile program exchanges files for links: directories are entered by
//! descriptors, and an archive's paths and links lead only to what is below the directory. Depth, links and
//! directories are bounded in number. The caller bounds bytes, and memory by the process's limits: long names are
//! read whole.

#![forbid(unsafe_code)]

mod attributes;
mod pack;
mod sparse;
#[cfg(test)]
mod tests;
mod unpack;
mod walk;

pub use pack::pack;
pub use unpack::{SpecialBits, UnpackError, Unpacked, unpack};
pub use walk::{MAX_DEPTH, READ, entries, refuse_procfs, too_deep};

/// Bytes copied at once.
pub const BUFFER_BYTES: usize = 256 * 1_024;

/// Permissions, with set-user-id, set-group-id and sticky bit.
pub const PERMISSIONS: u32 = 0o7777;

/// The prefix of the comment, a global PAX record at an archive's end, that counts what [`pack()`] skipped.
const SKIPPED_COMMENT: &str = "skipped sockets, FIFOs, devices and files of procfs: ";
