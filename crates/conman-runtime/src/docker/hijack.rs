//! Exchanges with the daemon that the client library cannot make safely: asking for its
//! version (the library asks for one that older daemons refuse), and taking over a connection for
//! a command's input and output (the library's decoder takes a terminal's bytes for frame headers,
//! whose lengths it would then buffer: up to 4 GiB at the will of what runs in the container), and,
//! for the same reason, reading the log of a container with a terminal.
//!
//! Neither spawns a task: the connection is driven by the very future that waits for the answer.

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

/// A connection that carries nothing but a command's bytes.
pub(super) type Hijacked = TokioIo<Upgraded>;

#[derive(Deserialize)]
struct ErrorAnswer {
    message: String,
}

/// The daemon's own version, whatever versions of the API it speaks.
pub(super) async fn get_version(socket: &Path) -> Result<SystemVersion, Failure> {
    let request = request(Method::GET, "/version").body(Full::default());
    let answer = exchange(socket, request, |response| read_whole(response, socket)).await?;
    serde_json::from_slice(&answer).map_err(|error| Failure::unavailable(&error, socket))
}

/// Starts a command that was created, and becomes its connection. `path` is with the API version.
pub(super) async fn start_exec(
    socket: &Path,
    path: &str,
    tty: Option<TerminalSize>,
) -> Result<Hijacked, Failure> {
    // Before version 1.42 (Docker 23.0) the daemon passes over the size.
    let body = match tty {
        Some(TerminalSize { columns, rows }) => {
            format!("{{\"Detach\":false,\"Tty\":true,\"ConsoleSize\":[{rows},{columns}]}}")
        }
        None => "{\"Detach\":false,\"Tty\":false}".to_owned(),
    };
    take_over(socket, path, body).await
}

/// Attaches to a container's terminal. `path` is with the API version.
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
        // An error comes as JSON; a success without the switch is something else than dockerd.
        read_whole(response, socket).await?;
        let reason = "it does not hand its connection over".to_owned();
        Err(Failure::Unavailable { reason })
    };
    exchange(socket, request, taken_over)
        .await
        .map(TokioIo::new)
}

/// The answer to a request, as it comes. Dropping it closes the connection.
pub(super) struct Streaming {
    /// Driven by who reads.
    connection: Driven,
    body: Incoming,
    socket: PathBuf,
}

/// Asks for what comes in pieces and has no frames. `path` is with the API version.
pub(super) async fn get_stream(socket: &Path, path: &str) -> Result<Streaming, Failure> {
    let request = request(Method::GET, path).body(Full::default());
    let request = request.map_err(|error| Failure::unavailable(&error, socket))?;
    let failure = |error: hyper::Error| Failure::unavailable(&error, socket);
    let (mut sender, connection) = open(socket).await?;
    let mut connection = Some(Box::pin(connection));
    let mut answer = pin!(sender.send_request(request));
    let response = tokio::select! {
        // The head is here.
        response = &mut answer => response.map_err(failure)?,
        // Ended: what was received is still to be looked at.
        _ = drive(&mut connection) => answer.await.map_err(failure)?,
    };
    if !response.status().is_success() {
        return Err(tokio::select! {
            refused = read_whole(response, socket) => match refused {
                Err(failure) => failure,
                Ok(_) => Failure::Unavailable { reason: "it answers in riddles".to_owned() },
            },
            // As long as it is read.
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
                // Loses nothing: a frame is taken when it is whole.
                frame = self.body.frame() => frame,
                // As long as it is read.
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

/// Until the connection ends, which is told by what is read from it.
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

/// A connection of its own, which nobody drives yet.
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

/// One request on a connection of its own, which is driven until `finish` has what it wants.
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
        // Everything is at hand; the connection has nothing left to do.
        result = &mut answer => return result,
        // Ended, or handed over: what was received is still to be looked at.
        ended = &mut connection => ended.map_err(failure)?,
    }
    answer.await
}

/// The body of a good answer; a bad one as a failure.
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
