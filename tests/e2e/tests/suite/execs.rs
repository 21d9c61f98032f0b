//! Kept commands on pipes, as a program uses them: over several connections, through the daemon's death, and
//! bounded when nobody reads them.

use std::time::Duration;

use conman_e2e::{
    Api, BUSYBOX, Conman, WebSocket, docker_shared, eventually, native, resident_bytes, websocket,
};
use conman_proto::{
    ATTACH_PROTOCOL, ExecChannel, ExecStatus, KeptExec, KeptExecList, OutputPosition,
};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(240);

/// Kept commands of one session.
const MOST: usize = 128;

/// What they may cost the shim: the kept output of each, twice.
const MOST_MEMORY: u64 = 2 * (MOST as u64) * 64 * 1024;

const EXECS: &str = "/v1/sessions/home/execs";

/// An attached program.
struct Client {
    socket: WebSocket,
    position: OutputPosition,
    dropped: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    ended: Option<ExecStatus>,
}

impl Client {
    async fn attach(api: &Api, exec: &KeptExec, query: &str) -> Self {
        let path = format!("{EXECS}/{}/attach{query}", exec.id);
        let request = api.request(Method::GET, &path, None);
        let socket = websocket(api, request, &[ATTACH_PROTOCOL]).await;
        let (_, socket) = socket.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
        Self {
            socket,
            position: OutputPosition {
                offset: 0,
                dropped: 0,
            },
            dropped: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
            ended: None,
        }
    }

    async fn send(&mut self, channel: ExecChannel, payload: &[u8]) {
        let bytes = [&[channel as u8], payload].concat();
        let sent = self.socket.send(Message::binary(bytes));
        let sent = timeout(PATIENCE, sent).await.expect("in time");
        sent.expect("sent");
    }

    /// One message; false when none comes any more.
    async fn next(&mut self) -> bool {
        let Some(Ok(message)) = self.socket.next().await else {
            return false;
        };
        if let Message::Binary(bytes) = message {
            let payload = &bytes[1..];
            match ExecChannel::try_from(bytes[0]).expect("a channel") {
                ExecChannel::Position => {
                    self.position = serde_json::from_slice(payload).expect("a position");
                    self.dropped += self.position.dropped;
                }
                ExecChannel::Stdout => self.stdout.extend_from_slice(payload),
                ExecChannel::Stderr => self.stderr.extend_from_slice(payload),
                ExecChannel::Status => {
                    self.ended = serde_json::from_slice(payload).expect("a status");
                }
                other => panic!("{other:?} of pipes"),
            }
            if bytes[0] == 1 || bytes[0] == 2 {
                self.position.offset += payload.len() as u64;
            }
        }
        true
    }

    async fn until(&mut self, done: impl Fn(&Self) -> bool) {
        let reading = async {
            while !done(self) {
                assert!(self.next().await, "it ended");
            }
        };
        assert!(timeout(PATIENCE, reading).await.is_ok(), "in time");
    }

    async fn end(mut self) -> (Vec<u8>, Vec<u8>, ExecStatus) {
        let reading = async { while self.next().await {} };
        timeout(PATIENCE, reading).await.expect("it ends");
        let ended = self.ended.expect("how it ended is told");
        (self.stdout, self.stderr, ended)
    }
}

async fn start(api: &Api, request: Value) -> KeptExec {
    api.post(EXECS, &request).await.expect(StatusCode::CREATED)
}

async fn shown(api: &Api, exec: &KeptExec) -> KeptExec {
    let answer = api.get(&format!("{EXECS}/{}", exec.id)).await;
    answer.expect(StatusCode::OK)
}

fn sh(script: &str) -> Value {
    json!({"command": ["sh", "-c", script], "open_stdin": true})
}

