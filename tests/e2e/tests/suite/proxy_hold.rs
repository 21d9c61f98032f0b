//! Connections to sessions that do not run yet: they are held, bounded in number, and served or
//! told why not.

use std::path::PathBuf;
use std::time::Duration;

use conman_e2e::{Answer, Conman, Docker, PYTHON, RawClient, docker_shared, eventually};
use conman_proto::{Problem, SessionState};
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// Listens once `/gate/open` exists, and then answers everything with its generation.
const GATED: &str = r"
import http.server, os, time

while not os.path.exists('/gate/open'):
    time.sleep(0.02)

class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = self.headers['X-Conman-Generation'].encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)

http.server.ThreadingHTTPServer(('127.0.0.1', 8080), Hello).serve_forever()
";

/// A conman whose sessions' programs listen once a file is made.
struct Stage {
    conman: Conman,
    gate: PathBuf,
    _directory: TempDir,
}

impl Stage {
    async fn start(docker: &Docker, limits: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let root = directory.path().canonicalize().expect("it is there");
        let gate = root.join("gate");
        std::fs::create_dir(&gate).expect("a directory can be made");
        let builder = Conman::builder().set("binds", &format!("allow = [\"{}\"]", root.display()));
        let builder = limits
            .iter()
            .fold(builder, |builder, limit| builder.set("limits", limit));
        Self {
            conman: builder.start(docker).await,
            gate,
            _directory: directory,
        }
    }

    /// A session of the template `python`, which a connection may start, with another program.
    fn request(&self) -> Value {
        json!({"template": "python", "command": ["python3", "-c", GATED],
            "binds": [format!("{}:/gate:ro", self.gate.display())]})
    }

    fn open(&self) {
        std::fs::write(self.gate.join("open"), "").expect("the gate can be opened");
    }

    fn close(&self) {
        std::fs::remove_file(self.gate.join("open")).expect("the gate was open");
    }

    /// Starts a session without waiting for it.
    async fn begin(&self, id: &str, request: &Value) {
        let path = format!("/v1/sessions/{id}?wait=false");
        let begun = self.conman.api().put(&path, request).await;
        assert!(begun.status.is_success(), "{}", begun.text());
    }

    async fn get(&self, id: &str) -> Answer {
        self.conman.sessions().get(&format!("/s/{id}/")).await
    }

    /// A client that has asked, and has not looked for an answer.
    async fn ask(&self, id: &str) -> RawClient {
        let mut client = RawClient::connect(self.conman.sessions_address()).await;
        let request = format!("GET /s/{id}/ HTTP/1.1\r\nHost: localhost\r\n\r\n");
        client.send(&request).await;
        client
    }

    /// Clients that ask, all of which are held then.
    async fn hold(&self, id: &str, count: usize) -> Vec<RawClient> {
        let before = self.held().await;
        let clients = join_all((0..count).map(|_| self.ask(id))).await;
        self.wait_held(before + count).await;
        clients
    }

    /// How many requests are held at this moment.
    async fn held(&self) -> usize {
        let metrics = self.conman.api().get("/metrics").await.text();
        let value = metrics
            .lines()
            .find_map(|line| line.strip_prefix("conman_proxy_held{listener=\"sessions\"} "));
        value.expect("it is told").parse().expect("a number")
    }

    async fn wait_held(&self, count: usize) {
        let what = format!("{count} requests are held");
        eventually(&what, PATIENCE, async || self.held().await == count).await;
    }
}

/// All of them were served; by which generation.
async fn served(clients: &mut [RawClient]) -> Vec<u64> {
    let mut generations = Vec::new();
    for client in clients {
        let head = client.read_until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        let lower = head.to_ascii_lowercase();
        let length = lower
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length = length.expect("a length").parse().expect("a number");
        let body = client.read(length).await;
        let text = String::from_utf8(body).expect("digits");
        generations.push(text.parse().expect("a generation"));
    }
    generations
}

fn assert_full(answer: &Answer) -> Problem {
    let problem = answer.problem();
    assert_eq!(problem.status, 503, "{problem:?}");
    assert!(
        problem.retryable && problem.slug().starts_with("too-many-"),
        "{problem:?}"
    );
    let seconds = answer
        .headers
        .get("retry-after")
        .expect("it says when to come back");
    let seconds: u32 = seconds.to_str().expect("text").parse().expect("seconds");
    assert!(seconds >= 1);
    problem
}

#[tokio::test]
async fn a_connection_to_a_session_that_starts_is_held_and_then_served() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    stage.begin("slow", &stage.request()).await;
    let mut clients = stage.hold("slow", 20).await;
    assert_eq!(
        stage.conman.api().session("slow").await.state,
        SessionState::Starting
    );
    stage.open();
    let generations = served(&mut clients).await;
    let session = stage.conman.api().session("slow").await;
    assert_eq!(session.state, SessionState::Running);
    assert_eq!(generations, vec![session.generation.get(); 20]);
    stage.wait_held(0).await;
}

#[tokio::test]
async fn a_program_that_binds_its_port_late_makes_a_slow_success_and_no_error() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let late = "sleep 8; cd /etc; exec python3 -m http.server 8080";
    let request = json!({"image": PYTHON, "port": 8080, "command": ["sh", "-c", late]});
    let begun = conman
        .api()
        .put("/v1/sessions/late?wait=false", &request)
        .await;
    assert!(begun.status.is_success(), "{}", begun.text());
    let page = conman.sessions().get("/s/late/").await;
    assert_eq!(page.status, StatusCode::OK, "{}", page.text());
    assert!(page.text().contains("Directory listing"), "{}", page.text());
    let phases = conman.api().session("late").await.phases_ms;
    assert!(phases["ready"] > 1_000.0, "{phases:?}");
}

