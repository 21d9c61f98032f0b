//! The client commands of `conman` alone: for machines that run no daemon, and for this crate's
//! own tests.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

use conman_cli::Command;

/// The documented code for wrong usage.
const USAGE: u8 = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = match conman_cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    match cli.command {
        Command::Client(command) => conman_cli::run(command, &cli.globals).await,
        Command::Serve(_)
        | Command::Shim(_)
        | Command::Auth(_)
        | Command::Doctor(_)
        | Command::Bench(_) => {
            let text = "error: this is the client alone; the `conman` binary does that";
            // Nobody is left to be told that it cannot be written.
            let _ = writeln!(std::io::stderr(), "{text}");
            USAGE.into()
        }
    }
}
