//! Commands that are kept: through the death of clients and daemons, for several at a time, and
//! bounded whatever a client does.

use std::time::Duration;

use conman_e2e::{
    Api, BUSYBOX, Conman, ROOT, WebSocket, docker_shared, eventually, log_with, native,
    resident_bytes, websocket,
};
use conman_proto::{
    ATTACH_PROTOCOL, ExecChannel, ExecStatus, KeptExec, KeptExecList, SessionState,
};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(240);

/// What all clients together may cost the daemon at most: their queues and the sockets' buffers.
const MOST_MEMORY: u64 = 48 * 1024 * 1024;

/// Somebody attached, before a terminal of 80 columns and 24 rows.
struct Person {
    socket: WebSocket,
    screen: vt100::Parser,
    replays: usize,
    ended: Option<ExecStatus>,
}

impl Person {
    async fn attach(api: &Api, path: &str) -> Self {
        let request = api.request(Method::GET, path, None);
        let socket = websocket(api, request, &[ATTACH_PROTOCOL]).await;
        let (_, socket) = socket.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
        Self {
            socket,
            screen: vt100::Parser::default(),
            replays: 0,
            ended: None,
        }
    }

    async fn types(&mut self, text: &str) {
        self.says(ExecChannel::Stdin, text.as_bytes()).await;
    }

    async fn says(&mut self, channel: ExecChannel, payload: &[u8]) {
        let bytes = [&[channel as u8], payload].concat();
        let sent = self.socket.send(Message::binary(bytes));
        timeout(PATIENCE, sent)
            .await
            .expect("in time")
            .expect("sent");
    }

    /// One message; false when none comes any more.
    async fn look(&mut self) -> bool {
        let Some(Ok(message)) = self.socket.next().await else {
            return false;
        };
        if let Message::Binary(bytes) = message {
            match ExecChannel::try_from(bytes[0]).expect("a channel") {
                ExecChannel::Stdout => self.screen.process(&bytes[1..]),
                ExecChannel::Replay => {
                    self.replays += 1;
                    self.screen = vt100::Parser::default();
                    self.screen.process(&bytes[1..]);
                }
                ExecChannel::Status => {
                    self.ended = serde_json::from_slice(&bytes[1..]).expect("a status");
                }
                ExecChannel::Position => {}
                other => panic!("{other:?} does not come from the server"),
            }
        }
        true
    }

    async fn sees(&mut self, wanted: impl Fn(&str) -> bool) {
        let looking = async {
            while !wanted(&self.text()) {
                assert!(self.look().await, "it ended with {:?}", self.text());
            }
        };
        let seen = timeout(PATIENCE, looking).await.is_ok();
        assert!(seen, "on the screen is {:?}", self.text());
    }

    /// The screen once vi shows this in a text of so many lines, and has left its insert mode: it has read all keys.
    async fn sees_in_vi(&mut self, wanted: &str, lines: usize) -> String {
        let total = format!("/{lines} ");
        self.sees(|screen| {
            let status = screen.trim_end().lines().last().unwrap_or_default();
            let is_over = status.starts_with("- ") && status.ends_with('%');
            is_over && status.contains(&total) && screen.contains(wanted)
        })
        .await;
        self.text()
    }

    async fn end(mut self) -> ExecStatus {
        let looking = async { while self.look().await {} };
        timeout(PATIENCE, looking).await.expect("it ends");
        self.ended.expect("how it ended is told")
    }

    fn text(&self) -> String {
        self.screen.screen().contents()
    }
}

fn terminal(command: &[&str]) -> Value {
    json!({"image": ROOT, "command": command, "tty": true})
}

async fn refusal(api: &Api, path: &str) -> (StatusCode, String) {
    let request = api.request(Method::GET, path, None);
    let answer = websocket(api, request, &[ATTACH_PROTOCOL]).await;
    let answer = answer.expect_err("it is refused");
    (answer.status, answer.problem().slug().to_owned())
}

