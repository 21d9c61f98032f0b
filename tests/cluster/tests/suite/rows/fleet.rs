//! A fleet whose sessions are witnesses, and what is asked of it again and again.

use std::path::Path;
use std::time::Duration;

use conman_cluster::overlap::{Life, SERVING, TEMPLATE, Tail, journal, monotonic_ns};
use conman_cluster::{Builder, Cluster, Cut, Holdings, Node, QUIET_MACHINE, requirements};
use conman_core::ownership::Timing;
use conman_e2e::{Answer, eventually, eventually_some, slowness};
use conman_proto::{EnsureResponse, NodeList, NodeStanding, Session, SessionList, SessionState};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::shown::witness;

const WITNESS: &str = env!("CARGO_BIN_EXE_witness");

/// Bound on anything that must come about, on a loaded machine: far above what it takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// A client's patience with a node that may stand still.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two looks at what is left.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// By when everything is to be as it was before there was a session.
const BASELINE_MS: u64 = 30_000;
/// Lines that show that a witness goes on.
const SOME_LINES: u64 = 5;

pub(crate) struct Fleet {
    pub(crate) cluster: Cluster,
    /// What each node had before there was a session.
    before: Vec<Holdings>,
    timing: Timing,
    tail: Tail,
}

impl Fleet {
    /// `None` on a machine that can hold none, which has been said then.
    pub(crate) async fn start(builder: Builder) -> Option<Self> {
        let ready = requirements()?;
        let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
        let cluster = cluster.expect("a cluster");
        let tail = Tail::open(&journal(cluster.layout())).expect("the journal");
        let timing = *builder.timing();
        let before = cluster.nodes().iter().map(Node::holdings);
        let before = before.collect::<Result<_, _>>().expect("what nodes have");
        Some(Self {
            before,
            cluster,
            timing,
            tail,
        })
    }

    /// The same of nodes that share etcd.
    pub(crate) async fn shared(builder: Builder) -> Option<Self> {
        use std::io::Write as _;
        if !builder.is_joined() {
            let _ = writeln!(std::io::stderr(), "skipped: the nodes share no registry");
            return None;
        }
        let fleet = Self::start(builder).await?;
        fleet.know_each_other().await;
        Some(fleet)
    }

    /// Waits until each node has heard from all others what they take.
    async fn know_each_other(&self) {
        for asked in self.cluster.nodes() {
            eventually("they know each other", PATIENCE, async || {
                let list: NodeList = asked.admin().get("/v1/nodes").await.expect(StatusCode::OK);
                let live = list.nodes.iter().filter(|node| {
                    let its = node.fleet.as_ref().map(|fleet| fleet.standing);
                    its == Some(NodeStanding::Live)
                });
                live.count() == self.cluster.nodes().len()
            })
            .await;
        }
    }

    /// When what a node had is to be served elsewhere that went without a word.
    pub(crate) fn served_again_ms(&self) -> u64 {
        self.timing().takeover_ms + 2_000
    }

    /// The fleet's time-outs.
    pub(crate) fn timing(&self) -> Timing {
        self.timing
    }

    /// Cuts a node off all other hosts.
    pub(crate) fn cut_off(&self, node: usize) {
        let own = self.node(node).host().clone();
        for other in self.cluster.layout().hosts() {
            if other != own {
                let cut = Cut::Between(own.clone(), other);
                self.cluster.cut(&cut).expect("cut");
            }
        }
    }

    pub(crate) fn node(&self, index: usize) -> &Node {
        &self.cluster.nodes()[index]
    }

    /// Asks a node for a witness that is to be restarted when its node goes, until one runs.
    pub(crate) async fn ensure_restarting(&self, node: usize, id: &str) -> Session {
        let body = json!({"template": TEMPLATE, "on_node_loss": "restart"});
        let path = format!("/v1/sessions/{id}");
        eventually_some("it runs", PATIENCE, async || {
            let answer = self.ask(node, Method::PUT, &path, Some(&body)).await?;
            if !answer.status.is_success() {
                return None;
            }
            let response: EnsureResponse = answer.expect(answer.status);
            Some(response.session)
        })
        .await
    }

    /// Asks a node for a witness until one runs, wherever that is.
    pub(crate) async fn ensure(&self, node: usize, id: &str) -> Session {
        self.ensure_after(node, id, 0).await
    }

    /// The same until one of a greater generation runs.
    pub(crate) async fn ensure_after(&self, node: usize, id: &str, generation: u64) -> Session {
        let what = format!("n{} has {id} run, later than {generation}", node + 1);
        eventually_some(&what, PATIENCE, async || {
            let answer = self.try_ensure(node, id).await?;
            if !answer.status.is_success() {
                return None;
            }
            let response: EnsureResponse = answer.expect(answer.status);
            (response.session.generation.get() > generation).then_some(response.session)
        })
        .await
    }

