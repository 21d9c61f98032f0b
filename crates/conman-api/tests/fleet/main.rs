//! Several nodes that share one registry: whatever is asked of one is answered by the session's
//! own.

mod events;
mod moving;
#[path = "../stage/mod.rs"]
mod stage;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use conman_api::{ServeOptions, serve_node, serve_tcp};
use conman_auth::{ClusterSecret, PeerGuard, Scope};
use conman_core::placement::PlacementLimits;
use conman_peer::{Dialer, FleetMap, PeerAcceptor, PeerAddress, PeerClient};
use conman_proto::{
    DrainReport, EXEC_PROTOCOL, EnsureResponse, ExecChannel, ExecResult, Generation, NodeList,
    NodeStanding, PreemptPlan, Session, SessionId, SessionList, SessionOwnership, SessionState,
    StopReport, Timeline,
};
use conman_proxy::{
    Backend, Link, OwnSessions, PeerFront, Proxy, ProxyOptions, Route, Stream, Turned,
};
use conman_registry::{Announcement, Fleet, Located, ModelFleet, ModelNode, Peer, PeerStanding};
use futures_util::{SinkExt as _, StreamExt as _};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, SEC_WEBSOCKET_PROTOCOL};
use http::{Method, Request, StatusCode};
use http_body_util::Empty;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use stage::{Api, PATIENCE, Stage, session};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_util::sync::CancellationToken;

/// What the nodes share.
struct World {
    fleet: Arc<ModelFleet>,
    secret: Arc<ClusterSecret>,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            fleet: ModelFleet::new(),
            secret: secret("0123456789abcdef"),
        })
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Peer)) {
        self.fleet.change(name, change);
    }

    fn announced(&self, name: &str, change: impl FnOnce(&mut Announcement)) {
        self.fleet.announced(name, change);
    }

    /// Where the node `b` listens for others.
    fn address_of_b(&self) -> PeerAddress {
        let mut url = None;
        self.change("b", |b| {
            url = b.announcement.clone().and_then(|told| told.peer_url);
        });
        PeerAddress::new("b", &url.expect("announced")).expect("an address")
    }
}

fn secret(text: &str) -> Arc<ClusterSecret> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("fleet.key");
    std::fs::write(&path, text.repeat(4)).expect("written");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("chmod");
    Arc::new(ClusterSecret::load(path).expect("valid"))
}

/// A node with its API and its listener for the others.
struct Node {
    api: Api,
    seen: Arc<ModelNode>,
    /// Where it listens for the others.
    address: SocketAddr,
    _proxy: Proxy,
    // Last: whatever still runs is ended when nothing else starts anything.
    _stage: Stage,
}

impl Node {
    async fn join(world: &Arc<World>, name: &str) -> Self {
        Self::join_with(world, name, &world.secret).await
    }

    /// As one that knows the others by a secret of its own.
    async fn join_with(world: &Arc<World>, name: &str, secret: &Arc<ClusterSecret>) -> Self {
        Self::join_waiting(world, name, secret, 100).await
    }

    /// With room for as many requests that wait for a node.
    async fn join_waiting(
        world: &Arc<World>,
        name: &str,
        secret: &Arc<ClusterSecret>,
        places: usize,
    ) -> Self {
        let stage = Stage::new();
        let (registry, seen) = world.fleet.join(name);
        let dialer = Dialer::new(name, Some(Arc::clone(secret)), None);
        let fleet: Arc<dyn Fleet> = seen.clone();
        let limits = PlacementLimits {
            // A busy machine must not decide where a test's sessions go.
            max_cpu_pressure_percent: 1_000.0,
            ..PlacementLimits::default()
        };
        let map = FleetMap::new(fleet, PeerClient::new(dialer), limits);
        let map = Arc::new(map.waiting(places));
        let api = stage
            .boot_among(registry, Some(map), |options| {
                options.name = name.to_owned();
            })
            .await;
        let listener = StdListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let guard = Arc::new(PeerGuard::new(name, Some(Arc::clone(secret))));
        let front = PeerFront {
            accept: Arc::new(PeerAcceptor::new(guard, None)),
            sessions: Arc::new(NoSessions),
            api: Arc::new(Pipe {
                router: api.peers.clone(),
                closing: api.closing.clone(),
                main: tokio::runtime::Handle::current(),
            }),
        };
        let options = ProxyOptions {
            workers: 1,
            ..ProxyOptions::default()
        };
        let proxy = Proxy::start_peers(listener, options, front).expect("a proxy");
        let told = Announcement {
            peer_url: Some(format!("http://{address}")),
            templates: vec!["idle".to_owned()],
            max_sessions: 100,
            view: Some(api.node.view()),
            ..Announcement::default()
        };
        world.announced(name, |present| *present = told);
        Self {
            api,
            seen,
            address,
            _proxy: proxy,
            _stage: stage,
        }
    }