#[tokio::test]
async fn an_editor_shows_the_same_screen_after_its_clients_and_its_daemon_died() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let script = "echo 'the first line' > /tmp/text; exec vi /tmp/text";
    let api = conman.api();
    api.ensure("ed", &terminal(&["sh", "-c", script])).await;
    let path = "/v1/sessions/ed/attach?columns=80&rows=24";
    let mut person = Person::attach(&api, path).await;
    person
        .sees(|screen| screen.contains("the first line") && screen.contains('~'))
        .await;
    // What comes at once behind an escape vi takes for a key's sequence.
    let mut before = String::new();
    for (key, text, lines) in [("o", "a second one, typed", 2), ("O", "and one between", 3)] {
        person.types(&format!("{key}{text}\u{1b}")).await;
        before = person.sees_in_vi(text, lines).await;
    }
    assert!(before.contains("a second one, typed"), "{before}");
    // In the middle of it, without a word: the connection is cut, and nobody is there.
    drop(person);
    conman.restart_after_crash().await;
    let api = conman.api();
    let mut again = Person::attach(&api, path).await;
    again.sees(|screen| screen == before).await;
    // And the shim becomes another program.
    let (code, said) = conman.order_shim("--replace");
    assert_eq!(code, Some(0), "{said}");
    let mut other = Person::attach(&api, path).await;
    other.sees(|screen| screen == before).await;
    again.types("otogether\u{1b}").await;
    for person in [&mut again, &mut other] {
        person.sees(|screen| screen.contains("together")).await;
    }
    again.sees_in_vi("together", 4).await;
    again.types(":wq\r").await;
    for person in [again, other] {
        let ended = person.end().await;
        assert_eq!((ended.exit_code, ended.error), (Some(0), None));
    }
    eventually("the session has ended", PATIENCE, async || {
        api.session("ed").await.state == SessionState::Stopped
    })
    .await;
    let refused = refusal(&api, path).await;
    assert_eq!(refused, (StatusCode::CONFLICT, "not-running".to_owned()));
}

#[tokio::test]
async fn a_kept_command_is_found_by_its_id_after_the_daemons_death() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    conman
        .api()
        .ensure("home", &json!({"template": "idle"}))
        .await;
    let words = ["exec", "-dt", "home", "--", "sh"];
    let printed = conman.cli(&words).await;
    let id = printed.success().trim().to_owned();
    let path = format!("/v1/sessions/home/execs/{id}/attach");
    let mut person = Person::attach(&conman.api(), &path).await;
    person
        .types("word=remembered; echo $((6 * 7)) is it\r")
        .await;
    // The next prompt is there, too.
    person
        .sees(|screen| screen.contains("42 is it") && screen.trim_end().ends_with('#'))
        .await;
    let before = person.text();
    drop(person);
    conman.restart_after_crash().await;
    let api = conman.api();
    let list = api.get("/v1/sessions/home/execs").await;
    let list: KeptExecList = list.expect(StatusCode::OK);
    let [KeptExec { running: true, .. }] = &list.execs[..] else {
        panic!("{list:?}")
    };
    assert_eq!(list.execs[0].id.to_string(), id);
    let mut person = Person::attach(&api, &path).await;
    // But for the prompt's last space.
    person
        .sees(|screen| screen.trim_end() == before.trim_end())
        .await;
    person.types("echo still $word; exit 7\r").await;
    let ended = person.end().await;
    assert_eq!(ended.exit_code, Some(7));
    let listed = conman.cli(&["execs", "home"]).await;
    let listed = listed.success();
    assert!(
        listed.contains(&id) && listed.contains("exited 7"),
        "{listed}"
    );
    let mut late = Person::attach(&api, &path).await;
    late.sees(|screen| screen.contains("still remembered"))
        .await;
    assert_eq!(late.end().await.exit_code, Some(7));
    let words = ["rm", "--exec", &id, "home"];
    conman.cli(&words).await.success();
    let refused = refusal(&api, &path).await;
    assert_eq!(refused, (StatusCode::NOT_FOUND, "no-such-exec".to_owned()));
    assert_eq!(api.session("home").await.state, SessionState::Running);
}

#[tokio::test]
async fn a_session_that_is_stopped_ends_what_is_attached_and_says_so() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("sh", &terminal(&["sh"])).await;
    api.ensure("home", &json!({"template": "idle"})).await;
    let mut person = Person::attach(&api, "/v1/sessions/sh/attach").await;
    person
        .types("stty size; tty; echo $TERM-$((6 * 7))\r")
        .await;
    person.sees(|screen| screen.contains("xterm-42")).await;
    assert!(person.text().contains("24 80"), "{}", person.text());
    let log = api.get("/v1/sessions/sh/logs").await.text();
    assert!(log.contains("xterm-42"), "{log}");
    assert_eq!(api.session("sh").await.connections, 1);
    assert_eq!(api.stop("sh").await.state, SessionState::Stopped);
    // conman killed it, and says so: that is no exit code of the program's.
    let ended = person.end().await;
    assert_eq!(ended.exit_code, None, "{ended:?}");
    assert!(ended.error.is_some(), "{ended:?}");
    let refused = refusal(&api, "/v1/sessions/home/attach").await;
    assert_eq!(refused, (StatusCode::CONFLICT, "no-terminal".to_owned()));
    let path = "/v1/sessions/home/execs/0123456789ab/attach";
    let refused = refusal(&api, path).await;
    assert_eq!(refused, (StatusCode::NOT_FOUND, "no-such-exec".to_owned()));
    // A resize to nothing is no resize.
    let kept = json!({"command": ["cat"], "tty": true});
    let kept = api.post("/v1/sessions/home/execs", &kept).await;
    let kept: KeptExec = kept.expect(StatusCode::CREATED);
    let path = format!("/v1/sessions/home/execs/{}/attach", kept.id);
    let mut wrong = Person::attach(&api, &path).await;
    let nothing = br#"{"columns":0,"rows":9}"#;
    wrong.says(ExecChannel::Resize, nothing).await;
    let looking = async { while wrong.look().await {} };
    timeout(PATIENCE, looking).await.expect("it is closed");
    assert_eq!(wrong.ended, None);
}

