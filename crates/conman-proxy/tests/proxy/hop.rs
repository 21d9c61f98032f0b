//! Requests that go by way of another node: an entry proxy for clients, and the owners' proxies
//! for nodes, all in this process.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener as StdListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use async_trait::async_trait;
use conman_core::Closing;
use conman_proto::{Generation, Problem, SessionId};
use conman_proxy::{
    Backend, Directory, Gate, Link, OwnSessions, PeerAccept, PeerFront, PeerVisitor, Proxy,
    ProxyOptions, Refusal, Route, Seal, Stream, Turned, Verdict, Way,
};
use futures_util::{SinkExt as _, StreamExt as _};
use http::HeaderValue;
use http::request::Parts;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::Message;

use crate::streaming::{counting, upload_at_constant_memory};
use crate::support::{
    Client, RawBackend, TestSession, body, serve, serve_echo_head, soon, status, until,
};

/// Stands for a node that takes nothing from this one.
const SHUT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

const PASS: &str = "x-conman-peer";

/// A node with its listener for other nodes.
struct Owner {
    proxy: Proxy,
    address: SocketAddr,
    sessions: Arc<OwnedSessions>,
    accepted: Arc<AtomicU64>,
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
    fn own(&self, id: &SessionId, generation: Generation) -> Result<Route, Turned> {
        let owned = self
            .sessions
            .lock()
            .expect("sound")
            .get(id.as_str())
            .cloned();
        let owned = owned.ok_or(Turned::NotOwner)?;
        let route = owned.session.route(id);
        if route.generation < generation {
            return Err(Turned::NotOwner);
        }
        if owned.ready {
            Ok(route)
        } else {
            Err(Turned::NotReady)
        }
    }
}

struct Accept(Arc<AtomicU64>);

#[async_trait]
impl PeerAccept for Accept {
    async fn accept(&self, stream: TcpStream) -> io::Result<(Stream, Box<dyn PeerVisitor>)> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok((Stream::Tcp(stream), Box::new(Visitor)))
    }
}

struct Visitor;

impl PeerVisitor for Visitor {
    fn admit(&self, parts: &Parts) -> Result<String, Box<Problem>> {
        match parts.headers.get(PASS) {
            Some(value) if value == "entry" => Ok("entry".to_owned()),
            _ => Err(Box::new(Problem::new("peer-refused", "No", 401, "no node"))),
        }
    }
}

/// The API as a backend: echoes heads.
struct Api(SocketAddr);

#[async_trait]
impl Backend for Api {
    async fn connect(&self) -> io::Result<Link> {
        TcpStream::connect(self.0).await.map(Link::from)
    }
}

impl Owner {
    async fn new() -> Self {
        Self::with(ProxyOptions::default()).await
    }

    async fn with(options: ProxyOptions) -> Self {
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

    fn own(&self, id: &str, session: &Arc<TestSession>, ready: bool) {
        let owned = Owned {
            session: Arc::clone(session),
            ready,
        };
        let mut sessions = self.sessions.sessions.lock().expect("sound");
        sessions.insert(id.to_owned(), owned);
    }

    fn disown(&self, id: &str) {
        self.sessions.sessions.lock().expect("sound").remove(id);
    }
}

/// The way to a node.
#[derive(Debug, Clone)]
struct ToNode {
    address: SocketAddr,
    pass: &'static str,
    silent: watch::Receiver<bool>,
}

#[async_trait]
impl Backend for ToNode {
    async fn connect(&self) -> io::Result<Link> {
        let stream = match self.address {
            SHUT => Stream::Other(Box::new(Shut)),
            address => Stream::Tcp(TcpStream::connect(address).await?),
        };
        Ok(Link {
            stream,
            seal: Some(Arc::new(self.clone())),
        })
    }

    async fn falls_silent(&self) -> String {
        let mut silent = self.silent.clone();
        let fell = silent.wait_for(|silent| *silent).await;
        fell.map_or_else(|_| "the test is over".to_owned(), |_| "no pulse".to_owned())
    }
}

impl Seal for ToNode {
    fn seal(&self, parts: &mut Parts) {
        parts
            .headers
            .insert(PASS, HeaderValue::from_static(self.pass));
    }
}

/// Who the entry node believes to own every session; waits while nobody does.
struct Believed {
    owner: watch::Sender<Option<SocketAddr>>,
    /// Told by a look-up anew.
    truth: watch::Sender<Option<SocketAddr>>,
    anew: Mutex<Vec<Turned>>,
    pass: &'static str,
    /// Becomes true once the node answers nothing any more.
    silent: watch::Sender<bool>,
    /// Becomes `Some` once it is declared dead.
    gone: watch::Sender<Option<Closing>>,
}

impl Believed {
    fn new(owner: SocketAddr) -> Arc<Self> {
        Self::with_pass(owner, "entry")
    }

