//! The command line of `conman`: its arguments, and the client of the HTTP API behind it.
//!
//! The client uses only HTTP, over the admin socket or TCP, and of the daemon's crates only its
//! wire types. `serve`, `doctor`, `bench` and `auth` are only described here; the binary
//! implements them. `src/bin/conman-client.rs` shows how a program uses this crate.
//!
//! Exit codes: 0 done; 1 it failed; 2 wrong usage; 3 no such session or image; 4 refused (another
//! 4xx); 5 the daemon cannot be reached or is unavailable (503); 6 stuck. `exec` exits with the
//! command's code: 125 if conman could not run it, 126 and 127 as shells use them, 128 + N after
//! signal N. A reader that has gone (`conman ps | head`) is not an error.
//!
//! Tasks: each request's connection is driven by one task that ends with the response. `exec`
//! adds a thread that reads standard input and one that writes the outputs, connected to its task
//! by two bounded channels; they end with the process at the latest. `image import` adds a thread
//! that reads the archive, connected to the request by a bounded channel.
#![forbid(unsafe_code)]

mod args;
mod client;
mod commands;
mod failure;
mod human;
mod output;
mod phases;
mod pieces;
mod progress;
mod stdio;
mod story;
mod terminal;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::FromArgMatches as _;

pub use args::*;

use failure::{Exit, Failure};
use output::Output;

/// Parses the command line. Prints help, the version and mistakes; the error is then the exit
/// code.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, ExitCode> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let parsed = args::command()
        .try_get_matches_from(&arguments)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|mut error| {
        args::drop_value_tip(&mut error);
        let words: Vec<String> = arguments
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        // The arguments could not be parsed, so the flag is searched for where it must be.
        let json = arguments
            .iter()
            .take_while(|word| *word != "--")
            .any(|word| word == "--json");
        let globals = Globals {
            json,
            ..Globals::default()
        };
        if let Some(answer) = args::answer(&words, &error) {
            Output::new(&globals).failure(&answer);
        } else if error.use_stderr() && json {
            let message = error.render().to_string();
            let message = message.trim().trim_start_matches("error: ");
            Output::new(&globals).failure(&Failure::usage(message));
        } else {
            // An error of printing cannot be reported.
            let _ = error.print();
        }
        if error.use_stderr() {
            Exit::Usage.into()
        } else {
            Exit::Done.into()
        }
    })
}

/// Runs a client command, prints its result, and returns its exit code.
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
