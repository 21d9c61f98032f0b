//! Nodes that leave while clients are connected through them to sessions on other nodes.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use conman_cluster::overlap::{SERVING, visit};
use conman_cluster::{Balancer, Cluster, has_haproxy};
use conman_e2e::{Api, EventStream, WebSocket, eventually, eventually_some, lacks, websocket};
use conman_proto::{DrainReport, DrainState, EXEC_PROTOCOL, EnsureResponse, Node, PreemptReport};
use futures_util::StreamExt as _;
use http::{Method, StatusCode};
use jiff::SignedDuration;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::Message;

use super::fleet::{Fleet, PATIENCE, is_quiet};
use super::load::Load;

/// How long a node of a fleet gives load balancers to notice, by default.
const SHUTDOWN_DELAY: SignedDuration = SignedDuration::from_secs(5);
/// Pause of a client that was refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(200);
/// The code of a connection that was closed without one.
const WITHOUT_CLOSE: u16 = 1006;

/// What clients saw.
#[derive(Debug, Default)]
struct Seen {
    open: usize,
    closes: BTreeMap<u16, usize>,
    refused: Vec<String>,
}

/// Clients with a WebSocket each, which connect again when it is closed.
struct Clients {
    seen: Arc<Mutex<Seen>>,
    _tasks: JoinSet<()>,
}

impl Clients {
    /// `count` of them for each session. The first connection goes through `first`, later ones through
    /// `then`.
    async fn connect(count: usize, ids: &[&str], first: SocketAddr, then: SocketAddr) -> Self {
        let seen = Arc::<Mutex<Seen>>::default();
        let mut tasks = JoinSet::new();
        for id in ids.iter().cycle().take(count * ids.len()) {
            tasks.spawn(stay((*id).to_owned(), first, then, Arc::clone(&seen)));
        }
        let clients = Self {
            seen,
            _tasks: tasks,
        };
        clients.all_are_open(count * ids.len()).await;
        clients
    }

    async fn all_are_open(&self, count: usize) {
        eventually("all clients are connected", PATIENCE, async || {
            self.seen.lock().expect("no panic while held").open == count
        })
        .await;
    }

    fn open(&self) -> usize {
        self.seen.lock().expect("no panic while held").open
    }

    /// Connections that were closed so far, however.
    fn closes(&self) -> usize {
        let seen = self.seen.lock().expect("no panic while held");
        seen.closes.values().sum()
    }

    /// Every connection was opened at once, and closed with 1012 if it was.
    fn saw_only_1012(&self) -> usize {
        let seen = self.seen.lock().expect("no panic while held");
        assert_eq!(seen.refused, Vec::<String>::new());
        let others: Vec<_> = seen.closes.keys().filter(|code| **code != 1012).collect();
        assert!(others.is_empty(), "{seen:?}");
        seen.closes.get(&1012).copied().unwrap_or_default()
    }
}

async fn stay(id: String, first: SocketAddr, then: SocketAddr, seen: Arc<Mutex<Seen>>) {
    let note = |change: &dyn Fn(&mut Seen)| change(&mut seen.lock().expect("no panic while held"));
    let mut through = first;
    loop {
        let opened = timeout(PATIENCE, visit(through, &id)).await;
        let mut socket = match opened.map_err(|_| "no greeting".to_owned()) {
            Ok(Ok((socket, _))) => socket,
            Ok(Err(error)) => {
                note(&|seen| seen.refused.push(format!("{error:#}")));
                sleep(REFUSED_PAUSE).await;
                continue;
            }
            Err(why) => {
                note(&|seen| seen.refused.push(why.clone()));
                continue;
            }
        };
        note(&|seen| seen.open += 1);
        let mut code = WITHOUT_CLOSE;
        while let Some(Ok(message)) = socket.next().await {
            if let Message::Close(frame) = message {
                code = frame.map_or(1005, |frame| frame.code.into());
            }
        }
        note(&|seen| {
            seen.open -= 1;
            *seen.closes.entry(code).or_default() += 1;
        });
        through = then;
    }
}

