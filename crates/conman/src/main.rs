//! The `conman` program: the daemon and its command line.
//!
//! This crate only composes. `serve` reads the configuration, opens the state directory, and
//! connects node, proxy and API; other crates implement the other subcommands.
#![forbid(unsafe_code)]

mod auth;
mod bench;
mod config;
mod doctor;
mod notice;
mod serve;
mod shim;
mod state_dir;
mod telemetry;

use std::process::ExitCode;

use conman_cli::{Command, ConfigCommand};

fn main() -> ExitCode {
    let cli = match conman_cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(exit) => return exit,
    };
    match cli.command {
        Command::Serve(arguments) => serve::run(&arguments),
        // Before there is any other thread.
        Command::Shim(arguments) => shim::run(&arguments),
        Command::Auth(arguments) => auth::run(&arguments, cli.globals.json),
        Command::Config(arguments) => match arguments.command {
            ConfigCommand::Check { file } => serve::check(file.as_deref()),
        },
        Command::Doctor(arguments) => doctor::run(&arguments, cli.globals.json),
        Command::Notice(arguments) => notice::run(&arguments, cli.globals.json),
        Command::Bench(arguments) => bench::run(&arguments, cli.globals.json),
        Command::Client(command) => {
            let mut globals = cli.globals;
            let named = globals.named_endpoint(|name| std::env::var_os(name));
            if named.is_none() {
                globals.socket = config::admin_socket();
            }
            on_runtime(async move { conman_cli::run(command, &globals).await })
        }
    }
}

fn on_runtime(work: impl Future<Output = ExitCode>) -> ExitCode {
    match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => {
            let code = runtime.block_on(work);
            // A thread that still reads standard input would delay the exit.
            runtime.shutdown_background();
            code
        }
        Err(error) => fail(&format!("cannot start a tokio runtime: {error}")),
    }
}

/// Prints a command's result. A reader that has gone (`conman doctor | head`) is a normal end.
fn tell(text: &str) {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    let _ = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
}

/// Prints the reason on standard error.
#[expect(
    clippy::print_stderr,
    reason = "the last message of a program that cannot continue"
)]
fn fail(why: &str) -> ExitCode {
    eprintln!("conman: {why}");
    ExitCode::FAILURE
}
