//! The native runtime, on a real shim, does what every runtime must.

use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_runtime::{NativeTimeouts, Runtime};
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::Harness;

use crate::native_host::{Host, IMAGE};

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
    use std::ffi::OsStr;
    use std::path::{Path, PathBuf};

    use conman_core::naming::{CgroupDriver, instance_cgroup};
    use conman_core::ownership::{BootTime, Slot};
    use conman_image::ImageName;
    use conman_linux::{Cgroups, Freezer, PidFd, Signal};
    use conman_runtime::{
        ContainerKey, FenceOpener, Lifecycle, NativeRuntime, Recorded, RuntimeError, ShimCommand,
        ShimFence,
    };
    use conman_shim::{Client, Reply, Request, VERSION};
    use conman_testkit::runtime_conformance::{Stage, say_skipped};
    use rustix::time::{ClockId, clock_gettime};

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

    #[tokio::test]
    async fn a_container_without_its_directory_for_files_does_not_start() {
        let Some((_host, stage)) = stage() else {
            return;
        };
        let plan = stage.plan("alice", &["sleep", "1000"]);
        stage.runtime().create(&plan).await.expect("created");
        std::fs::remove_dir(&plan.files_dir).expect("it is there, and empty");
        let error = stage.runtime().start(&plan.key).await;
        let error = error.expect_err("its removal may have begun").to_string();
        assert!(
            error.contains(&*plan.files_dir.to_string_lossy()),
            "{error}"
        );
    }

    /// The process of the shim that answers, once that is not `other`.
    async fn shim_but(socket: &Path, other: Option<i32>) -> PidFd {
        let found = async {
            loop {
                let client = Client::connect(socket, PATIENCE).map(|client| client.shim_pid());
                let new = client.ok().filter(|pid| Some(*pid) != other);
                if let Some(shim) = new.and_then(|pid| PidFd::open(pid).ok()) {
                    return shim;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(PATIENCE, found).await;
        found.expect("another shim answers in time")
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_shim_that_dies_is_succeeded_though_nobody_asks_for_anything() {
        let Some(host) = host() else { return };
        let [.., a, b] = std::process::id().to_be_bytes();
        let instance = Instance::new([0xd1, 0xe5, a, b]);
        let socket = host.path(&format!("{instance}.sock"));
        let cgroup = instance_cgroup(&instance, CgroupDriver::Cgroupfs);
        let root = host.path(".");
        let arguments: [&OsStr; 3] = [socket.as_ref(), cgroup.as_ref(), root.as_ref()];
        let command = ShimCommand {
            program: PathBuf::from(env!("CARGO_BIN_EXE_conman-runtime-shim")),
            arguments: arguments.map(OsStr::to_owned).to_vec(),
            stderr: host.path("complaints"),
        };
        let runtime = host.open_with(&instance, NativeTimeouts::default(), Some(command));
        let runtime = Arc::new(runtime);
        let kept = Arc::clone(&runtime);
        let keeper = tokio::spawn(async move { kept.keep_shim().await });
        let first = shim_but(&socket, None).await;
        assert!(first.kill().expect("it can be killed"));
        shim_but(&socket, Some(first.pid())).await;

        keeper.abort();
        let _ = keeper.await;
        runtime.info().await.expect("connected");
        runtime.end_idle_shim().await;
        assert!(Client::connect(&socket, PATIENCE).is_err());
        let cgroups = Cgroups::detect().expect("the host has cgroups");
        assert!(cgroups.remove_tree(&cgroup).is_empty());
    }

    #[tokio::test]
    async fn a_shim_that_runs_already_is_told_how_long_its_fence_waits() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let mut known = 700;
        let mut deadline = 1 << 40;
        let mut next = || {
            deadline += 1;
            BootTime(deadline)
        };
        for freeze_ms in [700, 1_300, 1_100] {
            let fence = ShimFence::new(socket.clone(), None, Some(freeze_ms));
            fence.look().await.expect("they agree");
            let mut client = Client::connect(&socket, PATIENCE).expect("connected");
            let mut its = || match client.ask(Request::Hello { version: VERSION }) {
                Ok(Reply::Hello { freeze_ms, .. }) => freeze_ms,
                other => panic!("{other:?}"),
            };
            // More only with the first deadline: until then others reckon with less.
            known = known.min(freeze_ms);
            assert_eq!(its(), known);
            fence.thaw(next(), &[]).await.expect("opened");
            assert_eq!(its(), freeze_ms);
            known = freeze_ms;
            // Not once more over the same connection: it would undo this.
            let other = Request::FreezePatience { freeze_ms: 9_000 };
            let mut another = Client::connect(&socket, PATIENCE).expect("connected");
            another.ask(other).expect("told");
            fence.look().await.expect("they have agreed");
            fence.extend(next()).await.expect("it is open");
            assert_eq!(its(), 9_000);
            another
                .ask(Request::FreezePatience { freeze_ms })
                .expect("told");
        }
    }

    #[tokio::test]
    async fn what_does_not_freeze_in_time_is_told_as_killed_by_the_fence_and_nothing_else_is() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let (late, ended) = (stage.run_idle("late").await, stage.run_idle("ended").await);
        ended.kill();
        assert!(ended.pidfd.wait_dead(PATIENCE).expect("waited"));
        let runtime = stage.runtime();
        let mut client = Client::connect(&socket, PATIENCE).expect("connected");
        let at_once = Request::FreezePatience { freeze_ms: 0 };
        client.ask(at_once).expect("told");
        assert!(!runtime.was_fenced(&late.key).await);
        client.ask(Request::FreezeAll).expect("ordered");
        assert!(late.pidfd.wait_dead(PATIENCE).expect("waited"));
        assert!(runtime.was_fenced(&late.key).await);
        assert!(!runtime.was_fenced(&ended.key).await);
    }

    #[tokio::test]
    async fn nobody_waits_for_long_for_a_shim_that_does_not_tell_what_its_fence_killed() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let (one, other) = (stage.run_idle("one").await, stage.run_idle("other").await);
        one.kill();
        assert!(one.pidfd.wait_dead(PATIENCE).expect("waited"));
        let runtime = stage.runtime();
        let shim = shim_but(&socket, None).await;
        let signal = |signal| {
            let sent = shim.signal(signal);
            sent.expect("signalled");
        };
        signal(Signal::SIGSTOP);
        let asked = tokio::time::timeout(PATIENCE, runtime.was_fenced(&one.key)).await;
        signal(Signal::SIGCONT);
        assert_eq!(asked, Ok(false));
        // It is the shim's word again.
        let mut client = Client::connect(&socket, PATIENCE).expect("connected");
        let at_once = Request::FreezePatience { freeze_ms: 0 };
        client.ask(at_once).expect("told");
        client.ask(Request::FreezeAll).expect("ordered");
        assert!(other.pidfd.wait_dead(PATIENCE).expect("waited"));
        assert!(runtime.was_fenced(&other.key).await);
    }

    /// Whether its cgroup is to freeze.
    fn is_ordered(stage: &Stage, key: &ContainerKey) -> bool {
        let freezer = Freezer::detect().expect("the host has cgroups");
        let above = instance_cgroup(stage.instance(), CgroupDriver::Cgroupfs);
        let name = format!("{}.{}", key.session, key.generation);
        let ordered = freezer.is_ordered(&format!("{above}/{name}"));
        ordered.expect("asked")
    }

    #[tokio::test]
    async fn what_begins_while_no_fleet_closes_the_fence_goes_on_when_it_closes_later() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let before = stage.run_idle("before").await;
        let recorded = Arc::new(Recorded::default());
        let opener = FenceOpener::Records(Arc::clone(&recorded));
        let runtime = host.open_by(stage.instance(), opener);
        recorded.are([before.key.clone()]);
        runtime.open_fence().await.expect("nothing is closed");
        let later = stage.run_idle("later").await;
        // As a shim does that has lost what it knew.
        let mut client = Client::connect(&socket, PATIENCE).expect("connected");
        client.ask(Request::FreezeAll).expect("ordered");
        let both = || {
            (
                is_ordered(&stage, &before.key),
                is_ordered(&stage, &later.key),
            )
        };
        assert_eq!(both(), (true, true));
        runtime.open_fence().await.expect("opened");
        assert_eq!(both(), (false, false));
        before.kill();
        later.kill();
    }

    #[tokio::test]
    async fn of_what_a_fleet_closed_only_what_is_in_the_records_goes_on() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let (own, gone) = (stage.run_idle("own").await, stage.run_idle("gone").await);
        let mut client = Client::connect(&socket, PATIENCE).expect("connected");
        let is_ordered = |key: &ContainerKey| is_ordered(&stage, key);
        let now = clock_gettime(ClockId::Boottime);
        let now_ns = u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).expect("since boot");
        let hour_ns = 3_600 * 1_000_000_000;
        // Whether the deadline has passed by then or not.
        for until_boottime_ns in [now_ns, now_ns + hour_ns] {
            let recorded = Arc::new(Recorded::default());
            let opener = FenceOpener::Records(Arc::clone(&recorded));
            let runtime = host.open_by(stage.instance(), opener);
            client
                .ask(Request::ExtendDeadline { until_boottime_ns })
                .expect("armed");
            let closed = until_boottime_ns == now_ns;
            let both = || (is_ordered(&own.key), is_ordered(&gone.key));
            runtime.info().await.expect("connected");
            assert_eq!(both(), (closed, closed), "nothing is known yet");
            recorded.are([own.key.clone()]);
            runtime.open_fence().await.expect("opened");
            assert_eq!(both(), (false, true));
            // A shim that loses what it knew closes it again.
            client.ask(Request::FreezeAll).expect("ordered");
            let third = stage.plan("third", &["sleep", "1000"]);
            runtime.create(&third).await.expect("created");
            let refused = runtime.start(&third.key).await.expect_err("closed");
            assert!(matches!(refused, RuntimeError::Fenced { .. }), "{refused}");
            runtime.open_fence().await.expect("opened");
            assert_eq!(both(), (false, true));
            runtime.start(&third.key).await.expect("it is open");
            client.ask(Request::FreezeAll).expect("ordered");
            runtime.open_fence().await.expect("opened");
            assert_eq!(both(), (false, true));
            assert!(!is_ordered(&third.key), "it began later");
            for pid in runtime.pids(&third.key).expect("seen") {
                let _ = PidFd::open(pid).map(|process| process.kill());
            }
            let removed = async {
                let key = std::slice::from_ref(&third.key);
                while !matches!(runtime.remove(key).await[..], [Ok(())]) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let removed = tokio::time::timeout(PATIENCE, removed).await;
            removed.expect("removed in time");
            let name = format!("{}.{}", gone.key.session, gone.key.generation);
            client.ask(Request::Thaw { name }).expect("for the next");
        }
        own.kill();
        gone.kill();
    }

    #[tokio::test]
    async fn whoever_leaves_the_fence_to_the_registry_starts_nothing_before_that_opened_it() {
        let Some((host, stage)) = stage() else { return };
        let socket = host.path(&format!("{}.sock", stage.instance()));
        let first = stage.run_idle("first").await;
        // A shim that was never told of a deadline.
        let fence = ShimFence::new(socket.clone(), None, None);
        assert!(fence.look().await.expect("answered").fired);
        let plan = stage.plan("second", &["sleep", "1000"]);
        stage.runtime().create(&plan).await.expect("created");
        let refused = stage.runtime().start(&plan.key).await;
        let refused = refused.expect_err("it is closed");
        assert!(matches!(refused, RuntimeError::Fenced { .. }), "{refused}");
        let slot = Slot {
            session: first.key.session.as_str().into(),
            generation: first.key.generation.get(),
        };
        let never = BootTime(1 << 40);
        fence.thaw(never, &[slot]).await.expect("opened");
        // Nobody who connects later closes it again.
        let another = ShimFence::new(socket, None, None);
        assert!(!another.look().await.expect("answered").fired);
        let third = stage.run_idle("third").await;
        first.kill();
        third.kill();
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
            assert_eq!(
                stage.runtime().pids(&plan.key).expect("seen"),
                Vec::<i32>::new()
            );
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
