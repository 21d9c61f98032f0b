//! A client of the HTTP API: one connection for each request, over the admin socket or TCP.
//!
//! The only task of a request drives its connection and ends when the response is read or
//! dropped. Every wait for a peer that may be dead is bounded.

mod connection;
mod error;
mod lines;
mod log_frames;
mod refusable;
mod sse;
mod target;
mod websocket;

use std::ffi::OsString;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use conman_proto::Problem;
use futures_util::{Stream, StreamExt as _};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use error::{ClientError, StreamError};
pub(crate) use lines::Lines;
pub(crate) use log_frames::{LogFrame, LogFrames};
pub(crate) use sse::SseEvents;
pub(crate) use websocket::{ExecSocket, ExecSocketError, FromCommand, FromExec, Socket, ToCommand};

use crate::args::Globals;
use refusable::Refusable;
use target::Target;

/// Bound on the head of an answer to a request that the daemon carries out at once. It is longer
/// than the daemon's 30 s, so that the daemon reports what took too long.
pub(crate) const PROMPT: Duration = Duration::from_secs(45);

/// Bound on a start: the longest ready timeout of a spec (600 s), and the runtime's time. Also
/// for the end of a session, whose node may first have to be declared dead, which takes the
/// fleet's configured time.
pub(crate) const START: Duration = Duration::from_secs(15 * 60);

/// Bound on an import: its upload over a slow line, and unpacking tens of gigabytes.
pub(crate) const IMPORT: Duration = Duration::from_secs(6 * 60 * 60);

/// Longest pause within the body of an answer that does not stream.
const BODY_SILENCE: Duration = Duration::from_secs(30);

/// Bound on an answer's body. Only a page of 1,000 sessions with specs of the maximal 160 KiB
/// each is larger.
const MAX_BODY_BYTES: usize = 64 * 1024 * 1024;

const USER_AGENT_VALUE: &str = concat!("conman/", env!("CARGO_PKG_VERSION"));

/// A typed answer, and its JSON as the daemon wrote it: a newer daemon may send unknown fields,
/// which `--json` shows.
#[derive(Debug)]
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    pub(crate) raw: serde_json::Value,
}

/// A daemon's address and the credentials for it.
#[derive(Debug)]
pub(crate) struct Client {
    target: Target,
    token: Option<HeaderValue>,
}