    async fn ensure(&self, id: &str) -> EnsureResponse {
        let answer = self
            .api
            .call(Method::PUT, &session(id), r#"{"template": "idle"}"#)
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.json()
    }
}

struct NoSessions;

impl OwnSessions for NoSessions {
    fn own(&self, _: &SessionId, _: Generation) -> Result<Route, Turned> {
        Err(Turned::NotOwner)
    }
}

struct Pipe {
    router: Router,
    closing: CancellationToken,
    main: tokio::runtime::Handle,
}

#[async_trait]
impl Backend for Pipe {
    async fn connect(&self) -> io::Result<Link> {
        let (here, there) = tokio::io::duplex(64 * 1024);
        let options = ServeOptions::default();
        let serving = serve_node(there, self.router.clone(), options, self.closing.clone());
        self.main.spawn(serving);
        Ok(Link {
            stream: Stream::Other(Box::new(here)),
            seal: None,
        })
    }
}

async fn two() -> (Arc<World>, Node, Node) {
    let world = World::new();
    let (a, b) = (Node::join(&world, "a").await, Node::join(&world, "b").await);
    (world, a, b)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_asked_of_one_node_the_sessions_own_node_answers() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    let started = a.ensure("alice").await;
    assert!(
        started.created && started.session.node == "b",
        "{started:?}"
    );
    world.announced("a", |a| a.draining = false);

    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Running)
    );
    let again = a.ensure("alice").await;
    assert!(!again.created && again.session.generation == started.session.generation);
    // It runs before it has written anything.
    let log = async {
        loop {
            let path = "/v1/sessions/alice/logs";
            let request = a.api.request(Scope::Frontend, Method::GET, path);
            let log = a.api.send(request).await.text();
            if !log.is_empty() {
                return log;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let log = tokio::time::timeout(PATIENCE, log).await;
    assert_eq!(log.expect("it writes"), "hello\n");
    let exec = a
        .api
        .call(
            Method::POST,
            "/v1/sessions/alice/exec",
            r#"{"command": ["cat"], "stdin": "hi"}"#,
        )
        .await;
    let result: ExecResult = exec.json();
    assert_eq!((result.exit_code, result.stdout.as_str()), (0, "hi"));
    let timeline: Timeline = a.api.get("/v1/sessions/alice/timeline").await.json();
    assert!(!timeline.events.is_empty());
    let stopped: StopReport = a
        .api
        .call(Method::DELETE, &session("alice"), "")
        .await
        .json();
    assert_eq!(stopped.state, SessionState::Stopped);
    assert!(!b.api.node.is_live(&"alice".parse().expect("an id")));
    // It is b's still, and b is the one that knows.
    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Stopped)
    );
}

