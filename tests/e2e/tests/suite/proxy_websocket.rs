//! WebSockets through the sessions listener: messages of every size, and how a client is told that
//! its session goes.

use std::net::SocketAddr;
use std::time::Duration;

use conman_e2e::{Conman, PYTHON, RawClient, WebSocket, docker_shared, eventually, websocket};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;

const PATIENCE: Duration = Duration::from_secs(60);

/// Sends every message back; at `/close` it says goodbye with a code of its own instead.
const ECHO: &str = r"
import asyncio, websockets

async def serve(socket):
    if socket.path == '/close':
        await socket.close(4001, 'of my own')
    async for message in socket:
        await socket.send(message)

async def main():
    async with websockets.serve(serve, '127.0.0.1', 8080, max_size=None, compression=None):
        await asyncio.Future()

asyncio.run(main())
";

/// Bytes of each frame that [`FLOOD`] sends.
const FLOOD_FRAME: usize = 1 << 20;

/// Answers an upgrade with binary frames for ever, whose content looks like frames' heads; at
/// `/half` only with the first half of one.
const FLOOD: &str = r"
import base64, hashlib, socketserver, time

GUID = b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11'
FRAME = b'\x82\x7f' + (1 << 20).to_bytes(8, 'big') + b'\x88\x02' * (1 << 19)

class Flood(socketserver.StreamRequestHandler):
    def handle(self):
        first, key = self.rfile.readline(), b''
        while (line := self.rfile.readline()).strip():
            name, _, value = line.partition(b':')
            if name.lower() == b'sec-websocket-key':
                key = value.strip()
        if not key:
            return
        accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
        self.wfile.write(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n'
            b'Connection: Upgrade\r\nSec-WebSocket-Accept: ' + accept + b'\r\n\r\n')
        if b'/half' in first:
            self.wfile.write(FRAME[:1 << 19])
            time.sleep(1000000)
        while True:
            self.wfile.write(FRAME)

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

Server(('127.0.0.1', 8080), Flood).serve_forever()
";

fn program(text: &str) -> Value {
    json!({"image": PYTHON, "command": ["python3", "-c", text], "port": 8080})
}

async fn dial(conman: &Conman, path: &str) -> WebSocket {
    let sessions = conman.sessions();
    let request = sessions.request(Method::GET, path, None);
    let opened = websocket(&sessions, request, &[]).await;
    opened
        .unwrap_or_else(|refusal| panic!("{}", refusal.text()))
        .1
}

async fn next(socket: &mut WebSocket) -> Option<Message> {
    let message = timeout(PATIENCE, socket.next()).await.expect("in time");
    message.map(|message| message.expect("a well-formed message"))
}

async fn exchange(socket: &mut WebSocket, message: Message) {
    let sent = timeout(PATIENCE, socket.send(message.clone())).await;
    sent.expect("in time").expect("it is taken");
    let back = next(socket).await.expect("no end");
    // Not by `assert_eq!`, which would print megabytes.
    assert!(
        back == message,
        "{} bytes came back as {}",
        message.len(),
        back.len()
    );
}

/// The Close frame that ends this WebSocket.
async fn farewell(socket: &mut WebSocket) -> CloseFrame {
    match next(socket).await {
        Some(Message::Close(Some(frame))) => frame,
        other => panic!("no Close frame with a code but {other:?}"),
    }
}

fn assert_restart(frame: &CloseFrame) {
    assert_eq!(u16::from(frame.code), 1012, "{frame:?}");
    assert!(!frame.reason.is_empty(), "a reason is given");
}

#[tokio::test]
async fn messages_of_every_size_come_back_as_they_were() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("echo", &program(ECHO)).await;
    let mut socket = dial(&conman, "/s/echo/x").await;
    for size in [
        0,
        1,
        2,
        124,
        125,
        126,
        127,
        65_534,
        65_535,
        65_536,
        65_537,
        131_072,
        1 << 20,
        5 << 20,
    ] {
        let bytes: Vec<u8> = (0..size)
            .map(|at: usize| at.to_le_bytes()[at % 2])
            .collect();
        let text: String = "añ☃b".chars().cycle().take(size / 4).collect();
        exchange(&mut socket, Message::binary(bytes)).await;
        exchange(&mut socket, Message::text(text)).await;
    }
    // Pings are the program's to answer.
    let ping = Message::Ping("of mine".into());
    timeout(PATIENCE, socket.send(ping))
        .await
        .expect("in time")
        .expect("taken");
    assert_eq!(
        next(&mut socket).await,
        Some(Message::Pong("of mine".into()))
    );
    // Many at a time keep their order.
    for number in 0..500 {
        let message = Message::text(number.to_string());
        timeout(PATIENCE, socket.feed(message))
            .await
            .expect("in time")
            .expect("taken");
    }
    timeout(PATIENCE, socket.flush())
        .await
        .expect("in time")
        .expect("taken");
    for number in 0..500 {
        assert_eq!(
            next(&mut socket).await,
            Some(Message::text(number.to_string()))
        );
    }
    assert_eq!(conman.api().session("echo").await.connections, 1);
    socket.close(None).await.expect("it can be closed");
    while next(&mut socket).await.is_some() {}
    eventually("the tunnel is gone", PATIENCE, async || {
        conman.api().session("echo").await.connections == 0
    })
    .await;
}

