//! The runtime of plain processes does what every runtime must, and makes the trouble that tests
//! ask of it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::Runtime;
use conman_testkit::runtime_conformance::Harness;
use conman_testkit::{Fault, Operation, ProcessOptions, ProcessRuntime, runtime_conformance};

struct Processes {
    state: tempfile::TempDir,
}

impl Processes {
    fn new() -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("making namespaces and cgroups takes root".to_owned());
        }
        Ok(Self {
            state: tempfile::tempdir().expect("a directory"),
        })
    }

    fn open(&self, instance: &Instance) -> ProcessRuntime {
        open(self.state.path().to_owned(), instance)
    }
}

impl Harness for Processes {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.open(instance))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let runtime = self.open(instance);
        let late = Fault::LoseAnswer {
            happens_after: Duration::from_millis(100),
        };
        runtime.faults().always(Operation::Start, late);
        Arc::new(runtime)
    }

    fn image(&self) -> String {
        "ignored".to_owned()
    }

    fn has_terminals(&self) -> bool {
        false
    }

    fn keeps_commands(&self) -> bool {
        false
    }
}

fn open(state_dir: PathBuf, instance: &Instance) -> ProcessRuntime {
    let options = ProcessOptions {
        instance: instance.clone(),
        state_dir,
        call_timeout: Duration::from_secs(30),
    };
    ProcessRuntime::open(options).expect("the host has cgroups")
}

runtime_conformance!(Processes::new());

mod trouble_on_demand {
    use conman_runtime::{Lifecycle, RuntimeError};
    use conman_testkit::runtime_conformance::{Stage, say_skipped};

    use super::*;

    /// A stage, and a runtime of its instance that trouble can be made for.
    fn set_up(call_timeout: Duration) -> Option<(Stage, ProcessRuntime)> {
        match Processes::new() {
            Ok(processes) => {
                let state = processes.state.path().to_owned();
                let stage = Stage::new(processes);
                let options = ProcessOptions {
                    instance: stage.instance().clone(),
                    state_dir: state,
                    call_timeout,
                };
                let runtime = ProcessRuntime::open(options).expect("the host has cgroups");
                Some((stage, runtime))
            }
            Err(why) => {
                say_skipped(&why);
                None
            }
        }
    }

    #[tokio::test]
    async fn a_refused_create_makes_nothing_and_the_next_one_succeeds() {
        let Some((stage, runtime)) = set_up(Duration::from_secs(30)) else {
            return;
        };
        let plan = stage.plan("alice", &["sleep", "1000"]);
        let refusal = Fault::Refuse("no space left".to_owned());
        runtime.faults().next(Operation::Create, 1, refusal);
        let error = runtime.create(&plan).await.expect_err("refused");
        assert!(
            error.to_string().contains("no space left") && !error.is_ambiguous(),
            "{error}"
        );
        assert_eq!(runtime.find(&plan.key).await.expect("answered"), None);
        runtime
            .create(&plan)
            .await
            .expect("only the first was refused");
        assert_eq!(runtime.faults().calls(Operation::Create), 2);
    }

    #[tokio::test]
    async fn trouble_for_one_session_spares_the_others() {
        let Some((stage, runtime)) = set_up(Duration::from_secs(30)) else {
            return;
        };
        let alice = stage.plan("alice", &["sleep", "1000"]);
        let bob = stage.plan("bob", &["sleep", "1000"]);
        let session = alice.key.session.clone();
        runtime
            .faults()
            .for_session(Operation::Create, session, Fault::Unavailable);
        let error = runtime.create(&alice).await.expect_err("unavailable");
        assert!(matches!(error, RuntimeError::Unavailable { .. }), "{error}");
        runtime.create(&bob).await.expect("not concerned");
        runtime.faults().clear();
        runtime.create(&alice).await.expect("the trouble is over");
    }

    #[tokio::test]
    async fn while_it_hangs_calls_time_out_and_the_kernel_still_answers() {
        let Some((stage, runtime)) = set_up(Duration::from_millis(300)) else {
            return;
        };
        let container = stage.run_idle("alice").await;
        runtime.faults().hang();
        for error in [
            runtime.list().await.expect_err("hangs"),
            runtime.find(&container.key).await.expect_err("hangs"),
            runtime
                .remove(std::slice::from_ref(&container.key))
                .await
                .remove(0)
                .expect_err("hangs"),
        ] {
            assert!(
                matches!(error, RuntimeError::TimedOut { after_ms: 300, .. }),
                "{error}"
            );
        }
        assert!(runtime.owns_pid(&container.key, container.pid));
        assert!(
            runtime
                .pids(&container.key)
                .expect("seen")
                .contains(&container.pid)
        );
        assert_eq!(
            runtime
                .exit_code(&container.key, Duration::from_millis(50))
                .await,
            None
        );
        container.kill();
        runtime.faults().resume();
        // On a busy machine a removal may take longer than that bound, too.
        loop {
            match runtime
                .remove(std::slice::from_ref(&container.key))
                .await
                .remove(0)
            {
                Err(RuntimeError::TimedOut { .. }) => {}
                other => break other.expect("removed"),
            }
        }
    }
}
