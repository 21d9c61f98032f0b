//! A proxy, sessions and clients for these tests.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use conman_core::{Activity, Closing};
use conman_peer::Stream;
use conman_proto::{Generation, Problem, SessionId};
use conman_proxy::{
    Backend, Directory, Gate, Proxy, ProxyOptions, Readiness, Refusal, Route, Verdict, Way,
};
use http::request::Parts;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

/// Bound on anything that a test waits for; only a test that fails gets near it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_elapsed) => panic!("{what} did not happen within {PATIENCE:?}"),
    }
}

/// Waits until `condition` holds, for counters that have no channel.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// A session as the test's directory knows it.
pub(crate) struct TestSession {
    pub(crate) activity: Arc<Activity>,
    pub(crate) closing: watch::Sender<Option<Closing>>,
    backend: Arc<TestBackend>,
    generation: AtomicU64,
}

struct TestBackend {
    address: Mutex<SocketAddr>,
    connections: AtomicU64,
}

#[async_trait]
impl Backend for TestBackend {
    async fn connect(&self) -> io::Result<Stream> {
        self.connections.fetch_add(1, Ordering::Relaxed);
        let address = *self.address.lock().expect("no panic while held");
        TcpStream::connect(address).await.map(Stream::from)
    }
}

impl TestSession {
    pub(crate) fn new(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            activity: Arc::default(),
            closing: watch::Sender::new(None),
            backend: Arc::new(TestBackend {
                address: Mutex::new(address),
                connections: AtomicU64::new(0),
            }),
            generation: AtomicU64::new(7),
        })
    }

    /// Connections that the proxy has opened.
    pub(crate) fn connections(&self) -> u64 {
        self.backend.connections.load(Ordering::Relaxed)
    }

    /// The session was started anew, at another address.
    pub(crate) fn restart(&self, address: SocketAddr) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        *self.backend.address.lock().expect("no panic while held") = address;
    }

    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Relaxed);
    }

    pub(crate) fn route(&self, id: &SessionId) -> Route {
        let generation = self.generation.load(Ordering::Relaxed);
        Route {
            session: id.clone(),
            generation: Generation::new(generation).expect("not zero"),
            activity: Arc::clone(&self.activity),
            closing: self.closing.subscribe(),
            port: None,
            strip_prefix: true,
            way: Way::Session,
            backend: Arc::clone(&self.backend) as Arc<dyn Backend>,
        }
    }
}

/// Sessions by id; `slow` ones are answered once the test says so.
#[derive(Default)]
pub(crate) struct TestDirectory {
    sessions: Mutex<HashMap<String, Arc<TestSession>>>,
    pub(crate) gate: watch::Sender<bool>,
    /// Ready unless set.
    pub(crate) readiness: Mutex<Option<Readiness>>,
}

impl TestDirectory {
    pub(crate) fn insert(&self, id: &str, session: Arc<TestSession>) {
        self.sessions
            .lock()
            .expect("no panic while held")
            .insert(id.to_owned(), session);
    }
}

#[async_trait]
impl Directory for TestDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        if id.as_str() == "panics" {
            panic!("a directory that panics");
        }
        if id.as_str().starts_with("slow") {
            let mut open = self.gate.subscribe();
            open.wait_for(|open| *open)
                .await
                .expect("the directory lives");
        }
        if id.as_str() == "never" {
            std::future::pending::<()>().await;
        }
        let session = self
            .sessions
            .lock()
            .expect("no panic while held")
            .get(id.as_str())
            .cloned();
        session
            .map(|session| session.route(id))
            .ok_or_else(|| Refusal {
                problem: Problem::new(
                    "no-such-session",
                    "No such session",
                    404,
                    format!("`{id}`, may_start={may_start}"),
                ),
                retry_after_s: Some(3),
            })
    }

    fn readiness(&self) -> Readiness {
        let set = *self.readiness.lock().expect("no panic while held");
        set.unwrap_or(Readiness::Ready)
    }
}

type Admit = dyn Fn(&mut Parts, &SessionId, &str) -> Verdict + Send + Sync;

struct TestGate(Box<Admit>);

impl Gate for TestGate {
    fn admit(&self, parts: &mut Parts, id: &SessionId, prefix: &str) -> Verdict {
        (self.0)(parts, id, prefix)
    }
}