#[tokio::test]
async fn websocketd_turns_messages_into_the_lines_of_a_program() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let request = json!({"image": PYTHON, "port": 8080, "command": ["websocketd",
        "--address=127.0.0.1", "--port=8080", "cat"]});
    conman.api().ensure("lines", &request).await;
    let mut socket = dial(&conman, "/s/lines/").await;
    for line in ["hello", "", "again"] {
        let message = Message::text(line);
        timeout(PATIENCE, socket.send(message))
            .await
            .expect("in time")
            .expect("taken");
        assert_eq!(next(&mut socket).await, Some(Message::text(line)));
    }
}

#[tokio::test]
async fn who_is_connected_to_a_session_that_is_deleted_is_told_with_1012() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for id in ["goes", "stays"] {
        api.ensure(id, &program(ECHO)).await;
    }
    let mut sockets = Vec::new();
    for _ in 0..8 {
        sockets.push(dial(&conman, "/s/goes/x").await);
    }
    let mut other = dial(&conman, "/s/stays/x").await;
    exchange(&mut sockets[0], Message::text("one of them is not idle")).await;
    api.stop("goes").await;
    for socket in &mut sockets {
        assert_restart(&farewell(socket).await);
        assert_eq!(next(socket).await, None);
    }
    // Nobody else notices.
    exchange(&mut other, Message::text("still here")).await;
    // A program's own farewell is not spoken over.
    let mut polite = dial(&conman, "/s/stays/close").await;
    let frame = farewell(&mut polite).await;
    assert_eq!(
        (u16::from(frame.code), frame.reason.as_str()),
        (4001, "of my own")
    );
}

#[tokio::test]
async fn who_is_connected_when_the_machine_goes_is_told_with_1012() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let mut sockets = Vec::new();
    for id in ["a", "b", "c"] {
        api.ensure(id, &program(ECHO)).await;
        for _ in 0..3 {
            let mut socket = dial(&conman, &format!("/s/{id}/x")).await;
            exchange(&mut socket, Message::text("up")).await;
            sockets.push(socket);
        }
    }
    let notice = api
        .post("/v1/nodes/self/preempt", &json!({"reason": "a test"}))
        .await;
    assert_eq!(notice.status, StatusCode::OK, "{}", notice.text());
    for socket in &mut sockets {
        assert_restart(&farewell(socket).await);
        assert_eq!(next(socket).await, None);
    }
    // The listener says so to whoever comes now.
    let refused = conman.sessions().get("/s/a/x").await.problem();
    assert!(refused.status >= 400, "{refused:?}");
}

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

/// A WebSocket whose frames nobody has taken apart.
async fn dial_raw(address: SocketAddr, path: &str) -> RawClient {
    let mut client = RawClient::connect(address).await;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{UPGRADE}\r\n");
    client.send(&request).await;
    let head = client.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    client
}

/// How a WebSocket's bytes ended.
#[derive(Debug, PartialEq)]
enum End {
    /// With a Close frame behind a whole frame, and nothing after it.
    Closed(u16),
    /// Within a frame of the program.
    Within,
}

/// Reads the program's frames to the connection's end; each must be one of [`FLOOD`], or the
/// farewell.
async fn read_flood(client: &mut RawClient) -> End {
    loop {
        let head = client.read(2).await;
        match head[..] {
            [0x82, 0x7f] => {
                let rest = client.read(8 + FLOOD_FRAME).await;
                let (length, content) = rest.split_at(rest.len().min(8));
                if length.len() == 8 {
                    assert_eq!(length, (FLOOD_FRAME as u64).to_be_bytes());
                }
                let same = content.chunks(2).all(|pair| b"\x88\x02".starts_with(pair));
                assert!(same, "something else stands within a frame");
                if rest.len() < 8 + FLOOD_FRAME {
                    return End::Within;
                }
            }
            [0x88, length @ 2..126] => {
                let payload = client.read(length.into()).await;
                assert_eq!(payload.len(), usize::from(length), "a Close frame is whole");
                assert_eq!(client.read_to_end().await, "", "nothing follows a farewell");
                return End::Closed(u16::from_be_bytes([payload[0], payload[1]]));
            }
            [0x82] => return End::Within,
            [] => panic!("it ended at a boundary without a farewell"),
            _ => panic!("no frame of the program begins with {head:?}"),
        }
    }
}

#[tokio::test]
async fn a_flood_of_large_frames_is_cut_between_two_of_them_or_within_the_last() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for round in 0..4 {
        api.ensure("flood", &program(FLOOD)).await;
        let mut clients = Vec::new();
        for _ in 0..4 {
            let mut client = dial_raw(conman.sessions_address(), "/s/flood/").await;
            // Each is at another place of its stream.
            for _ in 0..=clients.len() {
                assert_eq!(client.read(10 + FLOOD_FRAME).await.len(), 10 + FLOOD_FRAME);
            }
            clients.push(client);
        }
        if round % 2 == 0 {
            api.stop("flood").await;
        } else {
            let notice = api.post("/v1/nodes/self/preempt", &json!({})).await;
            assert_eq!(notice.status, StatusCode::OK, "{}", notice.text());
        }
        for client in &mut clients {
            let end = read_flood(client).await;
            assert!(matches!(end, End::Closed(1012) | End::Within), "{end:?}");
        }
        if round % 2 == 1 {
            let back = api.post("/v1/nodes/self/readmit", &json!({})).await;
            assert_eq!(back.status, StatusCode::OK, "{}", back.text());
        }
    }
}

#[tokio::test]
async fn behind_half_a_frame_comes_nothing_at_all() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("flood", &program(FLOOD)).await;
    let mut client = dial_raw(conman.sessions_address(), "/s/flood/half").await;
    assert_eq!(client.read(1 << 19).await.len(), 1 << 19);
    api.stop("flood").await;
    assert_eq!(client.read_to_end().await, "");
}
