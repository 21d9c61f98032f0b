//! The Docker runtime does what every runtime must, on real containers, and what dockerd is known
//! to do stays as it is known.

mod docker_relay;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bollard::models::{ContainerCreateBody, ContainerInspectResponse};
use bollard::query_parameters::{CreateContainerOptionsBuilder, RemoveContainerOptionsBuilder};
use bollard::{ClientVersion, Docker};
use bytes::Bytes;
use conman_core::Instance;
use conman_core::naming;
use conman_proto::{Network, TerminalSize};
use conman_runtime::conformance::{Harness, Stage, say_skipped};
use conman_runtime::{
    DockerOptions, DockerRuntime, DockerTimeouts, ExecPlan, LogOptions, Runtime, RuntimeError,
    runtime_conformance,
};
use docker_relay::{DOCKER_SOCKET, Relay, Treatment, socket_in};

const IMAGE: &str = "conman-test:busybox";
const PATIENCE: Duration = Duration::from_secs(60);

struct Dockers {
    relays: Mutex<Vec<Relay>>,
}

impl Dockers {
    fn new() -> Result<Self, String> {
        let found = std::iter::once(UnixStream::connect(DOCKER_SOCKET)).find_map(Result::ok);
        let mut stream = found.ok_or_else(|| format!("nothing listens on {DOCKER_SOCKET}"))?;
        let request = format!("GET /images/{IMAGE}/json HTTP/1.0\r\nHost: docker\r\n\r\n");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
            .write_all(request.as_bytes())
            .map_err(|error| error.to_string())?;
        let mut answer = [0; 12];
        stream
            .read_exact(&mut answer)
            .map_err(|error| format!("dockerd: {error}"))?;
        if answer.ends_with(b" 200") {
            Ok(Self {
                relays: Mutex::default(),
            })
        } else {
            Err(format!(
                "the image {IMAGE} is missing; `cargo xtask test` makes it"
            ))
        }
    }
}

impl Harness for Dockers {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(connect(
            DOCKER_SOCKET.into(),
            instance,
            DockerTimeouts::default(),
        ))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let relay = Relay::start(|request| {
            if request.starts_with("POST") && request.contains("/start") {
                Treatment::LoseAnswer
            } else {
                Treatment::Pass
            }
        });
        let timeouts = DockerTimeouts {
            start: Duration::from_millis(500),
            ..DockerTimeouts::default()
        };
        let runtime = connect(relay.socket(), instance, timeouts);
        self.relays.lock().expect("no panic before").push(relay);
        Arc::new(runtime)
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_commands(&self) -> bool {
        false
    }
}

fn connect(socket: PathBuf, instance: &Instance, timeouts: DockerTimeouts) -> DockerRuntime {
    let options = DockerOptions {
        timeouts,
        ..DockerOptions::new(socket, instance.clone())
    };
    DockerRuntime::connect(options).expect("the host has cgroups")
}

runtime_conformance!(Dockers::new());

/// The stage, or why there is none.
fn stage() -> Option<Stage> {
    match Dockers::new() {
        Ok(dockers) => Some(Stage::new(dockers)),
        Err(why) => {
            say_skipped(&why);
            None
        }
    }
}

/// Not the runtime's own way to dockerd.
fn docker() -> Docker {
    let version = ClientVersion {
        major_version: 1,
        minor_version: 41,
    };
    Docker::connect_with_unix(DOCKER_SOCKET, 60, &version).expect("the socket is there")
}

async fn inspect(container_id: &str) -> ContainerInspectResponse {
    docker()
        .inspect_container(container_id, None)
        .await
        .expect("it exists")
}

/// A field of `/proc/PID/status`.
fn process_status(pid: i32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("the kernel tells it").trim().to_owned()
}

mod containers {
    use super::*;

