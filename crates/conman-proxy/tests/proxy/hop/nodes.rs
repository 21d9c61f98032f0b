//! An entry node, and nodes that own sessions.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use async_trait::async_trait;
use conman_core::Closing;
use conman_peer::{PeerAccept, PeerRefusal, Stream};
use conman_proto::{Generation, Problem, SessionId};
use conman_proxy::{
    Backend, Directory, Gate, OwnSessions, PeerFront, Proxy, ProxyOptions, Refusal, Route, Verdict,
    Way,
};
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::support::{Client, RawBackend, TestSession, serve_echo_head};

/// Stands for a node that takes nothing from this one.
pub(crate) const SHUT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Stands for a node that this one takes nothing from.
pub(crate) const FOREIGN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 1);

/// Stands for a node that cannot be reached, and does not say so.
pub(crate) const CUT_OFF: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 2);

pub(crate) const GET_ALICE: &str =
    "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n";

/// With a body of this length.
pub(crate) fn upload(length: usize, more: &str) -> String {
    format!(
        "POST /up HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n{more}\
         Content-Length: {length}\r\n\r\n"
    )
}

/// A node with its listener for other nodes.
pub(crate) struct Owner {
    pub(crate) proxy: Proxy,
    pub(crate) address: SocketAddr,
    sessions: Arc<OwnedSessions>,
    /// Connections.
    pub(crate) accepted: Arc<AtomicU64>,
}

#[derive(Default)]
struct OwnedSessions {
    sessions: Mutex<HashMap<String, Owned>>,
}

#[derive(Clone)]
struct Owned {
    session: Arc<TestSession>,
    ready: bool,
}

impl OwnSessions for OwnedSessions {
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, PeerRefusal> {
        let owned = self
            .sessions
            .lock()
            .expect("sound")
            .get(id.as_str())
            .cloned();
        let owned = owned.ok_or(PeerRefusal::NotOwner)?;
        let route = owned.session.route(id);
        if route.generation < generation {
            return Err(PeerRefusal::NotOwner);
        }
        if owned.ready {
            Ok(route)
        } else {
            Err(PeerRefusal::NotReady)
        }
    }
}

struct Accept(Arc<AtomicU64>);

#[async_trait]
impl PeerAccept for Accept {
    async fn accept(&self, stream: TcpStream) -> io::Result<Stream> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(Stream::Tcp(stream))
    }
}

/// The API as a backend: echoes heads.
struct Api(SocketAddr);

#[async_trait]
impl Backend for Api {
    async fn connect(&self) -> io::Result<Stream> {
        TcpStream::connect(self.0).await.map(Stream::from)
    }
}

impl Owner {
    pub(crate) async fn new() -> Self {
        Self::with(ProxyOptions::default()).await
    }

    pub(crate) async fn with(options: ProxyOptions) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        let sessions = Arc::<OwnedSessions>::default();
        let accepted = Arc::<AtomicU64>::default();
        let front = PeerFront {
            accept: Arc::new(Accept(Arc::clone(&accepted))),
            sessions: sessions.clone(),
            api: Arc::new(Api(serve_echo_head().await)),
        };
        let options = ProxyOptions {
            workers: 1,
            ..options
        }
        .for_nodes();
        let proxy = Proxy::start_peers(listener, options, front).expect("a proxy");
        let address = proxy.local_addr();
        Self {
            proxy,
            address,
            sessions,
            accepted,
        }
    }

    /// One that owns alice, and what alice is.
    pub(crate) async fn of_alice() -> (Self, RawBackend) {
        let (owner, alice) = (Self::new().await, RawBackend::new().await);
        owner.own("alice", &TestSession::new(alice.address), true);
        (owner, alice)
    }

    /// One whose alice shows the heads of its requests.
    pub(crate) async fn of_echo() -> Self {
        let owner = Self::new().await;
        owner.own("alice", &TestSession::new(serve_echo_head().await), true);
        owner
    }

    /// To its listener for nodes, on which nobody has said anything yet.
    pub(crate) async fn connect(&self) -> Client {
        Client {
            stream: TcpStream::connect(self.address).await.expect("it listens"),
        }
    }

    pub(crate) fn own(&self, id: &str, session: &Arc<TestSession>, ready: bool) {
        let owned = Owned {
            session: Arc::clone(session),
            ready,
        };
        let mut sessions = self.sessions.sessions.lock().expect("sound");
        sessions.insert(id.to_owned(), owned);
    }

    pub(crate) fn disown(&self, id: &str) {
        self.sessions.sessions.lock().expect("sound").remove(id);
    }
}

/// The way to a node.
#[derive(Debug, Clone)]
struct ToNode {
    address: SocketAddr,
    silent: watch::Receiver<bool>,
}

