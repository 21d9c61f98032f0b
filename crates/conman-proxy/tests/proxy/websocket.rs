//! WebSockets through the proxy.

use std::sync::Arc;
use std::time::Duration;

use conman_core::{Closing, Departure};
use conman_proxy::{ProxyOptions, SubprotocolAnswer, Verdict};
use futures_util::{SinkExt, StreamExt};
use http::HeaderValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::support::{Client, Fixture, RawBackend, TestSession, soon, until};

type Socket = WebSocketStream<TcpStream>;

async fn serve_websocket_echo() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let Ok(mut socket) = tokio_tungstenite::accept_async(stream).await else {
                    return;
                };
                while let Some(Ok(message)) = socket.next().await {
                    if (message.is_text() || message.is_binary())
                        && socket.send(message).await.is_err()
                    {
                        return;
                    }
                }
            });
        }
    });
    address
}

async fn open(fixture: &Fixture, id: &str) -> Socket {
    let stream = TcpStream::connect(fixture.address)
        .await
        .expect("the proxy listens");
    let url = format!("ws://{id}.localhost/chat");
    soon("the handshake", client_async(url, stream))
        .await
        .expect("a handshake")
        .0
}

async fn setup() -> (Fixture, Arc<TestSession>) {
    let fixture = Fixture::new();
    let alice = fixture.session("alice", serve_websocket_echo().await);
    (fixture, alice)
}

#[tokio::test]
async fn messages_of_every_size_come_back_whole() {
    let (fixture, _alice) = setup().await;
    let mut socket = open(&fixture, "alice").await;
    for size in [0, 1, 125, 126, 65_535, 65_536, 1 << 20] {
        let message = Message::binary(vec![7_u8; size]);
        socket.send(message.clone()).await.expect("open");
        let echoed = soon("the echo", socket.next())
            .await
            .expect("open")
            .expect("well-formed");
        assert!(echoed == message, "{size} bytes");
    }
    socket.close(None).await.expect("open");
    while let Some(message) = soon("the end", socket.next()).await {
        assert!(message.expect("an orderly end").is_close());
    }
    until("the tunnel's end", || {
        fixture.proxy.stats().connections == 0
    })
    .await;
}