#[tokio::test]
async fn every_byte_comes_back_to_two_clients_and_after_the_daemons_death() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("home", &json!({"template": "idle"})).await;
    let exec = start(&api, sh("cat; echo done >&2; exit 3")).await;
    assert!(exec.running && !exec.tty, "{exec:?}");
    let bytes: Vec<u8> = (0..30_000_usize).map(|at| (at % 256) as u8).collect();
    let mut first = Client::attach(&api, &exec, "").await;
    let mut second = Client::attach(&api, &exec, "").await;
    first.send(ExecChannel::Stdin, &bytes).await;
    for client in [&mut first, &mut second] {
        client.until(|one| one.stdout == bytes).await;
    }
    let seen = second.position.offset;
    assert_eq!(seen, 30_000);
    // Cut, and the command goes on without anybody.
    drop(second);
    first.send(ExecChannel::Stdin, b"while one was away").await;
    first.until(|one| one.stdout.len() > bytes.len()).await;
    drop(first);
    conman.restart_after_crash().await;
    let api = conman.api();
    let again = shown(&api, &exec).await;
    assert!(again.running && again.pid == exec.pid, "{again:?}");
    let mut again = Client::attach(&api, &exec, &format!("?after={seen}")).await;
    again.until(|one| one.stdout == b"while one was away").await;
    assert_eq!(again.dropped, 0);
    let mut later = Client::attach(&api, &exec, "?scrollback=false").await;
    again.send(ExecChannel::Stdin, b"").await;
    let (stdout, stderr, ended) = again.end().await;
    assert_eq!(
        (&stdout[..], &stderr[..]),
        (&b"while one was away"[..], &b"done\n"[..])
    );
    assert_eq!((ended.exit_code, ended.error), (Some(3), None));
    later.until(|one| one.ended.is_some()).await;
    assert_eq!(
        (&later.stdout[..], &later.stderr[..]),
        (&b""[..], &b"done\n"[..])
    );
    // What it wrote is kept after its end, too.
    let late = Client::attach(&api, &exec, "?after=29990").await;
    let (stdout, ..) = late.end().await;
    assert_eq!(stdout, [&bytes[29_990..], b"while one was away"].concat());
    let ended = shown(&api, &exec).await;
    assert_eq!((ended.running, ended.exit_code), (false, Some(3)));
    let path = format!("{EXECS}/{}", exec.id);
    assert_eq!(api.delete(&path).await.status, StatusCode::NO_CONTENT);
    assert_eq!(api.get(&path).await.problem().slug(), "no-such-exec");
}

#[tokio::test]
async fn a_command_is_signalled_by_its_id_and_its_pid_is_the_sessions() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("home", &json!({"template": "idle"})).await;
    let script = "trap 'echo got it; exit 7' USR1; echo $$; while :; do sleep 0.1; done";
    let exec = start(&api, sh(script)).await;
    let mut client = Client::attach(&api, &exec, "").await;
    client.until(|one| one.stdout.ends_with(b"\n")).await;
    let pid = exec.pid.expect("it lives");
    assert_eq!(client.stdout, format!("{pid}\n").as_bytes());
    let signal = |name: &str| format!("{EXECS}/{}/signal?signal={name}", exec.id);
    let sent = api.send(Method::POST, &signal("USR1"), None).await;
    assert_eq!(sent.status, StatusCode::NO_CONTENT);
    let (stdout, _, ended) = client.end().await;
    assert_eq!(stdout, format!("{pid}\ngot it\n").as_bytes());
    assert_eq!(ended.exit_code, Some(7));
    let refused = api.send(Method::POST, &signal("TERM"), None).await;
    assert_eq!(refused.problem().slug(), "exec-ended");
    // On the command line.
    let words = [
        "exec",
        "-d",
        "home",
        "--",
        "sh",
        "-c",
        "echo hello; echo oops >&2; exec sleep 1000",
    ];
    let id = conman.cli(&words).await.success().trim().to_owned();
    let listed = conman.cli(&["execs", "home"]).await;
    let listed = listed.success().to_owned();
    assert!(
        listed.contains(&id) && listed.contains("running"),
        "{listed}"
    );
    let path = format!("{EXECS}/{id}");
    eventually("it has written", PATIENCE, async || {
        let shown: KeptExec = api.get(&path).await.expect(StatusCode::OK);
        shown.output_bytes == Some(11)
    })
    .await;
    let words = ["kill", "--exec", &id, "-s", "TERM", "home"];
    conman.cli(&words).await.success();
    let attached = conman.cli(&["attach", "--exec", &id, "home"]).await;
    assert_eq!(attached.code, Some(143), "{attached:?}");
    assert_eq!(
        (attached.stdout.as_str(), attached.stderr.as_str()),
        ("hello\n", "oops\n")
    );
    conman.cli(&["rm", "--exec", &id, "home"]).await.success();
    let listed = conman.cli(&["execs", "home"]).await;
    assert!(!listed.success().contains(&id));
}

