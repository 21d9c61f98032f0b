//! The client on a terminal of its own, with a person before it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;

use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Path, RawQuery};
use axum::response::Response;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use conman_observer::open_terminal;
use conman_proto::{ATTACH_PROTOCOL, TerminalSize};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::termios::{LocalModes, OutputModes, Termios, tcgetattr, tcsetwinsize};
use serde_json::json;
use tokio::sync::{Notify, mpsc};

use crate::calls::Calls;
use crate::exec::{framed, playing};
use crate::support::{Daemon, PATIENCE, moving, session, with};

/// Reads of the terminal that nobody has looked at yet: more than any test leaves.
const UNREAD: usize = 1_024;

/// A terminal, the client on it, and what a person sees.
struct Person {
    /// The keyboard.
    keys: File,
    /// Kept open so that the settings can be looked at after the client has ended.
    terminal: OwnedFd,
    screen: mpsc::Receiver<Vec<u8>>,
    unseen: String,
    client: Child,
    before: Termios,
}

impl Person {
    /// Begins `conman exec -it alice sh`.
    fn begin(daemon: &Daemon) -> Self {
        Self::runs(daemon, &["exec", "-it", "alice", "--", "sh"])
    }

    /// Runs the client on a terminal of 100 columns and 30 rows.
    fn runs(daemon: &Daemon, words: &[&str]) -> Self {
        let (master, slave) = open_terminal(30, 100).expect("a terminal");
        let before = tcgetattr(&slave).expect("settings");
        let end = || slave.try_clone().expect("a descriptor");
        let client = Command::new(env!("CARGO_BIN_EXE_conman-client"))
            .args(words)
            .env("CONMAN_SOCKET", daemon.socket())
            .env("TERM", "xterm")
            .env_remove("CONMAN_URL")
            .env_remove("NO_COLOR")
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .expect("runs");
        let keys = File::from(master);
        let mut output = keys.try_clone().expect("a descriptor");
        let (sender, screen) = mpsc::channel(UNREAD);
        // Ends with the test's process at the latest: the terminal stays open here.
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                if sender.blocking_send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            keys,
            terminal: slave,
            screen,
            unseen: String::new(),
            client,
            before,
        }
    }

    fn types(&mut self, text: &[u8]) {
        self.keys.write_all(text).expect("typed");
    }

    /// Waits until `text` stands on the screen, behind what was waited for before.
    async fn sees(&mut self, text: &str) {
        let wait = async {
            loop {
                if let Some(begin) = self.unseen.find(text) {
                    self.unseen.drain(..begin + text.len());
                    return;
                }
                let piece = self.screen.recv().await.expect("the terminal is open");
                self.unseen.push_str(&String::from_utf8_lossy(&piece));
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, wait).await.is_ok();
        assert!(in_time, "`{text}` is not in `{}`", self.unseen);
    }

    fn is_raw(&self) -> bool {
        let settings = tcgetattr(&self.terminal).expect("settings");
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        !settings.local_modes.intersects(cooked)
            && !settings.output_modes.contains(OutputModes::OPOST)
    }

    fn signals(&self, signal: Signal) {
        kill(self.pid(), signal).expect("sent");
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.client.id()).expect("a pid"))
    }

    /// Waits for the client's end and looks whether the terminal is as it was.
    async fn ends(&mut self) -> ExitStatus {
        let wait = async {
            loop {
                if let Some(status) = self.client.try_wait().expect("waited") {
                    return status;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        let status = tokio::time::timeout(PATIENCE, wait).await.expect("in time");
        self.assert_restored();
        status
    }

    #[track_caller]
    fn assert_restored(&self) {
        let after = tcgetattr(&self.terminal).expect("settings");
        assert_eq!(format!("{after:?}"), format!("{:?}", self.before));
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        // Ended already in every test that passes.
        let _ = self.client.kill();
        let _ = self.client.wait();
    }
}

/// A shell that says how large its terminal is from the beginning, and what it is told: input in capitals, the terminal's size, and for `q` its
/// end with code 42, for `x` a connection that breaks.
async fn shell(mut socket: WebSocket, request: conman_proto::ExecRequest) {
    assert!(request.tty);
    let size = request.terminal_size.expect("the terminal has a size");
    if socket.send(framed(1, told(size).as_bytes())).await.is_err() {
        return;
    }
    while let Some(Ok(Message::Binary(message))) = socket.recv().await {
        let answer = match (message[0], &message[1..]) {
            (0, b"q") => framed(3, br#"{"exit_code":42}"#),
            (0, b"x") => return,
            (0, b"\x03") => framed(1, b"[interrupt]"),
            (0, keys) => framed(1, &keys.to_ascii_uppercase()),
            (4, size) => {
                let size: TerminalSize = serde_json::from_slice(size).expect("a size");
                framed(1, told(size).as_bytes())
            }
            (channel, _) => panic!("channel {channel}"),
        };
        if socket.send(answer).await.is_err() {
            return;
        }
    }
}

fn told(size: TerminalSize) -> String {
    format!("[{}x{}]", size.columns, size.rows)
}

/// `raw` is also what a file or a pipe gets, which `streams` tests.
#[tokio::test]
async fn a_log_does_not_control_the_terminal_of_its_reader() {
    let log = || async {
        let line = "\u{1b}]52;c;cHduZWQ=\u{7}\u{1b}[31mred\tend\n";
        let length = u8::try_from(line.len()).expect("short");
        [&[1, 0, 0, 0, 0, 0, 0, length][..], line.as_bytes()].concat()
    };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}/logs", get(log)));
    let shown = "\\u{1b}]52;c;cHduZWQ=\\u{7}\\u{1b}[31mred";
    let mut person = Person::runs(&daemon, &["logs", "alice"]);
    person.sees(shown).await;
    person.sees("end").await;
    let mut person = Person::runs(&daemon, &["logs", "--raw", "alice"]);
    person.sees("\u{1b}]52;c;cHduZWQ=\u{7}\u{1b}[31mred").await;
}

#[tokio::test]
async fn keys_go_to_the_command_as_they_are_and_its_exit_code_comes_back() {
    let daemon = playing(&Calls::default(), shell);
    let mut person = Person::begin(&daemon);
    person.sees("[100x30]").await;
    assert!(person.is_raw());
    person.types(b"hello");
    person.sees("HELLO").await;
    person.types(b"\x03");
    person.sees("[interrupt]").await;
    person.types(b"q");
    assert_eq!(person.ends().await.code(), Some(42));
}

#[tokio::test]
async fn a_resized_terminal_is_told_to_the_command() {
    let daemon = playing(&Calls::default(), shell);
    let mut person = Person::begin(&daemon);
    person.sees("[100x30]").await;
    let size = rustix::termios::Winsize {
        ws_col: 132,
        ws_row: 43,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&person.terminal, size).expect("resized");
    // The kernel tells only the processes that the terminal controls; the client is not one here.
    person.signals(Signal::SIGWINCH);
    person.sees("[132x43]").await;
    person.types(b"q");
    assert_eq!(person.ends().await.code(), Some(42));
}

#[tokio::test]
async fn signals_that_end_the_client_leave_the_terminal_as_it_was() {
    let daemon = playing(&Calls::default(), shell);
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        let mut person = Person::begin(&daemon);
        person.sees("[100x30]").await;
        assert!(person.is_raw());
        person.signals(signal);
        assert_eq!(
            person.ends().await.code(),
            Some(128 + signal as i32),
            "{signal}"
        );
    }
}

#[tokio::test]
async fn a_connection_that_breaks_leaves_the_terminal_as_it_was() {
    let daemon = playing(&Calls::default(), shell);
    let mut person = Person::begin(&daemon);
    person.sees("[100x30]").await;
    person.types(b"x");
    person.sees("broke off").await;
    assert_eq!(person.ends().await.code(), Some(125));
}

#[tokio::test]
async fn a_suspended_client_gives_the_terminal_back_until_it_is_continued() {
    let daemon = playing(&Calls::default(), shell);
    let mut person = Person::begin(&daemon);
    person.sees("[100x30]").await;
    person.signals(Signal::SIGTSTP);
    let pid = person.pid();
    let stopped = tokio::task::spawn_blocking(move || waitpid(pid, Some(WaitPidFlag::WUNTRACED)))
        .await
        .expect("waited")
        .expect("a child");
    assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
    person.assert_restored();
    person.signals(Signal::SIGCONT);
    let raw_again = async {
        while !person.is_raw() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, raw_again)
        .await
        .expect("in time");
    person.types(b"still here");
    person.sees("STILL HERE").await;
    person.types(b"q");
    assert_eq!(person.ends().await.code(), Some(42));
}

#[tokio::test]
async fn a_person_who_waits_for_a_start_is_told_its_phase_and_then_the_url_and_the_time() {
    let watched = Arc::new(Notify::new());
    let looked = Arc::clone(&watched);
    let starting = with(
        session("alice", "starting"),
        json!({ "phases_ms": {"admit": 0.1, "claim": 1.0, "prepare": 1.0, "create": 90.0} }),
    );
    let show = move || {
        looked.notify_one();
        async { Json(starting) }
    };
    let finish = Arc::new(Notify::new());
    let may_finish = Arc::clone(&finish);
    let ensure = move || async move {
        may_finish.notified().await;
        Json(with(
            session("alice", "running"),
            json!({ "created": true, "spec_matches": true }),
        ))
    };
    let router = Router::new().route("/v1/sessions/{id}", get(show).put(ensure));
    let daemon = Daemon::start(router);
    let mut person = Person::runs(&daemon, &["run", "alice"]);
    tokio::time::timeout(PATIENCE, watched.notified())
        .await
        .expect("looked in time");
    person.sees("alice: starting the container").await;
    finish.notify_one();
    person.sees("http://alice.localhost:7701/").await;
    person.sees("started in 300 ms").await;
    assert_eq!(person.ends().await.code(), Some(0));
}

/// A daemon with one running session that notes what is stopped.
fn one_session(calls: &Calls) -> Daemon {
    let calls = calls.clone();
    let list =
        || async { Json(json!({ "sessions": [session("alice", "running")], "next": null })) };
    let stop = move |Path(id): Path<String>| {
        calls.note(id.clone());
        async move {
            Json(json!({
                "id": id, "generation": 7, "state": "stopped", "dead_ms": 1.0, "released_ms": 2.0,
            }))
        }
    };
    Daemon::start(
        Router::new()
            .route("/v1/sessions", get(list))
            .route("/v1/sessions/{id}", delete(stop)),
    )
}

#[tokio::test]
async fn stopping_everything_asks_the_person_and_only_yes_means_yes() {
    let calls = Calls::default();
    let daemon = one_session(&calls);
    for answer in ["n\n", "\n", "yeah\n"] {
        let mut person = Person::runs(&daemon, &["rm", "--all"]);
        person.sees("Stop 1 session? [y/N]").await;
        person.types(answer.as_bytes());
        assert_eq!(person.ends().await.code(), Some(1), "{answer}");
    }
    assert!(calls.all().is_empty());
    let mut person = Person::runs(&daemon, &["rm", "--all"]);
    person.sees("Stop 1 session? [y/N]").await;
    person.types(b"y\n");
    person.sees("alice is stopped, after 2.0 ms").await;
    assert_eq!(person.ends().await.code(), Some(0));
    assert_eq!(calls.all(), ["alice"]);
}

#[tokio::test]
async fn states_are_coloured_for_a_person_unless_they_ask_for_none() {
    let daemon = one_session(&Calls::default());
    let mut person = Person::runs(&daemon, &["ps"]);
    person.sees("\u{1b}[38;5;10m").await;
    assert_eq!(person.ends().await.code(), Some(0));
    let mut person = Person::runs(&daemon, &["ps", "--no-color", "--wide"]);
    person.sees("http://alice.localhost:7701/").await;
    assert_eq!(person.ends().await.code(), Some(0));
}

/// A daemon that keeps one terminal: it shows an old screen first, then what is typed in capitals;
/// `q` ends its program with code 42, `x` breaks the connection.
fn keeping(calls: &Calls) -> Daemon {
    Daemon::start(keeping_routes(calls))
}

fn keeping_routes(calls: &Calls) -> Router {
    let noted = calls.clone();
    let attach = move |RawQuery(query): RawQuery, upgrade: WebSocketUpgrade| {
        noted.note(query.unwrap_or_default());
        let upgrade = upgrade.protocols([ATTACH_PROTOCOL]);
        let response: Response = upgrade.on_upgrade(async |mut socket: WebSocket| {
            let position = framed(6, br#"{"offset":10,"dropped":0}"#);
            socket.send(position).await.expect("sent");
            let mut answer = framed(5, b"old screen");
            while socket.send(answer).await.is_ok() {
                let Some(Ok(Message::Binary(message))) = socket.recv().await else {
                    return;
                };
                answer = match (message[0], &message[1..]) {
                    (0, b"q") => framed(3, br#"{"exit_code":42}"#),
                    (0, b"x") => return,
                    (0, keys) => framed(1, &keys.to_ascii_uppercase()),
                    (channel, _) => panic!("channel {channel}"),
                };
            }
        });
        async { response }
    };
    let noted = calls.clone();
    let keep = async move |body: String| {
        noted.note(&body);
        let kept = json!({
            "id": "0123456789ab", "command": ["vi"], "running": true,
            "started_at": "2026-03-01T12:00:00Z",
        });
        (axum::http::StatusCode::CREATED, Json(kept))
    };
    Router::new()
        .route("/v1/sessions/{id}/attach", get(attach.clone()))
        .route("/v1/sessions/{id}/execs/{exec}/attach", get(attach))
        .route("/v1/sessions/{id}/execs", post(keep))
}

#[tokio::test]
async fn who_is_attached_to_a_session_that_moves_is_told_where_it_is() {
    let routes = keeping_routes(&Calls::default());
    let daemon = Daemon::start(routes.route("/v1/sessions/{id}", moving()));
    let mut person = Person::runs(&daemon, &["attach", "alice"]);
    person.sees("old screen").await;
    person.types(b"x");
    person.sees("generation 8 is running on node n2").await;
    person.sees("`conman attach alice` continues").await;
    assert_eq!(person.ends().await.code(), Some(125));
}

#[tokio::test]
async fn the_keys_detach_and_nothing_of_them_reaches_the_program() {
    let calls = Calls::default();
    let daemon = keeping(&calls);
    let mut person = Person::runs(&daemon, &["attach", "alice"]);
    person.sees("Ctrl-P Ctrl-Q detaches").await;
    person.sees("\u{1b}[2Jold screen").await;
    assert!(person.is_raw());
    person.types(b"a\x10");
    person.sees("A").await;
    person.types(b"b");
    person.sees("\u{10}B").await;
    person.types(b"\x10\x11");
    // Out of whatever modes the program had set.
    person.sees("\u{1b}[?1049l").await;
    person
        .sees("detached; `conman attach alice` comes back")
        .await;
    assert_eq!(person.ends().await.code(), Some(0));
    assert_eq!(calls.all(), ["scrollback=true&columns=100&rows=30"]);
}

#[tokio::test]
async fn the_end_of_the_program_while_attached_is_the_clients() {
    let daemon = keeping(&Calls::default());
    let mut person = Person::runs(&daemon, &["attach", "--no-scrollback", "alice"]);
    person.sees("old screen").await;
    person.types(b"q");
    assert_eq!(person.ends().await.code(), Some(42));
    let shown = get(async || Json(session("alice", "running")));
    let knowing = keeping_routes(&Calls::default()).route("/v1/sessions/{id}", shown);
    for (daemon, told) in [
        (
            Daemon::start(knowing),
            "the program still runs; `conman attach alice`",
        ),
        (daemon, "it is unknown whether the program still runs"),
    ] {
        let mut person = Person::runs(&daemon, &["attach", "alice"]);
        person.sees("old screen").await;
        person.types(b"x");
        person.sees("broke off").await;
        person.sees(told).await;
        assert_eq!(person.ends().await.code(), Some(125));
    }
}

#[tokio::test]
async fn a_kept_command_is_made_and_attached_to_by_its_id() {
    let calls = Calls::default();
    let daemon = keeping(&calls);
    let words = [
        "exec",
        "-it",
        "--keep",
        "--detach-keys",
        "ctrl-a,d",
        "alice",
        "--",
        "vi",
    ];
    let mut person = Person::runs(&daemon, &words);
    person.sees("Ctrl-A d detaches").await;
    person.sees("old screen").await;
    person.types(b"\x01d");
    person.sees("conman attach --exec 0123456789ab alice").await;
    assert_eq!(person.ends().await.code(), Some(0));
    let asked: serde_json::Value = serde_json::from_str(&calls.all()[0]).expect("JSON");
    let size = json!({"columns": 100, "rows": 30});
    assert_eq!(
        asked,
        json!({"command": ["vi"], "tty": true, "terminal_size": size})
    );
    let attached = "scrollback=true&columns=100&rows=30";
    assert_eq!(calls.all()[1], attached);
    // Without a person there is nothing to attach with.
    let outcome = daemon.run(&["exec", "-dt", "alice", "vi"]).await;
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, "0123456789ab\n")
    );
    let outcome = daemon.run(&["attach", "alice"]).await;
    assert_eq!(outcome.code, 125);
    assert!(
        outcome.stderr.contains("not a terminal"),
        "{}",
        outcome.stderr
    );
}
