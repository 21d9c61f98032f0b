//! A client of the HTTP API.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use conman_observer::slowness;
use conman_proto::{EnsureResponse, PROBLEM_CONTENT_TYPE, Problem, Session, StopReport};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Bound on one exchange: nothing that the daemon does on a busy machine takes so long.
const PATIENCE: Duration = Duration::from_secs(180);

/// Bound on the time in which a busy node refuses starts and commands.
const AVAILABLE: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_millis(200);

/// Where the daemon listens.
#[derive(Debug, Clone)]
pub(crate) enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A client of the HTTP API; every request has a connection of its own.
#[derive(Debug, Clone)]
pub struct Api {
    endpoint: Endpoint,
    token: Option<String>,
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// An answer whose body is still coming; dropping it closes the connection.
#[derive(Debug)]
pub struct Streamed {
    pub response: Response<Incoming>,
    connection: JoinHandle<()>,
}

impl Drop for Streamed {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Api {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            token: None,
        }
    }

    /// Of a daemon, or whatever else speaks HTTP, at this address.
    #[must_use]
    pub fn tcp(address: SocketAddr) -> Self {
        Self::new(Endpoint::Tcp(address))
    }

    /// The same at a socket of the file system.
    #[must_use]
    pub fn unix(path: &Path) -> Self {
        Self::new(Endpoint::Unix(path.to_path_buf()))
    }

    /// The same, with a bearer token.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    /// `GET`
    pub async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, None).await
    }

    /// `PUT` with a JSON body.
    pub async fn put(&self, path: &str, body: &Value) -> Answer {
        self.send(Method::PUT, path, Some(body)).await
    }

    /// `POST` with a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(Method::POST, path, Some(body)).await
    }

    /// `DELETE`
    pub async fn delete(&self, path: &str) -> Answer {
        self.send(Method::DELETE, path, None).await
    }

    /// Ensures a session and waits for it. Like any client it requests it again while the answer is retryable:
    /// the node is unavailable, or its shim got no processor time for seconds.
    ///
    /// # Panics
    /// When it does not run.
    pub async fn ensure(&self, id: &str, request: &Value) -> EnsureResponse {
        let path = format!("/v1/sessions/{id}");
        let deadline = Instant::now() + AVAILABLE * slowness();
        loop {
            let answer = self.put(&path, request).await;
            let may_help = !answer.status.is_success() && answer.json()["retryable"] == true;
            if !may_help || Instant::now() > deadline {
                return answer.expect(StatusCode::OK);
            }
            sleep(RETRY).await;
        }
    }

    /// Shows a session.
    ///
    /// # Panics
    /// When there is none.
    pub async fn session(&self, id: &str) -> Session {
        self.get(&format!("/v1/sessions/{id}"))
            .await
            .expect(StatusCode::OK)
    }

    /// Stops a session.
    ///
    /// # Panics
    /// When it is not dead and released then.
    pub async fn stop(&self, id: &str) -> StopReport {
        self.delete(&format!("/v1/sessions/{id}"))
            .await
            .expect(StatusCode::OK)
    }

    /// Sends a request and reads the whole answer. Like any client it repeats one that is refused because a
    /// runtime gets no processor time.
    ///
    /// # Panics
    /// When there is no answer.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Answer {
        let deadline = Instant::now() + AVAILABLE * slowness();
        loop {
            let answer = self.try_send(method.clone(), path, body).await;
            let answer = answer.unwrap_or_else(|error| panic!("{path}: {error}"));
            let is_starved = answer.status == StatusCode::SERVICE_UNAVAILABLE
                && answer.text().contains("gets no processor time");
            if !is_starved || Instant::now() > deadline {
                return answer;
            }
            sleep(RETRY).await;
        }
    }

    /// Sends a request and reads the whole answer; an error when the daemon is not there or goes
    /// away meanwhile.
    pub async fn try_send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        let exchange = async {
            let mut streamed = self.open(self.request(method, path, body)).await?;
            let body = streamed.response.body_mut().collect().await?.to_bytes();
            Ok(Answer {
                status: streamed.response.status(),
                headers: streamed.response.headers().clone(),
                body,
            })
        };
        timeout(PATIENCE, exchange).await?
    }

    /// Sends any request at all and reads its answer's head.
    pub async fn open(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Streamed, Box<dyn std::error::Error + Send + Sync>> {
        match &self.endpoint {
            Endpoint::Tcp(address) => exchange(TcpStream::connect(address).await?, request).await,
            Endpoint::Unix(path) => exchange(UnixStream::connect(path).await?, request).await,
        }
    }

    /// A request to this daemon, with the token.
    pub fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Request<Full<Bytes>> {
        let host = match &self.endpoint {
            Endpoint::Tcp(address) => address.to_string(),
            Endpoint::Unix(_) => "localhost".to_owned(),
        };
        let mut builder = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, host);
        if let Some(token) = &self.token {
            builder = builder.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let bytes = match body {
            Some(value) => {
                builder = builder.header(CONTENT_TYPE, "application/json");
                Bytes::from(value.to_string())
            }
            None => Bytes::new(),
        };
        builder
            .body(Full::new(bytes))
            .expect("the request is valid")
    }
}

async fn exchange(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Streamed, Box<dyn std::error::Error + Send + Sync>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await?;
    let connection = tokio::spawn(async move {
        // What breaks the connection shows in the answer.
        let _ = connection.with_upgrades().await;
    });
    let response = sender.send_request(request).await?;
    Ok(Streamed {
        response,
        connection,
    })
}

impl Answer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as a JSON value.
    ///
    /// # Panics
    /// When it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("no JSON ({error}): {}", self.text()))
    }

    /// The body of an answer with this status.
    ///
    /// # Panics
    /// When the answer is another one.
    pub fn expect<T: DeserializeOwned>(&self, status: StatusCode) -> T {
        assert_eq!(self.status, status, "{}", self.text());
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not understood ({error}): {}", self.text()))
    }

    /// The problem that the answer is.
    ///
    /// # Panics
    /// When it is none, or one whose status is not that of the answer.
    pub fn problem(&self) -> Problem {
        let kind = self.headers.get(CONTENT_TYPE);
        assert!(
            kind.is_some_and(|kind| kind == PROBLEM_CONTENT_TYPE),
            "no problem but {}: {}",
            self.status,
            self.text()
        );
        let problem: Problem = self.expect(self.status);
        assert_eq!(problem.status, self.status.as_u16());
        problem
    }
}