impl Fleet {
    async fn shown(&self, node: usize) -> Node {
        let name = self.node(node).name();
        let path = format!("/v1/nodes/{name}");
        self.node(node)
            .admin()
            .get(&path)
            .await
            .expect(StatusCode::OK)
    }

    /// Has a witness that answers clients run on that very node.
    async fn serves_on(&self, node: usize, id: &str) {
        let path = format!(
            "/v1/sessions/{id}?node_label=host%3D{}",
            self.node(node).name()
        );
        let body = json!({"template": SERVING});
        let session = eventually_some("it serves", PATIENCE, async || {
            let answer = self.ask(node, Method::PUT, &path, Some(&body)).await?;
            let success = answer.status.is_success();
            success.then(|| answer.expect::<EnsureResponse>(answer.status).session)
        })
        .await;
        assert_eq!(session.node, self.node(node).name());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_37_a_node_that_has_left_can_be_switched_off_without_cutting_a_client() {
    const EACH: usize = 10;
    let builder = Cluster::builder().nodes(3).short();
    let Some(mut fleet) = Fleet::shared(builder.set("node", "shutdown_delay_s = 1")).await else {
        return;
    };
    fleet.serve_on(0, "own").await;
    fleet.serves_on(1, "there").await;
    fleet.serves_on(2, "elsewhere").await;
    let (first, then) = (
        fleet.node(0).sessions_address(),
        fleet.node(1).sessions_address(),
    );
    let ids = ["own", "there", "elsewhere"];
    let clients = Clients::connect(EACH, &ids, first, then).await;
    assert_eq!(fleet.shown(0).await.through, 2 * EACH as u64);

    let admin = fleet.node(0).admin();
    let begun = admin.post("/v1/nodes/self/drain", &json!({})).await;
    assert!(begun.status.is_success(), "{}", begun.text());
    eventually("the node is drained", PATIENCE, async || {
        let answer = admin.get("/v1/nodes/self/drain").await;
        let report: DrainReport = answer.expect(StatusCode::OK);
        if report.state == DrainState::Draining {
            return false;
        }
        assert_eq!((report.through, report.remaining), (0, 0));
        true
    })
    .await;
    // Now the machine may go.
    fleet.node(0).lose().expect("switched off");
    clients.all_are_open(3 * EACH).await;
    assert_eq!(clients.saw_only_1012(), 3 * EACH);
    drop(clients);

    let (first, then) = (then, fleet.node(2).sessions_address());
    let clients = Clients::connect(EACH, &["elsewhere"], first, then).await;
    let preempted = fleet
        .node(1)
        .admin()
        .post("/v1/nodes/self/preempt", &json!({}))
        .await;
    let report: PreemptReport = preempted.expect(StatusCode::OK);
    assert_eq!((report.through, report.unreleased), (0, Vec::new()));
    fleet.node(1).lose().expect("switched off");
    clients.all_are_open(EACH).await;
    assert_eq!(clients.saw_only_1012(), EACH);
}

/// A command in a session that runs for ever.
async fn sleep_in(api: &Api, id: &str) -> WebSocket {
    // {"command":["sleep","1000000"]}
    let command = "%7B%22command%22:%5B%22sleep%22,%221000000%22%5D%7D";
    let path = format!("/v1/sessions/{id}/exec?request={command}");
    let exec = websocket(api, api.request(Method::GET, &path, None), &[EXEC_PROTOCOL]).await;
    let (_, exec) = exec.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
    exec
}

/// How a socket is closed.
async fn close_code(mut socket: WebSocket) -> u16 {
    let mut code = WITHOUT_CLOSE;
    while let Ok(Some(Ok(message))) = timeout(PATIENCE, socket.next()).await {
        if let Message::Close(Some(frame)) = message {
            code = frame.code.into();
        }
    }
    code
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_37_streams_of_the_api_through_a_node_that_leaves_are_counted_and_closed() {
    let builder = Cluster::builder().nodes(2).short();
    let Some(mut fleet) = Fleet::shared(builder.set("node", "shutdown_delay_s = 1")).await else {
        return;
    };
    let generation = fleet.ensure_on(1, "s").await.generation.get();
    let api = fleet.node(0).api();
    let mut events = EventStream::open(&api, "/v1/events", None).await;
    let follower = fleet.node(0).api();
    let logs = tokio::spawn(async move {
        let path = "/v1/sessions/s/logs?follow=true";
        follower.try_send(Method::GET, path, None).await.is_ok()
    });
    let exec = sleep_in(&api, "s").await;
    eventually("all three pass through", PATIENCE, async || {
        fleet.shown(0).await.through == 3
    })
    .await;

    let admin = fleet.node(0).admin();
    let begun = admin.post("/v1/nodes/self/drain", &json!({})).await;
    assert!(begun.status.is_success(), "{}", begun.text());
    assert_eq!(close_code(exec).await, 1012);
    while events.next().await.is_some() {}
    let whole = timeout(PATIENCE, logs).await.expect("it ends");
    let whole = whole.expect("no panic");
    assert!(
        !whole,
        "a log that is cut must not look like one that has ended"
    );
    eventually("nothing passes through", PATIENCE, async || {
        fleet.shown(0).await.through == 0
    })
    .await;
    // Who has no other node is still served.
    let late = EventStream::open(&api, "/v1/events", None).await;
    fleet.is_one(0, "s", generation).await;
    assert_eq!(fleet.shown(0).await.through, 1);
    drop(late);

    // A daemon that stops closes them, too.
    let back = admin.post("/v1/nodes/self/undrain", &json!({})).await;
    assert!(back.status.is_success(), "{}", back.text());
    let exec = sleep_in(&api, "s").await;
    let (code, ended) = tokio::join!(close_code(exec), fleet.node(0).end_daemon());
    ended.expect("it ends");
    assert_eq!(code, 1012);
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: takes all of a machine; row 37 stays"]
async fn row_38_a_rolling_restart_behind_a_load_balancer_refuses_nobody() {
    const EACH: usize = 5;
    let agent = SocketAddr::from((Ipv4Addr::LOCALHOST, 7703));
    let builder = Cluster::builder().nodes(3);
    let builder = builder.set("listen", &format!("agent = \"{agent}\""));
    if !has_haproxy() {
        return lacks("haproxy is missing (package haproxy)");
    }
    let Some(fleet) = Fleet::shared(builder).await else {
        return;
    };
    let balancer = Balancer::start(fleet.cluster.layout()).expect("HAProxy serves");
    let becomes = async |node: usize, status: &str| {
        let name = fleet.node(node).name();
        let what = format!("HAProxy takes {name} for {status}");
        eventually(&what, PATIENCE, async || {
            balancer
                .status(name)
                .is_ok_and(|now| now.starts_with(status))
        })
        .await;
    };
    let ids = ["one", "two", "three"];
    for (node, id) in ids.iter().enumerate() {
        fleet.serves_on(node, id).await;
        becomes(node, "UP").await;
    }
    let front = balancer.address();
    let clients = Clients::connect(EACH, &ids, front, front).await;
    let load = Load::of_sessions(front, &ids);
    for node in 0..3 {
        fleet.node(node).end_daemon().await.expect("stopped");
        fleet.node(node).start().expect("started");
        fleet.node(node).wait_ready().await.expect("ready");
        becomes(node, "UP").await;
        clients.all_are_open(3 * EACH).await;
    }
    let requests = load
        .end("requests through HAProxy in a rolling restart")
        .await;
    assert_eq!(requests.refused, 0, "of {} requests", requests.calls);
    // Each tunnel touches two nodes at most.
    let reconnects = clients.saw_only_1012();
    assert!(reconnects <= 3 * 3 * EACH, "{reconnects}");

    // A cordon keeps new clients away, and those that are there.
    let through = || async { fleet.shown(0).await };
    let before = through().await;
    let admin = fleet.node(0).admin();
    let cordoned: Node = admin
        .post("/v1/nodes/self/cordon", &json!({}))
        .await
        .expect(StatusCode::OK);
    eventually("HAProxy sends it no new clients", PATIENCE, async || {
        let status = balancer.status(fleet.node(0).name());
        status.is_ok_and(|now| now.starts_with("NOLB") || now.starts_with("DRAIN"))
    })
    .await;
    let after = through().await;
    assert_eq!(
        (before.through, before.connections),
        (after.through, after.connections)
    );
    assert_eq!(cordoned.sessions_running, 1);
    assert_eq!(clients.saw_only_1012(), reconnects);
    let _: Node = admin
        .post("/v1/nodes/self/uncordon", &json!({}))
        .await
        .expect(StatusCode::OK);
    becomes(0, "UP").await;

    // A node can be switched off only once no new clients come, even if it has none at the moment.
    drop(clients);
    eventually("nobody is connected", PATIENCE, async || {
        let shown = fleet.shown(0).await;
        shown.through + shown.connections == 0
    })
    .await;
    let begun = admin.post("/v1/nodes/self/drain", &json!({})).await;
    assert!(begun.status.is_success(), "{}", begun.text());
    let report = eventually_some("the node is drained", PATIENCE, async || {
        let answer = admin.get("/v1/nodes/self/drain").await;
        let report: DrainReport = answer.expect(StatusCode::OK);
        (report.state == DrainState::Drained).then_some(report)
    })
    .await;
    let finished_at = report.finished_at.expect("it is drained");
    let took = finished_at.duration_since(report.started_at);
    assert!(took >= SHUTDOWN_DELAY, "{took:?}");
    let status = balancer.status(fleet.node(0).name()).expect("its answer");
    assert!(!status.starts_with("UP"), "{status}");
    drop(balancer);
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_43_clients_of_a_machine_without_power_are_closed_by_the_balancer() {
    const EACH: usize = 10;
    /// Three checks, each a second after the one before, and time for them; on a loaded machine.
    const NOTICED: Duration = Duration::from_secs(20);
    const ATTEMPTS: u32 = 5;
    let agent = "agent = \"127.0.0.1:7703\"";
    let builder = Cluster::builder().nodes(3).set("listen", agent);
    if !has_haproxy() {
        return lacks("haproxy is missing (package haproxy)");
    }
    let Some(fleet) = Fleet::shared(builder).await else {
        return;
    };
    let ids = ["one", "two", "three"];
    for (node, id) in ids.iter().enumerate() {
        fleet.serves_on(node, id).await;
    }
    let balancer = Balancer::start(fleet.cluster.layout()).expect("HAProxy serves");
    let name = |node: usize| fleet.node(node).name();
    let all_are_up = async || {
        eventually("HAProxy takes all nodes for UP", PATIENCE, async || {
            (0..3).all(|node| {
                let status = balancer.status(name(node));
                status.is_ok_and(|now| now.starts_with("UP"))
            })
        })
        .await;
    };
    all_are_up().await;
    let front = balancer.address();
    let clients = Clients::connect(EACH, &ids, front, front).await;
    let through = || balancer.connections(name(0)).expect("its answer");
    assert!(through() > 0, "HAProxy spreads the clients");

    // One missed check closes nobody. On a loaded machine more of them may be missed.
    let attempts = if is_quiet() { 1 } else { ATTEMPTS };
    for left in (0..attempts).rev() {
        let before = clients.closes();
        fleet.cluster.unplug(0).expect("unplugged");
        sleep(Duration::from_millis(1_200)).await;
        fleet.cluster.plug(0).expect("plugged");
        sleep(Duration::from_secs(4)).await;
        if clients.closes() == before {
            break;
        }
        assert!(left > 0, "one missed check closes clients");
        all_are_up().await;
        clients.all_are_open(3 * EACH).await;
    }

    fleet.cluster.unplug(0).expect("unplugged");
    fleet.node(0).lose().expect("switched off");
    eventually("HAProxy closes the node's clients", NOTICED, async || {
        through() == 0
    })
    .await;
    // Those of sessions elsewhere reach them through another node. Its own session may run nowhere else.
    eventually(
        "the clients of sessions elsewhere are served",
        PATIENCE,
        async || clients.open() == 2 * EACH && through() == 0,
    )
    .await;
    drop((clients, balancer));
    fleet.cluster.plug(0).expect("plugged");
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    fleet.leaves_nothing().await;
}