    /// Asks a node until a witness runs on that very node, whatever the machine's load.
    pub(crate) async fn ensure_on(&self, node: usize, id: &str) -> Session {
        let name = self.node(node).name();
        let what = format!("{id} runs on {name}");
        eventually_some(&what, PATIENCE, async || {
            let answer = self.try_ensure_on(node, id).await?;
            if !answer.status.is_success() {
                return None;
            }
            let response: EnsureResponse = answer.expect(answer.status);
            Some(response.session)
        })
        .await
    }

    /// Has a witness that answers its clients run on that very node, as one that any other may have
    /// next: its generation. The others have no sessions, for they drain meanwhile.
    pub(crate) async fn serve_on(&mut self, node: usize, id: &str) -> u64 {
        self.others_drain(node, true).await;
        let path = format!("/v1/sessions/{id}");
        let body = json!({"template": SERVING});
        let what = format!("{id} serves");
        let session = eventually_some(&what, PATIENCE, async || {
            let answer = self.ask(node, Method::PUT, &path, Some(&body)).await?;
            if !answer.status.is_success() {
                return None;
            }
            let response: EnsureResponse = answer.expect(answer.status);
            Some(response.session)
        })
        .await;
        assert_eq!(session.node, self.node(node).name());
        self.others_drain(node, false).await;
        let generation = session.generation.get();
        self.goes_on(id, generation).await;
        generation
    }

    /// Has all nodes but one drain, or not any more, and waits until each knows that of each.
    pub(crate) async fn others_drain(&self, node: usize, drain: bool) {
        let others: Vec<usize> = (0..self.cluster.nodes().len())
            .filter(|other| *other != node)
            .collect();
        let path = match drain {
            true => "/v1/nodes/self/drain",
            false => "/v1/nodes/self/undrain",
        };
        for other in &others {
            let answer = self.node(*other).admin().post(path, &json!({})).await;
            assert!(answer.status.is_success(), "{}", answer.text());
        }
        self.know_who_drains(&others, drain).await;
    }

    /// Waits until each node knows of these that they drain, or do not.
    pub(crate) async fn know_who_drains(&self, these: &[usize], drain: bool) {
        for asked in self.cluster.nodes() {
            eventually("they know who drains", PATIENCE, async || {
                let list: NodeList = asked.admin().get("/v1/nodes").await.expect(StatusCode::OK);
                these.iter().all(|other| {
                    let name = self.node(*other).name();
                    let mut found = list.nodes.iter().filter(|one| one.name == name);
                    found.any(|one| one.fleet.as_ref().is_some_and(|one| one.draining == drain))
                })
            })
            .await;
        }
    }

    /// Asks once for one on that very node.
    pub(crate) async fn try_ensure_on(&self, node: usize, id: &str) -> Option<Answer> {
        let name = self.node(node).name();
        let path = format!("/v1/sessions/{id}?node_label=host%3D{name}");
        let body = json!({"template": TEMPLATE});
        self.ask(node, Method::PUT, &path, Some(&body)).await
    }

    /// Has a session end, whatever befalls the registry for a moment.
    pub(crate) async fn stop(&self, node: usize, id: &str) {
        let path = format!("/v1/sessions/{id}");
        eventually("it is stopped", PATIENCE, async || {
            let answer = self.ask(node, Method::DELETE, &path, None).await;
            answer.is_some_and(|answer| answer.status == StatusCode::OK)
        })
        .await;
    }

    /// Asks once; `None` without an answer in time.
    pub(crate) async fn try_ensure(&self, node: usize, id: &str) -> Option<Answer> {
        let body = json!({"template": TEMPLATE});
        self.ask(
            node,
            Method::PUT,
            &format!("/v1/sessions/{id}"),
            Some(&body),
        )
        .await
    }

    /// How often a node's fence has closed: all that it runs was frozen, or killed, since its
    /// ownership was not renewed.
    pub(crate) async fn closings(&self, node: usize) -> u64 {
        self.lapses(node, "fenced").await
    }

    /// How often a node's renewal was `late`, or too late (`fenced`).
    pub(crate) async fn lapses(&self, node: usize, to: &str) -> u64 {
        let admin = self.node(node).admin();
        let text = admin.send(Method::GET, "/metrics", None).await.text();
        let counter = format!(r#"conman_fleet_lapses_total{{to="{to}"}} "#);
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(&counter));
        let count = line.expect("it is counted");
        count.trim().parse().expect("a number")
    }

