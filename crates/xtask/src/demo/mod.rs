//! `cargo xtask demo`: conman on this machine, with sessions to try; `--once` tries them
//! automatically.

mod daemon;
mod tour;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Result, bail};
use daemon::Conman;

use crate::process::{cargo_build_conman, cargo_build_for_show, interrupted, is_raised, pause};
use crate::progress::Step;
use crate::setup;

/// Interval between checks whether the demo was interrupted or its daemon died.
const WATCH: Duration = Duration::from_millis(200);

/// Arguments of `cargo xtask demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArguments {
    /// Run the tour without a user, then stop with exit code 0.
    #[arg(long)]
    once: bool,
    /// Show sessions on Docker as well: one with a way out, and how fast many are killed.
    #[arg(long)]
    docker: bool,
}

pub(crate) fn run(arguments: &DemoArguments) -> Result<()> {
    let stop = interrupted()?;
    let machine = setup::for_demo(arguments.docker)?;
    let archive = setup::demo_archive()?;
    let step = Step::start("building conman");
    // The tour is one of the tests, which share a build.
    step.run(&mut match arguments.once {
        true => cargo_build_conman(),
        false => cargo_build_for_show(),
    })?;
    step.done();
    let step = Step::start("starting conman");
    let mut conman = Conman::start(arguments.docker)?;
    step.done();
    let result = show(&mut conman, &archive, arguments, &stop);
    println!("\nStopping: the sessions end, and nothing is left behind.");
    let cleaned = conman.stop();
    drop(machine);
    result.and(cleaned)
}

fn show(
    conman: &mut Conman,
    archive: &Path,
    arguments: &DemoArguments,
    stop: &AtomicBool,
) -> Result<()> {
    tour::open_sessions(conman, archive)?;
    if arguments.once {
        return tour::take(conman);
    }
    tour::explain(conman);
    while !is_raised(stop) {
        if let Some(status) = conman.ended()? {
            bail!(
                "conman ended by itself ({status}); its log is {}",
                conman.log_file().display()
            );
        }
        pause(WATCH);
    }
    Ok(())
}
