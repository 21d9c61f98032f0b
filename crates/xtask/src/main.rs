//! Developer commands of conman: `cargo xtask demo`, `cluster`, `test`, `acceptance`, `check`, `sim`,
//! `overlap`, `hostile`, `bench`, `setup`, `clean`.
//!
//! `demo`, `test` and `setup` set up a fresh Debian or Ubuntu machine: packages, Docker Engine,
//! images made locally from distribution packages. Every command stops what it started.
#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    reason = "a command line tool prints to standard output"
)]
#![expect(
    clippy::print_stderr,
    reason = "a command line tool reports errors on standard error"
)]

mod acceptance;
mod check;
mod clean;
mod cluster;
mod demo;
mod earlier;
mod hostile;
mod process;
mod progress;
mod setup;
mod sim;
mod sources;
mod suite;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Developer commands of conman.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Set up this machine, start conman, open a few sessions, show what to try.
    Demo(demo::DemoArguments),
    /// A fleet on this machine, to try out: nodes and etcd in network namespaces.
    #[command(disable_help_flag = true)]
    Cluster(cluster::ClusterArguments),
    /// Set up this machine for the test suite and run all of it.
    Test(suite::TestArguments),
    /// Compare the faults of a fleet to their figures, at full length: five minutes without etcd,
    /// thirty nodes. For an otherwise idle machine.
    Acceptance(acceptance::AcceptanceArguments),
    /// Attack a node from inside its sessions, while a bystander must not notice.
    Hostile(hostile::HostileArguments),
    /// Formatting, lints, documentation, dependency rules.
    Check,
    /// Search simulated fleets for two containers of one session, and other violations.
    Sim(sim::SimArguments),
    /// Disturb a real fleet at random, and judge whether two containers of one session ever ran.
    Overlap(cluster::OverlapArguments),
    /// Measure a real fleet; `conman bench` measures one node.
    Bench(cluster::BenchArguments),
    /// Only the set-up: packages, Docker Engine, images.
    Setup,
    /// List and remove what the set-up and the tests leave on this machine, except packages.
    Clean(clean::CleanArguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Cluster(arguments) => cluster::run(&arguments),
        Command::Overlap(arguments) => cluster::overlap(&arguments),
        Command::Bench(arguments) => cluster::bench(&arguments),
        Command::Test(arguments) => suite::run(&arguments),
        Command::Acceptance(arguments) => acceptance::run(&arguments),
        Command::Hostile(arguments) => hostile::run(&arguments),
        Command::Check => check::run(),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::Clean(arguments) => clean::run(&arguments),
        Command::Setup => setup::for_tests(&[]).map(|machine| {
            if let Some(machine) = machine {
                machine.leave_running();
            }
        }),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
