//! What is shown during faults is what a witness outside sees, which shares no code with conman: it reads
//! the sessions' cgroups.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_cluster::Cluster;
use conman_cluster::overlap::monotonic_ns;
use conman_e2e::{eventually, eventually_some, slowness};
use conman_proto::{Node, NodeList, NodeStanding, Session, SessionList, SessionState, Timeline};
use http::{Method, StatusCode};
use serde_json::json;
use tokio::time::timeout;

use super::fleet::{Fleet, PATIENCE, measured};
use super::typed::printed;

/// Where the kernel shows the unified hierarchy.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
/// How long anything that is shown may take while etcd does not answer, on a usual machine.
const ANSWER: Duration = Duration::from_secs(10);

/// Sessions of a node, as the kernel has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) running: u64,
    /// Paused ones, too.
    pub(crate) frozen: u64,
}

/// Counts the cgroups below one that have processes.
pub(crate) fn witness(fleet: &Fleet, node: usize) -> Seen {
    let mut seen = Seen {
        running: 0,
        frozen: 0,
    };
    let Some(cgroup) = fleet.node(node).cgroup() else {
        return seen;
    };
    let root = UNIFIED.map(Path::new).into_iter();
    let mut roots = root.filter(|root| root.join("cgroup.controllers").exists());
    let root = roots.next().expect("a unified hierarchy");
    let mut below = vec![root.join(cgroup.trim_start_matches('/'))];
    while let Some(one) = below.pop() {
        let read = |file: &str| fs::read_to_string(one.join(file)).unwrap_or_default();
        if !read("cgroup.procs").is_empty() {
            match read("cgroup.events").contains("frozen 1") {
                true => seen.frozen += 1,
                false => seen.running += 1,
            }
        }
        below.extend(folders(&one));
    }
    seen
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

/// The result of what is shown, which must come in time.
async fn in_time<T>(what: &str, shown: impl Future<Output = T>) -> T {
    let bound = ANSWER * slowness();
    let shown = timeout(bound, shown).await;
    shown.unwrap_or_else(|_| panic!("{what} was not answered in {bound:?}"))
}

impl Fleet {
    /// A gauge of a node.
    async fn gauge(&self, node: usize, name: &str) -> u64 {
        let admin = self.node(node).admin();
        let metrics = admin.send(Method::GET, "/metrics", None).await.text();
        let mut lines = metrics.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_else(|| panic!("{name} is a gauge of {metrics}"))
    }

    async fn sessions_in(&self, node: usize, state: SessionState) -> u64 {
        let name = format!(r#"conman_sessions{{state="{state}"}}"#);
        self.gauge(node, &name).await
    }

    async fn peers_that_are(&self, node: usize, standing: NodeStanding) -> u64 {
        let name = format!(r#"conman_fleet_peers{{standing="{}"}}"#, standing.as_str());
        self.gauge(node, &name).await
    }

    /// What a node shows, within a bounded time whatever etcd does.
    async fn shows<T: serde::de::DeserializeOwned>(&self, node: usize, path: &str) -> T {
        let admin = self.node(node).admin();
        in_time(path, admin.get(path)).await.expect(StatusCode::OK)
    }

    /// A node's gauges, its list and `nodes` all show what the witness sees of it.
    async fn agrees(&self, node: usize) -> bool {
        let name = self.node(node).name();
        let seen = witness(self, node);
        let mut gauges = Vec::new();
        for state in SessionState::ALL {
            gauges.push((state, self.sessions_in(node, state).await));
        }
        let list: SessionList = self.shows(node, &format!("/v1/sessions?node={name}")).await;
        let shown: Node = self.shows(node, "/v1/nodes/self").await;
        let of_node = |state| match state {
            SessionState::Running => shown.sessions_running,
            SessionState::Paused => shown.sessions_paused,
            SessionState::Frozen => shown.sessions_frozen,
            _ => 0,
        };
        let live = gauges.iter().filter(|(state, _)| !state.is_ended());
        let consistent = live.clone().all(|(state, count)| {
            let listed = list.sessions.iter().filter(|one| one.state == *state);
            listed.count() as u64 == *count && of_node(*state) == *count
        });
        let count = |wanted: &[SessionState]| -> u64 {
            let counted = live.clone().filter(|(state, _)| wanted.contains(state));
            counted.map(|(_, count)| *count).sum()
        };
        let still = [SessionState::Frozen, SessionState::Paused];
        consistent
            && count(&[SessionState::Running]) == seen.running
            && count(&still) == seen.frozen
            // A node that changes meanwhile proves nothing.
            && witness(self, node) == seen
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_40_while_etcd_is_away_all_that_is_shown_is_what_a_witness_sees() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    for (node, id) in [(0, "a"), (0, "b"), (1, "c"), (1, "p")] {
        let generation = fleet.ensure_on(node, id).await.generation.get();
        fleet.goes_on(id, generation).await;
    }
    let pause = "/v1/sessions/p/pause";
    let paused = fleet.node(1).admin().post(pause, &json!(null)).await;
    assert_eq!(paused.status, StatusCode::OK, "{}", paused.text());
    eventually(
        "another node shows it as paused, too",
        PATIENCE,
        async || {
            let list: SessionList = fleet.shows(0, "/v1/sessions?state=paused").await;
            list.sessions.len() == 1
        },
    )
    .await;
    for (node, (running, frozen)) in [(0, (2, 0)), (1, (1, 1))] {
        eventually("it agrees", PATIENCE, async || {
            witness(&fleet, node) == Seen { running, frozen } && fleet.agrees(node).await
        })
        .await;
    }

    for member in fleet.cluster.members() {
        member.kill().expect("killed");
    }
    for node in [0, 1] {
        eventually("everything is frozen", PATIENCE, async || {
            let seen = witness(&fleet, node);
            seen.running == 0 && seen.frozen == 2
        })
        .await;
        eventually("it says so", PATIENCE, async || {
            fleet.agrees(node).await
                && fleet.sessions_in(node, SessionState::Frozen).await == 2
                && fleet.peers_that_are(node, NodeStanding::Fenced).await == 1
                && fleet.peers_that_are(node, NodeStanding::Silent).await == 1
        })
        .await;
    }
    shows_without_etcd(&fleet).await;

    for member in fleet.cluster.members() {
        member.start().expect("started");
    }
    fleet.all_ready().await;
    for (node, (running, frozen)) in [(0, (2, 0)), (1, (1, 1))] {
        eventually("it runs again", PATIENCE, async || {
            witness(&fleet, node) == Seen { running, frozen } && fleet.agrees(node).await
        })
        .await;
        eventually("nothing is warned of", PATIENCE, async || {
            let list: SessionList = fleet.shows(node, "/v1/sessions").await;
            let nodes: NodeList = fleet.shows(node, "/v1/nodes").await;
            list.warnings.is_empty() && list.sessions.len() == 4 && nodes.warnings.is_empty()
        })
        .await;
    }
    fleet.leaves_nothing().await;
}

/// `ps`, `nodes`, `inspect`, `logs` and `why` of a node's own sessions.
async fn shows_without_etcd(fleet: &Fleet) {
    let begun = monotonic_ns();
    let list: SessionList = fleet.shows(0, "/v1/sessions").await;
    let ids: Vec<_> = list.sessions.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(ids, ["a", "b"]);
    assert!(list.warnings[0].contains("node n1"), "{list:?}");
    let nodes: NodeList = fleet.shows(0, "/v1/nodes").await;
    let endpoint = &fleet.cluster.layout().endpoints()[0];
    let port = endpoint.rsplit(':').next().expect("a port");
    assert!(nodes.warnings[0].contains(port), "{:?}", nodes.warnings);
    let session: Session = fleet.shows(0, "/v1/sessions/a").await;
    assert_eq!(session.state, SessionState::Frozen);
    let story: Timeline = fleet.shows(0, "/v1/sessions/a/timeline").await;
    assert!(!story.events.is_empty());
    assert!(
        story.fleet.is_some_and(|it| it.registry_error.is_some()),
        "it does not say that etcd is away"
    );
    let path = "/v1/sessions/a/logs";
    let logs = in_time(path, fleet.node(0).api().get(path)).await;
    assert_eq!(logs.status, StatusCode::OK, "{}", logs.text());
    measured("all that is shown without etcd", begun, monotonic_ns());
    // As a person at the other node asks.
    let asked: [(&[&str], &str); 5] = [
        (&["ps"], "frozen"),
        (&["nodes"], "fenced"),
        (&["inspect", "c"], "frozen"),
        (&["why", "c"], "frozen"),
        (&["logs", "c"], ""),
    ];
    for (words, part) in asked {
        let said = in_time(&words.join(" "), printed(fleet, words, 0)).await;
        assert!(said.contains(part), "{words:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: row 40 without etcd stays"]
async fn row_40_a_silent_node_and_its_sessions_are_shown_as_what_a_witness_sees() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).members(1).short()).await
    else {
        return;
    };
    let generation = fleet.ensure_on(0, "s").await.generation.get();
    fleet.goes_on("s", generation).await;
    eventually("it is announced", PATIENCE, async || {
        let node: Node = fleet.shows(1, "/v1/nodes/n1").await;
        node.sessions_running == 1
    })
    .await;
    fleet.cut_off(0);
    let silent = eventually_some("it is silent", PATIENCE, async || {
        let node: Node = fleet.shows(1, "/v1/nodes/n1").await;
        let gauge = fleet.peers_that_are(1, NodeStanding::Silent).await;
        let standing = node.fleet.as_ref().expect("of a fleet").standing;
        (standing == NodeStanding::Silent && gauge == 1).then_some(node)
    })
    .await;
    let frozen = Seen {
        running: 0,
        frozen: 1,
    };
    assert_eq!(witness(&fleet, 0), frozen);
    assert_eq!((silent.sessions_running, silent.sessions_frozen), (0, 1));
    is_shown_as_frozen(&fleet).await;
    eventually("it is lost", PATIENCE, async || {
        fleet.peers_that_are(1, NodeStanding::Fenced).await == 1
    })
    .await;
    assert_eq!(witness(&fleet, 0).running, 0);
    is_shown_as_frozen(&fleet).await;
    assert!(fleet.agrees(0).await, "the lost node itself");

    // Once another node has it, it is counted there alone.
    let next = fleet.ensure_after(1, "s", generation).await;
    fleet.goes_on("s", next.generation.get()).await;
    eventually("the new node agrees", PATIENCE, async || {
        fleet.agrees(1).await
    })
    .await;
    let list: SessionList = fleet.shows(1, "/v1/sessions").await;
    let shown = list
        .sessions
        .iter()
        .map(|one| (one.node.as_str(), one.state));
    assert_eq!(shown.collect::<Vec<_>>(), [("n2", SessionState::Running)]);
    let nodes: NodeList = fleet.shows(1, "/v1/nodes").await;
    let running: u64 = nodes.nodes.iter().map(|node| node.sessions_running).sum();
    let seen = [0, 1].map(|node| witness(&fleet, node).running);
    assert_eq!((running, seen.iter().sum()), (1, 1));
    fleet.leaves_nothing().await;
}

async fn is_shown_as_frozen(fleet: &Fleet) {
    let list: SessionList = fleet.shows(1, "/v1/sessions").await;
    assert_eq!(list.sessions[0].state, SessionState::Frozen, "{list:?}");
    assert!(list.sessions[0].reason.is_some());
}