    #[tokio::test]
    async fn a_container_has_the_limits_rights_and_settings_of_its_plan_and_no_others() {
        let Some(stage) = stage() else { return };
        let mut plan = stage.plan("alice", &["sleep", "1000"]);
        plan.spec.memory_bytes = Some(64 << 20);
        plan.spec.cpus = Some(0.25);
        let container = stage.run(&plan).await;
        let seen = inspect(&container.container_id).await;

        let host = seen.host_config.expect("told");
        assert_eq!(
            (host.memory, host.memory_swap),
            (Some(64 << 20), Some(64 << 20))
        );
        assert_eq!(
            (host.nano_cpus, host.pids_limit),
            (Some(250_000_000), Some(64))
        );
        assert_eq!((host.init, host.privileged), (Some(true), Some(false)));
        assert_eq!(
            host.pid_mode.as_deref(),
            Some(""),
            "a PID namespace of its own"
        );
        assert_eq!(host.ipc_mode.as_deref(), Some("private"));
        let policy = host
            .restart_policy
            .and_then(|policy| policy.name)
            .expect("told");
        assert_eq!(policy.to_string(), "no");
        assert_eq!(host.port_bindings.unwrap_or_default().len(), 0);
        let log = host.log_config.expect("told");
        assert_eq!(log.typ.as_deref(), Some("json-file"));
        assert_eq!(log.config.expect("bounded")["max-size"], "8m");
        assert_eq!(
            host.security_opt,
            Some(vec!["no-new-privileges".to_owned()])
        );

        // Not what dockerd repeats but what the kernel enforces: CHOWN, DAC_OVERRIDE, FOWNER,
        // FSETID, KILL, SETGID, SETUID and NET_BIND_SERVICE are bits 0, 1, 3, 4, 5, 6, 7 and 10.
        assert_eq!(process_status(container.pid, "CapBnd"), "00000000000004fb");
        assert_eq!(process_status(container.pid, "NoNewPrivs"), "1");
        assert_eq!(
            process_status(container.pid, "Seccomp"),
            "2",
            "Docker's own filter"
        );
    }

