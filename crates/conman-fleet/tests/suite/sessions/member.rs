//! A node with its listeners for clients and for nodes.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_api::{ApiBackend, ApiState, Listener, ServeOptions, StreamPlaces};
use conman_auth::{ApiGuard, ClusterSecret, ConnectTokens, FleetTls, HostRules, OriginRules};
use conman_core::naming::{CgroupDriver, Instance, instance_cgroup};
use conman_core::placement::PlacementLimits;
use conman_core::retention::Retention;
use conman_core::{SpecPolicy, Template};
use conman_fleet::{FleetMap, Locator, NodeSessions, run_restarter};
use conman_image::{ImageKeeper, ImageLimits, ImageStore, PullConfig};
use conman_linux::{Cgroups, PidFd};
use conman_node::{Node, NodeOptions};
use conman_peer::{Dialer, PeerAcceptor, PeerClient};
use conman_proto::{
    OnNodeLoss, PreemptRequest, RuntimeKind, Session, SessionId, SessionRequest, SessionState,
};
use conman_proxy::{Gate, PeerFront, Proxy, ProxyOptions, Verdict};
use conman_registry::{Announcement, Fleet as _, Journal};
use conman_runtime::{DockerOptions, DockerRuntime, Runtime};
use conman_testkit::{Faults, ModelFleet, ModelNode, ProcessOptions, ProcessRuntime};
use http::request::Parts;
use metrics_exporter_prometheus::PrometheusBuilder;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::directory::FleetDirectory;

/// Longer than any step takes on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between checks of a state that a test waits for.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct Member {
    pub(super) node: Arc<Node>,
    pub(super) fleet: Arc<ModelNode>,
    pub(super) faults: Faults,
    pub(super) clients: Proxy,
    pub(super) peers: Option<Proxy>,
    instance: Instance,
    _closing: DropGuard,
    _state: TempDir,
}

struct OpenGate;

impl Gate for OpenGate {
    fn admit(&self, _: &mut Parts, _: &SessionId, _: &str) -> Verdict {
        Verdict::Admit { may_start: true }
    }
}

pub(super) fn secret() -> Arc<ClusterSecret> {
    secret_of("0123456789abcdef")
}

pub(super) fn secret_of(text: &str) -> Arc<ClusterSecret> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("fleet.key");
    std::fs::write(&path, text.repeat(4)).expect("written");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("chmod");
    Arc::new(ClusterSecret::load(path).expect("valid"))
}

fn loopback() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

impl Member {
    pub(super) async fn join(
        fleet: &Arc<ModelFleet>,
        name: &str,
        secret: &Arc<ClusterSecret>,
    ) -> Self {
        Self::join_keeping(fleet, name, secret, Retention::default()).await
    }

    pub(super) async fn join_keeping(
        fleet: &Arc<ModelFleet>,
        name: &str,
        secret: &Arc<ClusterSecret>,
        retention: Retention,
    ) -> Self {
        Self::join_with(fleet, name, secret, retention, true).await
    }

    /// Joins without the runtime of these tests' sessions, and like an earlier version, which does
    /// not announce its runtimes.
    pub(super) async fn join_without_runtime(
        fleet: &Arc<ModelFleet>,
        name: &str,
        secret: &Arc<ClusterSecret>,
    ) -> Self {
        Self::join_with(fleet, name, secret, Retention::default(), false).await
    }

