//! Clients of one node, and sessions of another: two nodes on real processes, with their proxies
//! and listeners, and a fleet in memory.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

use conman_api::{ApiState, Listener, ServeOptions, StreamPlaces};
use conman_auth::{ApiGuard, ClusterSecret, ConnectTokens, HostRules, OriginRules};
use conman_core::naming::{CgroupDriver, Instance, instance_cgroup};
use conman_core::placement::PlacementLimits;
use conman_core::retention::Retention;
use conman_core::{EndCause, SpecPolicy, Template};
use conman_image::{ImageKeeper, ImageLimits, ImageStore, PullConfig};
use conman_linux::{Cgroups, PidFd};
use conman_node::NodeOptions;
use conman_peer::PeerClient;
use conman_proto::{
    DrainReport, DrainRequest, DrainState, NodeLoss, OnNodeLoss, PreemptRequest, ResolvedSpec,
    RuntimeKind, Session, SessionRequest, SessionState,
};
use conman_proxy::{Gate, Proxy, ProxyOptions, Verdict};
use conman_registry::{
    Announcement, Ending, Fleet, Journal, ModelFleet, ModelNode, PeerStanding, Phases, Registry,
    Release, SessionRecord, Standing,
};
use conman_runtime::{Fault, Faults, Operation, ProcessOptions, ProcessRuntime};
use http::request::Parts;
use metrics_exporter_prometheus::PrometheusBuilder;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::DropGuard;

use super::super::directory::NodeDirectory;
use super::super::peers::{Credentials, start_with};
use super::super::restarter;
use super::*;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Member {
    node: Arc<Node>,
    fleet: Arc<ModelNode>,
    faults: Faults,
    clients: Proxy,
    peers: Option<Proxy>,
    instance: Instance,
    _closing: DropGuard,
    _state: TempDir,
}

struct Anybody;

impl Gate for Anybody {
    fn admit(&self, _: &mut Parts, _: &SessionId, _: &str) -> Verdict {
        Verdict::Admit { may_start: true }
    }
}

fn secret() -> Arc<ClusterSecret> {
    secret_of("0123456789abcdef")
}

