//! Interactive commands, over a real connection with a WebSocket client that nobody here wrote.

use crate::stage::{Api, PATIENCE, Stage};
use conman_api::{ServeOptions, serve_tcp};
use conman_auth::Scope;
use conman_proto::{EXEC_PROTOCOL, ExecChannel, ExecStatus, TerminalSize};
use conman_watchdog::TaskProgress;
use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{AUTHORIZATION, HOST, SEC_WEBSOCKET_PROTOCOL};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tokio_util::sync::CancellationToken;

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// The API on a port of its own.
struct Server {
    address: std::net::SocketAddr,
    shutdown: CancellationToken,
    token: String,
}

impl Server {
    async fn start(api: &Api) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("an address");
        let shutdown = CancellationToken::new();
        let options = ServeOptions::default();
        tokio::spawn(serve_tcp(
            listener,
            api.tcp_router(),
            options,
            shutdown.clone(),
            TaskProgress::unwatched("API"),
        ));
        let token = api.token(Scope::Frontend).to_owned();
        Self {
            address,
            shutdown,
            token,
        }
    }

    async fn connect(&self, id: &str, request: &serde_json::Value) -> Result<Socket, Error> {
        let request = request.to_string();
        let query = utf8_percent_encode(&request, NON_ALPHANUMERIC);
        let uri = format!(
            "ws://{}/v1/sessions/{id}/exec?request={query}",
            self.address
        );
        let mut request = uri.into_client_request().expect("a request");
        let headers = request.headers_mut();
        // The guard knows the listener by its configured port.
        headers.insert(HOST, "127.0.0.1:7700".parse().expect("valid"));
        headers.insert(
            AUTHORIZATION,
            format!("Bearer {}", self.token).parse().expect("valid"),
        );
        headers.insert(
            SEC_WEBSOCKET_PROTOCOL,
            EXEC_PROTOCOL.parse().expect("valid"),
        );
        let connecting = tokio::time::timeout(PATIENCE, connect_async(request));
        connecting.await.expect("in time").map(|(socket, _)| socket)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

fn message(channel: ExecChannel, payload: &[u8]) -> Message {
    let mut bytes = vec![channel as u8];
    bytes.extend_from_slice(payload);
    Message::Binary(bytes.into())
}

/// What a command said until its status, and how the server closed.
#[derive(Debug, Default)]
struct Heard {
    stdout: String,
    stderr: String,
    status: Option<ExecStatus>,
    close: Option<CloseCode>,
}

async fn hear(socket: &mut Socket) -> Heard {
    let mut heard = Heard::default();
    while let Some(Ok(next)) = tokio::time::timeout(PATIENCE, socket.next())
        .await
        .expect("in time")
    {
        match next {
            Message::Binary(bytes) => match ExecChannel::try_from(bytes[0]) {
                Ok(ExecChannel::Stdout) => heard.stdout += &String::from_utf8_lossy(&bytes[1..]),
                Ok(ExecChannel::Stderr) => heard.stderr += &String::from_utf8_lossy(&bytes[1..]),
                Ok(ExecChannel::Status) => {
                    heard.status = Some(serde_json::from_slice(&bytes[1..]).expect("a status"));
                }
                other => panic!("{other:?} does not come from the server"),
            },
            Message::Close(frame) => heard.close = frame.map(|frame| frame.code),
            _ => {}
        }
    }
    heard
}

#[tokio::test]
async fn a_command_reads_to_the_end_of_its_input_and_tells_its_exit_code() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let request = json!({"command": ["sh", "-c", "cat; echo done >&2; exit 5"]});
    let mut socket = server.connect("a", &request).await.expect("connected");
    for payload in [&b"one "[..], b"two", b""] {
        socket
            .send(message(ExecChannel::Stdin, payload))
            .await
            .expect("sent");
    }
    let heard = hear(&mut socket).await;
    assert_eq!(
        (heard.stdout.as_str(), heard.stderr.as_str()),
        ("one two", "done\n")
    );
    assert_eq!(heard.status.expect("a status").exit_code, Some(5));
    assert_eq!(heard.close, Some(CloseCode::Normal));
}

