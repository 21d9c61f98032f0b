//! The API over a node on real processes, with tokens of every scope. Every stage has an instance
//! of its own, and leaves nothing behind.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use conman_api::{ApiState, Listener, Peer, StreamPlaces};
use conman_auth::{ApiGuard, ConnectTokens, HostRules, OriginRules, Scope, TokenFile};
use conman_core::naming::{CgroupDriver, instance_cgroup};
use conman_core::{Instance, SpecPolicy, Template};
use conman_fleet::FleetMap;
use conman_image::{ImageKeeper, ImageLimits, ImageStore, PullConfig};
use conman_linux::{Cgroups, PidFd};
use conman_node::{Node, NodeOptions};
use conman_proto::{Problem, RuntimeKind, SessionRequest};
use conman_registry::{Journal, Registry};
use conman_testkit::{Faults, ModelRegistry, ProcessOptions, ProcessRuntime};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;
use serde::de::DeserializeOwned;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

/// Longer than anything here takes on a busy machine, and short enough not to hang a build.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The one origin beside the API's own whose pages may use it.
pub const ALLOWED_ORIGIN: &str = "https://app.example";

/// What outlives a daemon: its directory, its records, its containers.
pub struct Stage {
    state: TempDir,
    instance: Instance,
    registry: Arc<ModelRegistry>,
    tokens: BTreeMap<Scope, String>,
    pub images: ImageStore,
    pub pulls: PullConfig,
}

/// A daemon's API, without a listener.
pub struct Api {
    pub node: Arc<Node>,
    pub faults: Faults,
    pub closing: CancellationToken,
    tcp: Router,
    admin: Router,
    pub peers: Router,
    tokens: BTreeMap<Scope, String>,
}

