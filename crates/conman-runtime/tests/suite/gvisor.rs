//! Sessions with gVisor as their kernel do what every runtime must, but for what the host does not see.

use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::{NativeTimeouts, Runtime};
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::{Harness, Stage, say_skipped};

use crate::native_host::{Host, IMAGE};

struct Sandboxed(Host);

impl Sandboxed {
    fn new() -> Result<Self, String> {
        Ok(Self(Host::new()?))
    }
}

impl Harness for Sandboxed {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.0.open(instance, NativeTimeouts::default()).gvisor())
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..NativeTimeouts::default()
        };
        Arc::new(self.0.open(instance, timeouts).gvisor())
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }
}

runtime_conformance!(
    Sandboxed::new(),
    #[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
);

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn the_limit_of_cpu_time_binds_from_the_moment_when_the_kernel_runs() {
    let Ok(host) = Sandboxed::new().map_err(|why| say_skipped(&why)) else {
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

/// Programs in the place of `runsc` that do not do what they are asked to.
#[cfg(target_arch = "x86_64")]
mod trouble {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use conman_linux::Signal;
    use conman_runtime::{ContainerKey, GvisorOptions, RuntimeError};

    use super::*;

    /// A program without libraries: there are none in the container beside it.
    fn program(code: &[u8]) -> Vec<u8> {
        const ADDRESS: u64 = 0x40_0000;
        const HEADERS: u64 = 64 + 56;
        let size = HEADERS + code.len() as u64;
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        // An executable for x86-64, with its entry behind the headers and one segment.
        file.extend([2, 0, 0x3e, 0, 1, 0, 0, 0]);
        for number in [ADDRESS + HEADERS, 64, 0] {
            file.extend(number.to_le_bytes());
        }
        file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
        // To be read and executed.
        file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
        for number in [0, ADDRESS, ADDRESS, size, size, 0x1000] {
            file.extend(number.to_le_bytes());
        }
        file.extend(code);
        file
    }

    /// exit(0)
    const NOTHING: &[u8] = &[0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];
    /// pause() for ever
    const HANGS: &[u8] = &[0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];

    /// write(1, "rubbish\n", 8), exit(1)
    fn rubbish() -> Vec<u8> {
        let write = [0xb8, 1, 0, 0, 0, 0xbf, 1, 0, 0, 0];
        // The text is behind the 24 bytes that follow.
        let text = [0x48, 0x8d, 0x35, 19, 0, 0, 0];
        let rest = [0xba, 8, 0, 0, 0, 0x0f, 0x05];
        let exit = [0xb8, 60, 0, 0, 0, 0xbf, 1, 0, 0, 0, 0x0f, 0x05];
        [&write[..], &text, &rest, &exit, b"rubbish\n"].concat()
    }

    struct Instead(Host, GvisorOptions);

    impl Instead {
        fn of(code: &[u8]) -> Option<Stage> {
            let host = Host::new().map_err(|why| say_skipped(&why)).ok()?;
            let path = host.path("instead-of-runsc");
            fs::write(&path, program(code)).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("changed");
            let options = GvisorOptions {
                program: path,
                ..GvisorOptions::default()
            };
            Some(Stage::new(Self(host, options)))
        }
    }

    impl Harness for Instead {
        fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
            let timeouts = NativeTimeouts {
                start: Duration::from_secs(3),
                ..NativeTimeouts::default()
            };
            let options = self.1.clone();
            let native = self.0.open_with_gvisor(instance, timeouts, options);
            Arc::new(native.gvisor())
        }

        fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
            self.runtime(instance)
        }

        fn image(&self) -> String {
            IMAGE.to_owned()
        }
    }

    /// How a start with such a program fails. Afterwards nothing of it is left.
    async fn failure(code: &[u8]) -> Option<RuntimeError> {
        let stage = Instead::of(code)?;
        let plan = stage.plan("s", &["sleep", "1000"]);
        stage.runtime().create(&plan).await.expect("created");
        let started = stage.runtime().start(&plan.key).await;
        let error = started.expect_err("nothing ran the program");
        if error.is_ambiguous() {
            // As the node does then.
            kill(&stage, &plan.key);
        }
        let removed = stage
            .runtime()
            .remove(std::slice::from_ref(&plan.key))
            .await;
        assert!(removed.iter().all(Result::is_ok), "{removed:?}");
        assert_eq!(stage.pids(&plan.key), [0; 0]);
        assert!(stage.runtime().list().await.expect("listed").is_empty());
        Some(error)
    }

    fn kill(stage: &Stage, key: &ContainerKey) {
        for pid in stage.pids(key) {
            let _ = conman_linux::signal_process(pid, Signal::SIGKILL);
        }
        while !stage.pids(key).is_empty() {
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    #[tokio::test]
    async fn a_kernel_that_ends_without_having_run_anything_fails_the_start() {
        let Some(error) = failure(NOTHING).await else {
            return;
        };
        let ended = matches!(&error, RuntimeError::EndedAtOnce { .. });
        assert!(
            ended && error.to_string().contains("exit code 0"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn what_a_failing_kernel_prints_is_quoted() {
        let Some(error) = failure(&rubbish()).await else {
            return;
        };
        let ended = matches!(&error, RuntimeError::EndedAtOnce { .. });
        assert!(ended && error.to_string().contains("rubbish"), "{error}");
    }

    #[tokio::test]
    async fn a_kernel_that_hangs_fails_the_start_in_time() {
        let Some(error) = failure(HANGS).await else {
            return;
        };
        let late = matches!(
            &error,
            RuntimeError::TimedOut {
                after_ms: 3_000,
                ..
            }
        );
        assert!(late, "{error}");
    }
}