    /// Waits until a node renews its ownership in etcd.
    pub(crate) async fn renews(&self, node: usize) {
        let key = format!("/conman/heartbeat/{}", self.node(node).name());
        let member = &self.cluster.members()[0];
        let heartbeat = || member.value(&key).expect("etcd answers");
        let before = heartbeat();
        eventually("it renews", PATIENCE, async || heartbeat() != before).await;
    }

    /// Waits until the kernel has frozen all sessions of a node.
    pub(crate) async fn is_frozen(&self, node: usize) {
        eventually("its sessions are frozen", PATIENCE, async || {
            witness(self, node).running == 0
        })
        .await;
    }

    /// Waits until a node that cannot renew has closed its fence, and the kernel has frozen its
    /// sessions.
    pub(crate) async fn is_fenced(&self, node: usize) {
        eventually("its ownership lapses", PATIENCE, async || {
            let readiness = self.node(node).readiness().await;
            readiness.is_err_and(|why| why.contains("ownership has lapsed"))
        })
        .await;
        self.is_frozen(node).await;
    }

    pub(crate) async fn ask(
        &self,
        node: usize,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Option<Answer> {
        let api = self.node(node).api();
        let asked = timeout(ANSWER, api.try_send(method, path, body)).await;
        asked.ok()?.ok()
    }

    /// Asks any node for what runs already, until it answers: that goes on, and no other one begins.
    pub(crate) async fn is_one(&mut self, node: usize, id: &str, generation: u64) {
        let told = self.ensure(node, id).await;
        assert_eq!(told.generation.get(), generation);
        self.goes_on(id, generation).await;
        let newest = self.lives(id).pop().expect("it lives");
        assert_eq!(newest.generation, generation);
    }

    /// The lives of a session so far.
    pub(crate) fn lives(&mut self, id: &str) -> Vec<Life> {
        self.tail.catch_up().expect("the journal can be read");
        self.tail.checker().lives(id)
    }

    /// The life of a generation, if it has begun.
    pub(crate) fn life(&mut self, id: &str, generation: u64) -> Option<Life> {
        let lives = self.lives(id).into_iter();
        lives.into_iter().find(|life| life.generation == generation)
    }

    /// Waits until a life writes, from now on.
    pub(crate) async fn goes_on(&mut self, id: &str, generation: u64) -> Life {
        let before = self.life(id, generation).map_or(0, |life| life.lines);
        let what = format!("{id}.{generation} goes on");
        let tail = &mut self.tail;
        eventually_some(&what, PATIENCE, async || {
            tail.catch_up().expect("the journal can be read");
            let lives = tail.checker().lives(id);
            let mut lives = lives.into_iter();
            lives.find(|life| life.generation == generation && life.lines > before + SOME_LINES)
        })
        .await
    }

    /// Waits until a life has not written for `quiet`: when its last line was.
    pub(crate) async fn stands_still(&mut self, id: &str, generation: u64, quiet: Duration) -> u64 {
        let quiet = u64::try_from(quiet.as_nanos()).expect("a short time");
        let tail = &mut self.tail;
        let what = format!("{id}.{generation} stands still");
        eventually_some(&what, PATIENCE, async || {
            // Read before the journal: what is written meanwhile is later.
            let now = monotonic_ns();
            tail.catch_up().expect("the journal can be read");
            let lives = tail.checker().lives(id);
            let life = lives.into_iter().find(|life| life.generation == generation);
            let last = life?.last_ns;
            (now.saturating_sub(last) > quiet).then_some(last)
        })
        .await
    }

    /// No two ever ran, and every later one has a greater generation.
    pub(crate) fn judge(&mut self) {
        let report = self.tail.catch_up().expect("the journal can be read");
        let violations: Vec<String> = report.violations.iter().map(ToString::to_string).collect();
        assert_eq!(violations, Vec::<String>::new(), "{report}");
        assert!(report.lines > 0, "nothing was witnessed");
    }

    /// A row's last word: has every session end, and waits until nothing of any is left where a
    /// daemon runs, or anything runs at all.
    pub(crate) async fn leaves_nothing(mut self) {
        self.judge();
        self.cluster.heal().expect("healed");
        let runs = |node: &Node| node.daemon_pid().is_some() && matches!(node.ended(), Ok(None));
        let nodes = 0..self.cluster.nodes().len();
        let running: Vec<usize> = nodes
            .clone()
            .filter(|&node| runs(self.node(node)))
            .collect();
        if let Some(&asked) = running.first() {
            self.end_all(asked).await;
        }
        for &node in &running {
            // A preempted one leaves it to its machine's end, unless that does not come.
            let admin = self.node(node).admin();
            let path = "/v1/nodes/self/readmit";
            let _ = admin.send(Method::POST, path, None).await;
        }
        let begun = monotonic_ns();
        for node in nodes {
            let mut beyond = Vec::new();
            let deadline = Instant::now() + PATIENCE * slowness();
            while Instant::now() < deadline {
                beyond = self.beyond(node, running.contains(&node));
                if beyond.is_empty() {
                    break;
                }
                sleep(LOOK_EVERY).await;
            }
            assert_eq!(beyond, Vec::<String>::new(), "{}", self.node(node).name());
        }
        within(
            BASELINE_MS,
            "from the last session's end until nothing is left",
            begun,
            monotonic_ns(),
        );
        self.judge();
    }

    async fn end_all(&self, asked: usize) {
        eventually("every session has ended", PATIENCE, async || {
            let list = self
                .ask(asked, Method::GET, "/v1/sessions?limit=1000", None)
                .await;
            let Some(list) = list.filter(|answer| answer.status == StatusCode::OK) else {
                return false;
            };
            let list: SessionList = list.expect(StatusCode::OK);
            let ended = [SessionState::Stopped, SessionState::Failed];
            let live = list
                .sessions
                .iter()
                .filter(|one| !ended.contains(&one.state));
            let mut any = false;
            for one in live {
                any = true;
                let path = format!("/v1/sessions/{}", one.id);
                let _ = self.ask(asked, Method::DELETE, &path, None).await;
            }
            !any
        })
        .await;
    }

    /// What a node has that it did not have before there was a session.
    pub(crate) fn beyond(&self, node: usize, runs: bool) -> Vec<String> {
        let processes = self.node(node).session_processes().into_iter();
        let mut found: Vec<String> = processes.map(|one| format!("process {one:?}")).collect();
        if runs {
            let now = self.node(node).holdings().expect("what it has");
            found.extend(now.beyond(&self.before[node]));
        }
        found
    }

    /// Waits until all nodes are ready.
    pub(crate) async fn all_ready(&self) {
        for node in self.cluster.nodes() {
            eventually("it is ready", PATIENCE, async || {
                assert!(
                    matches!(node.ended(), Ok(None)),
                    "the daemon of {} has ended: {}",
                    node.name(),
                    node.log()
                );
                node.readiness().await.is_ok()
            })
            .await;
        }
    }

    /// Has a node be preempted.
    pub(crate) async fn preempt(&self, node: usize) -> Answer {
        let body = json!({"reason": "a test"});
        let admin = self.node(node).admin();
        let answer = admin.post("/v1/nodes/self/preempt", &body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer
    }
}

/// Whether figures are to be judged.
pub(crate) fn is_quiet() -> bool {
    std::env::var_os(QUIET_MACHINE).is_some()
}

/// What a loaded machine may add to a bound, to a moment's at most, and how many times as long it may
/// take. A moment may have a packet that is lost, which is sent again after a second.
const LOADED_MS: u64 = 5_000;
const MOMENT_MS: u64 = 2_000;
const LOADED_TIMES: u64 = 3;

/// Tells how long it took, and that it was no longer than this; where the machine is not quiet, not
/// out of all proportion to it.
pub(crate) fn within(bound_ms: u64, what: &str, from_ns: u64, to_ns: u64) {
    judge(bound_ms, LOADED_MS, what, to_ns.saturating_sub(from_ns));
}

/// The same of what is over in a moment, of which a loaded machine has others beside.
pub(crate) fn momentary(bound_ms: u64, what: &str, took_ns: u64) {
    judge(bound_ms, MOMENT_MS, what, took_ns);
}

fn judge(bound_ms: u64, loaded_ms: u64, what: &str, took_ns: u64) {
    measured(what, 0, took_ns);
    let took_ms = took_ns / 1_000_000;
    let judged_ms = match is_quiet() {
        true => bound_ms,
        false => (LOADED_TIMES * bound_ms + loaded_ms) * u64::from(slowness()),
    };
    assert!(
        took_ms <= judged_ms,
        "{what}: {took_ms} ms, not {judged_ms} ms at most"
    );
}

/// Tells what was measured: figures belong to a quiet machine, not to a verdict.
pub(crate) fn measured(what: &str, from_ns: u64, to_ns: u64) {
    use std::io::Write as _;
    let ms = to_ns.saturating_sub(from_ns) / 1_000_000;
    // Not by `println!`, which the test harness keeps to itself where a test passes.
    let _ = writeln!(std::io::stderr(), "measured: {what}: {ms} ms");
}
