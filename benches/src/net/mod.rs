//! What each kind of network costs: sessions', Docker's, and plain ones for comparison.

mod cleanup;
mod fabric;
mod loads;
mod namespaces;
mod report;
mod routed;
mod services;
mod sessions;
mod ways;

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::arguments::Networking;
use crate::interruption::{early_end, until_interrupted};
use crate::report::Report;
use loads::Metric;
use ways::{Stage, Way};

pub(crate) use loads::load;
pub(crate) use services::serve_services;

/// Where the client and the server are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Side {
    /// Both on this machine.
    Local,
    /// The client on another machine.
    Inbound,
    /// The server on another machine.
    Outbound,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Name {
    side: Side,
    way: &'static str,
}

#[derive(Debug, Clone, Serialize)]
struct Measurement {
    name: Name,
    metric: Metric,
    value: f64,
}

/// A way without figures.
#[derive(Debug, Clone, Serialize)]
struct Unmeasured {
    name: Name,
    why: String,
}

/// Measures every way in rotation.
///
/// # Errors
/// When Docker or a package is missing, or a plain network cannot be made. A way that does not work
/// is reported as not measured.
pub(crate) async fn net(conman: &Path, options: &Networking) -> Result<Report> {
    if options.cleanup {
        return cleanup::cleanup(conman, options.count).await;
    }
    if options.fabric {
        return fabric::compare(conman, options).await;
    }
    if options.start || options.preempt {
        return routed::compare(conman, options).await;
    }
    let mut stage = Stage::default();
    let (mut measurements, mut unmeasured) = (Vec::new(), Vec::new());
    let ended = until_interrupted(async {
        stage.prepare(conman).await?;
        measure(options, &stage.ways, (&mut measurements, &mut unmeasured)).await;
        Ok(())
    })
    .await;
    let stopped = stage.stop().await;
    measurements.retain(|one| unmeasured.iter().all(|failed| failed.name != one.name));
    let early = early_end(ended, measurements.len())?;
    unmeasured.extend(stopped?);
    Ok(report::report(options, &measurements, &unmeasured)?.ended_early(early))
}

async fn measure(
    options: &Networking,
    ways: &[Way],
    (measurements, unmeasured): (&mut Vec<Measurement>, &mut Vec<Unmeasured>),
) {
    let length = Duration::from_secs(options.seconds as u64);
    let bar = ProgressBar::new((options.rounds * ways.len() * Metric::ALL.len()) as u64);
    for round in 0..options.rounds {
        for metric in Metric::ALL {
            // Each round begins with another way, so that none always runs after the same one.
            for turn in 0..ways.len() {
                let way = &ways[(turn + round) % ways.len()];
                bar.inc(1);
                if unmeasured.iter().any(|one| one.name == way.name) {
                    continue;
                }
                match metric.measure(&way.client, &way.services, length).await {
                    Ok(None) => {}
                    Ok(Some(value)) => measurements.push(Measurement {
                        name: way.name,
                        metric,
                        value,
                    }),
                    Err(error) => unmeasured.push(Unmeasured {
                        name: way.name,
                        why: format!("{metric:?}: {error:#}"),
                    }),
                }
            }
        }
    }
    bar.finish_and_clear();
}
