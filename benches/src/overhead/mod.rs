//! What containers cost: memory, random access, linear algebra, block I/O, Redis and a database, as a plain process, in
//! a native session and in Docker.
//!
//! All run the same programs of the distribution, from the same files: `/usr` of this machine, bound read-only.
//! The ways take turns within each round, and each figure is compared with the plain process of its round.

mod claims;
mod loads;
mod places;
mod report;
mod servers;

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use crate::arguments::Overhead;
use crate::interruption::until_interrupted;
use crate::needs;
use crate::report::Report;
pub(crate) use loads::Load;
use places::{Place, Places};

/// One figure.
#[derive(Debug, Clone, Serialize)]
struct Measurement {
    round: usize,
    place: Place,
    metric: String,
    value: f64,
}

/// What is not measured, and why.
#[derive(Debug, Clone, Serialize)]
struct Skipped {
    what: String,
    why: String,
}

/// What has been measured when the benchmark ends, in whichever way.
#[derive(Debug, Default)]
struct Measured {
    measurements: Vec<Measurement>,
    skipped: Vec<Skipped>,
}

/// Measures all loads in all places, round by round.
///
/// # Errors
/// When nothing can be measured.
pub(crate) async fn overhead(conman: &Path, options: &Overhead) -> Result<Report> {
    let mut measured = Measured::default();
    let loads: Vec<Load> = Load::ALL
        .into_iter()
        .filter(|load| options.loads.is_empty() || options.loads.contains(load))
        .filter(|load| match needs::missing(load.needs()) {
            None => true,
            Some(why) => {
                measured.skip(load.name(), why);
                false
            }
        })
        .collect();
    measured.skip("a virtual machine", places::no_virtual_machine());
    if loads.is_empty() {
        bail!("nothing can be measured: {}", measured.reasons());
    }
    let what = (&*loads, options.runtime);
    let places = Places::start(conman, what, &mut measured).await?;
    let run = rounds(options, &loads, &places, &mut measured);
    let ended = until_interrupted(run).await;
    let stopped = places.stop().await;
    if let Err(error) = ended {
        // The rounds before are kept.
        if measured.measurements.is_empty() {
            return Err(error);
        }
        measured.skip("further rounds", format!("{error:#}"));
    }
    stopped?;
    report::report(options, &measured)
}

async fn rounds(
    options: &Overhead,
    loads: &[Load],
    places: &Places,
    measured: &mut Measured,
) -> Result<()> {
    for round in 0..options.rounds {
        for load in loads {
            let all = places.of(*load);
            for turn in 0..all.len() {
                // Each round begins with another place, so that none always runs after the same one.
                let place = all[(turn + round) % all.len()];
                tell(&format!(
                    "round {}: {}, {}",
                    round + 1,
                    load.name(),
                    place.name()
                ));
                match places.run(*load, place, options).await {
                    Ok(figures) => {
                        measured
                            .measurements
                            .extend(figures.into_iter().map(|(metric, value)| Measurement {
                                round,
                                place,
                                metric,
                                value,
                            }))
                    }
                    Err(error) => {
                        let what = format!("{}, {}", load.name(), place.name());
                        measured.skip(&what, format!("{error:#}"));
                    }
                }
            }
        }
    }
    Ok(())
}

impl Measured {
    /// Once for each reason.
    fn skip(&mut self, what: &str, why: String) {
        if !self.skipped.iter().any(|one| one.what == what) {
            self.skipped.push(Skipped {
                what: what.to_owned(),
                why,
            });
        }
    }

    fn reasons(&self) -> String {
        let reasons = self.skipped.iter();
        let reasons: Vec<String> = reasons
            .map(|one| format!("{}: {}", one.what, one.why))
            .collect();
        reasons.join("; ")
    }
}

fn tell(what: &str) {
    use std::io::Write as _;

    // Progress that nobody reads is no failure.
    let _ = writeln!(std::io::stderr(), "  … {what}");
}

/// Runs a command to its end. Returns what it printed.
///
/// # Errors
/// When it cannot be started or fails, with what it complained of.
async fn output(command: &mut tokio::process::Command) -> Result<String> {
    let shown = format!("{:?}", command.as_std());
    let output = command
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        // The benchmark handles Ctrl-C at the terminal.
        .process_group(0)
        .output()
        .await
        .with_context(|| format!("starting {shown}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{shown} failed ({}): {}", output.status, errors.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
