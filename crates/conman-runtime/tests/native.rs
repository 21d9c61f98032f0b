//! The native runtime, on a real shim, does what every runtime must.

mod native_host;

use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::conformance::Harness;
use conman_runtime::{NativeTimeouts, Runtime, runtime_conformance};

use native_host::{Host, IMAGE};

impl Harness for Host {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.open(instance, NativeTimeouts::default()))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..NativeTimeouts::default()
        };
        Arc::new(self.open(instance, timeouts))
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }
}

runtime_conformance!(Host::new());

mod trouble {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use conman_image::ImageName;
    use conman_linux::PidFd;
    use conman_runtime::conformance::{Stage, say_skipped};
    use conman_runtime::{NativeRuntime, RuntimeError, ShimCommand};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn host() -> Option<Arc<Host>> {
        Host::new()
            .map_err(|why| say_skipped(&why))
            .ok()
            .map(Arc::new)
    }

    /// A host that the test goes on using.
    struct Shared(Arc<Host>);

    impl Harness for Shared {
        fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
            self.0.runtime(instance)
        }

        fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
            self.0.runtime_that_loses_answers_of_start(instance)
        }

        fn image(&self) -> String {
            self.0.image()
        }
    }

    fn stage() -> Option<(Arc<Host>, Stage)> {
        let host = host()?;
        Some((Arc::clone(&host), Stage::new(Shared(host))))
    }

    /// A runtime whose shim is this program.
    fn with_shim(host: &Host, program: &str, arguments: &[&str]) -> NativeRuntime {
        let command = ShimCommand {
            program: PathBuf::from(program),
            arguments: arguments.iter().map(Into::into).collect(),
            stderr: host.path("complaints"),
        };
        let instance = Instance::new([7; 4]);
        host.open_with(&instance, NativeTimeouts::default(), Some(command))
    }

    #[tokio::test]
    async fn a_shim_that_cannot_be_started_is_told_with_the_reason() {
        let Some(host) = host() else { return };
        for (program, arguments, words) in [
            ("/no/such/shim", &[][..], "No such file"),
            (
                "/bin/sh",
                &["-c", "echo broken >&2; exit 9"][..],
                "exit status: 9",
            ),
        ] {
            let runtime = with_shim(&host, program, arguments);
            let error = runtime.list().await.expect_err("there is no shim");
            assert!(matches!(error, RuntimeError::Unavailable { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.contains(words) && text.contains("complaints"),
                "{text}"
            );
        }
        let complaints = std::fs::read_to_string(host.path("complaints"));
        assert_eq!(complaints.expect("kept"), "broken\n");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_removed_while_its_start_is_under_way_never_runs_later() {
        let Some((host, stage)) = stage() else { return };
        let forgetful = host.runtime_that_loses_answers_of_start(stage.instance());
        let mut refused = 0;
        for number in 0..20 {
            let plan = stage.plan(&format!("s{number}"), &["sleep", "1000"]);
            forgetful.create(&plan).await.expect("created");
            let lost = forgetful.start(&plan.key).await.expect_err("no answer");
            assert!(lost.is_ambiguous(), "{lost}");
            let removed = async {
                loop {
                    let removed = stage
                        .runtime()
                        .remove(std::slice::from_ref(&plan.key))
                        .await;
                    match removed.into_iter().next().expect("one result") {
                        Ok(()) => return,
                        Err(RuntimeError::StillAlive { pids, .. }) => {
                            refused += 1;
                            for pid in pids {
                                if let Ok(process) = PidFd::open(pid)
                                    && stage.runtime().owns_pid(&plan.key, pid)
                                {
                                    let _ = process.kill();
                                }
                            }
                        }
                        // The cgroup of what has just died is busy for a moment.
                        Err(RuntimeError::Host { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            tokio::time::timeout(PATIENCE, removed)
                .await
                .expect("removed in time");
            assert_eq!(
                stage.runtime().find(&plan.key).await.expect("answered"),
                None
            );
            assert_eq!(stage.runtime().pids(&plan.key), Vec::<i32>::new());
        }
        // The shim takes starts in order, so each of them is over once this one is.
        let last = stage.run_idle("last").await;
        let list = stage.runtime().list().await.expect("listed");
        let keys: Vec<_> = list.into_iter().map(|found| found.key).collect();
        assert_eq!(keys, std::slice::from_ref(&last.key));
        assert!(refused > 0, "no removal met a start under way");
        last.kill();
    }

    #[tokio::test]
    async fn an_image_stays_as_long_as_a_container_is_made_of_it() {
        let Some((host, stage)) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let name: ImageName = IMAGE.parse().expect("a name");
        let store = host.store();
        store.remove(&name).expect("the name goes");
        // As a new daemon does, whose own guard it is then.
        let later = stage.another_runtime();
        store.collect(&BTreeSet::new()).expect("collected");
        assert_eq!(store.list().len(), 1);
        container.kill();
        for runtime in [stage.runtime(), &*later] {
            let removed = runtime.remove(std::slice::from_ref(&container.key)).await;
            assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
        }
        store.collect(&BTreeSet::new()).expect("collected");
        assert_eq!(store.list().len(), 0);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fifty_starts_at_a_time_are_fifty_containers() {
        let Some((_, stage)) = stage() else { return };
        let names: Vec<String> = (0..50).map(|number| format!("s{number}")).collect();
        let starts = names.iter().map(|name| stage.run_idle(name));
        let running = futures_util::future::join_all(starts).await;
        let mut pids: Vec<i32> = running.iter().map(|one| one.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        assert_eq!(pids.len(), 50);
        assert_eq!(stage.runtime().list().await.expect("listed").len(), 50);
        for one in &running {
            one.kill();
        }
    }
}
