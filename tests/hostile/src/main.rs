//! The hostile battery: attacks from inside a session on the host, on conman and on other sessions.
//!
//! [`probes`] is the table: each probe has a name, an area and the published attacks that it tries
//! again. Most run as functions of `inside.py` in one session; the others have a session for
//! themselves and are judged from outside, by the host's files, cgroups, processes and counters.
//! A [`bystander`] uses another session all the time: none of its operations may fail or be slow.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    reason = "a command line tool talks on standard output"
)]

mod bystander;
mod image;
mod layers;
mod outside;
mod pools;
mod probes;
mod releases;
mod run;
mod world;

use std::process::ExitCode;

use clap::Parser;
use tokio::task::LocalSet;

/// Runs the hostile battery against a daemon of its own.
#[derive(Debug, Parser)]
struct Arguments {
    /// Only probes whose names contain one of these.
    filter: Vec<String>,
    /// Only list the probes.
    #[arg(long)]
    list: bool,
    /// On sessions of another runtime, those that need nothing but a session: exactly those may succeed that are
    /// known to (for Docker, `conman doctor` lists them)
    #[arg(long, value_enum)]
    runtime: Option<Runtime>,
    /// Each layer of protection with the others off, for the probes that need nothing but a session.
    #[arg(long, conflicts_with = "runtime")]
    layers: bool,
    /// The long probes as well, the bystander's times held to those of a quiet machine, and the host's
    /// counters read after each probe.
    #[arg(long)]
    acceptance: bool,
}

/// What sessions are attacked instead of native ones.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Runtime {
    Docker,
    Gvisor,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let selected = probes::selected(&arguments.filter, arguments.acceptance);
    if arguments.list {
        for probe in &selected {
            println!("{:<11} {:<32} {}", probe.area, probe.name, probe.known);
        }
        return ExitCode::SUCCESS;
    }
    if arguments.layers {
        return code(LocalSet::new().run_until(layers::alone(&selected)).await);
    }
    if let Some(Runtime::Docker) = arguments.runtime {
        let Some(docker) = conman_e2e::docker_shared().await else {
            return ExitCode::SUCCESS;
        };
        let as_listed = LocalSet::new()
            .run_until(run::on_docker(&docker, &selected))
            .await;
        return code(as_listed);
    }
    let Some(native) = conman_e2e::native() else {
        return ExitCode::SUCCESS;
    };
    if let Some(Runtime::Gvisor) = arguments.runtime {
        let as_listed = LocalSet::new()
            .run_until(run::on_gvisor(&native, &selected))
            .await;
        return code(as_listed);
    }
    // Probes stay on this thread; the bystander's operations do not wait for it.
    let battery = run::all(&native, &selected, arguments.acceptance);
    code(LocalSet::new().run_until(battery).await)
}

fn code(as_it_should_be: bool) -> ExitCode {
    if as_it_should_be {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