#[tokio::test]
async fn a_crowd_of_connections_starts_an_ended_session_once() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    let api = stage.conman.api();
    stage.open();
    let first = api.ensure("s", &stage.request()).await.session;
    api.stop("s").await;
    stage.close();
    let mut clients = stage.hold("s", 30).await;
    stage.open();
    let generations = served(&mut clients).await;
    let second = api.session("s").await;
    assert!(second.generation > first.generation);
    assert_eq!(generations, vec![second.generation.get(); 30]);
    // Whether it ended by itself or was told to makes no difference.
    let pid = second.pid.expect("it runs");
    let kill = conman_linux::Signal::SIGKILL;
    conman_linux::signal_process(pid, kill).expect("it runs");
    eventually("the death is known", PATIENCE, async || {
        api.session("s").await.state.is_ended()
    })
    .await;
    let answer = stage.get("s").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let third: u64 = answer.text().parse().expect("a generation");
    assert!(third > second.generation.get());
}

#[tokio::test]
async fn one_session_holds_so_many_and_further_ones_are_told_when_to_come_back() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["max_held_per_session = 3"]).await;
    for id in ["full", "other"] {
        stage.begin(id, &stage.request()).await;
    }
    let mut clients = stage.hold("full", 3).await;
    for _ in 0..3 {
        let problem = assert_full(&stage.get("full").await);
        assert!(problem.detail.contains("full"), "{problem:?}");
    }
    // Another session has room of its own.
    let mut others = stage.hold("other", 1).await;
    // Whoever leaves gives its place up.
    drop(clients.pop());
    stage.wait_held(3).await;
    let mut next = stage.hold("full", 1).await;
    assert_full(&stage.get("full").await);
    stage.open();
    for clients in [&mut clients, &mut others, &mut next] {
        served(clients).await;
    }
    assert_eq!(stage.get("full").await.status, StatusCode::OK);
}

#[tokio::test]
async fn all_sessions_together_hold_so_many_and_no_more() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["max_held = 4"]).await;
    for id in ["a", "b"] {
        stage.begin(id, &stage.request()).await;
    }
    let mut clients = stage.hold("a", 2).await;
    clients.extend(stage.hold("b", 2).await);
    for id in ["a", "b"] {
        assert_full(&stage.get(id).await);
    }
    stage.open();
    assert_eq!(served(&mut clients).await.len(), 4);
}

#[tokio::test]
async fn a_start_that_fails_ends_the_hold_with_the_reason() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    let run =
        |script: &str| json!({"image": PYTHON, "port": 8080, "command": ["sh", "-c", script]});
    let mut dies = run("while [ ! -e /gate/open ]; do sleep 0.02; done; echo no luck >&2; exit 3");
    dies["binds"] = json!([format!("{}:/gate:ro", stage.gate.display())]);
    let mut deaf = run("sleep 1000000");
    deaf["ready_timeout_s"] = json!(10);
    stage.begin("dies", &dies).await;
    stage.begin("deaf", &deaf).await;
    let sessions = stage.conman.sessions();
    let dying = tokio::spawn(async move { sessions.get("/s/dies/").await });
    let unready = stage.get("deaf").await.problem();
    assert_eq!(
        (unready.status, unready.slug()),
        (504, "start-not-ready"),
        "{unready:?}"
    );
    assert!(unready.detail.contains("8080"), "{unready:?}");
    stage.open();
    let exited = dying.await.expect("an answer").problem();
    assert_eq!(
        (exited.status, exited.slug()),
        (502, "start-exited"),
        "{exited:?}"
    );
    assert!(exited.detail.contains("exit code 3"), "{exited:?}");
    // Afterwards it is a session that has failed, and says so at once.
    let after = stage.get("dies").await.problem();
    assert_eq!(
        (after.status, after.slug()),
        (409, "session-ended"),
        "{after:?}"
    );
    stage.wait_held(0).await;
}

#[tokio::test]
async fn a_session_that_is_deleted_while_it_starts_lets_everybody_go() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    let mut request = stage.request();
    // Without a template, a connection starts nothing again.
    request["template"] = Value::Null;
    request["image"] = json!(PYTHON);
    request["port"] = json!(8080);
    stage.begin("s", &request).await;
    let mut clients = stage.hold("s", 3).await;
    stage.conman.api().stop("s").await;
    for client in &mut clients {
        let answer = client.read_until("}").await;
        assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
        assert!(answer.contains("application/problem+json"), "{answer}");
    }
    stage.wait_held(0).await;
}

#[tokio::test]
async fn a_machine_that_goes_lets_everybody_go() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    stage.begin("s", &stage.request()).await;
    let mut clients = stage.hold("s", 3).await;
    let api = stage.conman.api();
    let notice = api.post("/v1/nodes/self/preempt", &json!({})).await;
    assert_eq!(notice.status, StatusCode::OK, "{}", notice.text());
    for client in &mut clients {
        let head = client.read_until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        assert!(head.to_ascii_lowercase().contains("retry-after:"), "{head}");
    }
    assert_eq!(stage.conman.processes(), []);
    stage.wait_held(0).await;
}
