//! Clients of the sessions listener that mean harm: what they send in disguise never reaches a
//! program, what never ends is ended, and everybody else is served meanwhile.

use std::net::SocketAddr;
use std::time::Duration;

use conman_e2e::{
    Conman, Docker, ECHO_TEMPLATE, PYTHON, RawClient, docker_shared, eventually, log_with,
    peak_resident_bytes, raw_exchange, resident_bytes,
};
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(60);

/// A head's time is 15 s; what is cut for being slow is cut by then, on a busy machine, too.
const CUT: Duration = Duration::from_secs(40);

/// Most by which the daemon may grow under any of this.
const GROWTH_BYTES: u64 = 32 << 20;

/// Logs every byte that it is sent, and answers each connection's first head.
///
/// At `/agree` and `/refuse` the answer is an agreement to change to the protocol `raw`, which
/// echoes, or a refusal of that; both wait until somebody asks for `/decide`.
const RECORDER: &str = r"
import socketserver, threading

decided = threading.Event()

class Recorder(socketserver.BaseRequestHandler):
    def handle(self):
        data = b''
        while b'\r\n\r\n' not in data:
            piece = self.request.recv(65536)
            if not piece:
                break
            print('seen', piece, flush=True)
            data += piece
        head, end, rest = data.partition(b'\r\n\r\n')
        if not end:
            return
        path = head.split(b' ')[1]
        if path in (b'/agree', b'/refuse'):
            self.wait(rest)
        if path == b'/agree':
            self.request.sendall(
                b'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n')
        else:
            self.request.sendall(
                b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 8\r\n\r\nrecorded')
        if path == b'/decide':
            decided.set()
        while piece := self.request.recv(65536):
            print('seen', piece, flush=True)
            if path == b'/agree':
                self.request.sendall(piece)

    def wait(self, early):
        self.request.settimeout(0.05)
        while not decided.is_set():
            try:
                early += self.request.recv(65536)
            except TimeoutError:
                pass
        self.request.settimeout(None)
        print('early', early, flush=True)

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

Server(('127.0.0.1', 8080), Recorder).serve_forever()
";

fn recorder() -> Value {
    json!({"image": PYTHON, "command": ["python3", "-c", RECORDER], "port": 8080})
}

struct Stage {
    conman: Conman,
    address: SocketAddr,
}

impl Stage {
    async fn start(docker: &Docker, recorders: &[&str]) -> Self {
        let conman = Conman::builder().toml(ECHO_TEMPLATE).start(docker).await;
        conman
            .api()
            .ensure("other", &json!({"template": "echo"}))
            .await;
        for id in recorders {
            conman.api().ensure(id, &recorder()).await;
        }
        let address = conman.sessions_address();
        Self { conman, address }
    }

    /// Everything that a recorder has been sent until now.
    async fn recorded(&self, id: &str) -> String {
        let last = self
            .conman
            .sessions()
            .get(&format!("/s/{id}/the-last"))
            .await;
        assert_eq!(last.status, StatusCode::OK, "{}", last.text());
        log_with(&self.conman.api(), id, "/the-last").await
    }

    /// Somebody else is served.
    async fn assert_serves(&self) {
        let answer = timeout(PATIENCE, self.conman.sessions().get("/s/other/x")).await;
        let answer = answer.expect("in time");
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }

    /// No connection's task has panicked.
    async fn assert_sound(&self) {
        self.assert_serves().await;
        let metrics = self.conman.api().get("/metrics").await.text();
        let mut lines = metrics.lines();
        assert!(
            lines.any(|line| line == "conman_proxy_panics_total{listener=\"sessions\"} 0"),
            "{metrics}"
        );
    }

    fn assert_small(&self, before: u64, peak: u64) {
        assert!(
            peak < before + GROWTH_BYTES,
            "the daemon grew from {before} to {peak} bytes"
        );
    }
}

/// Fields that let two readers disagree about where a request ends.
const AMBIGUOUS: [&str; 14] = [
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: 5, 5",
    "Content-Length: +5",
    "Content-Length: 0x5",
    "Content-Length: 99999999999999999999",
    "Content-Length : 5",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding:\x0bchunked",
    "X-Folded: a\r\n Transfer-Encoding: chunked",
    "X-Folded: a\r\n\tb",
    "X-Bare: a\rContent-Length: 5",
];

#[tokio::test]
async fn what_could_hide_a_request_is_refused_and_no_byte_of_it_reaches_a_program() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["victim"]).await;
    let smuggled = "GET /s/victim/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for host in ["localhost", "victim.localhost"] {
        let path = if host == "localhost" {
            "/s/victim/"
        } else {
            "/"
        };
        for fields in AMBIGUOUS {
            let request = format!(
                "POST {path}abuse HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n\r\n0\r\n\r\n{smuggled}"
            );
            let answer = raw_exchange(stage.address, request).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{fields:?}: {answer}");
            assert_eq!(
                answer.matches("HTTP/1.1 ").count(),
                1,
                "{fields:?}: {answer}"
            );
        }
    }
    for request in [
        format!("GET /s/victim/abuse HTTP/1.1\r\n Host: localhost\r\n\r\n{smuggled}"),
        format!("GET /s/victim/abuse\r\n\r\n{smuggled}"),
        format!("GET  /s/victim/abuse HTTP/1.1\r\nHost: localhost\r\n\r\n{smuggled}"),
        format!("GET /s/victim/abuse HTTP/2.0\r\nHost: localhost\r\n\r\n{smuggled}"),
        format!("GET /s/victim/abuse HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n{smuggled}"),
    ] {
        let answer = raw_exchange(stage.address, &request).await;
        assert!(!answer.contains(" 200 "), "{request:?}: {answer}");
        assert!(
            answer.matches("HTTP/1.1 ").count() <= 1,
            "{request:?}: {answer}"
        );
    }
    let recorded = stage.recorded("victim").await;
    for hidden in ["smuggled", "abuse"] {
        assert!(!recorded.contains(hidden), "{recorded}");
    }
    stage.assert_sound().await;
}