/// A proxy with its directory.
pub(crate) struct Fixture {
    pub(crate) proxy: Proxy,
    pub(crate) address: SocketAddr,
    pub(crate) directory: Arc<TestDirectory>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with_options(ProxyOptions::default())
    }

    pub(crate) fn with_options(options: ProxyOptions) -> Self {
        Self::with_gate(options, |_, _, _| Verdict::Admit { may_start: false })
    }

    pub(crate) fn with_gate(
        options: ProxyOptions,
        gate: impl Fn(&mut Parts, &SessionId, &str) -> Verdict + Send + Sync + 'static,
    ) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        let directory = Arc::<TestDirectory>::default();
        let gate = Arc::new(TestGate(Box::new(gate)));
        let options = ProxyOptions {
            workers: 2,
            ..options
        };
        let proxy = Proxy::start(listener, options, directory.clone(), gate).expect("a proxy");
        let address = proxy.local_addr();
        Self {
            proxy,
            address,
            directory,
        }
    }

    /// Adds a session that is served at `address`.
    pub(crate) fn session(&self, id: &str, address: SocketAddr) -> Arc<TestSession> {
        let session = TestSession::new(address);
        self.directory.insert(id, session.clone());
        session
    }

    pub(crate) async fn connect(&self) -> Client {
        Client {
            stream: TcpStream::connect(self.address)
                .await
                .expect("the proxy listens"),
        }
    }

    /// Sends raw bytes on a connection of their own and reads until the proxy closes it.
    pub(crate) async fn exchange(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut client = self.connect().await;
        client.send(bytes).await;
        client.read_to_end().await
    }

    /// A GET with `Connection: close`.
    pub(crate) async fn get(&self, target: &str, host: &str) -> String {
        self.exchange(format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        ))
        .await
    }
}

/// A client that speaks in bytes.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
}

impl Client {
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        soon("sending", self.stream.write_all(bytes.as_ref()))
            .await
            .expect("the peer reads");
    }

    /// Everything until the peer closes or resets the connection.
    pub(crate) async fn read_to_end(&mut self) -> String {
        let mut bytes = Vec::new();
        let ended = soon("the end", self.stream.read_to_end(&mut bytes)).await;
        let reset = if ended.is_err() { "[reset]" } else { "" };
        String::from_utf8_lossy(&bytes).into_owned() + reset
    }

    /// Everything up to and including `mark`.
    pub(crate) async fn read_until(&mut self, mark: &str) -> String {
        let mut bytes = Vec::new();
        soon(mark, async {
            while !bytes.ends_with(mark.as_bytes()) {
                match self.stream.read_u8().await {
                    Ok(byte) => bytes.push(byte),
                    Err(error) => {
                        let got = String::from_utf8_lossy(&bytes);
                        panic!("{error} before `{mark}`, after `{got}`");
                    }
                }
            }
        })
        .await;
        String::from_utf8(bytes).expect("text")
    }

    pub(crate) async fn read_head(&mut self) -> String {
        self.read_until("\r\n\r\n").await
    }
}

/// A backend that hands its connections to the test as raw streams.
pub(crate) struct RawBackend {
    pub(crate) address: SocketAddr,
    accepted: mpsc::Receiver<TcpStream>,
}

impl RawBackend {
    pub(crate) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        // Tests open a handful of connections.
        let (sender, accepted) = mpsc::channel(64);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                if sender.send(stream).await.is_err() {
                    return;
                }
            }
        });
        Self { address, accepted }
    }

    pub(crate) async fn accept(&mut self) -> Client {
        let stream = soon("a connection from the proxy", self.accepted.recv()).await;
        Client {
            stream: stream.expect("the listener lives"),
        }
    }

    /// The next connection that was already accepted or arrives shortly; `None` if there is none.
    pub(crate) fn try_accept(&mut self) -> Option<Client> {
        self.accepted
            .try_recv()
            .ok()
            .map(|stream| Client { stream })
    }
}

/// Serves an axum router on a free port.
pub(crate) async fn serve(router: axum::Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// A backend that answers every request with the request as it came, head only.
pub(crate) async fn serve_echo_head() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut client = Client { stream };
                let mut head = Vec::new();
                while let Ok(byte) = client.stream.read_u8().await {
                    head.push(byte);
                    if head.ends_with(b"\r\n\r\n") {
                        let length = head.len();
                        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
                        let answer = [answer.as_bytes(), &head].concat();
                        if client.stream.write_all(&answer).await.is_err() {
                            return;
                        }
                        head.clear();
                    }
                }
            });
        }
    });
    address
}

pub(crate) fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

pub(crate) fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}
