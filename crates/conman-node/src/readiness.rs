//! Checks from inside a session's network namespace whether its program answers on its port.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use conman_linux::{NetnsSockets, PidFd};
use conman_proto::Network;
use conman_runtime::Runtime;
use http::header::{HOST, USER_AGENT};
use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// Pauses between tries, in microseconds; the last one repeats. Short at first, because most programs are up in
/// milliseconds, and never long, because a client may be waiting. The kernel has no event for a program that begins to
/// listen. A pause below a millisecond ends with the timer's next tick, which comes every millisecond.
const PAUSES_US: [u64; 11] = [
    100, 100, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 50_000, 100_000, 200_000,
];

/// One connection or one HTTP answer.
const TRY_TIMEOUT: Duration = Duration::from_secs(5);

/// What must answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) network: Network,
    pub(crate) port: u16,
    /// A 2xx or 3xx answer to a GET of it means ready; a connection suffices without.
    pub(crate) path: Option<String>,
}

/// What the last try found.
#[derive(Debug)]
pub(crate) enum NotReady {
    Untried,
    Connect(std::io::Error),
    Http(hyper::Error),
    Status(StatusCode),
    Silent,
    BadPath,
}

impl fmt::Display for NotReady {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Untried => formatter.write_str("not tried"),
            Self::Connect(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                formatter.write_str("nothing listens there")
            }
            Self::Connect(error) => write!(formatter, "connecting failed: {error}"),
            Self::Http(error) => write!(formatter, "it does not speak HTTP: {error}"),
            Self::Status(status) => write!(formatter, "it answered {status}"),
            Self::Silent => write!(formatter, "no answer within {} s", TRY_TIMEOUT.as_secs()),
            Self::BadPath => formatter.write_str("the path is not valid in a request"),
        }
    }
}

/// Completes once the probe succeeds, or with the result of the last try before `deadline`. Cancel
/// safe: it only holds connections, which close.
pub(crate) async fn wait(
    runtime: &dyn Runtime,
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    probe: &Probe,
    deadline: Instant,
) -> Result<(), NotReady> {
    let mut last = NotReady::Untried;
    let mut pauses = PAUSES_US.into_iter();
    let mut pause = Duration::ZERO;
    loop {
        match timeout_at(deadline, attempt(runtime, sockets, process, probe)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(reason)) => last = reason,
            Err(_) => return Err(last),
        }
        pause = pauses.next().map_or(pause, Duration::from_micros);
        if timeout_at(deadline, sleep(pause)).await.is_err() {
            return Err(last);
        }
    }
}

async fn attempt(
    runtime: &dyn Runtime,
    sockets: &NetnsSockets,
    process: &Arc<PidFd>,
    probe: &Probe,
) -> Result<(), NotReady> {
    let attempt = async {
        let stream = runtime
            .connect(sockets, process, &probe.network, probe.port)
            .await
            .map_err(NotReady::Connect)?;
        match &probe.path {
            Some(path) => ask(stream, path).await,
            None => Ok(()),
        }
    };
    timeout(TRY_TIMEOUT, attempt)
        .await
        .map_err(|_| NotReady::Silent)?
}

async fn ask(stream: TcpStream, path: &str) -> Result<(), NotReady> {
    let request = Request::get(path)
        .header(HOST, "localhost")
        .header(USER_AGENT, "conman-readiness")
        .body(Empty::<Bytes>::new())
        .map_err(|_| NotReady::BadPath)?;
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(16 * 1024)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(NotReady::Http)?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(NotReady::Http)?;
        let status = response.status();
        // The body, of any length, is dropped with the connection.
        if status.is_success() || status.is_redirection() {
            Ok(())
        } else {
            Err(NotReady::Status(status))
        }
    };
    tokio::pin!(connection);
    tokio::pin!(answer);
    let mut connected = true;
    loop {
        tokio::select! {
            // Cancel safe: both are dropped together with this future.
            result = &mut answer => return result,
            // A failure of the connection is reported by the answer.
            _ = &mut connection, if connected => connected = false,
        }
    }
}