impl Client {
    /// From the flags and the environment; does not connect.
    pub(crate) fn new(
        globals: &Globals,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, ClientError> {
        let token = globals
            .token_file(&env)
            .map(|path| target::read_token(&path))
            .transpose()?;
        Ok(Self {
            target: Target::new(globals.endpoint(&env))?,
            token,
        })
    }

    /// Sends a GET and reads the JSON answer.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        Ok(self
            .answer(Method::GET, path, None::<&()>, PROMPT)
            .await?
            .value)
    }

    /// Sends `body` and reads the JSON answer; `patience` bounds the wait for its head.
    pub(crate) async fn answer<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        patience: Duration,
    ) -> Result<Answer<T>, ClientError> {
        let response = self
            .send(method, path, body, "application/json", patience)
            .await?;
        let bytes = self.read(response.into_body()).await?;
        self.typed(&bytes)
    }

    /// Opens an answer that streams, without a bound on pauses in its body.
    pub(crate) async fn stream(
        &self,
        path: &str,
        accept: &'static str,
    ) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::GET, path, None::<&()>, accept, PROMPT)
            .await
    }

    /// Sends `pieces` as they come, and reads the JSON answer. An error among them breaks the
    /// request, so that the daemon does not take the part for the whole.
    pub(crate) async fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        length: Option<u64>,
        patience: Duration,
    ) -> Result<Answer<T>, ClientError> {
        let bytes = self
            .send_pieces(Method::POST, path, pieces, length, patience)
            .await?;
        self.typed(&bytes)
    }

    /// Likewise, and returns the answer's body.
    pub(crate) async fn send_pieces(
        &self,
        method: Method,
        path: &str,
        pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
        length: Option<u64>,
        patience: Duration,
    ) -> Result<Bytes, ClientError> {
        let mut request = self.request(method, path)?;
        let headers = request.headers_mut();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let archive = HeaderValue::from_static("application/octet-stream");
        headers.insert(CONTENT_TYPE, archive);
        if let Some(length) = length {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        let request = request.map(|()| {
            let frames = pieces.map(|piece| piece.map(Frame::data));
            UnsyncBoxBody::new(StreamBody::new(frames))
        });
        let response = self.exchange(request, patience).await?;
        if !response.status().is_success() {
            return Err(self.refusal(response).await);
        }
        self.read(response.into_body()).await
    }

    /// Sends a HEAD and returns the answer's status.
    pub(crate) async fn head(&self, path: &str) -> Result<StatusCode, ClientError> {
        let request = self.request(Method::HEAD, path)?;
        let request = request.map(|()| Full::new(Bytes::new()));
        Ok(self.exchange(request, PROMPT).await?.status())
    }

    /// Sends a JSON body and opens an answer that streams.
    pub(crate) async fn post_for_stream(
        &self,
        path: &str,
        body: &impl Serialize,
        accept: &'static str,
    ) -> Result<Response<Incoming>, ClientError> {
        self.send(Method::POST, path, Some(body), accept, PROMPT)
            .await
    }

    fn typed<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<Answer<T>, ClientError> {
        let not_understood = |error: serde_json::Error| self.not_understood(error.to_string());
        let raw: serde_json::Value = serde_json::from_slice(bytes).map_err(not_understood)?;
        let value = T::deserialize(&raw).map_err(not_understood)?;
        Ok(Answer { value, raw })
    }

    /// Sends a request whose answer has no content.
    pub(crate) async fn order(&self, method: Method, path: &str) -> Result<(), ClientError> {
        self.send(method, path, None::<&()>, "application/json", PROMPT)
            .await
            .map(drop)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        accept: &'static str,
        patience: Duration,
    ) -> Result<Response<Incoming>, ClientError> {
        let body = match body {
            Some(body) => {
                let json = serde_json::to_vec(body);
                Some(json.map_err(|error| self.not_understood(error.to_string()))?)
            }
            None => None,
        };
        let mut request = self.request(method, path)?;
        request
            .headers_mut()
            .insert(ACCEPT, HeaderValue::from_static(accept));
        if body.is_some() {
            let json = HeaderValue::from_static("application/json");
            request.headers_mut().insert(CONTENT_TYPE, json);
        }
        let request = request.map(|()| Full::new(Bytes::from(body.unwrap_or_default())));
        let response = self.exchange(request, patience).await?;
        if response.status().is_success() {
            Ok(response)
        } else {
            Err(self.refusal(response).await)
        }
    }

    /// A request without a body, with the caller's credentials.
    fn request(&self, method: Method, path: &str) -> Result<Request<()>, ClientError> {
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|_| ClientError::BadUrl {
            given: path.to_owned(),
            reason: "the request's path is not a valid URI".to_owned(),
        })?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.target.host()?);
        headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        Ok(request)
    }

    /// Sends one request on a new connection and reads the head of the answer.
    async fn exchange<B>(
        &self,
        request: Request<B>,
        patience: Duration,
    ) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let broken = |source: hyper::Error| self.broken(source);
        let stream = connection::connect(&self.target).await?;
        let exchange = async {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(Refusable::new(stream)))
                    .await
                    .map_err(broken)?;
            // Its error also appears in the response or its body, where it is reported.
            tokio::spawn(connection.with_upgrades());
            sender.send_request(request).await.map_err(broken)
        };
        tokio::time::timeout(patience, exchange)
            .await
            .map_err(|_| ClientError::TimedOut {
                peer: self.target.to_string(),
                after_s: patience.as_secs(),
            })?
    }

    /// The problem in a response with an error status.
    async fn refusal(&self, response: Response<Incoming>) -> ClientError {
        let status = response.status();
        match self.read(response.into_body()).await {
            Ok(bytes) => match serde_json::from_slice::<Problem>(&bytes) {
                Ok(problem) => ClientError::Refused(Box::new(problem)),
                Err(_) => self.foreign(status),
            },
            Err(error) => error,
        }
    }

    /// An error response not from conman: from another program, or from a gateway.
    fn foreign(&self, status: StatusCode) -> ClientError {
        self.not_understood(format!("it answered {status} without problem details"))
    }

    async fn read(&self, body: Incoming) -> Result<Bytes, ClientError> {
        let mut body = Limited::new(body, MAX_BODY_BYTES);
        let mut bytes = Vec::new();
        loop {
            let frame = tokio::time::timeout(BODY_SILENCE, body.frame())
                .await
                .map_err(|_| ClientError::TimedOut {
                    peer: self.target.to_string(),
                    after_s: BODY_SILENCE.as_secs(),
                })?;
            match frame {
                Some(Ok(frame)) => {
                    bytes.extend_from_slice(&frame.into_data().unwrap_or_default());
                }
                Some(Err(error)) => return Err(self.body_error(error)),
                None => return Ok(bytes.into()),
            }
        }
    }

    fn body_error(&self, error: Box<dyn std::error::Error + Send + Sync>) -> ClientError {
        match error.downcast::<LengthLimitError>() {
            Ok(_) => ClientError::TooLarge {
                max_bytes: MAX_BODY_BYTES,
            },
            Err(source) => self.broken(source),
        }
    }

    /// The connection ended before the answer did.
    pub(crate) fn broken(
        &self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> ClientError {
        ClientError::Broken {
            peer: self.target.to_string(),
            source: source.into(),
        }
    }

    /// The error of a stream that ended early.
    pub(crate) fn stream_error(&self, error: StreamError) -> ClientError {
        match error {
            StreamError::Broken(source) => self.broken(source),
            StreamError::TooLarge { max_bytes } => ClientError::TooLarge { max_bytes },
            StreamError::NotFrames => self.not_understood("the log is not in frames"),
        }
    }

    /// An answer that does not conform to the API.
    pub(crate) fn not_understood(&self, reason: impl Into<String>) -> ClientError {
        ClientError::NotUnderstood {
            peer: self.target.to_string(),
            reason: reason.into(),
        }
    }
}

