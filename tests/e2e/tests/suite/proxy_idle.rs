//! Connections are what keeps a session from being idle.

use std::time::Duration;

use conman_e2e::{Conman, PYTHON, RawClient, docker_shared, eventually, websocket};
use conman_proto::SessionState;
use futures_util::{SinkExt as _, StreamExt as _};
use http::Method;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(60);

/// The sessions' idle timeout, and how long they are watched outliving it.
const IDLE_S: u64 = 5;
const OUTLIVED: Duration = Duration::from_secs(8);

/// Echoes WebSockets' messages, and answers a plain `GET` with `first` and, seconds later, with
/// `second`: a slow download.
const PROGRAM: &str = r"
import asyncio, websockets

async def echo(socket):
    async for message in socket:
        await socket.send(message)

async def serve(reader, writer):
    try:
        await reader.readuntil(b'\r\n\r\n')
    except asyncio.IncompleteReadError:
        writer.close()
        return
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nfirst')
    await asyncio.sleep(20)
    writer.write(b'second')
    await writer.drain()
    writer.close()

async def main():
    async with websockets.serve(echo, '127.0.0.1', 8080), \
            await asyncio.start_server(serve, '127.0.0.1', 8081):
        await asyncio.Future()

asyncio.run(main())
";

async fn start(conman: &Conman, id: &str, port: u16) {
    let request = json!({"image": PYTHON, "command": ["python3", "-c", PROGRAM], "port": port,
        "idle_timeout_s": IDLE_S});
    conman.api().ensure(id, &request).await;
}

/// Waits for the session's end by its idleness.
async fn ends_idle(conman: &Conman, id: &str) {
    eventually("it ends", PATIENCE, async || {
        conman.api().session(id).await.state == SessionState::Stopped
    })
    .await;
    let reason = conman.api().session(id).await.reason;
    assert!(
        reason
            .as_deref()
            .is_some_and(|reason| reason.contains("idle")),
        "{reason:?}"
    );
}

async fn stays(conman: &Conman, id: &str) {
    let until = Instant::now() + OUTLIVED;
    while Instant::now() < until {
        let session = conman.api().session(id).await;
        assert_eq!(session.state, SessionState::Running, "{:?}", session.reason);
        assert_eq!(session.connections, 1);
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_session_that_nobody_uses_ends_and_looking_at_it_is_no_use() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    start(&conman, "idle", 8080).await;
    ends_idle(&conman, "idle").await;
}

#[tokio::test]
async fn an_open_tunnel_keeps_its_session_however_silent_until_it_is_closed() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    start(&conman, "used", 8080).await;
    let sessions = conman.sessions();
    let request = sessions.request(Method::GET, "/s/used/", None);
    let opened = websocket(&sessions, request, &[]).await;
    let (_, mut socket) = opened.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
    stays(&conman, "used").await;
    let message = Message::text("still here");
    timeout(PATIENCE, socket.send(message.clone()))
        .await
        .expect("in time")
        .expect("taken");
    let back = timeout(PATIENCE, socket.next()).await.expect("in time");
    assert_eq!(back.expect("no end").expect("a message"), message);
    // A client that is suddenly gone counts as one that has left.
    drop(socket);
    ends_idle(&conman, "used").await;
}

#[tokio::test]
async fn a_slow_download_keeps_its_session_until_it_is_over() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    start(&conman, "slow", 8081).await;
    let mut client = RawClient::connect(conman.sessions_address()).await;
    client
        .send("GET /s/slow/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    client.read_until("first").await;
    stays(&conman, "slow").await;
    client.read_until("second").await;
    // The client's own connection stays open, and is nothing that the session is used for.
    ends_idle(&conman, "slow").await;
    client
        .send("GET /s/slow/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    let answer = client.read_until("\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 409 "), "{answer}");
}