#[tokio::test]
async fn a_body_that_is_broken_never_looks_whole_and_nothing_behind_it_is_a_request() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["victim"]).await;
    for chunk in [
        "z\r\n",
        "-1\r\n",
        "5\r\nhelloXX",
        "5\nhello\r\n",
        "5;a\nb\r\nhello\r\n",
        "fffffffffffffffff\r\n",
        "0\r\nA:\nb\r\n",
    ] {
        let request = format!(
            "POST /s/victim/broken HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\
             \r\n3\r\nabc\r\n{chunk}0\r\n\r\nGET /s/victim/smuggled HTTP/1.1\r\n\
             Host: localhost\r\n\r\n"
        );
        let answer = raw_exchange(stage.address, request).await;
        // The program answers before it has the whole body, and may be the first to speak.
        assert!(
            answer.matches("HTTP/1.1 ").count() <= 1,
            "{chunk:?}: {answer}"
        );
    }
    let recorded = stage.recorded("victim").await;
    assert!(!recorded.contains("smuggled"), "{recorded}");
    // The end of a chunked body.
    assert!(!recorded.contains("0\\r\\n\\r\\n"), "{recorded}");
    stage.assert_sound().await;
}

#[tokio::test]
async fn nothing_behind_an_upgrade_reaches_the_program_before_it_agrees() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["agrees", "refuses"]).await;
    let upgrade = |id: &str, path: &str| {
        format!(
            "GET /s/{id}/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n\
             Upgrade: raw\r\n\r\n"
        )
    };
    let behind = "GET /s/other/behind HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut agreed = RawClient::connect(stage.address).await;
    agreed.send(upgrade("agrees", "agree") + behind).await;
    let mut refused = RawClient::connect(stage.address).await;
    refused.send(upgrade("refuses", "refuse") + behind).await;
    for (id, path) in [("agrees", "/agree"), ("refuses", "/refuse")] {
        let log = log_with(&stage.conman.api(), id, path).await;
        assert!(log.contains("upgrade: raw"), "{log}");
    }
    // Time in which everything else that comes arrives, too.
    for client in [&mut agreed, &mut refused] {
        client
            .send("GET /s/other/more HTTP/1.1\r\nHost: localhost\r\n\r\n")
            .await;
    }
    stage.assert_serves().await;
    for id in ["agrees", "refuses"] {
        let decided = stage
            .conman
            .sessions()
            .get(&format!("/s/{id}/decide"))
            .await;
        assert_eq!(decided.status, StatusCode::OK);
        let log = log_with(&stage.conman.api(), id, "early").await;
        assert!(log.contains("early b''"), "{log}");
    }
    // Once it has agreed, it is the program's to read.
    let head = agreed.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    let echoed = agreed
        .read_until("/more HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    assert!(echoed.starts_with(behind), "{echoed}");
    // Once it has refused, it is a request like any other, to whomever it names.
    let refusal = refused.read_until("recorded").await;
    assert!(refusal.starts_with("HTTP/1.1 200 "), "{refusal}");
    let next = refused.read_until("GET /behind ").await;
    assert!(next.starts_with("HTTP/1.1 200 "), "{next}");
    refused.read_until("GET /more ").await;
    let recorded = stage.recorded("refuses").await;
    assert!(!recorded.contains("behind"), "{recorded}");
    stage.assert_sound().await;
}