/// One that has just joined, for as long as the others have not heard where it listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_of_a_node_that_has_just_joined_waits_for_its_word() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    let b = Node::join(&world, "b").await;
    let started = b.ensure("alice").await;
    assert_eq!(started.session.node, "b");
    for (method, path, body) in [
        (Method::GET, session("alice"), ""),
        (
            Method::POST,
            "/v1/nodes/b/drain".to_owned(),
            r#"{"dry_run": true}"#,
        ),
    ] {
        let mut told = None;
        world.change("b", |b| told = b.announcement.take());
        let tells = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            world.change("b", |b| b.announcement = told);
        };
        let (answer, ()) = tokio::join!(a.api.call(method, &path, body), tells);
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_are_asked_for_one_session_at_once_start_it_once() {
    let (_world, a, b) = two().await;
    for number in 0..10 {
        let id = format!("s{number}");
        let (one, other) = tokio::join!(a.ensure(&id), b.ensure(&id));
        assert_eq!(one.session.node, other.session.node);
        assert_eq!(one.session.generation, other.session.generation);
        assert!(one.created != other.created, "{one:?} {other:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_taken_for_the_owner_and_is_not_says_so_before_it_does_anything() {
    let (_world, a, b) = two().await;
    let alice = b.ensure("alice").await.session;
    for (method, wanted) in [
        (Method::GET, StatusCode::OK),
        (Method::DELETE, StatusCode::OK),
    ] {
        let stale = Located {
            node: "b".to_owned(),
            // Of a life that is none.
            generation: Generation::new(alice.generation.get() + 100).expect("not zero"),
            released: false,
        };
        a.seen.believe(&alice.id, stale.clone());
        let answer = a.api.call(method, &session("alice"), "").await;
        assert_eq!(answer.status, wanted, "{}", answer.text());
        assert!(!a.seen.believes(&alice.id, &stale));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_nobodys_any_more_is_placed_and_not_started_by_its_former_node() {
    let (world, a, b) = two().await;
    let former = b.ensure("alice").await.session;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    world.announced("b", |b| b.draining = true);
    let stale = Located {
        node: "b".to_owned(),
        generation: former.generation,
        released: false,
    };
    a.seen.believe(&former.id, stale);
    let present = a.ensure("alice").await.session;
    assert_eq!(present.node, "a");
    assert!(present.generation > former.generation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_refuses_this_one_is_passed_over_and_named_with_the_remedy() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    let b = Node::join_with(&world, "b", &secret("fedcba9876543210")).await;
    let _c = Node::join(&world, "c").await;
    world.announced("a", |a| a.draining = true);
    // Whichever of the two comes first for each of them.
    for number in 0..8 {
        let started = a.ensure(&format!("s{number}")).await;
        assert_eq!(started.session.node, "c");
    }
    world.announced("c", |c| c.draining = true);
    b.ensure("alice").await;
    let shown = a.api.get(&session("alice")).await;
    let put = a
        .api
        .call(Method::PUT, &session("alice"), r#"{"template": "idle"}"#)
        .await;
    let placed = a
        .api
        .call(Method::PUT, &session("bob"), r#"{"template": "idle"}"#)
        .await;
    let uri = "/v1/nodes/b/preempt";
    let told = a.api.call(Method::POST, uri, r#"{"dry_run": true}"#).await;
    for answer in [shown, put, placed, told] {
        let problem = answer.problem();
        assert_eq!(
            (answer.status, problem.slug()),
            (StatusCode::BAD_GATEWAY, "node-refuses"),
            "{}",
            answer.text()
        );
        for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
            assert!(problem.detail.contains(part), "{}", problem.detail);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_the_sessions_node_would_refuse_is_not_even_read_by_another() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    // More than any spec has, and less than a command may bring.
    const MUCH: usize = 300_000;
    for (method, uri, status, is_read) in [
        (
            Method::PUT,
            session("alice"),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        (
            Method::PUT,
            session("bob"),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        (
            Method::POST,
            "/v1/nodes/b/preempt".to_owned(),
            StatusCode::PAYLOAD_TOO_LARGE,
            false,
        ),
        // What has no body to be read may bring what it likes.
        (Method::GET, session("alice"), StatusCode::OK, false),
        // It is no command, which only who has read it knows.
        (
            Method::POST,
            "/v1/sessions/alice/exec".to_owned(),
            StatusCode::BAD_REQUEST,
            true,
        ),
    ] {
        let read = Arc::new(AtomicBool::new(false));
        let reading = Arc::clone(&read);
        let body = futures_util::stream::iter([0]).map(move |_| {
            reading.store(true, Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>("x".repeat(MUCH))
        });
        let mut request = a.api.request(Scope::Admin, method, &uri);
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, "application/json".parse().expect("valid"));
        headers.insert(CONTENT_LENGTH, MUCH.into());
        *request.body_mut() = Body::from_stream(body);
        let answer = a.api.send(request).await;
        assert_eq!(answer.status, status, "{uri}: {}", answer.text());
        assert_eq!(read.load(Ordering::Relaxed), is_read, "{uri}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_life_that_has_ended_does_not_answer_for_the_one_that_goes_on_elsewhere() {
    let (world, a, b) = two().await;
    let former = b.ensure("alice").await.session;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    // It goes on at a, and b is asked by one who does not know yet.
    world.announced("b", |b| b.draining = true);
    let present = a.ensure("alice").await.session;
    assert!(present.node == "a" && present.generation > former.generation);
    let to = world.address_of_b();
    let client = PeerClient::new(Dialer::new("c", Some(Arc::clone(&world.secret)), None));
    let request = Request::delete(session("alice"))
        .header("x-conman-caller", "admin test")
        .header("x-conman-generation", former.generation.get())
        .body(Empty::<bytes::Bytes>::new())
        .expect("a request");
    let answer = client.ask(&to, request).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(answer.headers()["x-conman-turned"], "not-owner");
    assert!(a.api.node.is_live(&present.id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_may_at_another_node_what_they_may_here() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    let request = a
        .api
        .request(Scope::Read, Method::DELETE, &session("alice"));
    assert_eq!(a.api.send(request).await.status, StatusCode::FORBIDDEN);
    // A node that would ask for more than its caller may is refused by the other as well.
    let to = world.address_of_b();
    let client = PeerClient::new(Dialer::new("a", Some(Arc::clone(&world.secret)), None));
    for (caller, status) in [
        (Some("read test"), StatusCode::FORBIDDEN),
        (None, StatusCode::BAD_REQUEST),
    ] {
        let mut request = Request::delete(session("alice")).header("x-conman-generation", "1");
        if let Some(caller) = caller {
            request = request.header("x-conman-caller", caller);
        }
        let request = request
            .body(Empty::<bytes::Bytes>::new())
            .expect("a request");
        let answer = client.ask(&to, request).await.expect("an answer");
        assert_eq!(answer.status(), status, "{caller:?}");
    }
    assert!(b.api.node.is_live(&"alice".parse().expect("an id")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_shows_every_nodes_sessions_and_a_page_at_a_time() {
    let (world, a, b) = two().await;
    for (node, id) in [(&a, "a1"), (&b, "b1"), (&a, "c1"), (&b, "d1")] {
        node.ensure(id).await;
    }
    let ids = |list: &SessionList| -> Vec<String> {
        list.sessions
            .iter()
            .map(|session| session.id.to_string())
            .collect()
    };
    let all: SessionList = a.api.get("/v1/sessions").await.json();
    assert_eq!(ids(&all), ["a1", "b1", "c1", "d1"]);
    assert_eq!(all.next, None);
    let of = |name: &str| -> Vec<String> {
        let own = all.sessions.iter().filter(|session| session.node == name);
        own.map(|session| session.id.to_string()).collect()
    };
    for (query, wanted) in [("node=b", of("b")), ("node=self", of("a"))] {
        let some: SessionList = a.api.get(&format!("/v1/sessions?{query}")).await.json();
        assert_eq!(ids(&some), wanted, "{query}");
    }
    let first: SessionList = a.api.get("/v1/sessions?limit=3").await.json();
    assert_eq!(ids(&first), ["a1", "b1", "c1"]);
    let next = first.next.expect("there is more");
    let rest: SessionList = a
        .api
        .get(&format!("/v1/sessions?cursor={next}"))
        .await
        .json();
    assert_eq!(ids(&rest), ["d1"]);
    // What cannot be read is no session, and no reason to show none.
    assert_eq!(rest.warnings, [""; 0]);
    let unreadable = "e1".parse().expect("an id");
    world
        .fleet
        .cannot_read(&unreadable, "the record at session/e1");
    let all: SessionList = a.api.get("/v1/sessions").await.json();
    assert_eq!(ids(&all).len(), 4);
    assert_eq!(all.warnings, ["the record at session/e1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_shown_with_how_they_stand_and_a_word_to_one_reaches_it() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    world.change("b", |b| b.standing = PeerStanding::Silent);
    let nodes: NodeList = a.api.get("/v1/nodes").await.json();
    let shown: Vec<_> = nodes
        .nodes
        .iter()
        .map(|node| {
            let fleet = node.fleet.as_ref().expect("of a fleet");
            (node.name.as_str(), fleet.standing)
        })
        .collect();
    assert_eq!(
        shown,
        [("a", NodeStanding::Live), ("b", NodeStanding::Silent)]
    );
    world.change("b", |b| b.standing = PeerStanding::Live);
    let plan = |name: &'static str| {
        let uri = format!("/v1/nodes/{name}/preempt");
        let a = &a;
        async move {
            let answer = a.api.call(Method::POST, &uri, r#"{"dry_run": true}"#).await;
            answer.json::<PreemptPlan>()
        }
    };
    let here = usize::from(a.api.node.is_live(&"alice".parse().expect("an id")));
    assert_eq!(plan("a").await.sessions.len(), here);
    assert_eq!(plan("b").await.sessions.len(), 1 - here);
    let unknown = a.api.call(Method::POST, "/v1/nodes/c/preempt", "{}").await;
    assert_eq!(unknown.problem().slug(), "no-such-node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_forgotten_once_it_is_fenced_and_owns_nothing() {
    let (world, a, b) = two().await;
    b.ensure("alice").await;
    world.announced("a", |a| a.draining = true);
    b.ensure("bob").await;
    world.announced("a", |a| a.draining = false);
    let forget = |name: &'static str| {
        let a = &a;
        async move {
            let path = format!("/v1/nodes/{name}");
            a.api.call(Method::DELETE, &path, "").await
        }
    };
    for (name, slug) in [
        ("self", "node-not-lost"),
        ("b", "node-not-lost"),
        ("c", "no-such-node"),
    ] {
        assert_eq!(forget(name).await.problem().slug(), slug, "{name}");
    }
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let kept = forget("b").await.problem();
    assert_eq!(kept.slug(), "node-owns-sessions");
    for id in ["alice", "bob"] {
        let taken = a.ensure(id).await;
        assert_eq!(taken.session.node, "a", "{id}");
    }
    assert_eq!(forget("b").await.status, StatusCode::OK);
    let left: NodeList = a.api.get("/v1/nodes").await.json();
    let names: Vec<_> = left.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_drained_and_undrained_by_way_of_another() {
    let (_world, a, b) = two().await;
    let none = a.api.get("/v1/nodes/b/drain").await;
    assert_eq!(none.problem().slug(), "not-draining");
    let plan = a
        .api
        .call(Method::POST, "/v1/nodes/b/drain", r#"{"dry_run": true}"#)
        .await;
    assert_eq!(plan.status, StatusCode::OK);
    let body = r#"{"reason": "new kernel"}"#;
    let begun = a.api.call(Method::POST, "/v1/nodes/b/drain", body).await;
    assert_eq!(begun.status, StatusCode::ACCEPTED);
    let shown: DrainReport = a.api.get("/v1/nodes/b/drain").await.json();
    assert_eq!(shown.reason, "new kernel");
    assert!(a.api.node.drain_report().is_none(), "it is not its own");
    assert!(b.api.node.drain_report().is_some());
    let back = a.api.call(Method::POST, "/v1/nodes/b/undrain", "").await;
    assert_eq!(back.status, StatusCode::OK);
    assert!(b.api.node.drain_report().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_no_node_takes_is_refused_with_every_nodes_reason() {
    let (world, a, _b) = two().await;
    world.announced("a", |a| a.draining = true);
    world.announced("b", |b| b.max_sessions = 0);
    let answer = a
        .api
        .call(Method::PUT, &session("alice"), r#"{"template": "idle"}"#)
        .await;
    let problem = answer.problem();
    assert_eq!(
        (answer.status, problem.slug()),
        (StatusCode::SERVICE_UNAVAILABLE, "no-node")
    );
    for part in ["node `a` is draining", "node `b` has its 0 sessions"] {
        assert!(problem.detail.contains(part), "{}", problem.detail);
    }
    world.announced("b", |b| {
        b.max_sessions = 10;
        b.labels.insert("pool".to_owned(), "gpu".to_owned());
    });
    world.announced("a", |a| a.draining = false);
    let uri = format!("{}?node_label=pool%3Dgpu", session("alice"));
    let answer = a
        .api
        .call(Method::PUT, &uri, r#"{"template": "idle"}"#)
        .await;
    let started = answer.json::<EnsureResponse>().session;
    assert_eq!(started.node, "b");
    // Whoever starts it anew has to know.
    assert_eq!(started.spec.node_labels["pool"], "gpu");
    let in_body = r#"{"template": "idle", "node_labels": {"pool": "gpu"}}"#;
    let answer = a.api.call(Method::PUT, &session("carol"), in_body).await;
    assert_eq!(answer.json::<EnsureResponse>().session.node, "b");
    let uri = format!("{}?node_label=pool", session("bob"));
    let answer = a
        .api
        .call(Method::PUT, &uri, r#"{"template": "idle"}"#)
        .await;
    assert_eq!(answer.problem().slug(), "bad-query");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_cannot_be_reached_is_named_with_what_becomes_of_its_sessions() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    b.ensure("bob").await;
    let stopped = b.api.call(Method::DELETE, &session("bob"), "").await;
    assert_eq!(stopped.status, StatusCode::OK);
    let nobody = StdListener::bind("127.0.0.1:0").expect("a free port");
    let address = nobody.local_addr().expect("bound");
    drop(nobody);
    world.announced("b", |b| b.peer_url = Some(format!("http://{address}")));
    let answer = a.api.get(&session("alice")).await;
    let problem = answer.problem();
    assert_eq!(problem.slug(), "node-unreachable");
    assert!(
        problem.detail.contains("node `b` at 127.0.0.1:"),
        "{}",
        problem.detail
    );
    // Once it is declared dead, its record tells what there is to tell.
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let shown: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (shown.node.as_str(), shown.state),
        ("b", SessionState::Running)
    );
    let exec = format!("{}/exec", session("alice"));
    let run = r#"{"command": ["true"]}"#;
    let problem = a.api.call(Method::POST, &exec, run).await.problem();
    assert_eq!((problem.slug(), problem.status), ("session-moves", 503));
    // No node has it, and whoever is asked to ends it.
    let ended: StopReport = a
        .api
        .call(Method::DELETE, &session("alice"), "")
        .await
        .json();
    assert_eq!(ended.state, SessionState::Stopped);
    let now: Session = a.api.get(&session("alice")).await.json();
    assert_eq!(
        (
            now.node.as_str(),
            now.state,
            now.generation > shown.generation
        ),
        ("a", SessionState::Stopped, true)
    );
    // What has ended there can be called off, so that nothing starts it by its record.
    let called_off: StopReport = a.api.call(Method::DELETE, &session("bob"), "").await.json();
    assert_eq!(called_off.state, SessionState::Stopped);
    let gone = a.api.get(&session("bob")).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
    assert!(problem.retryable, "{}", problem.detail);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_requests_wait_for_a_node_than_there_are_places() {
    let world = World::new();
    let a = Node::join_waiting(&world, "a", &world.secret, 1).await;
    let b = Node::join(&world, "b").await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    b.ensure("bob").await;
    world.announced("a", |a| a.draining = false);
    world.announced("b", |b| b.peer_url = Some(nowhere()));
    let put = |id: &str| {
        let (a, uri) = (&a, session(id));
        async move {
            let body = r#"{"template": "idle"}"#;
            a.api.call(Method::PUT, &uri, body).await
        }
    };
    let (alice, bob) = (std::pin::pin!(put("alice")), std::pin::pin!(put("bob")));
    let either = futures_util::future::select(alice, bob).await;
    let (refused, waiting) = either.factor_first();
    let problem = refused.problem();
    assert_eq!((problem.slug(), problem.status), ("too-many-waiting", 503));
    assert!(problem.detail.contains("node `b`"), "{}", problem.detail);
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    let started: EnsureResponse = waiting.await.json();
    assert_eq!(started.session.node, "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeline_names_as_takers_the_nodes_alone_that_have_the_sessions_labels() {
    let (world, a, b) = two().await;
    world.announced("b", |b| {
        b.labels.insert("pool".to_owned(), "gpu".to_owned());
    });
    let body = r#"{"template": "idle", "node_labels": {"pool": "gpu"}}"#;
    let answer = a.api.call(Method::PUT, &session("alice"), body).await;
    assert_eq!(answer.json::<EnsureResponse>().session.node, "b");
    b.api.call(Method::DELETE, &session("alice"), "").await;
    let uri = format!("{}/timeline", session("alice"));
    let timeline: Timeline = a.api.get(&uri).await.json();
    let fleet = timeline.fleet.expect("of a fleet");
    assert_eq!(fleet.ownership, SessionOwnership::Released);
    assert_eq!(fleet.takers, ["b"]);
    assert_eq!(fleet.refused.len(), 1);
    assert_eq!(fleet.refused[0].node, "a");
}

/// Where nobody listens.
fn nowhere() -> String {
    let nobody = StdListener::bind("127.0.0.1:0").expect("a free port");
    format!("http://{}", nobody.local_addr().expect("bound"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_in_a_session_of_another_node_is_spoken_with_through_both() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    b.ensure("alice").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let shutdown = CancellationToken::new();
    let options = ServeOptions::default();
    tokio::spawn(serve_tcp(
        listener,
        a.api.tcp_router(),
        options,
        shutdown.clone(),
    ));
    let asked = r#"{"command": ["cat"]}"#;
    let query = utf8_percent_encode(asked, NON_ALPHANUMERIC);
    let uri = format!("ws://{address}/v1/sessions/alice/exec?request={query}");
    let mut request = uri.into_client_request().expect("a request");
    let headers = request.headers_mut();
    headers.insert(HOST, "127.0.0.1:7700".parse().expect("valid"));
    let bearer = format!("Bearer {}", a.api.token(Scope::Frontend));
    headers.insert(AUTHORIZATION, bearer.parse().expect("valid"));
    headers.insert(
        SEC_WEBSOCKET_PROTOCOL,
        EXEC_PROTOCOL.parse().expect("valid"),
    );
    let connecting = tokio_tungstenite::connect_async(request);
    let (mut socket, _) = tokio::time::timeout(PATIENCE, connecting)
        .await
        .expect("in time")
        .expect("connected");
    let message = |channel: ExecChannel, payload: &[u8]| {
        Message::binary([&[channel as u8][..], payload].concat())
    };
    for payload in [&b"over two nodes"[..], b""] {
        let sent = socket.send(message(ExecChannel::Stdin, payload)).await;
        sent.expect("open");
    }
    let mut output = Vec::new();
    let conversation = async {
        while let Some(Ok(message)) = socket.next().await {
            let bytes = message.into_data();
            if bytes.first() == Some(&(ExecChannel::Stdout as u8)) {
                output.extend_from_slice(&bytes[1..]);
            }
        }
    };
    tokio::time::timeout(PATIENCE, conversation)
        .await
        .expect("it ends");
    assert_eq!(output, b"over two nodes");
    shutdown.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeline_has_what_every_node_knows_and_names_those_that_cannot_be_asked() {
    let (world, a, b) = two().await;
    world.announced("a", |a| a.draining = true);
    let first = b.ensure("alice").await.session;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    world.announced("a", |a| a.draining = false);
    world.announced("b", |b| b.draining = true);
    let second = a.ensure("alice").await.session;
    assert_eq!((first.node.as_str(), second.node.as_str()), ("b", "a"));

    let uri = format!("{}/timeline", session("alice"));
    for node in [&a, &b] {
        let timeline: Timeline = node.api.get(&uri).await.json();
        let of = |name: &str| timeline.events.iter().any(|event| event.node == name);
        assert!(of("a") && of("b"), "{timeline:?}");
        assert!(timeline.events.is_sorted_by_key(|event| event.at));
        let phases = timeline.phases.iter();
        assert!(!timeline.phases.is_empty());
        assert!(
            phases
                .clone()
                .all(|phase| phase.generation == second.generation)
        );
        let fleet = timeline.fleet.expect("of a fleet");
        assert_eq!(fleet.ownership, SessionOwnership::Owned);
        assert_eq!((fleet.node.as_deref(), fleet.unasked.len()), (Some("a"), 0));
    }
    let local: Timeline = a.api.get(&format!("{uri}?local=true")).await.json();
    assert!(local.events.iter().all(|event| event.node == "a"));
    assert_eq!(local.fleet, None);

    // What it knows is missing, and what becomes of its sessions is told all the same.
    let nobody = StdListener::bind("127.0.0.1:0").expect("a free port");
    let address = nobody.local_addr().expect("bound");
    drop(nobody);
    world.announced("a", |a| a.peer_url = Some(format!("http://{address}")));
    for (standing, ownership, part) in [
        (
            PeerStanding::Silent,
            SessionOwnership::Owned,
            address.to_string(),
        ),
        // Nobody asks a node that is gone.
        (
            PeerStanding::Fenced,
            SessionOwnership::Lost,
            "declared dead".to_owned(),
        ),
    ] {
        world.change("a", |a| a.standing = standing);
        let timeline: Timeline = b.api.get(&uri).await.json();
        assert!(timeline.events.iter().all(|event| event.node == "b"));
        let fleet = timeline.fleet.expect("of a fleet");
        assert_eq!(fleet.ownership, ownership);
        assert_eq!(fleet.unasked.len(), 1);
        assert!(fleet.unasked[0].why.contains(&part), "{fleet:?}");
    }
    let timeline: Timeline = b.api.get(&uri).await.json();
    let fleet = timeline.fleet.expect("of a fleet");
    let why: Vec<_> = fleet
        .refused
        .iter()
        .map(|refused| refused.node.as_str())
        .collect();
    assert_eq!(why, ["a", "b"], "{fleet:?}");

    let unknown = a.api.get("/v1/sessions/nobody/timeline").await;
    assert_eq!(unknown.problem().slug(), "no-such-session");
}
