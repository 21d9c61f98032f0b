//! Exchanges with the daemon that the client library cannot make safely:
//!
//! * requesting its version: the library requests one that older daemons refuse;
//! * taking over a connection for a command's input and output: the library takes a terminal's
//!   bytes for frame headers, and would buffer as many bytes as the container writes there, up to
//!   4 GiB;
//! * for the same reason, reading the log of a container with a terminal.
//!
//! No task is spawned: the future that waits for the answer drives the connection.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};

use bollard::models::SystemVersion;
use bytes::Bytes;
use conman_proto::TerminalSize;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, UPGRADE};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::UnixStream;

use super::failure::Failure;

/// Most bytes of an answer that is read whole.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// A connection that carries only a command's bytes.
pub(super) type Hijacked = TokioIo<Upgraded>;

#[derive(Deserialize)]
struct ErrorAnswer {
    message: String,
}

/// Requests the daemon's version, independent of the versions of its API.
pub(super) async fn get_version(socket: &Path) -> Result<SystemVersion, Failure> {
    let request = request(Method::GET, "/version").body(Full::default());
    let answer = exchange(socket, request, |response| read_whole(response, socket)).await?;
    serde_json::from_slice(&answer).map_err(|error| Failure::unavailable(&error, socket))
}

/// Starts a created command and takes over the connection. `path` includes the API version.
pub(super) async fn start_exec(
    socket: &Path,
    path: &str,
    tty: Option<TerminalSize>,
) -> Result<Hijacked, Failure> {
    // Before version 1.42 (Docker 23.0) the daemon ignores the size.
    let body = match tty {
        Some(TerminalSize { columns, rows }) => {
            format!("{{\"Detach\":false,\"Tty\":true,\"ConsoleSize\":[{rows},{columns}]}}")
        }
        None => "{\"Detach\":false,\"Tty\":false}".to_owned(),
    };
    take_over(socket, path, body).await
}

/// Attaches to a container's terminal. `path` includes the API version.
pub(super) async fn attach(socket: &Path, path: &str) -> Result<Hijacked, Failure> {
    take_over(socket, path, String::new()).await
}

async fn take_over(socket: &Path, path: &str, body: String) -> Result<Hijacked, Failure> {
    let request = request(Method::POST, path)
        .header(CONTENT_TYPE, "application/json")
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "tcp")
        .body(Full::from(body));
    let taken_over = |response: Response<Incoming>| async {
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let upgraded = hyper::upgrade::on(response).await;
            return upgraded.map_err(|error| Failure::unavailable(&error, socket));
        }
        // Errors come as JSON. A success without the switch is not from dockerd.
        read_whole(response, socket).await?;
        let reason = "it does not hand its connection over".to_owned();
        Err(Failure::Unavailable { reason })
    };
    exchange(socket, request, taken_over)
        .await
        .map(TokioIo::new)
}

/// An answer that is read in pieces. Dropping it closes the connection.
pub(super) struct Streaming {
    /// Driven by the reader.
    connection: Driven,
    body: Incoming,
    socket: PathBuf,
}

/// Requests an unframed stream. `path` includes the API version.
pub(super) async fn get_stream(socket: &Path, path: &str) -> Result<Streaming, Failure> {
    let request = request(Method::GET, path).body(Full::default());
    let request = request.map_err(|error| Failure::unavailable(&error, socket))?;
    let failure = |error: hyper::Error| Failure::unavailable(&error, socket);
    let (mut sender, connection) = open(socket).await?;
    let mut connection = Some(Box::pin(connection));
    let mut answer = pin!(sender.send_request(request));
    let response = tokio::select! {
        // The head has arrived.
        response = &mut answer => response.map_err(failure)?,
        // The connection ended: the received bytes may still hold the answer.
        _ = drive(&mut connection) => answer.await.map_err(failure)?,
    };
    if !response.status().is_success() {
        return Err(tokio::select! {
            refused = read_whole(response, socket) => match refused {
                Err(failure) => failure,
                Ok(_) => Failure::Unavailable { reason: "unexpected status".to_owned() },
            },
            // Never ends; cancelled when the error has been read.
            never = drive_on(&mut connection) => match never {},
        });
    }
    Ok(Streaming {
        connection,
        body: response.into_body(),
        socket: socket.to_owned(),
    })
}

impl Streaming {
    /// The next piece; `None` at the end. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, Failure>> {
        loop {
            let frame = tokio::select! {
                // Cancel safe: a frame is taken only when it is whole.
                frame = self.body.frame() => frame,
                // Never ends; cancelled when a frame has been read.
                never = drive_on(&mut self.connection) => match never {},
            };
            match frame? {
                Ok(frame) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Some(Ok(bytes));
                    }
                }
                Err(error) => return Some(Err(Failure::unavailable(&error, &self.socket))),
            }
        }
    }
}

type Connection = http1::Connection<TokioIo<UnixStream>, Full<Bytes>>;
type Driven = Option<Pin<Box<Connection>>>;

/// Drives the connection to its end. Errors show in what is read from it.
async fn drive(connection: &mut Driven) {
    if let Some(driven) = connection {
        let _ = driven.await;
        *connection = None;
    }
}

async fn drive_on(connection: &mut Driven) -> Infallible {
    drive(connection).await;
    std::future::pending().await
}

/// Opens a connection, which the caller must drive.
async fn open(socket: &Path) -> Result<(http1::SendRequest<Full<Bytes>>, Connection), Failure> {
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error: io::Error| Failure::unavailable(&error, socket))?;
    http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| Failure::unavailable(&error, socket))
}

fn request(method: Method, path: &str) -> hyper::http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "docker")
}

/// Sends one request on a new connection, which is driven until `finish` is done.
async fn exchange<T, F>(
    socket: &Path,
    request: Result<Request<Full<Bytes>>, hyper::http::Error>,
    finish: impl FnOnce(Response<Incoming>) -> F,
) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Failure>>,
{
    let request = request.map_err(|error| Failure::unavailable(&error, socket))?;
    let failure = |error: hyper::Error| Failure::unavailable(&error, socket);
    let (mut sender, connection) = open(socket).await?;
    let mut connection = pin!(connection.with_upgrades());
    let mut answer = pin!(async {
        let response = sender.send_request(request).await.map_err(failure)?;
        finish(response).await
    });
    tokio::select! {
        // Done; the connection is no longer needed.
        result = &mut answer => return result,
        // Ended, or handed over: the received bytes may still hold the answer.
        ended = &mut connection => ended.map_err(failure)?,
    }
    answer.await
}

/// The body of a successful answer; an error answer becomes a failure.
async fn read_whole(response: Response<Incoming>, socket: &Path) -> Result<Bytes, Failure> {
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await
        .map_err(|error| Failure::unavailable(error.as_ref(), socket))?
        .to_bytes();
    if status.is_success() {
        return Ok(body);
    }
    let message = match serde_json::from_slice::<ErrorAnswer>(&body) {
        Ok(answer) => answer.message,
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    Err(Failure::Answered {
        status: status.as_u16(),
        message,
    })
}
