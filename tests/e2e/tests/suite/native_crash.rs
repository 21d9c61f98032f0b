//! Daemons and shims that die or stop while native sessions run.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use conman_e2e::{Api, Conman, binary, docker_shared, eventually, native};
use conman_linux::{PidFd, Signal, signal_process};
use conman_proto::{Generation, Node, NodeState, RuntimeKind, SessionList, SessionState};
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// What must outlive a daemon: each running session's runtime, generation and process.
async fn running(api: &Api) -> BTreeMap<String, (RuntimeKind, Generation, Option<i32>)> {
    let list = api.get("/v1/sessions?state=running&limit=1000").await;
    let list: SessionList = list.expect(StatusCode::OK);
    let facts = list.sessions.into_iter().map(|one| {
        let facts = (one.runtime, one.generation, one.pid);
        (one.id.to_string(), facts)
    });
    facts.collect()
}

async fn page(conman: &Conman, id: &str) -> String {
    conman.sessions().get(&format!("/s/{id}/")).await.text()
}

#[tokio::test]
async fn sessions_outlive_a_killed_daemon_with_their_processes_and_generations() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    for number in 0..10 {
        let request = json!({"template": "web"});
        conman.api().ensure(&format!("s{number}"), &request).await;
    }
    let before = running(&conman.api()).await;
    let shim = conman.shim_pid();
    conman.restart_after_crash().await;
    let api = conman.api();
    assert_eq!(running(&api).await, before);
    assert_eq!((before.len(), conman.shim_pid()), (10, shim));
    assert_eq!(page(&conman, "s7").await, "hello\n");
    let exec = json!({"command": ["sh", "-c", "exit 5"]});
    let result = api.post("/v1/sessions/s7/exec", &exec).await;
    assert!(
        result.text().contains("\"exit_code\":5"),
        "{}",
        result.text()
    );
    // The image is in use, whatever becomes of its name.
    conman
        .cli(&["image", "rm", "--force", conman_e2e::ROOT])
        .await
        .success();
    assert_eq!(api.stop("s3").await.state, SessionState::Stopped);
    assert_eq!(page(&conman, "s4").await, "hello\n");
}

#[tokio::test]
async fn sessions_outlive_a_killed_shim_and_the_next_one_starts_more() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("before", &json!({"template": "web"})).await;
    let facts = running(&api).await;
    let shim = PidFd::open(conman.shim_pid()).expect("the shim lives");
    shim.kill().expect("it can be killed");
    assert!(shim.wait_dead(PATIENCE).expect("it is waited for"));
    assert_eq!(page(&conman, "before").await, "hello\n");
    api.ensure("after", &json!({"template": "web"})).await;
    assert_eq!(page(&conman, "after").await, "hello\n");
    assert_ne!(conman.shim_pid(), shim.pid());
    let mut now = running(&api).await;
    now.remove("after");
    assert_eq!(now, facts);
    for id in ["before", "after"] {
        assert_eq!(api.stop(id).await.state, SessionState::Stopped);
    }
    let containers = conman.state_dir().join("native/containers");
    eventually("both are removed", PATIENCE, async || {
        std::fs::read_dir(&containers).is_ok_and(|mut left| left.next().is_none())
    })
    .await;
}

#[tokio::test]
async fn a_shim_goes_on_as_another_program_with_all_that_it_runs() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("before", &json!({"template": "web"})).await;
    let facts = running(&api).await;
    let shim = conman.shim_pid();
    let (code, said) = conman.order_shim("--replace");
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(running(&api).await, facts);
    let exec = json!({"command": ["sh", "-c", "exit 5"]});
    let result = api.post("/v1/sessions/before/exec", &exec).await;
    assert!(
        result.text().contains("\"exit_code\":5"),
        "{}",
        result.text()
    );
    api.ensure("after", &json!({"template": "web"})).await;
    assert_eq!(page(&conman, "after").await, "hello\n");
    assert_eq!(conman.shim_pid(), shim);
    for id in ["before", "after"] {
        assert_eq!(api.stop(id).await.state, SessionState::Stopped);
    }
}