#[tokio::test]
async fn upgrades_that_would_carry_requests_unseen_are_no_upgrades() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["victim"]).await;
    for fields in [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
        "Connection: Upgrade\r\nUpgrade: HTTP/2.0",
        "Connection: Upgrade\r\nUpgrade: raw, h2c",
        "Connection: Upgrade\r\nUpgrade: raw\r\nUpgrade: h2c",
        "Connection: keep-alive\r\nUpgrade: raw",
        "Connection: Upgrade\r\nUpgrade: raw\r\nContent-Length: 3",
    ] {
        let mut client = RawClient::connect(stage.address).await;
        let request = format!("GET /s/victim/x HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n\r\nabc");
        client.send(&request).await;
        let answer = client.read_until("recorded").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{fields:?}: {answer}");
    }
    let recorded = stage.recorded("victim").await.to_ascii_lowercase();
    assert!(
        !recorded.contains("upgrade") && !recorded.contains("http2"),
        "{recorded}"
    );
    stage.assert_sound().await;
}

/// Sends without an end until the connection is broken, and gives what had been answered.
async fn send_for_ever(address: SocketAddr, beginning: &str, then: &str) -> String {
    let (mut reader, mut writer) = RawClient::connect(address).await.into_stream().into_split();
    let reading = tokio::spawn(async move {
        let mut answer = Vec::new();
        // Also a violent end is one.
        let _ = reader.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    });
    let piece = then.repeat((64 << 10) / then.len());
    let sending = async {
        if writer.write_all(beginning.as_bytes()).await.is_ok() {
            while writer.write_all(piece.as_bytes()).await.is_ok() {}
        }
    };
    timeout(PATIENCE, sending)
        .await
        .expect("it is not taken for ever");
    timeout(PATIENCE, reading)
        .await
        .expect("in time")
        .expect("no panic")
}

#[tokio::test]
async fn what_has_no_end_is_refused_and_cut_while_others_are_served() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["victim"]).await;
    stage.assert_serves().await;
    let before = resident_bytes(stage.conman.pid());
    let head = "GET /s/victim/endless HTTP/1.1\r\nHost: localhost\r\n";
    let chunked =
        "POST /s/victim/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    let line = "GET /s/victim/endless/";
    let heads = [
        (format!("{head}X-Long: "), "x"),
        (format!("{head}X-Long"), "x"),
        (head.to_owned(), "X-Many: y\r\n"),
        (line.to_owned(), "x"),
        ("G".to_owned(), "x"),
    ];
    // The program answers at once, and what it says may come first.
    let bodies = [
        (format!("{chunked}5;extension="), "x"),
        (
            chunked.to_owned(),
            "1;x=yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\nz\r\n",
        ),
        (format!("{chunked}0\r\nX-Trailer: "), "x"),
        (format!("{chunked}0\r\n"), "X-Trailer: y\r\n"),
        (format!("{chunked}f"), "f"),
    ];
    let work = async {
        let heads = join_all(heads.iter().map(async |(beginning, then)| {
            let answer = send_for_ever(stage.address, beginning, then).await;
            assert!(
                ["431", "414", "400"]
                    .iter()
                    .any(|status| { answer.starts_with(&format!("HTTP/1.1 {status} ")) }),
                "{beginning:?}: {answer}"
            );
            answer
        }));
        let bodies = join_all(bodies.iter().map(async |(beginning, then)| {
            let answer = send_for_ever(stage.address, beginning, then).await;
            assert!(
                answer.matches("HTTP/1.1 ").count() <= 1,
                "{beginning:?}: {answer}"
            );
        }));
        let others = async {
            for _ in 0..50 {
                stage.assert_serves().await;
            }
        };
        tokio::join!(heads, bodies, others).0
    };
    let (answers, peak) = peak_resident_bytes(stage.conman.pid(), work).await;
    for answer in &answers[..3] {
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
    stage.assert_small(before, peak);
    let recorded = stage.recorded("victim").await;
    assert!(!recorded.contains("endless"), "no head of these was whole");
    stage.assert_sound().await;
}