#[tokio::test]
async fn a_terminal_follows_the_clients_size() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let script = "read line; until stty size | grep -q '43 132'; do sleep 0.02; done; stty size";
    let request = json!({"command": ["sh", "-c", script], "tty": true});
    let mut socket = server.connect("a", &request).await.expect("connected");
    let size = TerminalSize {
        columns: 132,
        rows: 43,
    };
    let size = serde_json::to_vec(&size).expect("JSON");
    socket
        .send(message(ExecChannel::Resize, &size))
        .await
        .expect("sent");
    // The resize and the input go separate ways, and either may come first.
    socket
        .send(message(ExecChannel::Stdin, b"go\n"))
        .await
        .expect("sent");
    let heard = hear(&mut socket).await;
    assert!(heard.stdout.contains("43 132"), "{heard:?}");
    assert_eq!(heard.status.expect("a status").exit_code, Some(0));
}

#[tokio::test]
async fn a_terminal_has_the_asked_size_from_the_commands_first_moment_on() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let size = json!({"columns": 132, "rows": 43});
    let request = json!({"command": ["stty", "size"], "tty": true, "terminal_size": size});
    let mut socket = server.connect("a", &request).await.expect("connected");
    let heard = hear(&mut socket).await;
    assert_eq!(heard.stdout, "43 132\r\n", "{heard:?}");
}

#[tokio::test]
async fn a_large_output_arrives_whole_at_a_slow_reader() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let request = json!({"command": ["sh", "-c", "head -c 20000000 /dev/zero | tr '\\0' x"]});
    let mut socket = server.connect("a", &request).await.expect("connected");
    let heard = hear(&mut socket).await;
    assert_eq!(heard.stdout.len(), 20_000_000);
}

#[tokio::test]
async fn a_command_that_does_not_exist_has_a_status_like_in_a_shell() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let request = json!({"command": ["no-such-program"]});
    let mut socket = server.connect("a", &request).await.expect("connected");
    let status = hear(&mut socket).await.status.expect("a status");
    assert_eq!(status.exit_code, Some(127));
    assert!(status.error.expect("a reason").contains("no-such-program"));
}

#[tokio::test]
async fn who_breaks_the_protocol_is_told_and_cut_off() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    for wrong in [
        Message::Text("hello".into()),
        Message::Binary(Vec::new().into()),
        message(ExecChannel::Stdout, b"x"),
        Message::Binary(vec![9].into()),
        message(ExecChannel::Resize, b"{}"),
    ] {
        let request = json!({"command": ["sleep", "1000"]});
        let mut socket = server.connect("a", &request).await.expect("connected");
        socket.send(wrong.clone()).await.expect("sent");
        assert_eq!(
            hear(&mut socket).await.close,
            Some(CloseCode::Policy),
            "{wrong:?}"
        );
    }
}

#[tokio::test]
async fn a_message_beyond_the_bound_ends_the_connection() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let request = json!({"command": ["cat"]});
    let mut socket = server.connect("a", &request).await.expect("connected");
    // The server may cut the connection before all of it is sent.
    let _ = socket
        .send(message(ExecChannel::Stdin, &vec![b'x'; 2 << 20]))
        .await;
    assert!(hear(&mut socket).await.status.is_none());
}

#[tokio::test]
async fn a_shutdown_ends_commands_with_a_word() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    let server = Server::start(&api).await;
    let request = json!({"command": ["sleep", "1000"]});
    let mut socket = server.connect("a", &request).await.expect("connected");
    api.closing.cancel();
    assert_eq!(hear(&mut socket).await.close, Some(CloseCode::Restart));
}

#[tokio::test]
async fn a_session_that_does_not_run_is_refused_before_the_upgrade() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let server = Server::start(&api).await;
    let error = server
        .connect("a", &json!({"command": ["true"]}))
        .await
        .expect_err("refused");
    let Error::Http(response) = error else {
        panic!("{error}")
    };
    assert_eq!(response.status(), 404);
}