#[tokio::test]
async fn a_stopped_daemon_leaves_the_shim_with_what_runs_and_takes_an_idle_one_along() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    conman.api().ensure("s", &json!({"template": "idle"})).await;
    let facts = running(&conman.api()).await;
    let shim = PidFd::open(conman.shim_pid()).expect("the shim lives");
    assert!(conman.terminate().await.success());
    assert!(!shim.is_dead().expect("it can be looked at"));
    let (code, said) = conman.stop_shim();
    assert!(code != Some(0) && said.contains("1 containers"), "{said}");

    conman.launch().await;
    assert_eq!(running(&conman.api()).await, facts);
    conman.api().stop("s").await;
    assert!(conman.terminate().await.success());
    assert!(shim.wait_dead(PATIENCE).expect("it is waited for"));
    eventually("its files go with it", PATIENCE, async || {
        !conman.shim_directory().exists()
    })
    .await;
    let (code, said) = conman.stop_shim();
    assert_eq!((code, said.trim()), (Some(0), "no shim runs"));
}

/// What the shim's unit runs; it ends with the test.
struct Unit(Child);

impl Unit {
    /// Where another shim runs it stands by.
    fn start(conman: &Conman) -> Self {
        let child = Command::new(binary())
            .args(["shim", "--standby", "--config"])
            .arg(conman.config_path())
            .stderr(Stdio::piped())
            .spawn();
        Self(child.expect("conman starts"))
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).expect("a process id")
    }

    async fn stands_by(&self) {
        let pid = self.0.id().to_string();
        eventually("it stands by", PATIENCE, async || {
            let locks = fs::read_to_string("/proc/locks").expect("readable");
            locks
                .lines()
                .any(|line| line.contains("->") && line.split_whitespace().any(|word| word == pid))
        })
        .await;
    }

    /// How it ended, and what it said.
    async fn ended(mut self) -> (bool, String) {
        eventually("it ends", PATIENCE, async || {
            self.0.try_wait().expect("it is our child").is_some()
        })
        .await;
        let status = self.0.wait().expect("it is our child");
        let stderr = self.0.stderr.take().expect("it was piped");
        let said = std::io::read_to_string(stderr).expect("it can be read");
        (status.success(), said)
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_shim_that_ends_in_good_order_takes_nothing_from_the_one_that_stood_by() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let place = conman.shim_directory();
    let unit = Unit::start(&conman);
    unit.stands_by().await;
    // Idle, it goes with the daemon, and what it had with it.
    assert!(conman.terminate().await.success());
    let (succeeded, said) = unit.ended().await;
    let lock = place.join("shim.lock").display().to_string();
    let why = format!("cannot open {lock}");
    assert!(!succeeded && said.contains(&why), "{said}");
    assert!(!place.exists());

    // As its manager starts it again.
    let unit = Unit::start(&conman);
    eventually("it serves", PATIENCE, async || {
        place.join("shim.state").exists()
    })
    .await;
    conman.launch().await;
    conman.api().ensure("s", &json!({"template": "web"})).await;
    assert_eq!(conman.shim_pid(), unit.pid());
    assert_eq!(page(&conman, "s").await, "hello\n");
    assert!(place.join("shim.lock").exists() && place.join("shim.state").exists());
    assert_eq!(conman.api().stop("s").await.state, SessionState::Stopped);
    assert!(conman.terminate().await.success());
    let (succeeded, said) = unit.ended().await;
    assert!(succeeded, "{said}");
    assert!(!place.exists());
}

#[tokio::test]
async fn the_shim_has_a_session_of_its_own_and_nothing_of_the_daemons() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    conman.api().ensure("s", &json!({"template": "idle"})).await;
    let (shim, daemon) = (conman.shim_pid(), conman.pid());
    let session = conman_linux::Lineage::of(shim).expect("readable").session;
    assert_eq!(session, shim);
    let open = |pid: i32| {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("readable");
        let targets = entries
            .flatten()
            .filter_map(|fd| std::fs::read_link(fd.path()).ok());
        targets.map(|target| target.to_string_lossy().into_owned())
    };
    // Sockets and pipes are known by their numbers.
    let daemons: Vec<String> = open(daemon).filter(|one| one.contains(":[")).collect();
    let shared: Vec<String> = open(shim)
        .filter(|one| daemons.contains(one) && !one.starts_with("anon_inode"))
        .collect();
    assert_eq!(shared, Vec::<String>::new());
    // The daemon can be killed as a group without the shim.
    let process = PidFd::open(shim).expect("the shim lives");
    assert!(process.signal(Signal::SIGCONT).expect("sent"));
}