#[tokio::test]
async fn a_command_whose_time_is_over_is_killed_and_its_output_stays() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("home", &json!({"template": "idle"})).await;
    let mut request = sh("echo so far; sleep 1000");
    request["timeout_ms"] = json!(5_000);
    let exec = start(&api, request).await;
    // The time is over whether there is a daemon or not.
    conman.restart_after_crash().await;
    let api = conman.api();
    eventually("its time is over", PATIENCE, async || {
        !shown(&api, &exec).await.running
    })
    .await;
    let ended = shown(&api, &exec).await;
    assert!(ended.timed_out && ended.exit_code == Some(137), "{ended:?}");
    let (stdout, ..) = Client::attach(&api, &exec, "").await.end().await;
    assert_eq!(stdout, b"so far\n");
    // The simple form answers with the output so far, too.
    let request = json!({"command": ["sh", "-c", "echo so far; sleep 1000"], "timeout_ms": 5_000});
    let answer = api.post("/v1/sessions/home/exec", &request).await;
    let problem = answer.problem();
    assert_eq!(problem.slug(), "exec-timed-out");
    let output = problem.output.as_ref().expect("its output");
    assert_eq!(output.stdout, "so far\n");
}

#[tokio::test]
async fn more_commands_than_anybody_reads_are_bounded_and_harm_no_other_session() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let many = json!({"template": "idle", "pids": 1_024});
    api.ensure("home", &many).await;
    api.ensure("other", &json!({"template": "idle"})).await;
    let (shim, daemon) = (conman.shim_pid(), conman.pid());
    let before = (resident_bytes(shim), resident_bytes(daemon));
    let script = "head -c 1000000 /dev/zero; echo done >&2; exec sleep 1000";
    let mut execs = Vec::new();
    for _ in 0..MOST {
        execs.push(start(&api, sh(script)).await);
    }
    let refused = api.post(EXECS, &sh("true")).await;
    assert_eq!(refused.problem().slug(), "too-many-terminals");
    eventually("all have written", PATIENCE, async || {
        let list = api.get(EXECS).await;
        let list: KeptExecList = list.expect(StatusCode::OK);
        let written = |one: &KeptExec| one.output_bytes == Some(1_000_005);
        list.execs.len() == MOST && list.execs.iter().all(written)
    })
    .await;
    let after = (resident_bytes(shim), resident_bytes(daemon));
    assert!(
        after.0 < before.0 + MOST_MEMORY,
        "{before:?}, then {after:?}"
    );
    assert!(
        after.1 < before.1 + MOST_MEMORY,
        "{before:?}, then {after:?}"
    );
    let request = json!({"command": ["echo", "well"]});
    let answer = api.post("/v1/sessions/other/exec", &request).await;
    assert_eq!(answer.json()["stdout"], "well\n");
    let mut client = Client::attach(&api, &execs[0], "").await;
    client.until(|one| one.position.offset == 1_000_005).await;
    let kept = client.stdout.len() + client.stderr.len();
    assert_eq!(client.dropped + kept as u64, 1_000_005);
    assert_eq!(kept, 64 * 1024);
    // One that has ended makes room.
    let path = format!("{EXECS}/{}/signal", execs[5].id);
    api.send(Method::POST, &path, None).await;
    eventually("it has ended", PATIENCE, async || {
        !shown(&api, &execs[5]).await.running
    })
    .await;
    start(&api, sh("true")).await;
    let gone = api.get(&format!("{EXECS}/{}", execs[5].id)).await;
    assert_eq!(gone.problem().slug(), "no-such-exec");
}

#[tokio::test]
async fn a_session_of_dockers_says_that_it_keeps_no_commands() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let idle = json!({"image": BUSYBOX, "command": ["sleep", "1000"]});
    api.ensure("home", &idle).await;
    let refused = api.post(EXECS, &sh("true")).await;
    assert_eq!(refused.problem().slug(), "not-supported");
    let list: KeptExecList = api.get(EXECS).await.expect(StatusCode::OK);
    assert_eq!(list.execs, []);
}