fn secret_of(text: &str) -> Arc<ClusterSecret> {
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
    async fn join(fleet: &Arc<ModelFleet>, name: &str, secret: &Arc<ClusterSecret>) -> Self {
        Self::join_keeping(fleet, name, secret, Retention::default()).await
    }

    async fn join_keeping(
        fleet: &Arc<ModelFleet>,
        name: &str,
        secret: &Arc<ClusterSecret>,
        retention: Retention,
    ) -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let mut random = [0; 4];
        getrandom::fill(&mut random).expect("random bytes");
        let instance = Instance::new(random);
        let (registry, seen) = fleet.join(name);
        let runtime = ProcessRuntime::open(ProcessOptions {
            instance: instance.clone(),
            state_dir: state.path().join("containers"),
            call_timeout: Duration::from_secs(30),
        });
        let runtime = Arc::new(runtime.expect("the host has cgroups, and this is root"));
        let faults = runtime.faults().clone();
        let web = Template {
            request: SessionRequest {
                image: Some("none".to_owned()),
                command: Some(
                    ["sh", "-c", "exec busybox httpd -f -p 8080 -h /etc"]
                        .map(str::to_owned)
                        .to_vec(),
                ),
                port: Some(Some(8080)),
                ..SessionRequest::default()
            },
            ..Template::default()
        };
        let policy = SpecPolicy {
            default_runtime: RuntimeKind::Process,
            templates: [("web".to_owned(), web)].into(),
            ..SpecPolicy::default()
        };
        let path = state.path().to_owned();
        let mut options = NodeOptions::new(name.to_owned(), instance.clone(), path, policy);
        options.standing = seen.standing();
        let journal = Journal::open(&state.path().join("journal"), name, 10_000);
        let journal = Arc::new(journal.expect("a journal"));
        let node = Node::start(options, registry, journal, vec![runtime])
            .await
            .expect("the node starts");
        let credentials = Credentials {
            secret: Some(Arc::clone(secret)),
            tls: None,
        };
        let dialer = credentials.dialer(name);
        let limits = PlacementLimits {
            // A busy machine must not decide where a test's sessions go.
            max_cpu_pressure_percent: 1_000.0,
            ..PlacementLimits::default()
        };
        let client = PeerClient::new(dialer.clone());
        let map = Arc::new(FleetMap::new(seen.clone(), client, limits));
        let closing = CancellationToken::new();
        let seeker = Seeker::new(Arc::clone(&node), Arc::clone(&map), dialer, closing.clone());
        let known: Arc<dyn Fleet> = seen.clone();
        let vitals = conman_vitals::Vitals::default();
        restarter::run(&node, &known, &seeker, &vitals, retention, closing.clone());
        let guard = closing.clone().drop_guard();
        let api = api(&node, &map, &state, secret, closing.clone());
        let (listener, address) = loopback();
        let serving = (
            conman_api::router(api, Listener::Peers),
            ServeOptions::default(),
            closing,
        );
        let proxied = ProxyOptions {
            workers: 1,
            ..ProxyOptions::default()
        };
        let peers = start_with(
            name,
            proxied.clone(),
            listener,
            &credentials,
            &node,
            serving,
        );
        seen.announce(Announcement {
            peer_url: Some(format!("http://{address}")),
            templates: vec!["web".to_owned()],
            max_sessions: 100,
            ..Announcement::default()
        });
        let directory = NodeDirectory::new(Arc::clone(&node), Some(seeker));
        let (listener, _) = loopback();
        let clients = Proxy::start(listener, proxied, Arc::new(directory), Arc::new(Anybody));
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

    async fn start(&self, id: &SessionId) {
        self.start_with(id, OnNodeLoss::Wait).await;
    }

    async fn start_with(&self, id: &SessionId, on_node_loss: OnNodeLoss) {
        let web = SessionRequest {
            template: Some("web".to_owned()),
            on_node_loss: Some(on_node_loss),
            ..SessionRequest::default()
        };
        self.node.ensure(id, &web, true).await.expect("it starts");
    }

    /// The session, once it runs here.
    async fn runs(&self, id: &SessionId) -> Session {
        let running = async {
            loop {
                let shown = self.node.get(id);
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
    async fn holds(&self) {
        let held = async {
            while self.clients.stats().held == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let held = tokio::time::timeout(PATIENCE, held).await;
        held.expect("it is held");
    }

    async fn preempt(&self) {
        let notice = PreemptRequest::default();
        self.node.preempt(&notice, "test").await.expect("a report");
    }

    /// Asks for a file of the session's, by this node, and gives the whole answer.
    fn fetch(&self, id: &SessionId) -> impl Future<Output = String> + Send + use<> {
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
                // Gone is just as well.
                let _ = process.kill();
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

async fn two() -> (Arc<ModelFleet>, Member, Member) {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let b = Member::join(&fleet, "b", &secret).await;
    (fleet, a, b)
}

fn is_served(answer: &str, id: &SessionId) -> bool {
    answer.starts_with("HTTP/1.1 200") && answer.ends_with(&format!("{id}\n"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_of_any_node_reaches_the_one_session() {
    let (_fleet, a, b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    for node in [&a, &b, &a] {
        let answer = node.fetch(&id).await;
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(!a.node.is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_held_where_it_came_while_the_session_starts_on_another_node() {
    let (_fleet, a, b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    let slow = Fault::Delay(Duration::from_millis(500));
    b.faults.next(Operation::Start, 1, slow);
    let starting = {
        let (node, id) = (Arc::clone(&b.node), id.clone());
        let web = SessionRequest {
            template: Some("web".to_owned()),
            ..SessionRequest::default()
        };
        node.ensure(&id, &web, false).await.expect("begun");
        id
    };
    let answer = a.fetch(&starting).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert_eq!(b.peers.as_ref().map(|peers| peers.stats().held), Some(0));
    assert_eq!(a.clients.stats().held, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_preempted_nodes_session_is_started_by_who_is_asked_for_it() {
    let (fleet, a, b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    assert!(is_served(&a.fetch(&id).await, &id));
    fleet.announced("b", |b| b.draining = true);
    let notice = PreemptRequest::default();
    b.node.preempt(&notice, "test").await.expect("a report");
    let (one, other) = (a.fetch(&id), a.fetch(&id));
    for answer in <[String; 2]>::from(tokio::join!(one, other)) {
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(a.node.is_live(&id));
    // The node that is going away brings its own clients there.
    let answer = b.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_a_silent_node_until_its_sessions_may_be_claimed() {
    let (fleet, a, mut b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    // Returns when nobody listens there any more.
    let peers = b.peers.take().expect("it listens");
    peers.shutdown(Duration::ZERO).await;
    let waiting = tokio::spawn(a.fetch(&id));
    a.holds().await;
    assert!(!waiting.is_finished() && !a.node.is_live(&id));
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = waiting.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.is_live(&id));
    assert_eq!(a.clients.stats().held, 0);
}

/// One that has just begun may have sessions to adopt before it says anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_a_node_that_comes_until_it_has_said_where_it_listens() {
    let (fleet, a, b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    let mut told = None;
    fleet.change("b", |b| told = b.announcement.take());
    let waiting = tokio::spawn(a.fetch(&id));
    a.holds().await;
    assert!(!waiting.is_finished());
    fleet.change("b", |b| b.announcement = told);
    let answer = waiting.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(b.node.is_live(&id) && !a.node.is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_listens_for_no_other_node_is_not_waited_for() {
    let (fleet, a, b) = two().await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    let mut told = None;
    fleet.change("b", |b| told = b.announcement.take());
    let early = tokio::spawn(a.fetch(&id));
    a.holds().await;
    fleet.change("b", |b| {
        b.announcement = told;
        b.announcement.get_or_insert_default().peer_url = None;
    });
    let answers = [early.await.expect("no panic"), a.fetch(&id).await];
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("listen.peers"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_of_a_fenced_node_is_held_there_and_elsewhere_until_it_owns_again() {
    let (_fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    b.fleet.stand(Standing::Fenced);
    let waiting = [tokio::spawn(a.fetch(&id)), tokio::spawn(b.fetch(&id))];
    a.holds().await;
    b.holds().await;
    let refused = b.node.kept_execs(&id).await.expect_err("it is frozen");
    assert!(refused.to_string().contains("frozen"), "{refused}");
    b.fleet.stand(Standing::Live);
    for answer in waiting {
        let answer = answer.await.expect("no panic");
        assert!(is_served(&answer, &id), "{answer}");
    }
    assert!(b.node.is_live(&id) && !a.node.is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_silent_node_has_frozen_is_served_by_its_new_owner_though_the_old_one_answers() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let old = b.node.get(&id).expect("it runs").generation;
    b.fleet.stand(Standing::Fenced);
    fleet.change("b", |b| b.standing = PeerStanding::Silent);
    let waiting = [tokio::spawn(a.fetch(&id)), tokio::spawn(b.fetch(&id))];
    a.holds().await;
    b.holds().await;
    let [elsewhere, there] = waiting;
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = elsewhere.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.is_live(&id) && !there.is_finished());
    // Back from the dead, it may know that it owns again before it has ended what it lost.
    fleet.change("b", |b| b.standing = PeerStanding::Live);
    b.fleet.stand(Standing::Live);
    b.node.condemn(&id, old, "it was lost");
    let answer = there.await.expect("no panic");
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.is_live(&id) && !b.node.is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_being_ended_here_is_served_by_whoever_owns_it_now() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    let old = b.node.get(&id).expect("it runs").generation;
    b.fleet.stand(Standing::Fenced);
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    fleet.hold_releases("b", true);
    fleet.change("b", |b| b.standing = PeerStanding::Live);
    b.node.condemn(&id, old, "it was lost");
    b.fleet.stand(Standing::Live);
    let deadline = Instant::now() + PATIENCE;
    while b.node.get(&id).map(|session| session.state) != Some(SessionState::Stopping) {
        assert!(Instant::now() < deadline, "{:?}", b.node.get(&id));
        tokio::time::sleep(PAUSE).await;
    }
    let answer = b.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(a.node.is_live(&id));
    fleet.hold_releases("b", false);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_heard_of_late_and_says_that_it_owns_is_not_waited_for() {
    let (fleet, a, b) = two().await;
    let id = id("alice");
    b.start(&id).await;
    b.fleet.stand(Standing::Late);
    fleet.change("b", |b| b.standing = PeerStanding::Silent);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(b.node.is_live(&id) && !a.node.is_live(&id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_started_anew_only_where_the_labels_are_that_it_was_asked_for_with() {
    let (fleet, a, b) = two().await;
    let c = Member::join(&fleet, "c", &secret()).await;
    for name in ["b", "c"] {
        fleet.announced(name, |node| {
            node.labels.insert("pool".to_owned(), "gpu".to_owned());
        });
    }
    let ids: Vec<SessionId> = (0..4)
        .map(|number| format!("s{number}").parse().expect("an id"))
        .collect();
    for id in &ids {
        let web = SessionRequest {
            template: Some("web".to_owned()),
            node_labels: Some([("pool".to_owned(), "gpu".to_owned())].into()),
            ..SessionRequest::default()
        };
        b.node.ensure(id, &web, true).await.expect("it starts");
    }
    fleet.announced("b", |b| b.draining = true);
    let notice = PreemptRequest::default();
    b.node.preempt(&notice, "test").await.expect("a report");
    for id in &ids {
        let answer = a.fetch(id).await;
        assert!(is_served(&answer, id), "{answer}");
        assert!(c.node.is_live(id) && !a.node.is_live(id));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_node_has_is_not_waited_for() {
    let (_fleet, a, _b) = two().await;
    let answer = a.fetch(&id("nobody")).await;
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    assert_eq!(a.fleet.asked(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_a_session_has_ended_is_asked_of_the_registry_once() {
    let (_fleet, a, b) = two().await;
    let (elsewhere, own) = (id("alice"), id("bob"));
    b.start(&elsewhere).await;
    a.start(&own).await;
    for (node, id) in [(&b, &elsewhere), (&a, &own)] {
        node.node.stop(id, "a test").await.expect("stopped");
        let before = a.fleet.asked();
        let answer = a.fetch(id).await;
        assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
        assert_eq!(a.fleet.asked() - before, 1, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_of_a_node_that_refuses_this_one_is_answered_with_both_and_the_remedy() {
    let fleet = ModelFleet::new();
    let a = Member::join(&fleet, "a", &secret()).await;
    let b = Member::join(&fleet, "b", &secret_of("fedcba9876543210")).await;
    let id: SessionId = "alice".parse().expect("an id");
    b.start(&id).await;
    let answer = a.fetch(&id).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    for part in ["node `a`", "node `b`", "`fleet.secret_file`"] {
        assert!(answer.contains(part), "{answer}");
    }
    // What is given up there is started by another that may be used.
    fleet.announced("a", |a| a.draining = true);
    let c = Member::join(&fleet, "c", &secret()).await;
    fleet.announced("b", |b| b.draining = true);
    let notice = PreemptRequest::default();
    b.node.preempt(&notice, "test").await.expect("a report");
    fleet.announced("b", |b| b.draining = false);
    let answer = a.fetch(&id).await;
    assert!(is_served(&answer, &id), "{answer}");
    assert!(c.node.is_live(&id));
}

fn id(name: &str) -> SessionId {
    name.parse().expect("an id")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_preempted_node_what_is_to_be_restarted_comes_back_unasked_and_the_rest_waits() {
    let (fleet, a, b) = two().await;
    let (back, waits) = (id("back"), id("a-waits"));
    b.start_with(&back, OnNodeLoss::Restart).await;
    b.start_with(&waits, OnNodeLoss::Wait).await;
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!((restarted.from.as_str(), restarted.count), ("b", 1));
    assert_eq!(restarted.because, NodeLoss::Preempted);
    // The same look at the records met this one first.
    assert!(!a.node.is_live(&waits));
    let answer = a.fetch(&waits).await;
    assert!(is_served(&answer, &waits), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_a_node_that_was_declared_dead_come_back_unasked() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    b.start_with(&back, OnNodeLoss::Restart).await;
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!(restarted.because, NodeLoss::Lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_failed_is_tried_again() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    b.start_with(&back, OnNodeLoss::Restart).await;
    let fails = Fault::Refuse("there is no such thing".to_owned());
    a.faults.next(Operation::Create, 1, fails);
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let session = a.runs(&back).await;
    let restarted = session.spec.restarted.expect("it says so");
    assert_eq!((restarted.from.as_str(), restarted.count), ("b", 2));
    assert_eq!(restarted.because, NodeLoss::Preempted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stopped_after_its_node_had_gone_is_not_restarted() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    let (back, stopped) = (id("back"), id("a-stopped"));
    for id in [&back, &stopped] {
        b.start_with(id, OnNodeLoss::Restart).await;
    }
    fleet.announced("b", |b| b.draining = true);
    b.preempt().await;
    let report = b.node.stop(&stopped, "a test").await.expect("stopped");
    assert!(report.state.is_ended());
    let a = Member::join(&fleet, "a", &secret).await;
    a.runs(&back).await;
    assert!(!a.node.is_live(&stopped));
    assert_eq!(a.node.record(&stopped).await.expect("readable"), None);
}

/// Waits until the record is so.
async fn is_recorded(node: &Node, id: &SessionId, is: impl Fn(Option<&SessionRecord>) -> bool) {
    let becoming = async {
        loop {
            let record = node.record(id).await.expect("readable");
            if is(record.as_ref()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let became = tokio::time::timeout(PATIENCE, becoming).await;
    became.expect("it is so in time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_a_node_that_is_gone_go_in_time_and_what_was_lost_with_it_ends() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    let (stopped, waits, back) = (id("stopped"), id("waits"), id("back"));
    for (id, on_node_loss) in [
        (&stopped, OnNodeLoss::Wait),
        (&waits, OnNodeLoss::Wait),
        (&back, OnNodeLoss::Restart),
    ] {
        b.start_with(id, on_node_loss).await;
    }
    b.node.stop(&stopped, "a test").await.expect("stopped");
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let keeping = Member::join(&fleet, "a", &secret).await;
    // Whoever restarts it has looked at all records before.
    keeping.runs(&back).await;
    let record = keeping.node.record(&stopped).await.expect("readable");
    assert!(record.is_some_and(|record| record.state.is_ended()));
    fleet.announced("a", |a| a.draining = true);
    let at_once = Retention {
        ended: Duration::ZERO,
        lost: Duration::ZERO,
    };
    let c = Member::join_keeping(&fleet, "c", &secret, at_once).await;
    is_recorded(&c.node, &stopped, |record| record.is_none()).await;
    is_recorded(&c.node, &waits, |record| {
        record.is_some_and(|record| record.state.end_cause() == Some(EndCause::Deleted))
    })
    .await;
    // It is released first.
    let deadline = Instant::now() + PATIENCE;
    while c.node.get(&waits).map(|session| session.state) != Some(SessionState::Stopped) {
        assert!(Instant::now() < deadline, "{:?}", c.node.get(&waits));
        tokio::time::sleep(PAUSE).await;
    }
    assert!(keeping.node.is_live(&back));
}

/// Has a record of a session that has ended.
async fn ends(registry: &dyn Registry, id: &SessionId, spec: &ResolvedSpec) {
    let claimed = registry.claim(id, spec).await.expect("claimed");
    let ending = Ending {
        failed: false,
        cause: Some(EndCause::Exited),
        reason: "exited".to_owned(),
        exit_code: Some(0),
        ended_at: jiff::Timestamp::now(),
        started_at: None,
        phases: Phases::default(),
    };
    let release = Release {
        id: id.clone(),
        generation: claimed.generation,
        ending,
    };
    let released = registry.release(vec![release]).await;
    assert!(released.iter().all(Result::is_ok), "{released:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_records_of_a_node_that_is_gone_than_go_at_once_go_one_after_another() {
    /// Five times as many as go after one look.
    const RECORDS: usize = 1_000;
    let (fleet, secret) = (ModelFleet::new(), secret());
    let at_once = Retention {
        ended: Duration::ZERO,
        lost: Duration::ZERO,
    };
    let a = Member::join_keeping(&fleet, "a", &secret, at_once).await;
    a.start(&id("here")).await;
    let spec = a.node.get(&id("here")).expect("it is shown").spec;
    let (registry, _gone) = fleet.join("gone");
    for number in 0..RECORDS {
        ends(&*registry, &id(&format!("s-{number}")), &spec).await;
    }
    fleet.change("gone", |gone| gone.standing = PeerStanding::Fenced);
    let deadline = Instant::now() + 2 * PATIENCE;
    while !registry.list().await.expect("listed").is_empty() {
        assert!(Instant::now() < deadline, "some never go");
        tokio::time::sleep(PAUSE).await;
    }
    assert!(a.node.is_live(&id("here")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_failed_to_forget_goes_later() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let (kept, left) = (id("kept"), id("left"));
    a.start(&kept).await;
    a.node.stop(&kept, "a test").await.expect("stopped");
    let spec = a.node.get(&kept).expect("it is shown").spec;
    let (registry, _) = fleet.join("a");
    ends(&*registry, &left, &spec).await;
    // Whoever sees a node go looks at all records soon.
    let _gone = fleet.join("gone");
    fleet.change("gone", |gone| gone.standing = PeerStanding::Fenced);
    is_recorded(&a.node, &left, |record| record.is_none()).await;
    let record = a.node.record(&kept).await.expect("readable");
    assert!(record.is_some());
}

async fn drained(node: &Node) -> DrainReport {
    let request = DrainRequest::default();
    node.drain(&request).await.expect("it begins");
    let draining = async {
        loop {
            let report = node.drain_report().expect("it drains");
            if report.state == DrainState::Drained {
                return report;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, draining)
        .await
        .expect("it ends")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_has_other_nodes_start_what_it_released_and_says_where_it_is() {
    let (fleet, a, b) = two().await;
    let (back, waits) = (id("back"), id("waits"));
    b.start_with(&back, OnNodeLoss::Restart).await;
    b.start_with(&waits, OnNodeLoss::Wait).await;
    fleet.announced("b", |b| b.draining = true);
    let report = drained(&b.node).await;
    assert_eq!(report.released, 2);
    let moved: Vec<_> = report
        .moved
        .iter()
        .map(|one| (&one.id, &*one.node))
        .collect();
    assert_eq!(moved, [(&back, "a")]);
    let restarted = a.runs(&back).await.spec.restarted.expect("it says so");
    assert_eq!(restarted.because, NodeLoss::Drained);
    assert!(!a.node.is_live(&waits));
    let answer = b.fetch(&waits).await;
    assert!(is_served(&answer, &waits), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_with_nowhere_to_go_ends_and_its_sessions_come_back_when_there_is_room() {
    let (fleet, a, b) = two().await;
    let back = id("back");
    b.start_with(&back, OnNodeLoss::Restart).await;
    for name in ["a", "b"] {
        fleet.announced(name, |node| node.draining = true);
    }
    let report = drained(&b.node).await;
    assert_eq!((report.released, report.moved.len()), (1, 0));
    fleet.announced("a", |a| a.draining = false);
    a.runs(&back).await;
}
