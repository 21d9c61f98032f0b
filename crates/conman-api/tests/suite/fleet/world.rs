//! Nodes that share one registry.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use conman_api::{ApiBackend, ServeOptions};
use conman_auth::{ClusterSecret, FleetTls};
use conman_core::placement::PlacementLimits;
use conman_fleet::FleetMap;
use conman_node::NodeOptions;
use conman_peer::{Dialer, PeerAcceptor, PeerAddress, PeerClient, PeerRefusal};
use conman_proto::{EnsureResponse, Generation, RuntimeKind, Session, SessionId};
use conman_proxy::{OwnSessions, PeerFront, Proxy, ProxyOptions, Route};
use conman_registry::{Announcement, Fleet, Peer, Registry};
use conman_testkit::{ModelFleet, ModelNode};
use http::{Method, StatusCode};

use crate::stage::{Answer, Api, Stage, session};

/// What the nodes share.
pub(crate) struct World {
    pub(crate) fleet: Arc<ModelFleet>,
    pub(crate) secret: Arc<ClusterSecret>,
}

impl World {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            fleet: ModelFleet::new(),
            secret: secret("0123456789abcdef"),
        })
    }

    pub(crate) fn change(&self, name: &str, change: impl FnOnce(&mut Peer)) {
        self.fleet.change(name, change);
    }

    pub(crate) fn announced(&self, name: &str, change: impl FnOnce(&mut Announcement)) {
        self.fleet.announced(name, change);
    }

    /// Starts it on the node `b`.
    pub(crate) async fn start_on_b(&self, b: &Node, id: &str) -> Session {
        self.announced("a", |a| a.draining = true);
        let started = b.ensure(id).await.session;
        self.announced("a", |a| a.draining = false);
        started
    }

    /// The certificates of the node `name`.
    pub(crate) fn tls(&self, name: &str) -> Arc<FleetTls> {
        tls(&self.secret, name)
    }

    /// Asks as the node `name`.
    pub(crate) fn client(&self, name: &str) -> PeerClient {
        PeerClient::new(Dialer::new(name, Some(self.tls(name))))
    }

    /// Where the node `b` listens for others.
    pub(crate) fn address_of_b(&self) -> PeerAddress {
        let mut url = None;
        self.change("b", |b| {
            url = b.announcement.clone().and_then(|told| told.peer_url);
        });
        PeerAddress::new("b", &url.expect("announced")).expect("an address")
    }
}

pub(crate) fn secret(text: &str) -> Arc<ClusterSecret> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("fleet.key");
    std::fs::write(&path, text.repeat(4)).expect("written");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("chmod");
    Arc::new(ClusterSecret::load(path).expect("valid"))
}

fn tls(secret: &Arc<ClusterSecret>, name: &str) -> Arc<FleetTls> {
    Arc::new(FleetTls::derive(Arc::clone(secret), name).expect("derived"))
}

/// A node with its API and its listener for the others.
pub(crate) struct Node {
    pub(crate) api: Api,
    pub(crate) seen: Arc<ModelNode>,
    _proxy: Proxy,
    // Last: whatever still runs is ended when nothing else starts anything.
    _stage: Stage,
}

impl Node {
    pub(crate) async fn join(world: &Arc<World>, name: &str) -> Self {
        Self::join_with(world, name, &world.secret).await
    }

    /// As one that knows the others by a secret of its own.
    pub(crate) async fn join_with(
        world: &Arc<World>,
        name: &str,
        secret: &Arc<ClusterSecret>,
    ) -> Self {
        Self::join_waiting(world, name, secret, 100).await
    }

    /// With room for as many requests that wait for a node.
    pub(crate) async fn join_waiting(
        world: &Arc<World>,
        name: &str,
        secret: &Arc<ClusterSecret>,
        places: usize,
    ) -> Self {
        Self::join_by(world, name, (secret, places), |registry| registry).await
    }

    /// With a template that names a runtime, whether it has that or not.
    pub(crate) async fn join_naming(world: &Arc<World>, name: &str, runtime: RuntimeKind) -> Self {
        let secret = (&world.secret, 100);
        let names = move |options: &mut NodeOptions| {
            let idle = options.policy.templates.get_mut("idle");
            idle.expect("it has the template").runtime = Some(runtime);
        };
        Self::join_as(world, name, secret, |registry| registry, names).await
    }

    /// Reading the records in a way of its own.
    pub(crate) async fn join_by(
        world: &Arc<World>,
        name: &str,
        secret: (&Arc<ClusterSecret>, usize),
        reads: impl FnOnce(Arc<dyn Registry>) -> Arc<dyn Registry>,
    ) -> Self {
        Self::join_as(world, name, secret, reads, |_| {}).await
    }

    async fn join_as(
        world: &Arc<World>,
        name: &str,
        (secret, places): (&Arc<ClusterSecret>, usize),
        reads: impl FnOnce(Arc<dyn Registry>) -> Arc<dyn Registry>,
        change: impl FnOnce(&mut NodeOptions),
    ) -> Self {
        let stage = Stage::new();
        let (registry, seen) = world.fleet.join(name);
        let registry = reads(registry);
        let tls = Some(tls(secret, name));
        let dialer = Dialer::new(name, tls.clone());
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
                options.standing = seen.standing();
                change(options);
            })
            .await;
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let front = PeerFront {
            accept: Arc::new(PeerAcceptor::new(tls)),
            sessions: Arc::new(NoSessions),
            api: Arc::new(ApiBackend::new(
                api.peers.clone(),
                ServeOptions::default(),
                api.closing.clone(),
            )),
        };
        let options = ProxyOptions {
            workers: 1,
            ..ProxyOptions::default()
        };
        let proxy = Proxy::start_peers(listener, options, front).expect("a proxy");
        let told = Announcement {
            peer_url: Some(format!("https://{address}")),
            templates: vec!["idle".to_owned()],
            max_sessions: 100,
            view: Some(api.node.status().view()),
            ..Announcement::default()
        };
        world.announced(name, |present| *present = told);
        Self {
            api,
            seen,
            _proxy: proxy,
            _stage: stage,
        }
    }

    pub(crate) async fn ensure(&self, id: &str) -> EnsureResponse {
        let answer = self.put(id).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.json()
    }

    pub(crate) async fn put(&self, id: &str) -> Answer {
        let body = r#"{"template": "idle"}"#;
        self.api.call(Method::PUT, &session(id), body).await
    }
}

struct NoSessions;

impl OwnSessions for NoSessions {
    fn own(&self, _: &SessionId, _: Generation) -> Result<Route, PeerRefusal> {
        Err(PeerRefusal::NotOwner)
    }
}

pub(crate) async fn two() -> (Arc<World>, Node, Node) {
    let world = World::new();
    let (a, b) = (Node::join(&world, "a").await, Node::join(&world, "b").await);
    (world, a, b)
}

/// Where nobody listens.
pub(crate) fn nowhere() -> String {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    format!("https://{}", nobody.local_addr().expect("bound"))
}
