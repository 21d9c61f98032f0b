//! The parent of all native containers of a node: [`conman_fence`], which decides what may run, and the parts
//! besides it that make containers, keep their terminals, bound their logs and carry files.
//!
//! Three processes, each with one thread and no async runtime:
//!
//! - the *shim* ([`run`]): the loop of [`conman_fence`], and in it the streams of terminals and kept commands;
//! - the *launcher*, which the shim forks: creates containers, as children of the shim. When it dies
//!   the shim forks another;
//! - the *log sweeper*, forked likewise: bounds logs by punching out their oldest parts.
//!
//! Dependencies: this crate depends on `conman-fence` for the messages of its two processes and for
//! [`conman_fence::ContainerStreams`], which the streams implement; `conman-fence` knows nothing of this crate. Both
//! use `conman-shim-protocol`, which is all that clients need.
#![forbid(unsafe_code)]

mod files;
mod launcher;
mod log_sweeper;
mod output_ring;
mod seccomp_filter;
mod seccomp_profile;
mod stream_table;
mod streams;
mod terminal_modes;
#[cfg(test)]
mod tests;

use conman_fence::ShimParts;

pub use conman_fence::{ENDING_TIMEOUT, IDS_FILE, IdsTaken, LastHold, ShimOptions, ids_taken};
pub use conman_shim_protocol::*;

/// Runs the shim, as [`conman_fence::run`] describes.
///
/// # Errors
/// As [`conman_fence::run`].
pub fn run(options: ShimOptions) -> std::io::Result<LastHold> {
    let parts = ShimParts {
        launcher: launcher::serve,
        log_sweeper: log_sweeper::serve,
        streams: Box::new(stream_table::StreamTable::new()?),
    };
    conman_fence::run(options, parts)
}
