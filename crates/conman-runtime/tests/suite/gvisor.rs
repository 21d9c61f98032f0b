//! Sessions with gVisor as their kernel do what every runtime must, but for what the host does not see.

use std::time::Duration;

use conman_core::DEFAULT_BIND_FIRST_ID;
use conman_runtime::BindPlan;
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::{Stage, say_skipped};

use crate::oci_host::WithRuntime;

runtime_conformance!(
    WithRuntime::gvisor(),
    #[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
);

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn the_limit_of_cpu_time_binds_from_the_moment_when_the_kernel_runs() {
    let Ok(host) = WithRuntime::gvisor().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let stage = Stage::new(host);
    let mut plan = stage.plan("limited", &["sleep", "1000"]);
    plan.spec.cpus = Some(0.01);
    // With a hundredth of a processor its start would take ten seconds.
    let limited = stage.run(&plan).await;
    assert!(stage.runtime().cpu_limit(&limited.key).is_some());
    // A daemon that starts after a crash sets it again.
    let lifted = stage.runtime().cpu_limit(&limited.key);
    lifted.expect("a limit").lift().expect("lifted");
    let runtime = stage.another_runtime();
    assert!(runtime.cpu_limit(&limited.key).is_some());
    limited.kill();
}

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn binds_at_and_below_tmp_are_there_although_it_is_a_mount_of_its_own() {
    let Ok(host) = WithRuntime::gvisor().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let stage = Stage::new(host);
    let shared = stage.dir().join("shared");
    std::fs::create_dir(&shared).expect("a new directory");
    let owner = Some(DEFAULT_BIND_FIRST_ID);
    std::os::unix::fs::chown(&shared, owner, owner).expect("owned");
    for (session, target) in [("alice", "/tmp"), ("bob", "/tmp/below")] {
        let script = format!("echo {session} >{target}/{session}; exec sleep 1000");
        let mut plan = stage.plan(session, &["sh", "-c", &script]);
        plan.binds = vec![BindPlan {
            root: stage.dir().to_owned(),
            below: "shared".into(),
            target: target.to_owned(),
            read_only: false,
        }];
        let container = stage.run(&plan).await;
        let written = shared.join(session);
        let there = async {
            while std::fs::read_to_string(&written).ok() != Some(format!("{session}\n")) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let there = tokio::time::timeout(Duration::from_secs(10), there).await;
        there.unwrap_or_else(|_| panic!("{session} does not write to the host's directory"));
        container.kill();
    }
}
