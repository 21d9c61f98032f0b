//! Under the dead-man fence of a shim.

use std::time::Instant;

use conman_core::naming::{CgroupDriver, cgroup_parent, instance_cgroup};
use conman_linux::{Cgroups, Freezer, PidFd, Signal};
use conman_runtime::{DockerFence, FenceOpener, ShimCommand};
use conman_shim::{Client, FenceState, Reply, Request};
use conman_testkit::runtime_conformance::Running;

use super::*;

struct Fenced {
    dockers: Dockers,
    directory: Arc<tempfile::TempDir>,
}

impl Harness for Fenced {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(fenced(&self.directory, instance, DOCKER_SOCKET.into()))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        self.dockers.runtime_that_loses_answers_of_start(instance)
    }

    fn image(&self) -> String {
        self.dockers.image()
    }
}

/// Under the fence of the shim in this directory.
fn fenced(directory: &tempfile::TempDir, instance: &Instance, docker: PathBuf) -> DockerRuntime {
    let socket = directory.path().join("shim.sock");
    let cgroup = instance_cgroup(instance, CgroupDriver::Cgroupfs);
    let shim = ShimCommand {
        program: env!("CARGO_BIN_EXE_conman-runtime-shim").into(),
        arguments: vec![
            socket.clone().into(),
            cgroup.into(),
            directory.path().into(),
        ],
        stderr: directory.path().join("complaints"),
    };
    let options = DockerOptions {
        fence: Some(DockerFence {
            socket,
            shim: Some(shim),
            opener: FenceOpener::AnyConnection,
        }),
        ..DockerOptions::new(docker, instance.clone())
    };
    DockerRuntime::connect(options).expect("the host has cgroups")
}

/// The stage, and then the shim, whose work it is until the stage is cleared.
struct Ground {
    stage: Stage,
    shim: OwnShim,
}

/// Ended with the test.
struct OwnShim(Arc<tempfile::TempDir>);

impl OwnShim {
    fn client(&self) -> Option<Client> {
        Client::connect(&self.0.path().join("shim.sock"), PATIENCE).ok()
    }
}

impl Drop for OwnShim {
    fn drop(&mut self) {
        if let Some(client) = self.client()
            && let Ok(shim) = PidFd::open(client.shim_pid())
        {
            let _ = shim.signal(Signal::SIGTERM);
            let _ = shim.wait_dead(PATIENCE);
        }
    }
}

impl Ground {
    fn new() -> Option<Self> {
        let dockers = Dockers::new().map_err(|why| say_skipped(&why)).ok()?;
        let directory = Arc::new(tempfile::tempdir().expect("a directory"));
        let stage = Stage::new(Fenced {
            dockers,
            directory: Arc::clone(&directory),
        });
        let shim = OwnShim(directory);
        Some(Self { stage, shim })
    }

    fn client(&self) -> Client {
        self.shim.client().expect("the shim answers")
    }

    /// The cgroup above all of it.
    fn cgroup(&self, container: &Running) -> String {
        let key = &container.key;
        let driver = CgroupDriver::Cgroupfs;
        cgroup_parent(self.stage.instance(), &key.session, key.generation, driver).path
    }
}

fn unfence() -> Request {
    Request::Unfence {
        until_boottime_ns: None,
        names: None,
    }
}

fn fence_is(client: &mut Client, wanted: fn(FenceState) -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        match client.ask(Request::Fence).expect("answered") {
            Reply::Fence { state } if wanted(state) => return true,
            _ => std::thread::park_timeout(Duration::from_millis(5)),
        }
    }
    false
}

