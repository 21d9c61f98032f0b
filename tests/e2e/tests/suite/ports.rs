//! A session's further ports: by host and by path, without a token, and over the API.

use std::time::Duration;

use conman_e2e::{Api, Conman, ROOT, eventually, eventually_some, native, raw_exchange, websocket};
use conman_proto::{PORT_PROTOCOL, SessionState};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(60);

/// Pages on 8080, 3000 and 9000, an echo of bytes on 5432, and one that is not listed on 7000.
fn spec() -> Value {
    let script = "for port in 3000 7000 9000; do mkdir /tmp/$port; echo page of $port >/tmp/$port/index.html; \
        httpd -p $port -h /tmp/$port; done; nc -ll -p 5432 -e cat & exec httpd -f -p 8080 -h /www";
    json!({"image": ROOT, "command": ["sh", "-c", script], "port": 8080,
        "ports": ["3000-3001", 5432, {"port": 9000, "public": true}]})
}

/// What the sessions listener answers a client that names this host.
async fn at_host(conman: &Conman, host: &str) -> String {
    let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    raw_exchange(conman.sessions_address(), request).await
}

async fn ready(sessions: &Api, id: &str) {
    eventually("all ports are open", PATIENCE, async || {
        sessions.get(&format!("/s/{id}:9000/")).await.status == StatusCode::OK
    })
    .await;
}

#[tokio::test]
async fn each_port_has_a_host_and_a_path() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let sessions = conman.sessions();
    conman.api().ensure("s", &spec()).await;
    ready(&sessions, "s").await;
    for (path, page) in [
        ("/s/s/", "hello\n"),
        ("/s/s:8080/", "hello\n"),
        ("/s/s:3000/", "page of 3000\n"),
    ] {
        assert_eq!(sessions.get(path).await.text(), page, "{path}");
        // Again on an idle connection, which belongs to one port.
        assert_eq!(sessions.get(path).await.text(), page, "{path}");
    }
    let answer = at_host(&conman, "3000-s.localhost").await;
    assert!(answer.ends_with("page of 3000\n"), "{answer}");
    let unlisted = sessions.get("/s/s:7000/").await;
    assert_eq!(
        (unlisted.status, unlisted.problem().slug()),
        (StatusCode::NOT_FOUND, "no-such-port")
    );
    let closed = sessions.get("/s/s:3001/").await;
    assert_eq!(closed.problem().slug(), "connection-refused");

    let listed = conman.cli(&["port", "s"]).await;
    let authority = format!("localhost:{}", conman.sessions_address().port());
    for part in [
        format!("http://s.{authority}/"),
        format!("http://3000-s.{authority}/"),
        format!("http://3001-s.{authority}/"),
        format!("http://9000-s.{authority}/"),
        "public".to_owned(),
    ] {
        assert!(listed.success().contains(&part), "{part}: {listed:?}");
    }
    let url = conman.cli(&["run", "s", "--image", ROOT]).await;
    assert_eq!(url.success().trim(), format!("http://s.{authority}/"));

    let refused = conman.api().put("/v1/sessions/80-s", &spec()).await;
    assert_eq!(refused.problem().slug(), "bad-path");
}

#[tokio::test]
async fn the_first_of_its_ports_is_the_default_of_a_session_without_a_port() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let sessions = conman.sessions();
    let script = "sleep 1; exec httpd -f -p 3000 -h /www";
    let request = json!({"image": ROOT, "command": ["sh", "-c", script], "ports": ["3000-3001"]});
    // It runs before anything listens.
    let session = conman.api().ensure("s", &request).await.session;
    assert_eq!((session.state, session.port), (SessionState::Running, None));
    assert!(session.url.is_some() && session.port_url.is_some());
    for path in ["/s/s:3000/", "/s/s/"] {
        eventually("the page is served", PATIENCE, async || {
            sessions.get(path).await.text() == "hello\n"
        })
        .await;
    }
}

#[tokio::test]
async fn a_public_port_alone_answers_callers_without_a_token() {
    let Some(native) = native() else { return };
    let builder = Conman::builder().token("app", "frontend");
    let conman = builder.start_native(&native).await;
    let token = conman.token("app").to_owned();
    conman.api().with_token(&token).ensure("s", &spec()).await;
    ready(&conman.sessions().with_token(&token), "s").await;
    let sessions = conman.sessions();
    assert_eq!(sessions.get("/s/s:9000/").await.text(), "page of 9000\n");
    let answer = at_host(&conman, "9000-s.localhost").await;
    assert!(answer.ends_with("page of 9000\n"), "{answer}");
    // Such a caller resumes nothing that was paused by an order, and learns of it at a public port alone.
    let api = conman.api().with_token(&token);
    let paused = api.post("/v1/sessions/s/pause", &json!(null)).await;
    assert_eq!(paused.status, StatusCode::OK, "{}", paused.text());
    for path in [
        "/s/s/",
        "/s/s:8080/",
        "/s/s:3000/",
        "/s/s:7000/",
        "/s/nobody:9000/",
    ] {
        let answer = sessions.get(path).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}");
    }
    let refused = sessions.get("/s/s:9000/").await.problem();
    assert_eq!((refused.status, refused.slug()), (409, "session-paused"));
    assert_eq!(api.session("s").await.state, SessionState::Paused);
    let resumed = api.post("/v1/sessions/s/resume", &json!(null)).await;
    assert_eq!(resumed.status, StatusCode::OK, "{}", resumed.text());
    assert_eq!(sessions.get("/s/s:9000/").await.text(), "page of 9000\n");
}

