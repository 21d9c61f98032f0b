//! The command line of `conman`: what can be typed, and the client of the HTTP API behind it.
//!
//! The client speaks nothing but HTTP, over the admin socket or TCP, and knows no crate of the
//! daemon but its wire types. `serve`, `bench` and `auth` are only described here; the binary
//! carries them out.
#![forbid(unsafe_code)]

mod args;

use std::process::ExitCode;

pub use args::*;

/// Carries out a client command and says how it went.
#[expect(clippy::unused_async, reason = "the commands follow")]
pub async fn run(_command: ClientCommand, _globals: &Globals) -> ExitCode {
    ExitCode::FAILURE
}