/// An answer, read to its end.
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Stage {
    pub fn new() -> Self {
        let mut random = [0; 4];
        getrandom::fill(&mut random).expect("random bytes");
        let state = tempfile::tempdir().expect("a directory");
        let tokens = write_tokens(&state.path().join("tokens"));
        let limits = ImageLimits::default();
        let images = ImageStore::open(&state.path().join("images"), limits).expect("a store");
        Self {
            state,
            instance: Instance::new(random),
            registry: Arc::new(ModelRegistry::new()),
            tokens,
            images,
            pulls: PullConfig::default(),
        }
    }

    pub async fn boot(&self) -> Api {
        self.boot_with(|_| ()).await
    }

    pub async fn boot_with(&self, change: impl FnOnce(&mut NodeOptions)) -> Api {
        self.boot_among(self.registry.clone(), None, change).await
    }

    /// A daemon of a fleet, which shares its registry with others.
    pub async fn boot_among(
        &self,
        registry: Arc<dyn Registry>,
        fleet: Option<Arc<FleetMap>>,
        change: impl FnOnce(&mut NodeOptions),
    ) -> Api {
        let runtime = ProcessRuntime::open(ProcessOptions {
            instance: self.instance.clone(),
            state_dir: self.state.path().join("containers"),
            call_timeout: Duration::from_secs(30),
        });
        let runtime = Arc::new(runtime.expect("the host has cgroups, and this is root"));
        let faults = runtime.faults().clone();
        let mut options = self.options();
        change(&mut options);
        let journal = self.journal(&options.name).await;
        let emergency = conman_node::EmergencyThread::start(&[]).expect("a thread");
        let node = Node::start(options, emergency, registry, journal, vec![runtime])
            .await
            .expect("the node starts");
        let closing = CancellationToken::new();
        let instance = self.instance.as_str();
        let connect_tokens = ConnectTokens::open(self.state.path(), instance).expect("a key");
        let state = ApiState {
            node: Arc::clone(&node),
            guard: Arc::new(self.guard()),
            connect_tokens: Arc::new(connect_tokens),
            fleet,
            images: ImageKeeper::new(self.images.clone(), self.pulls.clone()),
            metrics: PrometheusBuilder::new().build_recorder().handle(),
            streams: StreamPlaces::default(),
            closing: closing.clone(),
        };
        Api {
            node,
            faults,
            closing,
            tcp: conman_api::router(state.clone(), Listener::Tcp),
            admin: conman_api::router(state.clone(), Listener::Admin),
            peers: conman_api::router(state, Listener::Peers),
            tokens: self.tokens.clone(),
        }
    }

    /// The journal of a daemon that ended is closed a moment after it.
    async fn journal(&self, name: &str) -> Arc<Journal> {
        let dir = self.state.path().join("journal");
        let open = async {
            loop {
                match Journal::open(&dir, name, 10_000) {
                    Ok(journal) => break Arc::new(journal),
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, open)
            .await
            .expect("the journal is free")
    }

    fn options(&self) -> NodeOptions {
        let idle = Template {
            request: idle(),
            ..Template::default()
        };
        let policy = SpecPolicy {
            default_runtime: RuntimeKind::Process,
            templates: BTreeMap::from([("idle".to_owned(), idle)]),
            ..SpecPolicy::default()
        };
        NodeOptions::new(
            "test-node".to_owned(),
            self.instance.clone(),
            self.state.path().to_owned(),
            policy,
        )
    }

    fn guard(&self) -> ApiGuard {
        let listen = "127.0.0.1:7700".parse().expect("an address");
        let tokens = TokenFile::load(self.state.path().join("tokens")).expect("a token file");
        ApiGuard::new(
            Some(Arc::new(tokens)),
            HostRules::new(listen, &[], Some("localhost")).expect("valid"),
            OriginRules::new(&[ALLOWED_ORIGIN.to_owned()]).expect("valid"),
        )
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let below = instance_cgroup(&self.instance, CgroupDriver::Cgroupfs);
        let cgroups = Cgroups::detect().expect("the host has cgroups");
        for _ in 0..1_000 {
            let pids = cgroups.pids_below(&below);
            if pids.is_empty() && cgroups.remove_tree(&below).is_empty() {
                return;
            }
            for process in pids.into_iter().filter_map(|pid| PidFd::open(pid).ok()) {
                // Gone is just as well.
                let _ = process.kill();
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

impl Api {
    /// A request with a token of `scope`.
    pub fn request(&self, scope: Scope, method: Method, uri: &str) -> Request<Body> {
        let token = format!("Bearer {}", self.tokens[&scope]);
        let mut request = plain(method, uri);
        let token = token.parse().expect("a header's value");
        request.headers_mut().insert(AUTHORIZATION, token);
        request
    }

    /// What the API listener answers.
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let peer = Peer::Tcp("127.0.0.1:5000".parse().expect("an address"));
        read(self.respond(self.tcp.clone(), request, peer).await).await
    }

    /// What the API listener answers, its body still to be read.
    pub async fn open(&self, request: Request<Body>) -> http::Response<Body> {
        let peer = Peer::Tcp("127.0.0.1:5000".parse().expect("an address"));
        self.respond(self.tcp.clone(), request, peer).await
    }

    /// What the admin socket answers to a process of `uid`.
    pub async fn send_to_admin(&self, request: Request<Body>, uid: u32) -> Answer {
        let peer = Peer::Unix {
            uid,
            gid: 0,
            pid: None,
        };
        read(self.respond(self.admin.clone(), request, peer).await).await
    }

    /// A GET with the least scope.
    pub async fn get(&self, uri: &str) -> Answer {
        self.send(self.request(Scope::Read, Method::GET, uri)).await
    }

    /// A request with a JSON body and every scope.
    pub async fn call(&self, method: Method, uri: &str, body: impl AsRef<str>) -> Answer {
        let mut request = self.request(Scope::Admin, method, uri);
        let json = "application/json".parse().expect("a header's value");
        request.headers_mut().insert(CONTENT_TYPE, json);
        *request.body_mut() = Body::from(body.as_ref().to_owned());
        self.send(request).await
    }

    /// A session of the template `idle`.
    pub async fn start(&self, id: &str) {
        let answer = self
            .call(Method::PUT, &session(id), r#"{"template": "idle"}"#)
            .await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    }

    pub fn tcp_router(&self) -> Router {
        self.tcp.clone()
    }

    pub fn token(&self, scope: Scope) -> &str {
        &self.tokens[&scope]
    }

    async fn respond(
        &self,
        router: Router,
        mut request: Request<Body>,
        peer: Peer,
    ) -> http::Response<Body> {
        request.extensions_mut().insert(peer);
        tokio::time::timeout(PATIENCE, router.oneshot(request))
            .await
            .expect("nothing takes that long")
            .expect("a router does not fail")
    }
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.status, self.text()))
    }

    /// The problem, after checking what holds for every one.
    pub fn problem(&self) -> Problem {
        assert_eq!(
            self.headers[CONTENT_TYPE],
            "application/problem+json",
            "{}",
            self.text()
        );
        let problem: Problem = self.json();
        assert_eq!(problem.status, self.status.as_u16());
        assert!(problem.instance.is_some());
        assert!(!problem.detail.is_empty());
        problem
    }
}

async fn read(response: http::Response<Body>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect())
        .await
        .expect("the body ends")
        .expect("the body is whole")
        .to_bytes()
        .to_vec();
    Answer {
        status: parts.status,
        headers: parts.headers,
        body,
    }
}

/// A request without credentials.
pub fn plain(method: Method, uri: &str) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(uri)
        .header(HOST, "127.0.0.1:7700")
        .body(Body::empty())
        .expect("a request")
}

/// A path of a session.
pub fn session(id: &str) -> String {
    format!("/v1/sessions/{id}")
}

/// A program without a port that runs until it is killed.
fn idle() -> SessionRequest {
    SessionRequest {
        image: Some("none".to_owned()),
        command: Some(
            ["sh", "-c", "echo hello; exec sleep 1000"]
                .map(str::to_owned)
                .to_vec(),
        ),
        ..SessionRequest::default()
    }
}

fn write_tokens(path: &Path) -> BTreeMap<Scope, String> {
    let mut text = String::new();
    let mut tokens = BTreeMap::new();
    for scope in [Scope::Read, Scope::Frontend, Scope::Admin] {
        let new = conman_auth::generate(scope).expect("random numbers");
        writeln!(
            text,
            "[[token]]\nname = \"{scope}\"\nscope = \"{scope}\"\nsha256 = \"{}\"",
            new.sha256
        )
        .expect("writing to memory");
        tokens.insert(scope, new.text);
    }
    std::fs::write(path, text).expect("writing");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("chmod");
    tokens
}