#[tokio::test]
async fn a_program_that_serves_below_its_prefix_gets_the_whole_path() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let script = "mkdir -p /tmp/s/s /tmp/s/s:8080; echo whole >/tmp/s/s/a; echo port >/tmp/s/s:8080/a; \
        echo host >/tmp/a; exec httpd -f -p 8080 -h /tmp";
    let mut spec = spec();
    spec["command"] = json!(["sh", "-c", script]);
    spec["strip_prefix"] = json!(false);
    conman.api().ensure("s", &spec).await;
    let sessions = conman.sessions();
    assert_eq!(sessions.get("/s/s/a").await.text(), "whole\n");
    assert_eq!(sessions.get("/s/s:8080/a").await.text(), "port\n");
    let request = "GET /a HTTP/1.1\r\nhost: s.localhost\r\nconnection: close\r\n\r\n";
    let answer = raw_exchange(conman.sessions_address(), request).await;
    assert!(answer.ends_with("host\n"), "{answer}");
}

#[tokio::test]
async fn bytes_reach_a_port_over_the_api_and_by_a_local_port() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("s", &spec()).await;
    ready(&conman.sessions(), "s").await;
    let connect = |port: u16| format!("/v1/sessions/s/ports/{port}/connect");
    let open = async |port| {
        let request = api.request(Method::GET, &connect(port), None);
        websocket(&api, request, &[PORT_PROTOCOL]).await
    };
    // It listens in its own time.
    let (_, socket) = eventually_some("its port", PATIENCE, async || open(5432).await.ok()).await;
    // Pings are answered, and carry nothing.
    let mut socket = socket.filter(|message| {
        let is_ping = matches!(message, Ok(Message::Ping(_)));
        std::future::ready(!is_ping)
    });
    let sent = Message::Binary(b"some bytes".to_vec().into());
    socket.send(sent.clone()).await.expect("sent");
    assert_eq!(socket.next().await.expect("echoed").expect("echoed"), sent);
    // The end of this direction ends `cat`, and with it the other one.
    let end = Message::Binary(Vec::new().into());
    socket.send(end.clone()).await.expect("sent");
    assert_eq!(socket.next().await.expect("an end").expect("an end"), end);
    for (port, slug) in [(7000, "no-such-port"), (3001, "connection-refused")] {
        assert!(open(port).await.is_err(), "{slug}");
    }

    let mut forward = conman.cli_command();
    forward.args(["forward", "s", "0:5432"]);
    forward
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true);
    let mut forward = forward.spawn().expect("it starts");
    let printed = forward.stdout.take().expect("piped");
    let line = BufReader::new(printed)
        .lines()
        .next_line()
        .await
        .expect("read")
        .expect("a line");
    let address = line.split(' ').next().expect("an address").to_owned();
    let mut stream = TcpStream::connect(&address).await.expect("it listens");
    let bytes: Vec<u8> = (0..1_000_000_u32)
        .map(|number| (number % 251) as u8)
        .collect();
    let (mut from, mut to) = stream.split();
    let sending = async {
        to.write_all(&bytes).await.expect("sent");
        to.shutdown().await.expect("ended");
    };
    let mut echoed = Vec::new();
    let (_, read) = tokio::join!(sending, from.read_to_end(&mut echoed));
    read.expect("read");
    assert!(echoed == bytes, "{} of {} bytes", echoed.len(), bytes.len());
    forward.kill().await.expect("ended");
}

#[tokio::test]
async fn looking_at_a_session_neither_starts_it_nor_keeps_it() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let mut idle = spec();
    idle["idle_timeout_s"] = json!(2);
    api.ensure("s", &idle).await;
    // The session ends although it is looked at all the time.
    eventually_some("it is stopped as idle", PATIENCE, async || {
        api.get("/v1/sessions?limit=10").await;
        let session = api.session("s").await;
        session.state.is_ended().then_some(session)
    })
    .await;
    let later = api.session("s").await;
    assert!(later.state.is_ended(), "{later:?}");
}
