//! Sessions with gVisor as their kernel do what every runtime must, but for what the host does not see.

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
