//! Measuring what a native container takes of the disk while its program works against that.

use std::time::Duration;

use conman_linux::{DiskUsage, Freezer, ProjectQuotas};
use conman_runtime::DiskExcess;
use conman_testkit::runtime_conformance::{Harness, Stage, say_skipped};

use crate::native_host::Host;
use crate::oci_host::WithRuntime;

/// Moves a file between the first and the last of many directories as fast as it can.
const MOVE: &str =
    "mkdir -p /tmp; cd /tmp; i=0; while [ $i -lt 800 ]; do i=$((i+1)); mkdir $i; done; : > 1/file
    while :; do mv 1/file 800/; mv 800/file 1/; done";

/// A file without a name.
const HIDE: &str = "exec 3>/big; rm /big; dd if=/dev/zero bs=1M count=8 >&3; sleep 1000";

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_session_is_steady_while_it_is_measured_frozen_and_runs_afterwards() {
    let Ok(host) = Host::new().map_err(|why| say_skipped(&why)) else {
        return;
    };
    if !Freezer::detect().is_ok_and(|freezer| freezer.dies_frozen()) {
        say_skipped("this host has no unified cgroup hierarchy");
        return;
    }
    let stage = Stage::new(host);
    if ProjectQuotas::of(stage.dir()).is_some() {
        say_skipped("the file system enforces project quotas, so nothing is measured");
        return;
    }
    let running = stage.run(&stage.plan("mover", &["sh", "-c", MOVE])).await;
    let runtime = stage.runtime();
    let ample = DiskUsage {
        bytes: 1 << 40,
        inodes: 1 << 20,
    };
    let measured = async |limits, freeze| {
        let excess = runtime.excess_disk_usage(&running.key, limits, freeze);
        excess.await.expect("measured")
    };
    let few = DiskUsage {
        inodes: 100,
        ..ample
    };
    let is_excess = |excess: &_| matches!(excess, Some(DiskExcess::Measured(_)));
    // Until it has made its directories.
    while !is_excess(&measured(few, false).await) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    while measured(ample, false).await != Some(DiskExcess::Unsteady) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut steady = 0;
    for _ in 0..20 {
        steady += u32::from(measured(ample, true).await.is_none());
    }
    // One that froze within the same tick of the kernel's clock as its last change is not.
    assert!(steady >= 10, "{steady} of 20");
    let excess = measured(few, true).await;
    assert!(is_excess(&excess), "{excess:?}");
    // It runs again.
    while measured(ample, false).await != Some(DiskExcess::Unsteady) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(runtime.paused_by(&running.key).await, None);
}

#[tokio::test]
async fn a_session_that_writes_uses_processor_time_and_an_idle_one_none() {
    let Ok(host) = Host::new().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let stage = Stage::new(host);
    let writes = "while :; do : > /file; sleep 0.01; done";
    let writer = stage
        .run(&stage.plan("writer", &["sh", "-c", writes]))
        .await;
    let idle = stage.run_idle("idle").await;
    let used = |key| stage.runtime().cpu_us(key).expect("counted");
    // Until it waits.
    let mut before = used(&idle.key);
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = used(&idle.key);
        if now == before {
            break;
        }
        before = now;
    }
    let begun = used(&writer.key);
    while used(&writer.key) < begun + 10_000 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(used(&idle.key), before);
}

async fn files_without_a_name_count<H: Harness>(host: Result<H, String>) {
    let Ok(host) = host.map_err(|why| say_skipped(&why)) else {
        return;
    };
    let stage = Stage::new(host);
    if ProjectQuotas::of(stage.dir()).is_some() {
        say_skipped("the file system enforces project quotas, so nothing is measured");
        return;
    }
    let running = stage.run(&stage.plan("hider", &["sh", "-c", HIDE])).await;
    let limits = DiskUsage {
        bytes: 4 << 20,
        inodes: 1 << 20,
    };
    let is_found = async {
        loop {
            let excess = stage
                .runtime()
                .excess_disk_usage(&running.key, limits, false);
            if let Some(DiskExcess::Measured(_)) = excess.await.expect("measured") {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let found = tokio::time::timeout(PATIENCE, is_found).await;
    found.expect("it is counted");
}

#[tokio::test]
async fn files_without_a_name_count_in_native_sessions() {
    files_without_a_name_count(Host::new()).await;
}

#[tokio::test]
async fn files_without_a_name_count_in_sessions_of_crun() {
    files_without_a_name_count(WithRuntime::crun()).await;
}
