//! The command line of `conman`: what can be typed, and the client of the HTTP API behind it.
//!
//! The client speaks nothing but HTTP, over the admin socket or TCP, and knows no crate of the
//! daemon but its wire types. `serve`, `doctor`, `bench` and `auth` are only described here; the binary
//! carries them out. `src/bin/conman-client.rs` shows how a program uses this crate.
//!
//! Exit codes: 0 done; 1 it failed; 2 wrong usage; 3 no such session or image; 4 refused (another 4xx);
//! 5 the daemon cannot be reached or is unavailable (503); 6 stuck. `exec` exits with the
//! command's code: 125 when conman could not run it, 126 and 127 as shells have them, 128 + N
//! after signal N. A reader that went away (`conman ps | head`) is no error.
//!
//! Tasks: each request's connection is driven by one task that ends with the response. `exec`
//! adds a thread that reads standard input and one that writes the outputs, joined to its task
//! by two bounded channels; they end with the process at the latest. `image import` adds a thread
//! that reads the archive, joined to the request by a bounded channel.
#![forbid(unsafe_code)]

mod args;
mod client;
mod commands;
mod failure;
mod human;
mod output;
mod phases;
mod progress;
mod stdio;
mod story;
mod terminal;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser as _;

pub use args::*;

use failure::{Exit, Failure};
use output::Output;

/// Reads the command line. Help, the version and mistakes are printed here; the error is the
/// code to exit with then.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    Cli::try_parse_from(&arguments).map_err(|error| {
        // What was asked for could not be parsed, so the flag is looked for where it must stand.
        let json = arguments
            .iter()
            .take_while(|word| *word != "--")
            .any(|word| word == "--json");
        if error.use_stderr() && json {
            let globals = Globals {
                json,
                ..Globals::default()
            };
            let message = error.render().to_string();
            let message = message.trim().trim_start_matches("error: ");
            Output::new(&globals).failure(&Failure::usage(message));
        } else {
            // Nobody is left to be told that it cannot be printed.
            let _ = error.print();
        }
        if error.use_stderr() {
            Exit::Usage.into()
        } else {
            Exit::Done.into()
        }
    })
}

/// Carries out a client command, prints what comes of it, and says how it went.
///
/// Needs a tokio runtime with time and I/O; one thread suffices.
pub async fn run(command: ClientCommand, globals: &Globals) -> ExitCode {
    let output = Output::new(globals);
    let exit = match commands::dispatch(command, globals, output).await {
        Ok(exit) => exit,
        Err(failure) => {
            output.failure(&failure);
            failure.exit()
        }
    };
    exit.into()
}