fn names(client: &mut Client) -> Vec<(i32, bool)> {
    let all = client.list().expect("listed").into_iter();
    all.map(|view| (view.pid, view.state.is_alive())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fence_freezes_thaws_and_kills_a_session_of_dockers() {
    let Some(ground) = Ground::new() else { return };
    let stage = &ground.stage;
    let container = stage.run_idle("alice").await;
    let mut client = ground.client();
    assert_eq!(names(&mut client), [(container.pid, true)]);
    let freezer = Freezer::detect().expect("detected");
    let frozen = || {
        freezer
            .is_frozen(&ground.cgroup(&container))
            .expect("asked")
    };
    assert!(!frozen());
    client.ask(Request::FreezeAll).expect("ordered");
    let closed = |state| matches!(state, FenceState::Fenced { .. });
    assert!(fence_is(&mut client, closed));
    assert!(frozen());
    // Nothing starts behind it.
    let late = stage.plan("bob", &["sleep", "1000"]);
    stage.runtime().create(&late).await.expect("created");
    let error = stage.runtime().start(&late.key).await.expect_err("closed");
    assert!(!error.is_ambiguous(), "{error}");
    assert!(error.to_string().contains("frozen"), "{error}");
    assert_eq!(
        stage.runtime().pids(&late.key).expect("seen"),
        Vec::<i32>::new()
    );
    client.ask(unfence()).expect("ordered");
    assert!(!frozen());
    client.ask(Request::FreezeAll).expect("ordered");
    assert!(fence_is(&mut client, closed));
    let name = format!("{}.{}", container.key.session, container.key.generation);
    client.ask(Request::Kill { name }).expect("killed");
    let process = &container.pidfd;
    assert!(process.wait_dead(PATIENCE).expect("waited"), "it lives on");
    client.ask(unfence()).expect("ordered");
    for key in [&container.key, &late.key] {
        let removed = stage.runtime().remove(std::slice::from_ref(key)).await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    }
    assert_eq!(names(&mut client), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_freeze_in_time_is_told_as_killed_by_the_fence_and_nothing_else_is() {
    let Some(ground) = Ground::new() else { return };
    let stage = &ground.stage;
    let runtime = stage.runtime();
    let (late, ended) = (stage.run_idle("late").await, stage.run_idle("ended").await);
    ended.kill();
    assert!(ended.pidfd.wait_dead(PATIENCE).expect("waited"));
    let mut client = ground.client();
    client
        .ask(Request::FreezePatience { freeze_ms: 0 })
        .expect("told");
    assert!(!runtime.was_fenced(&late.key).await);
    client.ask(Request::FreezeAll).expect("ordered");
    assert!(late.pidfd.wait_dead(PATIENCE).expect("waited"));
    assert!(runtime.was_fenced(&late.key).await);
    assert!(!runtime.was_fenced(&ended.key).await);
    client.ask(unfence()).expect("ordered");
    for key in [&late.key, &ended.key] {
        let removed = runtime.remove(std::slice::from_ref(key)).await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    }
    assert!(!runtime.was_fenced(&late.key).await, "it is forgotten");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_docker_reports_as_failed_and_that_runs_stays_under_the_fence() {
    let Some(ground) = Ground::new() else { return };
    let stage = &ground.stage;
    let relay = Relay::start(|request| {
        if request.starts_with("POST") && request.contains("/start") {
            Treatment::Misreport(500, "the task was lost sight of")
        } else {
            Treatment::Pass
        }
    });
    let runtime = fenced(&ground.shim.0, stage.instance(), relay.socket());
    let plan = stage.plan("alice", &["sleep", "1000"]);
    runtime.create(&plan).await.expect("created");
    let error = runtime.start(&plan.key).await.expect_err("reported");
    assert!(!error.is_ambiguous(), "{error}");
    let pids = stage.runtime().pids(&plan.key).expect("seen");
    assert!(!pids.is_empty(), "Docker did not start it");
    let mut client = ground.client();
    assert_eq!(
        names(&mut client),
        [(0, true)],
        "it is certified to be over"
    );
    client.ask(Request::FreezeAll).expect("ordered");
    assert!(fence_is(&mut client, |state| matches!(
        state,
        FenceState::Fenced { .. }
    )));
    let freezer = Freezer::detect().expect("detected");
    let driver = CgroupDriver::Cgroupfs;
    let key = &plan.key;
    let parent = cgroup_parent(stage.instance(), &key.session, key.generation, driver);
    assert!(freezer.is_frozen(&parent.path).expect("asked"));
    freezer.kill(&parent.path).expect("killed");
    eventually("its end", || {
        let pids = stage.runtime().pids(key).expect("seen");
        pids.is_empty()
    })
    .await;
    client.ask(unfence()).expect("ordered");
    let removed = runtime.remove(std::slice::from_ref(key)).await;
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    assert_eq!(names(&mut client), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_already_is_taken_under_the_fence_and_what_fails_is_forgotten() {
    let Some(ground) = Ground::new() else { return };
    let stage = &ground.stage;
    let dockers = connect(
        DOCKER_SOCKET.into(),
        stage.instance(),
        DockerTimeouts::default(),
    );
    let plan = stage.plan("alice", &["sleep", "1000"]);
    dockers.create(&plan).await.expect("created");
    let started = dockers.start(&plan.key).await.expect("started");
    // As after a restart of the daemon: its health is looked at.
    stage.runtime().info().await.expect("described");
    let mut client = ground.client();
    assert_eq!(names(&mut client), [(started.pid, true)]);
    let failing = stage.plan("bob", &["/no/such/program"]);
    stage.runtime().create(&failing).await.expect("created");
    let failed = stage.runtime().start(&failing.key).await;
    failed.expect_err("there is no such program");
    let alive = |all: Vec<(i32, bool)>| all.into_iter().filter(|(_, alive)| *alive).count();
    assert_eq!(alive(names(&mut client)), 1);
    let process = PidFd::open(started.pid).expect("it lives");
    assert!(stage.runtime().owns_pid(&plan.key, started.pid));
    process.kill().expect("killed");
    assert!(process.wait_dead(PATIENCE).expect("waited"));
    for key in [&plan.key, &failing.key] {
        let removed = stage.runtime().remove(std::slice::from_ref(key)).await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    }
    assert_eq!(names(&mut client), []);
    let cgroups = Cgroups::detect().expect("detected");
    let above = instance_cgroup(stage.instance(), CgroupDriver::Cgroupfs);
    assert_eq!(cgroups.children(&above), Vec::<String>::new());
}
