//! The WebSockets of `exec` and `attach`.
//!
//! The handshake uses hyper instead of tungstenite: a refusal contains problem details, and
//! tungstenite keeps only the part of its body that arrived together with its head.

use std::time::Duration;

use bytes::Bytes;
use conman_proto::{
    ATTACH_PROTOCOL, EXEC_PROTOCOL, ExecChannel, ExecRequest, ExecStatus, OutputPosition,
    TerminalSize,
};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{
    CONNECTION, HeaderMap, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL,
    SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::Full;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::{Error as WsError, ProtocolError};
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role, WebSocketConfig};

use super::{Client, ClientError, PROMPT};

/// Bound on one message of the daemon; it sends far smaller pieces.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// Time for a clean close; nothing depends on it.
const CLOSE: Duration = Duration::from_millis(500);

pub(crate) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// An open connection to a command.
#[derive(Debug)]
pub(crate) struct ExecSocket {
    pub(crate) to_command: ToCommand,
    pub(crate) from_command: FromCommand,
}

/// The direction to the command.
#[derive(Debug)]
pub(crate) struct ToCommand(SplitSink<Socket, Message>);

/// The direction from the command.
#[derive(Debug)]
pub(crate) struct FromCommand(SplitStream<Socket>);

/// A message from the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromExec {
    Stdout(Bytes),
    Stderr(Bytes),
    /// The terminal's last output, for an empty screen.
    Replay(Bytes),
    /// Where the output continues.
    Position(OutputPosition),
    Ended(ExecStatus),
}

/// Why the connection to a command ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecSocketError {
    #[error("the connection broke off; the command may still be running")]
    Broken(#[source] Option<WsError>),
    #[error("the connection was closed: {reason} (WebSocket code {code})")]
    Closed { code: u16, reason: String },
    #[error(
        "the daemon sent a message that {EXEC_PROTOCOL} and {ATTACH_PROTOCOL} do not have: {0}"
    )]
    Protocol(String),
}

impl Client {
    /// Runs a command over a WebSocket at `path`.
    pub(crate) async fn exec(
        &self,
        path: &str,
        request: &ExecRequest,
    ) -> Result<ExecSocket, ClientError> {
        let not_understood = |reason: &str| self.not_understood(reason);
        let json =
            serde_json::to_string(request).map_err(|error| not_understood(&error.to_string()))?;
        let path = format!("{path}?request={}", super::encode(&json));
        self.open(&path, EXEC_PROTOCOL).await
    }

    /// Attaches to a terminal over a WebSocket at `path`.
    pub(crate) async fn attach(&self, path: &str) -> Result<ExecSocket, ClientError> {
        self.open(path, ATTACH_PROTOCOL).await
    }

    async fn open(&self, path: &str, protocol: &'static str) -> Result<ExecSocket, ClientError> {
        let (sink, stream) = self.upgrade(path, protocol).await?.split();
        Ok(ExecSocket {
            to_command: ToCommand(sink),
            from_command: FromCommand(stream),
        })
    }

    /// Opens a WebSocket of this subprotocol at `path`.
    pub(crate) async fn upgrade(
        &self,
        path: &str,
        protocol: &'static str,
    ) -> Result<Socket, ClientError> {
        let not_understood = |reason: &str| self.not_understood(reason);
        let mut request = self.request(Method::GET, path)?.map(|()| Full::default());
        let key = generate_key();
        ask_for_upgrade(request.headers_mut(), &key, protocol)
            .map_err(|_| not_understood("the WebSocket key is not a header value"))?;
        let mut response = self.exchange(request, PROMPT).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(self.refusal(response).await);
        }
        check_upgrade(response.headers(), &key, protocol).map_err(not_understood)?;
        let upgraded = hyper::upgrade::on(&mut response).await;
        let upgraded = upgraded.map_err(|source| self.broken(source))?;
        let config = WebSocketConfig::default()
            .max_message_size(Some(MAX_MESSAGE_BYTES))
            .max_frame_size(Some(MAX_MESSAGE_BYTES));
        let io = TokioIo::new(upgraded);
        Ok(WebSocketStream::from_raw_socket(io, Role::Client, Some(config)).await)
    }
}

impl ToCommand {
    /// Bytes for the command's standard input; empty ends it.
    pub(crate) async fn stdin(&mut self, bytes: &[u8]) -> Result<(), ExecSocketError> {
        self.send(ExecChannel::Stdin, bytes).await
    }

    /// The terminal's size.
    pub(crate) async fn resize(&mut self, size: TerminalSize) -> Result<(), ExecSocketError> {
        let json = serde_json::to_vec(&size)
            .map_err(|error| ExecSocketError::Protocol(error.to_string()))?;
        self.send(ExecChannel::Resize, &json).await
    }

    async fn send(&mut self, channel: ExecChannel, payload: &[u8]) -> Result<(), ExecSocketError> {
        let message = Message::binary([&[channel as u8], payload].concat());
        self.0
            .send(message)
            .await
            .map_err(|error| ExecSocketError::Broken(Some(error)))
    }

