//! Notices of other clouds, of a file and of a command, by peers that behave as the vendors' documentation says.

use std::io::Read as _;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::stage::{Daemon, Stage, eventually, idle};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, put};
use axum::{Json, Router};
use conman_core::Departure;
use conman_node::{EmergencyThread, NOTICE_SOURCES, NoticeSourceOptions};
use conman_proto::{EndCause, NodeState, SessionState};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

fn source(name: &str, setting: &[&str]) -> NoticeSourceOptions {
    let kind = NOTICE_SOURCES.iter().find(|kind| kind.name == name);
    NoticeSourceOptions {
        kind: *kind.expect("it is known"),
        is_on: true,
        setting: setting.iter().map(|&one| one.to_owned()).collect(),
    }
}

fn boot(stage: &Stage, source: NoticeSourceOptions) -> Daemon {
    stage.boot_after(EmergencyThread::start(&[source]).expect("a thread"))
}

fn await_node(daemon: &Daemon, state: NodeState) {
    eventually("the node's state", || {
        (daemon.node.status().view().state == state).then_some(())
    });
}

fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a peer on threads of its own.
fn serve(app: Router) -> (Runtime, SocketAddr) {
    let server = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a tokio runtime");
    let address = server.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("bound");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    });
    (server, address)
}

/// EC2's instance metadata service, version 2.
#[derive(Debug, Default)]
struct Ec2 {
    /// The token that it takes; it makes another one for each request.
    token: u32,
    action: Option<Value>,
    rebalance: Option<Value>,
    /// It does not answer about the recommendation.
    is_broken: bool,
}

type Shared<T> = Arc<Mutex<T>>;

fn ec2(state: &Shared<Ec2>) -> Router {
    let make_token = async |State(state): State<Shared<Ec2>>, headers: HeaderMap| {
        let lifetime = headers.get("x-aws-ec2-metadata-token-ttl-seconds");
        let lifetime = lifetime.and_then(|text| text.to_str().ok()?.parse::<u32>().ok());
        if !lifetime.is_some_and(|seconds| (1..=21_600).contains(&seconds)) {
            return (StatusCode::BAD_REQUEST, String::new());
        }
        let mut state = lock(&state);
        state.token += 1;
        (StatusCode::OK, format!("token-{}", state.token))
    };
    let say = |which: fn(&Ec2) -> &Option<Value>| {
        async move |State(state): State<Shared<Ec2>>, headers: HeaderMap| {
            let state = lock(&state);
            let token = headers.get("x-aws-ec2-metadata-token");
            if token.is_none_or(|token| token != &format!("token-{}", state.token)) {
                return Err(StatusCode::UNAUTHORIZED);
            }
            if state.is_broken && which(&state) == &state.rebalance {
                return Err(StatusCode::INTERNAL_SERVER_ERROR);
            }
            which(&state).clone().map(Json).ok_or(StatusCode::NOT_FOUND)
        }
    };
    Router::new()
        .route("/latest/api/token", put(make_token))
        .route(
            "/latest/meta-data/spot/instance-action",
            get(say(|state| &state.action)),
        )
        .route(
            "/latest/meta-data/events/recommendations/rebalance",
            get(say(|state| &state.rebalance)),
        )
        .with_state(Arc::clone(state))
}

#[test]
fn a_spot_instance_is_cordoned_preempted_in_time_and_readmitted() {
    let state = Shared::<Ec2>::default();
    let (server, address) = serve(ec2(&state));
    let aws = source("aws", &[&format!("http://{address}")]);
    assert_eq!(server.block_on(aws.probe()).as_deref(), Ok("no notice"));
    let stage = Stage::new();
    let daemon = boot(&stage, aws.clone());
    daemon.start("alice", &idle());
    lock(&state).rebalance = Some(json!({"noticeTime": "2020-10-27T08:22:00Z"}));
    await_node(&daemon, NodeState::Cordoned);
    assert_eq!(daemon.show("alice").state, SessionState::Running);

    let at = Timestamp::now() + SignedDuration::from_secs(120);
    let at = at.to_string();
    {
        let mut state = lock(&state);
        // Its token has expired, and what is read after the end of the machine fails.
        state.token += 1;
        state.is_broken = true;
        state.action = Some(json!({"action": "terminate", "time": at}));
    }
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert_eq!(shown.end.map(|end| end.cause), Some(EndCause::Preempted));
    let reason = shown.reason.unwrap_or_default();
    assert!(reason.contains("EC2 will terminate"), "{reason}");
    lock(&state).is_broken = false;
    let probed = server.block_on(aws.probe()).expect("an answer");
    assert!(probed.starts_with("terminate at "), "{probed}");

    lock(&state).action = None;
    // The cordon is an operator's to take back.
    await_node(&daemon, NodeState::Cordoned);
}