/// `value` as one component of a path or a query.
pub(crate) fn encode(value: &str) -> percent_encoding::PercentEncode<'_> {
    percent_encoding::utf8_percent_encode(value, percent_encoding::NON_ALPHANUMERIC)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::UnixListener;

    use super::*;

    /// The client's error if a daemon sends `bytes` and then nothing for ever.
    async fn answer_of_a_daemon_that_stalls(bytes: &'static [u8]) -> ClientError {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).expect("bound");
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            stream.write_all(bytes).await.expect("sent");
            std::future::pending::<()>().await;
        });
        let globals = Globals {
            socket: Some(socket),
            ..Globals::default()
        };
        let client = Client::new(&globals, |_| None).expect("configured");
        let error = client
            .get::<Problem>("/v1/nodes")
            .await
            .expect_err("no answer");
        server.abort();
        error
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_never_answers_is_given_up() {
        let error = answer_of_a_daemon_that_stalls(b"").await;
        assert!(
            matches!(error, ClientError::TimedOut { after_s: 45, .. }),
            "{error}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_stalls_in_the_middle_is_given_up() {
        let half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{";
        let error = answer_of_a_daemon_that_stalls(half).await;
        assert!(
            matches!(error, ClientError::TimedOut { after_s: 30, .. }),
            "{error}"
        );
    }
}