#[tokio::test]
async fn clients_that_do_not_read_or_never_stop_typing_harm_nobody() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let script = "read go; i=0; while [ $i -lt 400000 ]; do echo number $i of many; \
                  i=$((i+1)); done; echo all done; stty raw -echo; echo deaf; sleep 1000";
    api.ensure("busy", &terminal(&["sh", "-c", script])).await;
    let path = "/v1/sessions/busy/attach";
    let mut quick = Person::attach(&api, path).await;
    let mut slow = Vec::new();
    for _ in 0..8 {
        slow.push(Person::attach(&api, path).await);
    }
    let before = resident_bytes(conman.pid());
    quick.types("go\r").await;
    quick.sees(|screen| screen.contains("deaf")).await;
    let after = resident_bytes(conman.pid());
    assert!(after < before + MOST_MEMORY, "{before} and then {after}");
    // Who was slow gets to see where it has come to, and not all that was missed.
    let mut late = slow.pop().expect("one of them");
    late.sees(|screen| screen.contains("deaf")).await;
    assert!(late.replays > 1, "it was told anew");
    // Nobody reads what is typed now; it waits at the client.
    let piece = [&[ExecChannel::Stdin as u8][..], &[b'x'; 64 * 1024]].concat();
    let flooding = async {
        for _ in 0..4_096 {
            let piece = Message::binary(piece.clone());
            late.socket.send(piece).await.expect("it is open");
        }
    };
    let all = timeout(Duration::from_secs(5), flooding).await;
    assert!(all.is_err(), "it takes everything");
    let flooded = resident_bytes(conman.pid());
    assert!(
        flooded < before + MOST_MEMORY,
        "{before} and then {flooded}"
    );
    let mut other = Person::attach(&api, path).await;
    other.sees(|screen| screen.contains("deaf")).await;
    // There is an end to how many may be there.
    let mut crowd = Vec::new();
    let refused = loop {
        let request = api.request(Method::GET, path, None);
        match websocket(&api, request, &[ATTACH_PROTOCOL]).await {
            Ok((_, socket)) => crowd.push(socket),
            Err(answer) => break answer,
        }
        assert!(crowd.len() < 1_000, "everybody is let in");
    };
    assert_eq!(refused.problem().slug(), "too-many-terminals");
    drop(crowd);
    assert_eq!(api.stop("busy").await.state, SessionState::Stopped);
}

#[tokio::test]
async fn a_session_of_dockers_has_a_terminal_to_come_back_to_and_its_commands_have_none() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let shell = json!({"image": BUSYBOX, "command": ["sh"], "tty": true});
    conman.api().ensure("sh", &shell).await;
    let path = "/v1/sessions/sh/attach?columns=80&rows=24";
    let mut person = Person::attach(&conman.api(), path).await;
    person
        .types("word=remembered; echo $((6 * 7)) is it\r")
        .await;
    person.sees(|screen| screen.contains("42 is it")).await;
    // Docker shows what is in its log, which it writes in its own time.
    log_with(&conman.api(), "sh", "42 is it").await;
    drop(person);
    conman.restart_after_crash().await;
    let api = conman.api();
    let mut person = Person::attach(&api, path).await;
    person.sees(|screen| screen.contains("42 is it")).await;
    let kept = json!({"command": ["sh"], "tty": true});
    let kept = api.post("/v1/sessions/sh/execs", &kept).await;
    assert_eq!(kept.problem().slug(), "not-supported");
    person.types("echo still $word; exit 7\r").await;
    person
        .sees(|screen| screen.contains("still remembered"))
        .await;
    assert_eq!(person.end().await.exit_code, Some(7));
}
