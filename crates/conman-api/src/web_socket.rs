//! What the API's WebSockets share: the upgrade with its bounds, the detection of dead clients, the close.
//!
//! A dead client is detected in two ways: a ping is sent every [`PING_INTERVAL`], and a client without any
//! frame, including answers to pings, within [`SILENCE`] is disconnected.

use std::time::Duration;

use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use http::HeaderValue;
use http::header::{CONNECTION, UPGRADE};
use tokio::time::{Interval, MissedTickBehavior, timeout};

use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Most bytes in a message from the client: enough for a terminal's paste; files are split.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// Most bytes of frames waiting to be written: one output chunk and the control frames.
const MAX_WRITE_BUFFER_BYTES: usize = 2 * 1024 * 1024;

/// Interval between pings.
const PING_INTERVAL: Duration = Duration::from_secs(20);

/// A client without a frame for this long, which includes answers to two pings, is disconnected.
/// It bounds a single write too: a client that does not read cannot answer pings either.
const SILENCE: Duration = Duration::from_secs(60);

/// Time for the client to answer the closing handshake.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) type Sender = SplitSink<WebSocket, Message>;
pub(crate) type Receiver = SplitStream<WebSocket>;

/// Why the conversation ended, which decides how it is closed.
pub(crate) enum SocketEnd {
    /// Everything was sent.
    Finished,
    /// The client closed, disappeared or stopped reading: nothing is sent any more.
    Gone,
    /// The client violated the protocol.
    Violation(&'static str),
    /// The daemon stops.
    ShuttingDown,
}

/// Accepts a WebSocket of this subprotocol, with bounds; `or` names the client's alternative.
pub(crate) fn accept(
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    protocol: &'static str,
    or: &str,
) -> Result<WebSocketUpgrade, ApiError> {
    let refused = |reason: &str| upgrade_required(reason, protocol, or);
    let upgrade = upgrade.map_err(|rejection| refused(&rejection.body_text()))?;
    if !upgrade
        .requested_protocols()
        .any(|offered| offered == protocol)
    {
        return Err(refused("the client does not offer the subprotocol"));
    }
    Ok(upgrade
        .protocols([protocol])
        .max_message_size(MAX_MESSAGE_BYTES)
        .max_frame_size(MAX_MESSAGE_BYTES)
        .max_write_buffer_size(MAX_WRITE_BUFFER_BYTES))
}

fn upgrade_required(reason: &str, protocol: &str, or: &str) -> ApiError {
    Kind::UPGRADE
        .because(format!(
            "{}; connect with a WebSocket client and subprotocol `{protocol}`{or}",
            crate::field_errors::cut(reason)
        ))
        .header(UPGRADE, HeaderValue::from_static("websocket"))
        .header(CONNECTION, HeaderValue::from_static("upgrade"))
}

/// When pings are due.
pub(crate) fn pings() -> Interval {
    let mut pings = tokio::time::interval(PING_INTERVAL);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    pings
}

/// The client's next binary message.
pub(crate) async fn receive(receiver: &mut Receiver) -> Result<Bytes, SocketEnd> {
    loop {
        match timeout(SILENCE, receiver.next()).await {
            Ok(Some(Ok(Message::Binary(payload)))) => return Ok(payload),
            // The socket answers pings.
            Ok(Some(Ok(Message::Ping(_) | Message::Pong(_)))) => {}
            Ok(Some(Ok(Message::Text(_)))) => {
                return Err(SocketEnd::Violation("text messages have no meaning here"));
            }
            Ok(Some(Ok(Message::Close(_)) | Err(_)) | None) | Err(_) => {
                return Err(SocketEnd::Gone);
            }
        }
    }
}

pub(crate) async fn send(sender: &mut Sender, message: Message) -> Result<(), SocketEnd> {
    match timeout(SILENCE, sender.send(message)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(SocketEnd::Gone),
    }
}

pub(crate) async fn close(mut sender: Sender, mut receiver: Receiver, end: &SocketEnd) {
    let (code, reason) = match end {
        SocketEnd::Finished => (close_code::NORMAL, ""),
        SocketEnd::Gone => return,
        SocketEnd::Violation(reason) => (close_code::POLICY, *reason),
        SocketEnd::ShuttingDown => (close_code::RESTART, "conman is restarting"),
    };
    let frame = CloseFrame {
        code,
        reason: Utf8Bytes::from_static(reason),
    };
    let handshake = async {
        if sender.send(Message::Close(Some(frame))).await.is_ok() {
            while let Some(Ok(_)) = receiver.next().await {}
        }
    };
    // A client that does not answer in time is disconnected; all messages have been sent.
    let _ = timeout(CLOSE_PATIENCE, handshake).await;
}
