//! Only the client commands of `conman`: for machines without a daemon, and for this crate's
//! tests.
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
        | Command::Config(_)
        | Command::Doctor(_)
        | Command::Notice(_)
        | Command::Bench(_) => {
            let text = "error: this program is only the client; use `conman` for that";
            // An error of standard error cannot be reported.
            let _ = writeln!(std::io::stderr(), "{text}");
            USAGE.into()
        }
    }
}