async fn close_code(socket: &mut Socket) -> (u16, String) {
    loop {
        let message = soon("a Close frame", socket.next()).await;
        match message
            .expect("a Close frame before the end")
            .expect("whole frames only")
        {
            Message::Close(Some(frame)) => return (frame.code.into(), frame.reason.to_string()),
            Message::Close(None) => panic!("a Close frame without a code"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_session_that_moves_closes_its_idle_tunnels_with_1012_and_a_reason() {
    let (fixture, alice) = setup().await;
    let mut sockets = Vec::new();
    for _ in 0..10 {
        sockets.push(open(&fixture, "alice").await);
    }
    until("the tunnels", || fixture.proxy.stats().tunnels == 10).await;
    alice
        .closing
        .send_replace(Some(Closing::service_restart("session is moving")));
    for socket in &mut sockets {
        let (code, reason) = close_code(socket).await;
        assert_eq!(code, u16::from(CloseCode::Restart));
        assert_eq!(reason, "session is moving");
    }
    drop(sockets);
    until("their end", || fixture.proxy.stats().tunnels == 0).await;
    assert_eq!(alice.activity.in_flight(), 0);
}

#[tokio::test]
async fn a_close_frame_in_the_middle_of_a_stream_of_messages_comes_between_two_of_them() {
    let (fixture, alice) = setup().await;
    let socket = open(&fixture, "alice").await;
    let (mut sink, mut stream) = socket.split();
    let sending = tokio::spawn(async move {
        let mut size = 1;
        while sink.send(Message::binary(vec![1_u8; size])).await.is_ok() {
            size = (size * 7 + 13) % 200_000;
        }
    });
    let mut received = 0;
    let (code, _) = soon("the Close frame", async {
        loop {
            match stream
                .next()
                .await
                .expect("a Close frame first")
                .expect("whole frames only")
            {
                Message::Close(Some(frame)) => break (u16::from(frame.code), frame.reason),
                Message::Binary(_) => received += 1,
                other => panic!("{other:?}"),
            }
            if received == 50 {
                alice
                    .closing
                    .send_replace(Some(Closing::service_restart("moving")));
            }
        }
    })
    .await;
    assert_eq!(code, 1012);
    drop(stream);
    soon("the sender's end", sending).await.expect("no panic");
}

const HANDSHAKE: &str = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\n\
    Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
    Sec-WebSocket-Version: 13\r\n\r\n";
const ACCEPT: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
    Upgrade: WebSocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// A WebSocket whose two ends the test plays byte by byte.
async fn raw(fixture: &Fixture, backend: &mut RawBackend) -> (Client, Client) {
    let mut client = fixture.connect().await;
    client.send(HANDSHAKE).await;
    let mut session = backend.accept().await;
    session.read_head().await;
    session.send(ACCEPT).await;
    client.read_head().await;
    (client, session)
}

async fn rest(client: &mut Client) -> Vec<u8> {
    let mut bytes = Vec::new();
    soon("the end", client.stream.read_to_end(&mut bytes))
        .await
        .expect("no reset");
    bytes
}

const CLOSE_1012: &[u8] = &[0x88, 4, 0x03, 0xf4, b'g', b'o'];

#[tokio::test]
async fn a_frame_that_is_under_way_is_finished_before_the_close_frame() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = raw(&fixture, &mut backend).await;
    session.send([0x82, 6, b'a', b'b']).await;
    let mut begun = [0; 4];
    client
        .stream
        .read_exact(&mut begun)
        .await
        .expect("the frame's beginning");
    alice
        .closing
        .send_replace(Some(Closing::service_restart("go")));
    tokio::time::sleep(Duration::from_millis(50)).await;
    // The rest, and another frame that comes too late.
    session.send([b'c', b'd', b'e', b'f', 0x82, 1, b'x']).await;
    // The proxy may have heard of the end only after it passed the whole next frame on.
    let in_time = [b"cdef", CLOSE_1012].concat();
    let late = [b"cdef", &[0x82, 1, b'x'][..], CLOSE_1012].concat();
    let mut last = Vec::new();
    soon("the rest and the Close frame", async {
        while !last.ends_with(CLOSE_1012) {
            last.push(client.stream.read_u8().await.expect("not the end yet"));
        }
    })
    .await;
    assert!(last == in_time || last == late, "{last:?}");
    client.stream.shutdown().await.expect("open");
    assert_eq!(rest(&mut client).await, b"");
}

#[tokio::test]
async fn a_frame_that_its_session_will_never_finish_is_followed_by_nothing() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = raw(&fixture, &mut backend).await;
    session.send([0x82, 6, b'a', b'b']).await;
    let mut begun = [0; 4];
    client
        .stream
        .read_exact(&mut begun)
        .await
        .expect("the frame's beginning");
    drop(session);
    alice
        .closing
        .send_replace(Some(Closing::service_restart("go")));
    assert_eq!(rest(&mut client).await, b"");
}

#[tokio::test]
async fn a_session_killed_before_anybody_knows_why_still_ends_with_1012() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = raw(&fixture, &mut backend).await;
    session.send([0x82, 1, b'a']).await;
    // The kernel closes the sockets of a killed process; the certificate comes later.
    drop(session);
    tokio::time::sleep(Duration::from_millis(100)).await;
    alice
        .closing
        .send_replace(Some(Closing::service_restart("go")));
    let mut bytes = [0; 9];
    client
        .stream
        .read_exact(&mut bytes)
        .await
        .expect("a frame and a Close frame");
    assert_eq!(bytes, [&[0x82, 1, b'a'], CLOSE_1012].concat()[..]);
}

#[tokio::test]
async fn a_session_that_says_goodbye_itself_is_not_spoken_for() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    fixture.session("alice", backend.address);
    let (mut client, mut session) = raw(&fixture, &mut backend).await;
    session.send([0x88, 2, 0x03, 0xe8]).await;
    drop(session);
    assert_eq!(rest(&mut client).await, [0x88, 2, 0x03, 0xe8]);
}