#[tokio::test]
async fn docker_and_native_sessions_live_side_by_side() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    api.ensure("native", &json!({"template": "web"})).await;
    api.ensure("docker", &json!({"template": "python"})).await;
    let before = running(&api).await;
    let kinds: Vec<RuntimeKind> = before.values().map(|(kind, ..)| *kind).collect();
    assert_eq!(kinds, [RuntimeKind::Docker, RuntimeKind::Native]);
    assert_eq!(page(&conman, "native").await, "hello\n");
    assert!(page(&conman, "docker").await.contains("Directory listing"));

    conman.restart_after_crash().await;
    let api = conman.api();
    assert_eq!(running(&api).await, before);
    for id in ["native", "docker"] {
        let exec = json!({"command": ["echo", "here"]});
        let answer = api.post(&format!("/v1/sessions/{id}/exec"), &exec).await;
        assert!(answer.text().contains("here"), "{}", answer.text());
    }
    let report = api
        .post("/v1/nodes/self/preempt", &json!({"reason": "a test"}))
        .await;
    assert_eq!(report.status, StatusCode::OK, "{}", report.text());
    assert_eq!(conman.processes(), []);
    assert_eq!(running(&api).await, BTreeMap::new());
}

#[tokio::test]
async fn a_cordon_outlives_the_daemon_until_it_is_taken_back() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let order = async |conman: &Conman, what: &str| {
        let path = format!("/v1/nodes/self/{what}");
        let node: Node = conman
            .admin()
            .post(&path, &json!({}))
            .await
            .expect(StatusCode::OK);
        node.state
    };
    let idle = json!({"template": "idle"});
    conman.api().ensure("before", &idle).await;
    assert_eq!(order(&conman, "cordon").await, NodeState::Cordoned);
    let shown = async |conman: &Conman| -> Node {
        let admin = conman.admin();
        admin.get("/v1/nodes/self").await.expect(StatusCode::OK)
    };
    for _ in 0..2 {
        conman.crash();
        conman.spawn();
        eventually("it is cordoned again", PATIENCE, async || {
            let answer = conman.admin().try_send(Method::GET, "/healthz", None).await;
            answer.is_ok() && shown(&conman).await.state == NodeState::Cordoned
        })
        .await;
        let refused = conman.api().put("/v1/sessions/new", &idle).await;
        assert_eq!(refused.problem().slug(), "node-cordoned");
        assert_eq!(shown(&conman).await.sessions_running, 1);
    }
    assert_eq!(order(&conman, "uncordon").await, NodeState::Live);
    conman.restart_after_crash().await;
    assert_eq!(shown(&conman).await.state, NodeState::Live);
    conman.api().ensure("new", &idle).await;
}

/// A process in the session's PID namespace whose parent does not reap it: the kernel keeps the namespace's init
/// until it does.
struct Unreaped(Child);

impl Unreaped {
    fn begin(init: i32) -> Self {
        let mut nsenter = Command::new("nsenter");
        let init = init.to_string();
        let nsenter = nsenter.args(["--target", &init, "--pid", "sleep", "infinity"]);
        let child = nsenter.spawn().expect("nsenter runs");
        let this = Self(child);
        let children = format!("/proc/{0}/task/{0}/children", this.pid());
        let begun = || fs::read_to_string(&children).is_ok_and(|text| !text.trim().is_empty());
        let deadline = std::time::Instant::now() + PATIENCE;
        while !begun() {
            assert!(std::time::Instant::now() < deadline, "nsenter has no child");
            std::thread::yield_now();
        }
        signal_process(this.pid(), Signal::SIGSTOP).expect("stopped");
        this
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Unreaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_drained_session_is_released_although_the_kernel_keeps_its_init() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let ensured = api.ensure("slow", &json!({"template": "web"})).await;
    let program = ensured.session.pid.expect("it runs");
    let mut processes = conman.processes().into_iter();
    let init = processes.find(|one| one.pid != program);
    let init = init.expect("it runs below an init").pid;
    let unreaped = Unreaped::begin(init);
    let init = PidFd::open(init).expect("it lives");
    let drained = api.post("/v1/nodes/self/drain", &json!({})).await;
    assert_eq!(drained.status, StatusCode::ACCEPTED, "{}", drained.text());
    eventually("it is released", PATIENCE, async || {
        api.session("slow").await.state == SessionState::Stopped
    })
    .await;
    assert!(!init.is_dead().expect("polled"), "the kernel keeps it");
    drop(unreaped);
    assert!(init.wait_dead(PATIENCE).expect("waited"));
    // What it left is removed then.
    eventually("its container is gone", PATIENCE, async || {
        conman.processes().is_empty()
    })
    .await;
}