#[async_trait]
impl Backend for ToNode {
    async fn connect(&self) -> io::Result<Stream> {
        match self.address {
            SHUT => Ok(Stream::Other(Box::new(Shut))),
            FOREIGN => Err(io::ErrorKind::PermissionDenied.into()),
            CUT_OFF => std::future::pending().await,
            address => TcpStream::connect(address).await.map(Stream::from),
        }
    }

    async fn becomes_unresponsive(&self) -> String {
        let mut silent = self.silent.clone();
        let fell = silent.wait_for(|silent| *silent).await;
        fell.map_or_else(
            |_| "the test is over".to_owned(),
            |_| "no progress".to_owned(),
        )
    }
}

/// The end of a connection whose other end takes nothing from this node.
struct Shut;

impl AsyncRead for Shut {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let why = io::Error::new(
            io::ErrorKind::PermissionDenied,
            "no certificate of the fleet",
        );
        Poll::Ready(Err(why))
    }
}

impl AsyncWrite for Shut {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Who the entry node believes to own every session; waits while nobody does.
pub(crate) struct Believed {
    owner: watch::Sender<Option<SocketAddr>>,
    /// The owner that the next look-up finds.
    pub(crate) truth: watch::Sender<Option<SocketAddr>>,
    refusals: watch::Sender<Vec<PeerRefusal>>,
    /// Becomes true once the node answers nothing any more.
    pub(crate) silent: watch::Sender<bool>,
    /// Becomes `Some` once it is declared dead.
    pub(crate) gone: watch::Sender<Option<Closing>>,
}

impl Believed {
    pub(crate) fn new(owner: SocketAddr) -> Arc<Self> {
        Arc::new(Self {
            owner: watch::Sender::new(Some(owner)),
            truth: watch::Sender::new(Some(owner)),
            refusals: watch::Sender::default(),
            silent: watch::Sender::new(false),
            gone: watch::Sender::new(None),
        })
    }

    fn route_to(&self, id: &SessionId, address: SocketAddr) -> Route {
        Route {
            session: id.clone(),
            generation: Generation::new(7).expect("not zero"),
            activity: Arc::default(),
            closing: self.gone.subscribe(),
            port: None,
            strip_prefix: true,
            way: Way::Peer {
                node: address.to_string().into(),
                incarnation: 1,
            },
            backend: Arc::new(ToNode {
                address,
                silent: self.silent.subscribe(),
            }),
        }
    }

    pub(crate) fn refusal(&self) -> Vec<PeerRefusal> {
        self.refusals.borrow().clone()
    }

    /// Waits for the first refusal.
    pub(crate) async fn refused(&self) -> PeerRefusal {
        let mut refusals = self.refusals.subscribe();
        let first = refusals.wait_for(|refusals| !refusals.is_empty()).await;
        first.expect("it lives")[0].clone()
    }
}

#[async_trait]
impl Directory for Believed {
    async fn route(&self, id: &SessionId, _may_start: bool) -> Result<Route, Refusal> {
        let mut owner = self.owner.subscribe();
        let owner = *owner.wait_for(Option::is_some).await.expect("it lives");
        Ok(self.route_to(id, owner.expect("waited for")))
    }

    async fn route_again(
        &self,
        from: &Route,
        why: &PeerRefusal,
        _times: u32,
        _may_start: bool,
    ) -> Result<Route, Refusal> {
        self.refusals
            .send_modify(|refusals| refusals.push(why.clone()));
        if *why == PeerRefusal::Refused {
            return Err(Refusal::from(Problem::new("told", "Told", 502, "both")));
        }
        let mut truth = self.truth.subscribe();
        let owner = *truth.wait_for(Option::is_some).await.expect("it lives");
        Ok(self.route_to(&from.session, owner.expect("waited for")))
    }
}

struct Anybody;

impl Gate for Anybody {
    fn admit(&self, _: &mut Parts, _: &SessionId, _: &str) -> Verdict {
        Verdict::Admit { may_start: true }
    }
}

pub(crate) struct Entry(pub(crate) Proxy);

impl Entry {
    pub(crate) fn new(believed: &Arc<Believed>) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        let options = ProxyOptions {
            workers: 1,
            ..ProxyOptions::default()
        };
        let directory = Arc::clone(believed);
        let proxy = Proxy::start(listener, options, directory, Arc::new(Anybody));
        Self(proxy.expect("a proxy"))
    }

    pub(crate) async fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.0.local_addr()).await;
        Client {
            stream: stream.expect("the proxy listens"),
        }
    }

    pub(crate) async fn exchange(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut client = self.connect().await;
        client.send(bytes).await;
        client.read_to_end().await
    }
}