#[tokio::test]
async fn a_slow_client_gets_what_was_read_and_the_close_frame_behind_it() {
    let fixture = Fixture::new();
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (mut client, mut session) = raw(&fixture, &mut backend).await;
    let payload = vec![b'x'; 60_000];
    let frame = [&[0x82, 126][..], &60_000_u16.to_be_bytes(), &payload].concat();
    // As much as fits between the two of them, to the last byte of a frame.
    let writing = tokio::spawn(async move {
        loop {
            if session.stream.write_all(&frame).await.is_err() {
                return;
            }
        }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    alice
        .closing
        .send_replace(Some(Closing::service_restart("go")));
    let bytes = rest(&mut client).await;
    let mut at = 0;
    while bytes[at] == 0x82 {
        at += 4 + payload.len();
    }
    assert_eq!(&bytes[at..], CLOSE_1012, "after {at} bytes");
    writing.abort();
}

#[tokio::test]
async fn a_client_that_does_not_read_its_messages_is_cut() {
    let fixture = Fixture::with_options(ProxyOptions {
        write_stall_timeout: Duration::from_millis(200),
        ..ProxyOptions::default()
    });
    let mut backend = RawBackend::new().await;
    let alice = fixture.session("alice", backend.address);
    let (client, mut session) = raw(&fixture, &mut backend).await;
    let chunk = vec![0; 1 << 20];
    soon("the cut", async {
        while session.stream.write_all(&chunk).await.is_ok() {}
    })
    .await;
    until("the tunnel's end", || alice.activity.in_flight() == 0).await;
    drop(client);
}

#[tokio::test]
async fn shutting_the_proxy_down_closes_tunnels_with_1012() {
    let (fixture, alice) = setup().await;
    let mut socket = open(&fixture, "alice").await;
    until("the tunnel", || fixture.proxy.stats().tunnels == 1).await;
    let Fixture { proxy, .. } = fixture;
    let ended = tokio::spawn(proxy.shutdown(Duration::from_secs(60)));
    assert_eq!(close_code(&mut socket).await.0, 1012);
    drop(socket);
    soon("the shutdown", ended).await.expect("no panic");
    assert_eq!(alice.activity.in_flight(), 0);
}

#[tokio::test]
async fn a_node_that_leaves_closes_its_tunnels_with_1012_and_refuses_new_ones() {
    let (fixture, alice) = setup().await;
    let (departs, departure) = watch::channel(Departure::Announced);
    fixture.proxy.follow(departure);
    let mut sockets = Vec::new();
    for _ in 0..8 {
        sockets.push(open(&fixture, "alice").await);
    }
    until("the tunnels", || fixture.proxy.stats().tunnels == 8).await;
    departs.send_replace(Departure::Closing);
    for socket in &mut sockets {
        assert_eq!(close_code(socket).await.0, 1012);
    }
    drop(sockets);
    until("the tunnels' end", || alice.activity.in_flight() == 0).await;
    // A client that no load balancer leads elsewhere.
    let upgrade = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
        Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let mut late = fixture.connect().await;
    late.send(upgrade).await;
    let refusal = late.read_to_end().await.to_ascii_lowercase();
    assert!(refusal.starts_with("http/1.1 503"), "{refusal}");
    for part in ["retry-after: 1", "connection: close", "node-leaves"] {
        assert!(refusal.contains(part), "{refusal}");
    }
    departs.send_replace(Departure::Staying);
    soon("the node stays", async {
        loop {
            let mut client = fixture.connect().await;
            client.send(upgrade).await;
            if client.read_head().await.starts_with("HTTP/1.1 101") {
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_gate_may_answer_for_the_subprotocol_that_carried_a_credential() {
    let fixture = Fixture::with_gate(ProxyOptions::default(), |parts, _, _| {
        if let Some(offered) = parts.headers.remove("sec-websocket-protocol") {
            parts.extensions.insert(SubprotocolAnswer(offered));
        }
        Verdict::Admit { may_start: false }
    });
    fixture.session("alice", serve_websocket_echo().await);
    let stream = TcpStream::connect(fixture.address)
        .await
        .expect("the proxy listens");
    let mut request = "ws://alice.localhost/"
        .into_client_request()
        .expect("a request");
    let token = HeaderValue::from_static("conman.token.abc");
    request
        .headers_mut()
        .insert("sec-websocket-protocol", token.clone());
    let (_socket, response) = soon("the handshake", client_async(request, stream))
        .await
        .expect("a handshake");
    assert_eq!(
        response.headers().get("sec-websocket-protocol"),
        Some(&token)
    );
}
