//! Exchanges with the daemon that the client library cannot make safely:
//!
//! * requesting its version: the library requests one that older daemons refuse;
//! * taking over a connection for a command's input and output: the library takes a terminal's
//!   bytes for frame headers, and would buffer as many bytes as the container writes there, up to
//!   4 GiB;
//! * for the same reason, reading logs.
//!
//! Each exchange has a separate connection, which a task drives. The task ends as soon as the caller stops
//! waiting, or drops what it got.

use std::path::Path;

use bollard::models::SystemVersion;
use bytes::Bytes;
use conman_proto::TerminalSize;
use futures_util::stream::{BoxStream, StreamExt, TryStreamExt};
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
    let answer = read_whole(exchange(socket, request).await?, socket).await?;
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
    let response = exchange(socket, request).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        // It is not dockerd's.
        let reason = "it does not hand its connection over".to_owned();
        return Err(Failure::Unavailable { reason });
    }
    let upgraded = hyper::upgrade::on(response).await;
    upgraded
        .map(TokioIo::new)
        .map_err(|error| Failure::unavailable(&error, socket))
}

/// Requests an unframed stream. `path` includes the API version.
pub(super) async fn get_stream(
    socket: &Path,
    path: &str,
) -> Result<BoxStream<'static, Result<Bytes, Failure>>, Failure> {
    let request = request(Method::GET, path).body(Full::default());
    let body = exchange(socket, request).await?.into_body();
    let socket = socket.to_owned();
    let pieces = body.into_data_stream();
    let pieces = pieces.map_err(move |error| Failure::unavailable(&error, &socket));
    Ok(pieces.boxed())
}

fn request(method: Method, path: &str) -> hyper::http::request::Builder {
    Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "docker")
}

/// Sends one request on a new connection. An error answer becomes a failure.
async fn exchange(
    socket: &Path,
    request: Result<Request<Full<Bytes>>, hyper::http::Error>,
) -> Result<Response<Incoming>, Failure> {
    let request = request.map_err(|error| Failure::unavailable(&error, socket))?;
    let failure = |error: hyper::Error| Failure::unavailable(&error, socket);
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|error| Failure::unavailable(&error, socket))?;
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(failure)?;
    // Its errors show in the answer, and in what is read from it.
    tokio::spawn(connection.with_upgrades());
    let response = sender.send_request(request).await.map_err(failure)?;
    let status = response.status();
    if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
        return Ok(response);
    }
    let body = read_whole(response, socket).await?;
    let message = match serde_json::from_slice::<ErrorAnswer>(&body) {
        Ok(answer) => answer.message,
        Err(_) => String::from_utf8_lossy(&body).into_owned(),
    };
    Err(Failure::Answered {
        status: status.as_u16(),
        message,
    })
}

async fn read_whole(response: Response<Incoming>, socket: &Path) -> Result<Bytes, Failure> {
    let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES);
    let read = body.collect().await;
    let read = read.map_err(|error| Failure::unavailable(error.as_ref(), socket))?;
    Ok(read.to_bytes())
}