    #[tokio::test]
    async fn with_networking_off_docker_makes_no_sandbox_that_would_pin_the_namespace() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let seen = inspect(&container.container_id).await;
        assert_eq!(seen.config.expect("told").network_disabled, Some(true));
        let network = seen.network_settings.expect("told");
        assert_eq!(network.sandbox_id.as_deref(), Some(""));
        assert_eq!(network.sandbox_key.as_deref(), Some(""));
        let namespace =
            |pid: String| std::fs::read_link(format!("/proc/{pid}/ns/net")).expect("readable");
        assert_ne!(
            namespace(container.pid.to_string()),
            namespace("self".to_owned())
        );
    }

    #[tokio::test]
    async fn the_bridge_gives_an_interface_a_way_out_and_dockers_own_files() {
        let Some(stage) = stage() else { return };
        let mut plan = stage.plan("alice", &["sh", "-c", "cat /proc/net/route; sleep 1000"]);
        plan.spec.network = Network::Bridge;
        let container = stage.run(&plan).await;
        let interfaces = std::fs::read_to_string(format!("/proc/{}/net/dev", container.pid));
        assert!(interfaces.expect("readable").contains("eth0:"));
        let routes = std::fs::read_to_string(format!("/proc/{}/net/route", container.pid));
        assert!(
            routes.expect("readable").contains("\t00000000\t"),
            "a default route"
        );
        let targets = inspect(&container.container_id)
            .await
            .mounts
            .unwrap_or_default();
        let targets: Vec<_> = targets
            .into_iter()
            .filter_map(|mount| mount.destination)
            .collect();
        assert_eq!(targets, ["/run/conman"], "nothing of ours in /etc");
        container.kill();
        let removed = stage
            .runtime()
            .remove(std::slice::from_ref(&container.key))
            .await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    }

    #[tokio::test]
    async fn an_image_that_is_not_there_is_not_pulled_but_named_with_the_remedy() {
        let Some(stage) = stage() else { return };
        let mut plan = stage.plan("alice", &["sleep", "1000"]);
        plan.spec.image = "conman-test:no-such-tag".to_owned();
        let error = stage.runtime().create(&plan).await.expect_err("not there");
        assert!(matches!(error, RuntimeError::NoSuchImage { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("docker pull conman-test:no-such-tag"),
            "{error}"
        );
        assert!(!plan.files_dir.exists(), "a refused create leaves no files");
        assert_eq!(stage.runtime().list().await.expect("answered"), []);
    }

    #[tokio::test]
    async fn a_program_that_ends_at_once_is_told_with_its_exit_code_and_last_words() {
        let Some(stage) = stage() else { return };
        let plan = stage.plan("alice", &["sh", "-c", "echo no luck >&2; exit 9"]);
        stage.runtime().create(&plan).await.expect("created");
        // dockerd may have noticed the end when it is asked right after the start, or not.
        match stage.runtime().start(&plan.key).await {
            Ok(_) => {
                let exit_code = stage.runtime().exit_code(&plan.key, PATIENCE).await;
                assert_eq!(exit_code, Some(9));
            }
            Err(RuntimeError::EndedAtOnce { reason, .. }) => {
                assert!(reason.contains("exit code 9"), "{reason}");
                assert!(reason.contains("no luck"), "{reason}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[tokio::test]
    async fn without_a_command_the_images_own_is_run_and_an_image_without_one_is_refused() {
        let Some(stage) = stage() else { return };
        let image = inspect_image().await;
        let plan = stage.plan("alice", &[]);
        let created = stage.runtime().create(&plan).await;
        if image {
            created.expect("the image says what to run");
        } else {
            let error = created.expect_err("nobody says what to run");
            assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
        }
    }

    /// Whether the image has a command of its own.
    async fn inspect_image() -> bool {
        let image = docker().inspect_image(IMAGE).await.expect("it exists");
        let config = image.config.expect("told");
        let given = |words: Option<Vec<String>>| words.is_some_and(|words| !words.is_empty());
        given(config.cmd) || given(config.entrypoint)
    }

    #[tokio::test]
    async fn a_container_that_only_has_the_name_is_neither_found_nor_removed() {
        let Some(stage) = stage() else { return };
        let key = stage.plan("alice", &[]).key;
        let name = naming::container_name(stage.instance(), &key.session, key.generation);
        let options = CreateContainerOptionsBuilder::default().name(&name).build();
        let body = ContainerCreateBody {
            image: Some(IMAGE.to_owned()),
            cmd: Some(vec!["true".to_owned()]),
            ..ContainerCreateBody::default()
        };
        let made = docker()
            .create_container(Some(options), body)
            .await
            .expect("made");
        let found = stage.runtime().find(&key).await;
        let listed = stage.runtime().list().await;
        let removed = stage.runtime().remove(std::slice::from_ref(&key)).await;
        let refused = stage
            .runtime()
            .create(&stage.plan("alice", &["true"]))
            .await;
        let still_there = docker().inspect_container(&made.id, None).await;
        let force = RemoveContainerOptionsBuilder::default().force(true).build();
        docker()
            .remove_container(&made.id, Some(force))
            .await
            .expect("removed by its maker");

        assert_eq!(found.expect("answered"), None);
        assert_eq!(listed.expect("answered"), []);
        assert!(
            matches!(removed[..], [Ok(())]),
            "nothing of ours to remove: {removed:?}"
        );
        assert!(
            matches!(refused, Err(RuntimeError::Exists { .. })),
            "{refused:?}"
        );
        still_there.expect("left alone");
    }
}

mod commands {
    use super::*;

    #[tokio::test]
    async fn a_terminals_bytes_come_as_they_are_even_when_they_look_like_frame_headers() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let script = r"printf '\001\000\000\000\377\377\377\377and \002 more'";
        let plan = ExecPlan {
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            tty: Some(TerminalSize {
                columns: 80,
                rows: 24,
            }),
            ..ExecPlan::default()
        };
        let mut io = stage
            .runtime()
            .exec(&container.key, plan)
            .await
            .expect("run");
        let mut seen = Vec::new();
        while let Some((_, bytes)) = io.output.recv().await {
            seen.extend_from_slice(&bytes);
        }
        assert_eq!(seen, b"\x01\0\0\0\xff\xff\xff\xffand \x02 more");
        assert_eq!(io.status.await.expect("told").exit_code, Some(0));
    }

    #[tokio::test]
    async fn a_caller_that_leaves_ends_the_connection_and_not_the_command() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let relay = Relay::start(|_| Treatment::Pass);
        let runtime = connect(relay.socket(), stage.instance(), DockerTimeouts::default());
        let script = "read line; while :; do echo tick; echo tick >>/run/ticks; sleep 0.05; done";
        let plan = ExecPlan {
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            stdin: true,
            ..ExecPlan::default()
        };
        let mut io = runtime.exec(&container.key, plan).await.expect("run");
        io.stdin
            .send(Bytes::from_static(b"line\n"))
            .await
            .expect("it reads");
        assert_eq!(io.output.recv().await.expect("output").1, "tick\n");
        drop(io);
        eventually("the connection's end", || relay.open() == 0).await;
        let ticks = || {
            let path = format!("/proc/{}/root/run/ticks", container.pid);
            std::fs::metadata(path).expect("it ticks").len()
        };
        let then = ticks();
        eventually("another tick", || ticks() > then).await;
    }

    #[tokio::test]
    async fn more_streams_than_allowed_are_refused_until_one_ends() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let options = DockerOptions {
            max_streams: 1,
            ..DockerOptions::new(DOCKER_SOCKET.into(), stage.instance().clone())
        };
        let runtime = DockerRuntime::connect(options).expect("the host has cgroups");
        let follow = LogOptions {
            follow: true,
            ..LogOptions::default()
        };
        let log = runtime
            .logs(&container.key, follow)
            .await
            .expect("the first");
        let plan = || ExecPlan {
            command: vec!["true".to_owned()],
            ..ExecPlan::default()
        };
        let error = runtime
            .exec(&container.key, plan())
            .await
            .expect_err("one too many");
        assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
        drop(log);
        runtime
            .exec(&container.key, plan())
            .await
            .expect("there is a place again");
    }
}

mod trouble {
    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    fn short() -> DockerTimeouts {
        DockerTimeouts {
            info: SHORT,
            create: SHORT,
            start: SHORT,
            inspect: SHORT,
            list: SHORT,
            remove: SHORT,
            exec: SHORT,
        }
    }

    /// The error of every call about containers.
    async fn errors(runtime: &DockerRuntime, stage: &Stage) -> Vec<(&'static str, RuntimeError)> {
        let plan = stage.plan("alice", &["true"]);
        let key = plan.key.clone();
        let command = ExecPlan {
            command: vec!["true".to_owned()],
            ..ExecPlan::default()
        };
        vec![
            ("create", runtime.create(&plan).await.expect_err("trouble")),
            ("start", runtime.start(&key).await.expect_err("trouble")),
            ("find", runtime.find(&key).await.expect_err("trouble")),
            ("list", runtime.list().await.expect_err("trouble")),
            (
                "exec",
                runtime.exec(&key, command).await.expect_err("trouble"),
            ),
            (
                "logs",
                runtime
                    .logs(&key, LogOptions::default())
                    .await
                    .err()
                    .expect("trouble"),
            ),
            (
                "remove",
                runtime.remove(&[key]).await.remove(0).expect_err("trouble"),
            ),
        ]
    }

    #[tokio::test]
    async fn a_daemon_that_hangs_costs_its_callers_their_patience_and_nothing_that_stays() {
        let Some(stage) = stage() else { return };
        for swallowed in ["/version", "/info", "/containers"] {
            let relay = Relay::start(move |request| {
                if request.contains(swallowed) {
                    Treatment::Swallow
                } else {
                    Treatment::Pass
                }
            });
            let runtime = connect(relay.socket(), stage.instance(), short());
            if swallowed != "/containers" {
                let error = runtime.info().await.expect_err("trouble");
                assert!(error.is_ambiguous(), "{swallowed}: {error}");
            }
            for (call, error) in errors(&runtime, &stage).await {
                assert!(
                    matches!(
                        error,
                        RuntimeError::TimedOut { .. } | RuntimeError::Unavailable { .. }
                    ),
                    "{swallowed}: {call}: {error}"
                );
                assert!(error.is_ambiguous(), "{error}");
            }
            eventually("the end of every connection", || relay.open() == 0).await;
        }
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_there_is_told_with_the_remedy_and_found_once_it_comes() {
        let Some(stage) = stage() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let runtime = connect(socket_in(dir.path()), stage.instance(), short());
        let of_info = ("info", runtime.info().await.expect_err("trouble"));
        for (call, error) in errors(&runtime, &stage).await.into_iter().chain([of_info]) {
            match error {
                RuntimeError::Unavailable { reason, .. } => {
                    assert!(reason.contains("start Docker"), "{call}: {reason}");
                }
                other => panic!("{call}: {other}"),
            }
        }
        assert!(
            !stage.plan("alice", &[]).files_dir.exists(),
            "nothing can come of that create"
        );
        let relay = Relay::start_in(dir, |_| Treatment::Pass);
        let info = runtime.info().await.expect("it is there now");
        assert!(!info.version.is_empty());
        drop(relay);
    }

    #[tokio::test]
    async fn a_container_that_docker_believes_to_run_is_removed_once_it_notices() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        container.kill();
        let refusals = AtomicUsize::new(0);
        let relay = Relay::start(move |request| {
            let early = || refusals.fetch_add(1, Ordering::SeqCst) < 3;
            if request.starts_with("DELETE") && early() {
                Treatment::Answer(409, "You cannot remove a running container")
            } else {
                Treatment::Pass
            }
        });
        let runtime = connect(relay.socket(), stage.instance(), DockerTimeouts::default());
        let removed = runtime.remove(std::slice::from_ref(&container.key)).await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
        assert_eq!(stage.runtime().list().await.expect("answered"), []);
    }

    #[tokio::test]
    async fn a_container_that_docker_believes_to_run_for_ever_is_reported_and_can_be_tried_again() {
        let Some(stage) = stage() else { return };
        let container = stage.run_idle("alice").await;
        let never = stage.plan("nobody", &[]).key;
        container.kill();
        let relay = Relay::start(|request| {
            if request.starts_with("DELETE") {
                Treatment::Answer(409, "You cannot remove a running container")
            } else {
                Treatment::Pass
            }
        });
        let timeouts = DockerTimeouts {
            remove: SHORT,
            ..DockerTimeouts::default()
        };
        let runtime = connect(relay.socket(), stage.instance(), timeouts);
        let keys = [container.key.clone(), never];
        match &runtime.remove(&keys).await[..] {
            [Err(RuntimeError::Refused { reason, .. }), Ok(())] => {
                assert!(reason.contains("running container"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let again = stage.runtime().remove(&keys).await;
        assert!(matches!(again[..], [Ok(()), Ok(())]), "{again:?}");
        assert!(!stage.plan("alice", &[]).files_dir.exists());
    }

    #[tokio::test]
    async fn a_create_whose_answer_is_lost_keeps_its_files_and_is_removed_with_them() {
        let Some(stage) = stage() else { return };
        let relay = Relay::start(|request| {
            if request.contains("/containers/create") {
                Treatment::LoseAnswer
            } else {
                Treatment::Pass
            }
        });
        let timeouts = DockerTimeouts {
            create: Duration::from_millis(500),
            ..DockerTimeouts::default()
        };
        let runtime = connect(relay.socket(), stage.instance(), timeouts);
        let plan = stage.plan("alice", &["sleep", "1000"]);
        let error = runtime.create(&plan).await.expect_err("no answer");
        assert!(matches!(error, RuntimeError::TimedOut { .. }), "{error}");
        assert!(
            plan.files_dir.exists(),
            "the container that was made after all needs them"
        );
        let found = async {
            while stage
                .runtime()
                .find(&plan.key)
                .await
                .expect("answered")
                .is_none()
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, found)
            .await
            .expect("it comes to exist");
        // By a runtime that did not create it: the container's label says where the files are.
        let removed = stage
            .runtime()
            .remove(std::slice::from_ref(&plan.key))
            .await;
        assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
        assert!(!plan.files_dir.exists());
    }
}

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let looking = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let seen = tokio::time::timeout(PATIENCE, looking).await;
    assert!(seen.is_ok(), "{what} did not come within {PATIENCE:?}");
}

/// Under the dead-man fence of a shim.
mod fenced {
    use std::time::Instant;

    use conman_core::naming::{CgroupDriver, cgroup_parent, instance_cgroup};
    use conman_linux::{Cgroups, Freezer, PidFd, Signal};
    use conman_runtime::conformance::Running;
    use conman_runtime::{DockerFence, ShimCommand};
    use conman_shim::{Client, FenceState, Reply, Request};

    use super::*;

    struct Fenced {
        dockers: Dockers,
        directory: Arc<tempfile::TempDir>,
    }

    impl Harness for Fenced {
        fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
            let socket = self.directory.path().join("shim.sock");
            let cgroup = instance_cgroup(instance, CgroupDriver::Cgroupfs);
            let shim = ShimCommand {
                program: env!("CARGO_BIN_EXE_conman-runtime-shim").into(),
                arguments: vec![
                    socket.clone().into(),
                    cgroup.into(),
                    self.directory.path().into(),
                ],
                stderr: self.directory.path().join("complaints"),
            };
            let options = DockerOptions {
                fence: Some(DockerFence {
                    socket,
                    shim: Some(shim),
                }),
                ..DockerOptions::new(DOCKER_SOCKET.into(), instance.clone())
            };
            Arc::new(DockerRuntime::connect(options).expect("the host has cgroups"))
        }

        fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
            self.dockers.runtime_that_loses_answers_of_start(instance)
        }

        fn image(&self) -> String {
            self.dockers.image()
        }
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
                let _ = shim.signal(Signal::TERM);
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
        assert_eq!(stage.runtime().pids(&late.key), Vec::<i32>::new());
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
}