/// Azure's scheduled events, and what was acknowledged.
#[derive(Debug, Default)]
struct Azure {
    events: Vec<Value>,
    acknowledged: Vec<String>,
}

fn azure(state: &Shared<Azure>) -> Router {
    let is_asked_properly =
        |headers: &HeaderMap| headers.get("metadata").is_some_and(|value| value == "true");
    let list = async move |State(state): State<Shared<Azure>>, headers: HeaderMap| {
        if !is_asked_properly(&headers) {
            return Err(StatusCode::BAD_REQUEST);
        }
        let events = &lock(&state).events;
        Ok(Json(json!({"DocumentIncarnation": 1, "Events": events})))
    };
    let start = async |State(state): State<Shared<Azure>>, body: String| {
        let Ok(body) = serde_json::from_str::<Value>(&body) else {
            return StatusCode::BAD_REQUEST;
        };
        let id = body["StartRequests"][0]["EventId"].as_str();
        lock(&state).acknowledged.extend(id.map(str::to_owned));
        StatusCode::OK
    };
    Router::new()
        .route("/metadata/scheduledevents", get(list).post(start))
        .route("/metadata/instance/compute/name", get(async || "worker-1"))
        .with_state(Arc::clone(state))
}

fn event(id: &str, kind: &str, machine: &str) -> Value {
    json!({
        "EventId": id, "EventStatus": "Scheduled", "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": [machine], "NotBefore": "Mon, 11 Apr 2050 22:26:58 GMT", "Description": "",
        "EventSource": "Platform", "DurationInSeconds": -1,
    })
}

#[test]
fn an_azure_machine_acknowledges_its_event_once_everything_is_released() {
    let state = Shared::<Azure>::default();
    let (server, address) = serve(azure(&state));
    let options = source("azure", &[&format!("http://{address}")]);
    lock(&state).events = vec![
        event("other", "Preempt", "worker-2"),
        event("frozen", "Freeze", "worker-1"),
    ];
    assert_eq!(server.block_on(options.probe()).as_deref(), Ok("no notice"));
    let stage = Stage::new();
    let daemon = boot(&stage, options);
    daemon.start("alice", &idle());
    lock(&state)
        .events
        .push(event("ours", "Preempt", "worker-1"));
    daemon.await_state("alice", SessionState::Stopped);
    eventually("the acknowledgement", || {
        (lock(&state).acknowledged == ["ours"]).then_some(())
    });
    assert!(daemon.record("alice").state.is_ended());

    // A later event is another notice, also where the first one is still listed.
    let readmitted = daemon.run(daemon.node.preemption().readmit());
    readmitted.expect("the order is carried out");
    await_node(&daemon, NodeState::Live);
    let later = event("later", "Reboot", "worker-1");
    lock(&state).events.push(later);
    await_node(&daemon, NodeState::Preempted);
    lock(&state).events.clear();
    await_node(&daemon, NodeState::Live);
}

#[test]
fn an_azure_machine_acknowledges_its_event_once_nothing_passes_through_it() {
    let state = Shared::<Azure>::default();
    let (_server, address) = serve(azure(&state));
    let stage = Stage::new();
    let daemon = boot(&stage, source("azure", &[&format!("http://{address}")]));
    let leave = daemon.node.leave();
    let (tunnel, departure) = (leave.through().begin(), leave.departure());
    let ours = event("ours", "Preempt", "worker-1");
    lock(&state).events.push(ours);
    eventually("the tunnels to be closed", || {
        (*departure.borrow() == Departure::Closing).then_some(())
    });
    assert!(lock(&state).acknowledged.is_empty());
    drop(tunnel);
    eventually("the acknowledgement", || {
        (lock(&state).acknowledged == ["ours"]).then_some(())
    });
}

