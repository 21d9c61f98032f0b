//! Periodic maintenance of metrics and of the heap.

use std::time::Duration;

use anyhow::{Context as _, Result};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use super::metric_help;

/// The buckets of histograms, in seconds. Without them the recorder keeps sketches of 400 KiB
/// each and exports quantiles, which cannot be added up over nodes.
const BUCKETS_S: [f64; 16] = [
    0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0,
    300.0,
];
/// Interval between clean-ups of the metrics' histograms.
const METRICS_UPKEEP: Duration = Duration::from_secs(5);

/// How often free memory is given back to the kernel.
const HEAP_TRIM: Duration = Duration::from_secs(10);

pub(super) fn install_metrics() -> Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets(&BUCKETS_S)
        .context("cannot divide the metrics' histograms")?
        .install_recorder()
        .context("cannot install the metrics recorder")?;
    metric_help::describe();
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(METRICS_UPKEEP).await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

/// Returns memory to the kernel that a crowd of clients needed.
pub(super) fn keep_heap_small() {
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(HEAP_TRIM).await;
            // It walks the heap and waits for the locks of its arenas.
            if let Err(error) = tokio::task::spawn_blocking(conman_linux::trim_heap).await {
                tracing::warn!(%error, "cannot return memory to the kernel");
            }
        }
    });
}