#[tokio::test]
async fn an_upload_without_an_end_stops_where_the_program_has_refused_it() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &[]).await;
    // http.server refuses every PUT at once, reads nothing of it, and closes.
    stage
        .conman
        .api()
        .ensure("files", &json!({"template": "python"}))
        .await;
    let before = resident_bytes(stage.conman.pid());
    let head = "PUT /s/files/x HTTP/1.1\r\nHost: localhost\r\n";
    let work = join_all(
        [
            (
                format!("{head}Transfer-Encoding: chunked\r\n\r\n"),
                "4\r\nlong\r\n",
            ),
            (
                format!("{head}Content-Length: 9000000000000000000\r\n\r\n"),
                "x",
            ),
        ]
        .map(|(beginning, then)| {
            let address = stage.address;
            async move { send_for_ever(address, &beginning, then).await }
        }),
    );
    let (answers, peak) = peak_resident_bytes(stage.conman.pid(), work).await;
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 501 "), "{answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
    }
    stage.assert_small(before, peak);
    eventually("nothing is open to the session", PATIENCE, async || {
        stage.conman.api().session("files").await.connections == 0
    })
    .await;
    stage.assert_sound().await;
}

/// Sends the rest byte by byte until the connection is closed; what came back, and when.
async fn trickle(address: SocketAddr, first: &str, then: &str) -> (String, Duration) {
    let (mut reader, mut writer) = RawClient::connect(address).await.into_stream().into_split();
    let began = Instant::now();
    let trickling = async {
        if writer.write_all(first.as_bytes()).await.is_err() {
            return;
        }
        for byte in then.bytes().cycle() {
            sleep(Duration::from_millis(250)).await;
            if writer.write_all(&[byte]).await.is_err() {
                return;
            }
        }
    };
    let mut answer = Vec::new();
    let reading = async {
        let _ = reader.read_to_end(&mut answer).await;
    };
    let both = async { tokio::join!(reading, trickling) };
    timeout(CUT, both).await.expect("it is cut in time");
    (
        String::from_utf8_lossy(&answer).into_owned(),
        began.elapsed(),
    )
}

#[tokio::test]
async fn heads_that_trickle_in_are_cut_in_time_while_others_are_served() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let stage = Stage::start(&docker, &["victim"]).await;
    stage.assert_serves().await;
    let before = resident_bytes(stage.conman.pid());
    let head = "GET /s/victim/slow HTTP/1.1\r\nHost: localhost\r\n";
    let whole = "GET /s/other/x HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let second = format!("{whole}GET /s/victim/slow HTTP/1.1\r\nX: ");
    let kinds = [
        (head, "X: y\r\n"),
        ("", "G"),
        ("", "\r\n"),
        (&second, "x"),
        (head, ""),
    ];
    let slow = join_all((0..200).map(|number| {
        let (first, then) = kinds[number % kinds.len()];
        let address = stage.address;
        async move { (first, trickle(address, first, then).await) }
    }));
    let work = async {
        let others = async {
            for _ in 0..50 {
                stage.assert_serves().await;
                sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::join!(slow, others).0
    };
    let (cut, peak) = peak_resident_bytes(stage.conman.pid(), work).await;
    for (first, (answer, after)) in cut {
        // Nobody is cut who could still have made it.
        assert!(
            after >= Duration::from_secs(14),
            "{first:?} after {after:?}: {answer}"
        );
        let answers: Vec<_> = answer.matches("HTTP/1.1 ").collect();
        let expected = if first.starts_with(whole) { 2 } else { 1 };
        assert!(answers.len() <= expected, "{first:?}: {answer}");
        if first == head {
            assert!(answer.starts_with("HTTP/1.1 408 "), "{first:?}: {answer}");
        }
    }
    stage.assert_small(before, peak);
    let recorded = stage.recorded("victim").await;
    assert!(!recorded.contains("slow"), "{recorded}");
    stage.assert_sound().await;
}

#[tokio::test]
async fn connections_beyond_the_bound_are_told_so_and_room_comes_back() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .set("limits", "max_connections = 10")
        .toml(ECHO_TEMPLATE)
        .start(&docker)
        .await;
    conman
        .api()
        .ensure("other", &json!({"template": "echo"}))
        .await;
    let address = conman.sessions_address();
    let request = "GET /s/other/x HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut open = Vec::new();
    for _ in 0..10 {
        let mut client = RawClient::connect(address).await;
        client.send(request).await;
        let answer = client.read_until("GET /x ").await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        open.push(client);
    }
    let refused = raw_exchange(address, request).await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    assert!(refused.contains("retry-after: 1\r\n"), "{refused}");
    assert!(refused.contains("too-many-connections"), "{refused}");
    // The API has room of its own.
    assert_eq!(conman.api().session("other").await.id.as_str(), "other");
    drop(open);
    eventually("there is room again", PATIENCE, async || {
        let answer = conman.sessions().get("/s/other/x").await;
        answer.status == StatusCode::OK
    })
    .await;
}