    async fn join_with(
        fleet: &Arc<ModelFleet>,
        name: &str,
        secret: &Arc<ClusterSecret>,
        retention: Retention,
        has_runtime: bool,
    ) -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let mut random = [0; 4];
        getrandom::fill(&mut random).expect("random bytes");
        let instance = Instance::new(random);
        let (registry, seen) = fleet.join(name);
        let process = runtime(&instance, &state);
        let faults = process.faults().clone();
        let runtimes: Vec<Arc<dyn Runtime>> = match has_runtime {
            true => vec![process],
            // Nothing listens there: only its kind matters.
            false => {
                let socket = state.path().join("docker.sock");
                let docker = DockerRuntime::connect(DockerOptions::new(socket, instance.clone()));
                vec![Arc::new(docker.expect("the host has cgroups"))]
            }
        };
        let path = state.path().to_owned();
        let mut options = NodeOptions::new(name.to_owned(), instance.clone(), path, policy());
        options.standing = seen.standing();
        let journal = Journal::open(&state.path().join("journal"), name, 10_000);
        let journal = Arc::new(journal.expect("a journal"));
        let emergency = conman_node::EmergencyThread::start(&[]).expect("a thread");
        let node = Node::start(options, emergency, registry, journal, runtimes)
            .await
            .expect("the node starts");
        let tls = FleetTls::derive(Arc::clone(secret), name).expect("derived");
        let tls = Some(Arc::new(tls));
        let dialer = Dialer::new(name, tls.clone());
        let client = PeerClient::new(dialer.clone());
        let map = Arc::new(FleetMap::new(seen.clone(), client, limits()));
        let closing = CancellationToken::new();
        let locator = Locator::new(
            Arc::clone(&node),
            Arc::clone(&map),
            dialer,
            4_096,
            closing.clone(),
        );
        let watchdog = conman_watchdog::Watchdog::default();
        run_restarter(&locator, &watchdog, retention, closing.clone());
        let guard = closing.clone().drop_guard();
        let api = api(&node, &map, &state, secret, closing.clone());
        let (listener, address) = loopback();
        let front = PeerFront {
            accept: Arc::new(PeerAcceptor::new(tls)),
            sessions: Arc::new(NodeSessions(node.access().clone())),
            api: Arc::new(ApiBackend::new(
                conman_api::router(api, Listener::Peers),
                ServeOptions::default(),
                closing,
            )),
        };
        let peers = Proxy::start_peers(listener, proxied(), front);
        seen.announce(Announcement {
            peer_url: Some(format!("https://{address}")),
            templates: vec!["web".to_owned()],
            max_sessions: 100,
            ..Announcement::default()
        });
        let directory = FleetDirectory(locator);
        let (listener, _) = loopback();
        let clients = Proxy::start(listener, proxied(), Arc::new(directory), Arc::new(OpenGate));
        Self {
            node,
            fleet: seen,
            faults,
            clients: clients.expect("a proxy"),
            peers: Some(peers.expect("a proxy")),
            instance,
            _closing: guard,
            _state: state,
        }
    }

    pub(super) async fn start(&self, id: &SessionId) {
        self.start_with(id, OnNodeLoss::Wait).await;
    }

    pub(super) async fn start_with(&self, id: &SessionId, on_node_loss: OnNodeLoss) {
        let web = SessionRequest {
            on_node_loss: Some(on_node_loss),
            ..web()
        };
        self.node
            .sessions()
            .ensure(id, &web, true)
            .await
            .expect("it starts");
    }

    /// The session, once it runs here.
    pub(super) async fn runs(&self, id: &SessionId) -> Session {
        let running = async {
            loop {
                let shown = self.node.sessions().get(id);
                match shown.filter(|session| session.state == SessionState::Running) {
                    Some(session) => return session,
                    None => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let ran = tokio::time::timeout(PATIENCE, running).await;
        ran.expect("it runs in time")
    }

    /// Returns once its proxy holds a request.
    pub(super) async fn holds(&self) {
        let held = async {
            while self.clients.stats().held == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let held = tokio::time::timeout(PATIENCE, held).await;
        held.expect("it is held");
    }

    pub(super) async fn preempt(&self) {
        let notice = PreemptRequest::default();
        self.node
            .preemption()
            .preempt(&notice, "test")
            .await
            .expect("a report");
    }

    /// Requests a file of the session through this node, and returns the whole answer.
    pub(super) fn fetch(&self, id: &SessionId) -> impl Future<Output = String> + Send + use<> {
        let address = self.clients.local_addr();
        let request = format!(
            "GET /s/{id}/hostname HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        );
        async move {
            let fetching = async {
                let mut stream = TcpStream::connect(address).await.expect("it listens");
                stream.write_all(request.as_bytes()).await.expect("open");
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).await.expect("whole");
                String::from_utf8_lossy(&answer).into_owned()
            };
            let fetched = tokio::time::timeout(PATIENCE, fetching).await;
            fetched.expect("an answer in time")
        }
    }
}

/// A session of the one template.
pub(super) fn web() -> SessionRequest {
    SessionRequest {
        template: Some("web".to_owned()),
        ..SessionRequest::default()
    }
}

fn runtime(instance: &Instance, state: &TempDir) -> Arc<ProcessRuntime> {
    let runtime = ProcessRuntime::open(ProcessOptions {
        instance: instance.clone(),
        state_dir: state.path().join("containers"),
        call_timeout: Duration::from_secs(30),
    });
    Arc::new(runtime.expect("the host has cgroups, and this is root"))
}

fn proxied() -> ProxyOptions {
    ProxyOptions {
        workers: 1,
        ..ProxyOptions::default()
    }
}

fn policy() -> SpecPolicy {
    let serve = "exec busybox httpd -f -p 8080 -h /etc";
    let web = Template {
        request: SessionRequest {
            image: Some("none".to_owned()),
            command: Some(["sh", "-c", serve].map(str::to_owned).to_vec()),
            port: Some(Some(8080)),
            ..SessionRequest::default()
        },
        ..Template::default()
    };
    SpecPolicy {
        default_runtime: RuntimeKind::Process,
        templates: [("web".to_owned(), web)].into(),
        ..SpecPolicy::default()
    }
}

fn limits() -> PlacementLimits {
    PlacementLimits {
        // A busy machine must not decide where a test's sessions are placed.
        max_cpu_pressure_percent: 1_000.0,
        ..PlacementLimits::default()
    }
}

fn api(
    node: &Arc<Node>,
    map: &Arc<FleetMap>,
    state: &TempDir,
    secret: &Arc<ClusterSecret>,
    closing: CancellationToken,
) -> ApiState {
    let listen = "127.0.0.1:7700".parse().expect("an address");
    let hosts = HostRules::new(listen, &[], None).expect("valid");
    let guard = ApiGuard::new(None, hosts, OriginRules::new(&[]).expect("valid"));
    let images = state.path().join("images");
    let images = ImageStore::open(&images, ImageLimits::default()).expect("a store");
    ApiState {
        node: Arc::clone(node),
        guard: Arc::new(guard),
        fleet: Some(Arc::clone(map)),
        connect_tokens: Arc::new(ConnectTokens::of_fleet(Arc::clone(secret))),
        images: ImageKeeper::new(images, PullConfig::default()),
        metrics: PrometheusBuilder::new().build_recorder().handle(),
        streams: StreamPlaces::default(),
        closing,
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let below = instance_cgroup(&self.instance, CgroupDriver::Cgroupfs);
        let cgroups = Cgroups::detect().expect("the host has cgroups");
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let pids = cgroups.pids_below(&below);
            if pids.is_empty() && cgroups.remove_tree(&below).is_empty() {
                return;
            }
            for process in pids.into_iter().filter_map(|pid| PidFd::open(pid).ok()) {
                // It may have gone already.
                let _ = process.kill();
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

pub(super) async fn two() -> (Arc<ModelFleet>, Member, Member) {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let b = Member::join(&fleet, "b", &secret).await;
    (fleet, a, b)
}

pub(super) fn is_served(answer: &str, id: &SessionId) -> bool {
    answer.starts_with("HTTP/1.1 200") && answer.ends_with(&format!("{id}\n"))
}

pub(super) fn id(name: &str) -> SessionId {
    name.parse().expect("an id")
}