    fn with_pass(owner: SocketAddr, pass: &'static str) -> Arc<Self> {
        Arc::new(Self {
            owner: watch::Sender::new(Some(owner)),
            truth: watch::Sender::new(Some(owner)),
            anew: Mutex::default(),
            pass,
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
            way: Way::Peer {
                node: address.to_string().into(),
                incarnation: 1,
            },
            backend: Arc::new(ToNode {
                address,
                pass: self.pass,
                silent: self.silent.subscribe(),
            }),
        }
    }

    fn turned(&self) -> Vec<Turned> {
        self.anew.lock().expect("sound").clone()
    }
}

#[async_trait]
impl Directory for Believed {
    async fn route(&self, id: &SessionId, _may_start: bool) -> Result<Route, Refusal> {
        let mut owner = self.owner.subscribe();
        let owner = *owner.wait_for(Option::is_some).await.expect("it lives");
        Ok(self.route_to(id, owner.expect("waited for")))
    }

    async fn route_anew(
        &self,
        from: &Route,
        why: &Turned,
        _times: u32,
        _may_start: bool,
    ) -> Result<Route, Refusal> {
        self.anew.lock().expect("sound").push(why.clone());
        if *why == Turned::Refused {
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

struct Entry(Proxy);

impl Entry {
    fn new(believed: &Arc<Believed>) -> Self {
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        let options = ProxyOptions {
            workers: 1,
            ..ProxyOptions::default()
        };
        let directory = Arc::clone(believed);
        let proxy = Proxy::start(listener, options, directory, Arc::new(Anybody));
        Self(proxy.expect("a proxy"))
    }

    async fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.0.local_addr()).await;
        Client {
            stream: stream.expect("the proxy listens"),
        }
    }

    async fn exchange(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut client = self.connect().await;
        client.send(bytes).await;
        client.read_to_end().await
    }
}

fn upload(length: usize, more: &str) -> String {
    format!(
        "POST /up HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n{more}\
         Content-Length: {length}\r\n\r\n"
    )
}

#[tokio::test]
async fn a_session_sees_the_client_and_nothing_of_the_hop() {
    let owner = Owner::new().await;
    let alice = TestSession::new(serve_echo_head().await);
    owner.own("alice", &alice, true);
    let entry = Entry::new(&Believed::new(owner.address));
    let answer = entry
        .exchange(
            "GET /s/alice/a/b?c HTTP/1.1\r\nHost: conman.test\r\nConnection: close\r\n\
             X-Conman-Hop: 1\r\nX-Conman-Peer: me\r\nX-Conman-Seal: x\r\nX-Conman-Generation: 1\r\n\
             X_Conman_Session: bob\r\nX-Forwarded-For: 6.6.6.6\r\nCookie: a=b\r\n\r\n",
        )
        .await;
    assert_eq!(status(&answer), "200", "{answer}");
    let head = body(&answer);
    let mut lines: Vec<&str> = head.trim_end().split("\r\n").collect();
    lines[1..].sort_unstable();
    assert_eq!(
        lines,
        [
            "GET /a/b?c HTTP/1.1",
            "cookie: a=b",
            "host: conman.test",
            "x-conman-generation: 7",
            "x-conman-session: alice",
            "x-forwarded-for: 127.0.0.1",
            "x-forwarded-host: conman.test",
            "x-forwarded-prefix: /s/alice",
            "x-forwarded-proto: http",
        ]
    );
}

#[tokio::test]
async fn requests_for_many_sessions_of_a_node_share_its_connections() {
    let owner = Owner::new().await;
    let target = serve_echo_head().await;
    for id in ["alice", "bob"] {
        owner.own(id, &TestSession::new(target), true);
    }
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    for id in ["alice", "bob", "alice", "bob"] {
        client
            .send(format!("GET /s/{id}/ HTTP/1.1\r\nHost: x\r\n\r\n"))
            .await;
        let head = client.read_head().await;
        assert_eq!(status(&head), "200", "{head}");
        let echoed = client.read_head().await;
        assert!(
            echoed.contains(&format!("x-conman-session: {id}\r\n")),
            "{echoed}"
        );
    }
    assert_eq!(owner.accepted.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn an_upload_reaches_the_session_whole_and_without_an_expect_of_the_hop() {
    let owner = Owner::new().await;
    let mut backend = RawBackend::new().await;
    owner.own("alice", &TestSession::new(backend.address), true);
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    client.send(upload(10, "")).await;
    client.send("0123456789").await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(
        !head.contains("expect") && !head.contains("x-conman-expect"),
        "{head}"
    );
    assert!(head.contains("content-length: 10\r\n"), "{head}");
    session.read_until("0123456789").await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Conman-Turned: not-owner\r\n\r\nok")
        .await;
    let answer = client.read_to_end().await;
    assert_eq!((status(&answer), body(&answer)), ("200", "ok"), "{answer}");
}

#[tokio::test]
async fn a_client_that_waits_for_leave_to_send_its_body_gets_the_sessions() {
    let owner = Owner::new().await;
    let mut backend = RawBackend::new().await;
    owner.own("alice", &TestSession::new(backend.address), true);
    let entry = Entry::new(&Believed::new(owner.address));
    let mut client = entry.connect().await;
    client.send(upload(4, "Expect: 100-continue\r\n")).await;
    let mut session = backend.accept().await;
    let head = session.read_head().await;
    assert!(head.contains("expect: 100-continue\r\n"), "{head}");
    session.send("HTTP/1.1 100 Continue\r\n\r\n").await;
    let leave = client.read_head().await;
    assert!(leave.starts_with("HTTP/1.1 100"), "{leave}");
    client.send("body").await;
    session.read_until("body").await;
    session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(status(&client.read_to_end().await), "204");
}

#[tokio::test]
async fn an_owner_that_is_none_answers_before_the_body_and_the_next_one_gets_it() {
    let (former, owner) = (Owner::new().await, Owner::new().await);
    let mut backend = RawBackend::new().await;
    owner.own("alice", &TestSession::new(backend.address), true);
    let believed = Believed::new(former.address);
    believed.truth.send_replace(Some(owner.address));
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(upload(1 << 20, "")).await;
    let sent = tokio::spawn(async move {
        client.send(vec![b'x'; 1 << 20]).await;
        client.read_to_end().await
    });
    let mut session = backend.accept().await;
    session.read_head().await;
    let mut bytes = vec![0; 1 << 20];
    soon(
        "the body",
        tokio::io::AsyncReadExt::read_exact(&mut session.stream, &mut bytes),
    )
    .await
    .expect("whole");
    assert!(bytes.iter().all(|byte| *byte == b'x'));
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    assert_eq!(
        body(&soon("the answer", sent).await.expect("no panic")),
        "ok"
    );
    assert_eq!(believed.turned(), [Turned::NotOwner]);
}

#[tokio::test]
async fn an_owner_of_an_older_generation_turns_a_request_away() {
    let (former, owner) = (Owner::new().await, Owner::new().await);
    let target = serve_echo_head().await;
    let old = TestSession::new(target);
    old.set_generation(6);
    former.own("alice", &old, true);
    // One that has a newer one than the entry node knows of serves it.
    let new = TestSession::new(target);
    new.set_generation(8);
    owner.own("alice", &new, true);
    let believed = Believed::new(former.address);
    believed.truth.send_replace(Some(owner.address));
    let answer = Entry::new(&believed)
        .exchange("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    assert!(
        body(&answer).contains("x-conman-generation: 8\r\n"),
        "{answer}"
    );
    assert_eq!(believed.turned(), [Turned::NotOwner]);
}

#[tokio::test]
async fn a_request_is_held_while_its_node_is_gone_and_served_by_the_next_one() {
    let gone = StdListener::bind("127.0.0.1:0").expect("a free port");
    let believed = Believed::new(gone.local_addr().expect("bound"));
    drop(gone);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(upload(4, "")).await;
    client.send("body").await;
    until("the request is held", || entry.0.stats().held == 1).await;
    assert!(matches!(believed.turned()[..], [Turned::Unreachable(_)]));

    let owner = Owner::new().await;
    let mut backend = RawBackend::new().await;
    owner.own("alice", &TestSession::new(backend.address), true);
    believed.truth.send_replace(Some(owner.address));
    let mut session = backend.accept().await;
    session.read_until("body").await;
    session
        .send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        .await;
    assert_eq!(body(&client.read_to_end().await), "ok");
    assert_eq!(entry.0.stats().held, 0);
}

#[tokio::test]
async fn a_node_does_not_hold_what_another_brings_it() {
    let owner = Owner::new().await;
    let alice = TestSession::new(serve_echo_head().await);
    owner.own("alice", &alice, false);
    let believed = Believed::new(owner.address);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    until("the entry node holds it", || entry.0.stats().held == 1).await;
    assert_eq!(owner.proxy.stats().held, 0);
    assert_eq!(believed.turned(), [Turned::NotReady]);
    owner.own("alice", &alice, true);
    believed.truth.send_replace(Some(owner.address));
    assert_eq!(status(&client.read_to_end().await), "200");
}

#[tokio::test]
async fn a_session_that_moves_all_the_time_is_given_up_with_its_reason() {
    let owner = Owner::new().await;
    owner.disown("alice");
    let believed = Believed::new(owner.address);
    let answer = Entry::new(&believed)
        .exchange("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(status(&answer), "503", "{answer}");
    assert!(
        answer.contains("session-elsewhere") && answer.contains("retry-after"),
        "{answer}"
    );
    assert!(believed.turned().len() > 1);
}

#[tokio::test]
async fn a_node_that_is_not_known_to_the_other_is_looked_after_by_the_directory() {
    let owner = Owner::new().await;
    owner.own("alice", &TestSession::new(serve_echo_head().await), true);
    let believed = Believed::with_pass(owner.address, "stranger");
    let answer = Entry::new(&believed)
        .exchange("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(status(&answer), "502", "{answer}");
    assert!(!answer.contains("x-conman"), "{answer}");
    assert_eq!(believed.turned(), [Turned::Refused]);
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

#[tokio::test]
async fn a_connection_that_ends_because_this_node_is_unknown_there_has_taken_nothing() {
    for wish in [
        "Connection: close\r\n",
        "Connection: upgrade\r\nUpgrade: x\r\n",
    ] {
        let believed = Believed::with_pass(SHUT, "entry");
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        let request = format!("GET / HTTP/1.1\r\nHost: alice.localhost\r\n{wish}\r\n");
        client.send(request).await;
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{head}");
        assert_eq!(believed.turned(), [Turned::Refused]);
    }
}

#[tokio::test]
async fn an_answer_of_a_node_that_falls_silent_or_is_declared_dead_is_not_waited_for() {
    for (upgrade, dead) in [(false, false), (false, true), (true, false), (true, true)] {
        let owner = Owner::new().await;
        let mut backend = RawBackend::new().await;
        owner.own("alice", &TestSession::new(backend.address), true);
        let believed = Believed::new(owner.address);
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        let wish = match upgrade {
            true => "Connection: upgrade\r\nUpgrade: x\r\n",
            false => "Connection: close\r\n",
        };
        client
            .send(format!(
                "GET / HTTP/1.1\r\nHost: alice.localhost\r\n{wish}\r\n"
            ))
            .await;
        // It has arrived, and the session takes as long as it likes.
        let mut session = backend.accept().await;
        session.read_head().await;
        if dead {
            let closing = Closing::service_restart("gone");
            believed.gone.send_replace(Some(closing));
        } else {
            believed.silent.send_replace(true);
        }
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{head}");
        assert!(believed.turned().is_empty());
    }
}

#[tokio::test]
async fn what_changes_nothing_is_sent_once_more_where_its_node_broke_before_it_answered() {
    let (mut former, owner) = (RawBackend::new().await, Owner::new().await);
    owner.own("alice", &TestSession::new(serve_echo_head().await), true);
    let believed = Believed::new(former.address);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    let request = "GET /s/alice/again HTTP/1.1\r\nHost: x\r\n\r\n";
    client.send(request).await;
    let mut node = former.accept().await;
    node.read_head().await;
    node.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(status(&client.read_head().await), "204");
    client.send(request).await;
    assert!(node.read_head().await.starts_with("GET /again "));
    believed.truth.send_replace(Some(owner.address));
    drop(node);
    let head = client.read_head().await;
    assert_eq!(status(&head), "200", "{head}");
    let echoed = client.read_head().await;
    assert!(echoed.starts_with("GET /again "), "{echoed}");
    assert!(matches!(believed.turned()[..], [Turned::Unreachable(_)]));
}

#[tokio::test]
async fn what_broke_is_sent_twice_at_most_and_once_where_it_may_change_something() {
    let requests = [
        ("GET", "", 2),
        ("POST", "", 1),
        ("DELETE", "", 1),
        ("GET", "Content-Length: 4\r\n\r\nbody", 1),
        ("GET", "Connection: upgrade\r\nUpgrade: x\r\n", 1),
    ];
    for (method, more, times) in requests {
        let mut node = RawBackend::new().await;
        let believed = Believed::new(node.address);
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        client
            .send(format!(
                "{method} /s/alice/ HTTP/1.1\r\nHost: x\r\n{more}\r\n"
            ))
            .await;
        for _ in 0..times {
            node.accept().await.read_head().await;
        }
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{method} {more}: {head}");
        assert_eq!(believed.turned().len(), times - 1, "{method} {more}");
        assert!(node.try_accept().is_none(), "{method} {more}");
    }
}

#[tokio::test]
async fn a_head_that_one_node_has_just_accepted_the_other_accepts_as_well() {
    let owner = Owner::new().await;
    let mut backend = RawBackend::new().await;
    owner.own("alice", &TestSession::new(backend.address), true);
    let entry = Entry::new(&Believed::new(owner.address));
    let start = "GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n";
    let most = ProxyOptions::default();
    let many = "A: b\r\n".repeat(most.max_headers - 2);
    let long = "x".repeat(most.max_head_bytes - start.len() - 200);
    for head in [
        format!("{start}{many}\r\n"),
        format!("{start}X-Long: {long}\r\n\r\n"),
    ] {
        let mut client = entry.connect().await;
        client.send(head).await;
        let answered = async {
            let mut session = backend.accept().await;
            session.read_head().await;
            session.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        };
        let (answer, ()) = tokio::join!(client.read_to_end(), answered);
        assert_eq!(status(&answer), "204", "{answer}");
    }
}

/// A connection by which a node has made itself known.
async fn known(owner: &Owner) -> Client {
    let mut client = Client {
        stream: TcpStream::connect(owner.address).await.expect("it listens"),
    };
    pulse(&mut client).await;
    client
}

/// A request of a node.
async fn pulse(client: &mut Client) {
    let request = "GET /peer/pulse HTTP/1.1\r\nHost: b\r\nX-Conman-Peer: entry\r\n\r\n";
    client.send(request).await;
    let head = client.read_head().await;
    assert_eq!(status(&head), "204", "{head}");
}

/// A connection on which nobody says anything.
async fn stranger(owner: &Owner) -> Client {
    Client {
        stream: TcpStream::connect(owner.address).await.expect("it listens"),
    }
}

#[tokio::test]
async fn a_listener_for_nodes_that_is_full_says_that_it_has_taken_nothing() {
    let owner = Owner::with(ProxyOptions {
        max_connections: 1,
        ..ProxyOptions::default()
    })
    .await;
    owner.own("alice", &TestSession::new(serve_echo_head().await), true);
    let _only = known(&owner).await;
    let believed = Believed::new(owner.address);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client
        .send("GET / HTTP/1.1\r\nHost: alice.localhost\r\nConnection: close\r\n\r\n")
        .await;
    until("it is held", || entry.0.stats().held == 1).await;
    assert!(matches!(believed.turned()[..], [Turned::Unreachable(_)]));
}

#[tokio::test]
async fn who_is_no_node_leaves_room_for_a_node_at_the_same_address() {
    let owner = Owner::with(ProxyOptions {
        max_strangers: 2,
        ..ProxyOptions::default()
    })
    .await;
    let nodes = [known(&owner).await, known(&owner).await];
    let mut strangers = [stranger(&owner).await, stranger(&owner).await];
    // Nothing of theirs ends for what a node needs, but the oldest.
    let third = known(&owner).await;
    assert_eq!(strangers[0].read_to_end().await, "");
    // A node that is known takes none of their places, so there is one left now.
    strangers[0] = stranger(&owner).await;
    let all = nodes.len() + strangers.len() + 1;
    until("all are there", || {
        owner.proxy.stats().connections == all as u64
    })
    .await;
    for mut node in nodes.into_iter().chain([third]) {
        pulse(&mut node).await;
    }
}

#[tokio::test]
async fn who_is_no_node_leaves_the_last_place_of_all_to_a_node() {
    let owner = Owner::with(ProxyOptions {
        max_connections: 2,
        ..ProxyOptions::default()
    })
    .await;
    let _node = known(&owner).await;
    let mut idle = stranger(&owner).await;
    until("it is taken", || owner.proxy.stats().connections == 2).await;
    let _another = known(&owner).await;
    assert_eq!(idle.read_to_end().await, "");
}

#[tokio::test]
async fn the_listener_for_nodes_says_that_it_lives_to_nodes_alone() {
    let owner = Owner::new().await;
    for (pass, wanted) in [("entry", "204"), ("nobody", "401")] {
        let mut client = Client {
            stream: TcpStream::connect(owner.address).await.expect("it listens"),
        };
        let asked = format!(
            "GET /peer/pulse HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\
             X-Conman-Peer: {pass}\r\n\r\n"
        );
        client.send(asked).await;
        let answer = client.read_to_end().await;
        assert_eq!(status(&answer), wanted, "{answer}");
    }
}

#[tokio::test]
async fn a_websocket_by_way_of_another_node_is_closed_by_the_sessions_farewell() {
    let owner = Owner::new().await;
    let echo = axum::Router::new().route(
        "/ws",
        axum::routing::any(|upgrade: axum::extract::ws::WebSocketUpgrade| async move {
            upgrade.on_upgrade(|mut socket| async move {
                while let Some(Ok(message)) = socket.recv().await {
                    if socket.send(message).await.is_err() {
                        return;
                    }
                }
            })
        }),
    );
    let alice = TestSession::new(serve(echo).await);
    owner.own("alice", &alice, true);
    let entry = Entry::new(&Believed::new(owner.address));
    let url = format!("ws://{}/s/alice/ws", entry.0.local_addr());
    let (mut socket, _) = soon("a socket", tokio_tungstenite::connect_async(url))
        .await
        .expect("connected");
    for text in ["one", &"two".repeat(50_000)] {
        soon("sending", socket.send(Message::text(text)))
            .await
            .expect("open");
        let echoed = soon("an echo", socket.next()).await.expect("open");
        assert_eq!(echoed.expect("a message"), Message::text(text));
    }
    assert_eq!(alice.activity.in_flight(), 1);
    assert_eq!(
        (entry.0.stats().tunnels, owner.proxy.stats().tunnels),
        (1, 1)
    );
    let closing = Closing::service_restart("moves");
    alice.closing.send_replace(Some(closing));
    let last = soon("the farewell", socket.next())
        .await
        .expect("a message");
    match last.expect("a message") {
        Message::Close(Some(frame)) => {
            assert_eq!(
                (u16::from(frame.code), frame.reason.as_str()),
                (1012, "moves")
            );
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_a_node_asks_of_the_api_keeps_who_asks() {
    let owner = Owner::new().await;
    let ask = |pass: &str| {
        format!(
            "GET /v1/sessions HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\
             X-Conman-Peer: {pass}\r\nX-Conman-Caller: read alice\r\n\r\n"
        )
    };
    let exchange = async |pass: &str| {
        let mut client = Client {
            stream: TcpStream::connect(owner.address).await.expect("it listens"),
        };
        client.send(ask(pass)).await;
        client.read_to_end().await
    };
    let answer = exchange("entry").await;
    assert!(
        body(&answer).contains("x-conman-caller: read alice\r\n"),
        "{answer}"
    );
    let answer = exchange("nobody").await;
    assert_eq!(status(&answer), "401", "{answer}");
}

#[tokio::test]
async fn a_large_upload_passes_by_way_of_another_node_at_constant_memory() {
    let owner = Owner::new().await;
    let alice = TestSession::new(serve(counting()).await);
    owner.own("alice", &alice, true);
    let entry = Entry::new(&Believed::new(owner.address));
    upload_at_constant_memory(async || entry.connect().await).await;
}