#[test]
fn a_file_that_appears_preempts_and_admits_again_when_it_is_gone() {
    let stage = Stage::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("machine goes");
    let daemon = boot(&stage, source("file", &[text(&path)]));
    daemon.start("alice", &idle());
    std::fs::write(&path, "").expect("written");
    let shown = daemon.await_state("alice", SessionState::Stopped);
    let reason = shown.reason.unwrap_or_default();
    assert!(reason.contains("machine goes exists"), "{reason}");
    std::fs::remove_file(&path).expect("removed");
    await_node(&daemon, NodeState::Live);
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// It ends after each line: the next run waits for the next one.
#[test]
fn a_command_that_prints_is_obeyed_and_started_again_when_it_ends() {
    let stage = Stage::new();
    let directory = tempfile::tempdir().expect("a directory");
    let line = directory.path().join("line");
    let script = "until mv \"$0\" \"$0.taken\"; do sleep 0.05; done 2>/dev/null; cat \"$0.taken\"";
    let options = source("command", &["/bin/sh", "-c", script, text(&line)]);
    let daemon = boot(&stage, options.clone());
    daemon.start("alice", &idle());
    let say = |said: &str| {
        let whole = directory.path().join("whole");
        std::fs::write(&whole, format!("{said}\n")).expect("written");
        std::fs::rename(&whole, &line).expect("renamed");
    };
    say("cordon prices rise");
    await_node(&daemon, NodeState::Cordoned);
    assert_eq!(daemon.show("alice").state, SessionState::Running);
    say("preempt 20 the price is too high");
    let shown = daemon.await_state("alice", SessionState::Stopped);
    let reason = shown.reason.unwrap_or_default();
    assert!(reason.contains("the price is too high"), "{reason}");
    say(&format!("nothing that is known {}", "x".repeat(100_000)));
    eventually("the line to be read", || (!line.exists()).then_some(()));
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
    say("stay");
    await_node(&daemon, NodeState::Cordoned);
    let quiet = daemon.run(async move { options.probe().await });
    assert_eq!(
        quiet.as_deref(),
        Ok("no notice: it runs and has printed nothing")
    );
}

/// systemd-logind, on a bus of its own.
struct Logind {
    shuts_down: bool,
    /// The other end of the inhibitor; it reads to the end once that is closed.
    inhibitor: Shared<Option<UnixStream>>,
}

#[zbus::interface(name = "org.freedesktop.login1.Manager")]
impl Logind {
    fn inhibit(
        &self,
        what: &str,
        _who: &str,
        _why: &str,
        mode: &str,
    ) -> zbus::fdo::Result<zbus::OwnedFd> {
        if (what, mode) != ("shutdown", "delay") {
            return Err(zbus::fdo::Error::InvalidArgs(format!("{what} {mode}")));
        }
        if self.shuts_down {
            return Err(zbus::fdo::Error::Failed("operation in progress".to_owned()));
        }
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        *lock(&self.inhibitor) = Some(ours);
        Ok(OwnedFd::from(theirs).into())
    }

    #[zbus(property, name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max_usec(&self) -> u64 {
        5_000_000
    }

    #[zbus(property)]
    fn preparing_for_shutdown(&self) -> bool {
        self.shuts_down
    }

    #[zbus(signal)]
    async fn prepare_for_shutdown(
        emitter: &zbus::object_server::SignalEmitter<'_>,
        start: bool,
    ) -> zbus::Result<()>;
}

/// A bus that ends with this.
struct Bus(std::process::Child);

impl Bus {
    fn start(address: &str) -> Self {
        let mut bus = std::process::Command::new("dbus-daemon")
            .args([
                "--session",
                "--nofork",
                "--nopidfile",
                "--print-address",
                "--address",
            ])
            .arg(address)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("dbus-daemon, of the package of this name");
        let mut line = String::new();
        let output = bus.stdout.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).expect("read");
        Self(bus)
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.0.kill().expect("it is ours");
        self.0.wait().expect("it ends");
    }
}