    /// Closes the connection, if the daemon still listens.
    pub(crate) async fn close(mut self) {
        // An error or a delay here changes nothing: the command has ended.
        let _ = tokio::time::timeout(CLOSE, self.0.close()).await;
    }
}

impl FromCommand {
    /// The next piece of output, or the end. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<FromExec, ExecSocketError> {
        loop {
            let bytes = match self.0.next().await {
                Some(Ok(Message::Binary(bytes))) => bytes,
                Some(Ok(Message::Close(Some(frame)))) => {
                    return Err(ExecSocketError::Closed {
                        code: frame.code.into(),
                        reason: frame.reason.to_string(),
                    });
                }
                Some(Ok(Message::Text(_))) => {
                    return Err(ExecSocketError::Protocol("a text message".to_owned()));
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(None))) | None => return Err(ExecSocketError::Broken(None)),
                Some(Err(
                    WsError::ConnectionClosed
                    | WsError::Protocol(ProtocolError::ResetWithoutClosingHandshake),
                )) => {
                    return Err(ExecSocketError::Broken(None));
                }
                Some(Err(error)) => return Err(ExecSocketError::Broken(Some(error))),
            };
            return decode(bytes);
        }
    }
}

fn decode(mut message: Bytes) -> Result<FromExec, ExecSocketError> {
    if message.is_empty() {
        return Err(ExecSocketError::Protocol("an empty message".to_owned()));
    }
    let payload = message.split_off(1);
    match ExecChannel::try_from(message[0]) {
        Ok(ExecChannel::Stdout) => Ok(FromExec::Stdout(payload)),
        Ok(ExecChannel::Stderr) => Ok(FromExec::Stderr(payload)),
        Ok(ExecChannel::Status) => serde_json::from_slice(&payload)
            .map(FromExec::Ended)
            .map_err(|error| ExecSocketError::Protocol(error.to_string())),
        Ok(ExecChannel::Replay) => Ok(FromExec::Replay(payload)),
        Ok(ExecChannel::Position) => serde_json::from_slice(&payload)
            .map(FromExec::Position)
            .map_err(|error| ExecSocketError::Protocol(error.to_string())),
        Ok(channel @ (ExecChannel::Stdin | ExecChannel::Resize)) => Err(ExecSocketError::Protocol(
            format!("a message on the channel {channel:?}"),
        )),
        Err(byte) => Err(ExecSocketError::Protocol(format!(
            "a message on the channel {byte}"
        ))),
    }
}

fn ask_for_upgrade(
    headers: &mut HeaderMap,
    key: &str,
    protocol: &'static str,
) -> Result<(), http::header::InvalidHeaderValue> {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
    headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
    headers.insert(SEC_WEBSOCKET_KEY, HeaderValue::from_str(key)?);
    Ok(())
}

/// RFC 6455, section 4.1: what a client must check before it sends a frame.
fn check_upgrade(headers: &HeaderMap, key: &str, protocol: &str) -> Result<(), &'static str> {
    let is = |name, value: &str| {
        headers
            .get(name)
            .and_then(|header: &HeaderValue| header.to_str().ok())
            .is_some_and(|header| header.eq_ignore_ascii_case(value))
    };
    if !is(UPGRADE, "websocket") {
        return Err("it switched to another protocol than WebSocket");
    }
    if headers
        .get(SEC_WEBSOCKET_ACCEPT)
        .is_none_or(|accept| accept.as_bytes() != derive_accept_key(key.as_bytes()).as_bytes())
    {
        return Err("its WebSocket handshake does not match ours");
    }
    if !is(SEC_WEBSOCKET_PROTOCOL, protocol) {
        return Err("it does not support the protocol of `exec` and `attach`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_channels_that_only_a_client_uses_are_refused_from_a_daemon() {
        for byte in [0_u8, 4, 9] {
            let message = Bytes::from(vec![byte, b'x']);
            assert!(
                matches!(decode(message), Err(ExecSocketError::Protocol(_))),
                "{byte}"
            );
        }
        assert!(matches!(
            decode(Bytes::new()),
            Err(ExecSocketError::Protocol(_))
        ));
    }

    #[test]
    fn output_and_status_are_told_apart() {
        let decoded = |bytes: &[u8]| decode(Bytes::copy_from_slice(bytes)).expect("valid");
        assert_eq!(decoded(b"\x01out"), FromExec::Stdout("out".into()));
        assert_eq!(decoded(b"\x02err"), FromExec::Stderr("err".into()));
        assert_eq!(decoded(b"\x05all"), FromExec::Replay("all".into()));
        let ended = ExecStatus {
            exit_code: Some(3),
            error: None,
            ..ExecStatus::default()
        };
        assert_eq!(decoded(b"\x03{\"exit_code\":3}"), FromExec::Ended(ended));
    }
}