#[test]
fn a_shutdown_waits_until_everything_is_released_and_may_be_cancelled() {
    let directory = tempfile::tempdir().expect("a directory");
    let address = format!("unix:path={}", text(&directory.path().join("bus")));
    let _bus = Bus::start(&address);
    let runtime = tokio::runtime::Runtime::new().expect("tokio");
    let inhibitor = Shared::<Option<UnixStream>>::default();
    let logind = Logind {
        shuts_down: false,
        inhibitor: Arc::clone(&inhibitor),
    };
    let connection = runtime.block_on(async {
        zbus::connection::Builder::address(address.as_str())
            .serve_at("/org/freedesktop/login1", logind)
            .name("org.freedesktop.login1")
            .build()
            .await
            .expect("on the bus")
    });
    let announce = |start: bool| {
        runtime.block_on(async {
            let server = connection.object_server();
            let interface = server
                .interface::<_, Logind>("/org/freedesktop/login1")
                .await;
            let interface = interface.expect("served");
            interface.get_mut().await.shuts_down = start;
            let announced = Logind::prepare_for_shutdown(interface.signal_emitter(), start).await;
            announced.expect("sent");
        });
    };
    let options = source("logind", &[&address]);
    let probed = runtime.block_on(options.probe());
    assert_eq!(probed.as_deref(), Ok("no notice; it may be delayed by 5 s"));
    *lock(&inhibitor) = None;

    let stage = Stage::new();
    let daemon = boot(&stage, options.clone());
    daemon.start("alice", &idle());
    let held = || lock(&inhibitor).take();
    let mut inhibited = eventually("an inhibitor", held);
    announce(true);
    let mut end = Vec::new();
    inhibited.read_to_end(&mut end).expect("it is closed");
    // Then it is released, whatever the shutdown does next.
    assert!(daemon.record("alice").state.is_ended());
    let shown = daemon.await_state("alice", SessionState::Stopped);
    let reason = shown.reason.unwrap_or_default();
    assert!(
        reason.contains("logind shuts this machine down"),
        "{reason}"
    );

    announce(false);
    await_node(&daemon, NodeState::Live);
    eventually("another inhibitor", held);

    // logind gives no inhibitor to a daemon that is started during a shutdown.
    announce(true);
    await_node(&daemon, NodeState::Preempted);
    let probed = runtime.block_on(options.probe());
    let state = "a shutdown has begun; it may be delayed by 5 s";
    assert_eq!(probed.as_deref(), Ok(state));
    let late = Stage::new();
    let late_daemon = boot(&late, options);
    await_node(&late_daemon, NodeState::Preempted);
}

#[test]
fn a_command_that_closes_its_output_is_started_again() {
    let stage = Stage::new();
    let directory = tempfile::tempdir().expect("a directory");
    let starts = directory.path().join("starts");
    let script = "echo started >>\"$0\"; exec >&-; exec sleep 1000";
    let options = source("command", &["/bin/sh", "-c", script, text(&starts)]);
    let daemon = boot(&stage, options);
    eventually("two starts", || {
        let started = std::fs::read_to_string(&starts).unwrap_or_default();
        (started.lines().count() >= 2).then_some(())
    });
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
}

#[test]
fn a_source_that_is_not_there_says_why() {
    let runtime = tokio::runtime::Runtime::new().expect("tokio");
    for (name, setting, words) in [
        ("aws", "http://127.0.0.1:1", "cannot connect"),
        ("azure", "http://127.0.0.1:1", "cannot connect"),
        ("gce", "http://127.0.0.1:1", "cannot connect"),
        ("gce", "https://example", "must be http://HOST"),
        ("logind", "unix:path=/no/such/bus", "No such file"),
        ("logind", "somewhere", "is no address of a bus"),
        ("file", "relative", "must be an absolute path"),
        ("command", "/no/such/program", "No such file"),
        ("command", "/bin/true", "it ends at once"),
    ] {
        let silent = runtime.block_on(source(name, &[setting]).probe());
        let reason = silent.expect_err("it does not answer");
        assert!(reason.contains(words), "{name} {setting}: {reason}");
    }
    // Somebody else answers at the address.
    let (server, address) = serve(Router::new().fallback(async || "hello"));
    for name in ["aws", "azure", "gce"] {
        let wrong = source(name, &[&format!("http://{address}")]);
        let reason = server.block_on(wrong.probe());
        let reason = reason.expect_err("it is no metadata server");
        assert!(
            reason.contains("not the documented one") || reason.contains("no metadata server"),
            "{name}: {reason}"
        );
    }
}
