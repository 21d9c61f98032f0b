//! Daemons and shims that die or stand still.

use std::time::Duration;

use conman_cluster::overlap::{TEMPLATE, monotonic_ns};
use conman_cluster::{Cluster, Node};
use conman_e2e::{eventually, eventually_some};
use conman_linux::Signal;
use conman_proto::EnsureResponse;
use serde_json::json;
use tokio::net::UnixDatagram;
use tokio::time::{sleep, timeout};

use super::fleet::{Fleet, PATIENCE, within};
use super::load::Bystander;

/// Sessions that a fault is to leave alone.
const SESSIONS: [&str; 4] = ["a", "b", "c", "d"];

pub(crate) async fn started(fleet: &mut Fleet) -> Vec<u64> {
    let mut generations = Vec::new();
    for id in SESSIONS {
        let session = fleet.ensure(0, id).await;
        let generation = session.generation.get();
        fleet.goes_on(id, generation).await;
        generations.push(generation);
    }
    generations
}

/// The very processes that ran before.
pub(crate) async fn untouched(fleet: &mut Fleet, generations: &[u64]) {
    for (id, generation) in SESSIONS.into_iter().zip(generations) {
        fleet.goes_on(id, *generation).await;
        assert_eq!(fleet.lives(id).len(), 1, "{id} was restarted");
    }
    fleet.judge();
}

#[tokio::test]
async fn row_01_daemon_crash_at_any_moment_restarts_no_session() {
    let builder = Cluster::builder().nodes(1).short();
    let Some(mut fleet) = Fleet::start(builder).await else {
        return;
    };
    let generations = started(&mut fleet).await;
    let mut random = fastrand::Rng::with_seed(1);
    // Kills in a row, before it is ready, would make it wait for minutes.
    let failed_starts = fleet.cluster.layout().state_dir("n1").join("failed-starts");
    for _ in 0..10 {
        fleet.node(0).kill_daemon().expect("killed");
        let _ = std::fs::remove_file(&failed_starts);
        fleet.node(0).start().expect("started");
        // While it opens, adopts, joins, serves.
        sleep(Duration::from_millis(random.u64(0..800))).await;
    }
    fleet.node(0).kill_daemon().expect("killed");
    let _ = std::fs::remove_file(&failed_starts);
    let begun = monotonic_ns();
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    within(
        2_000,
        "from a daemon's start to its readiness",
        begun,
        monotonic_ns(),
    );
    untouched(&mut fleet, &generations).await;
    fleet.leaves_nothing().await;
}

/// All of the daemon stands still, and the test is the service manager.
#[tokio::test]
async fn row_03_daemon_deadlock_is_noticed_by_the_watchdog_and_the_next_one_adopts_all() {
    let builder = Cluster::builder().nodes(1).short();
    let Some(mut fleet) = Fleet::start(builder).await else {
        return;
    };
    let generations = started(&mut fleet).await;
    fleet.node(0).kill_daemon().expect("killed");
    let path = fleet.cluster.layout().directory.join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket can be made");
    start_watched(fleet.node(0), &path);
    assert!(
        alive(&socket, PATIENCE).await,
        "the daemon says that it lives"
    );
    fleet
        .node(0)
        .signal_daemon(Signal::SIGSTOP)
        .expect("stopped");
    // What it said before is read first; then nothing comes, for longer than it promised.
    let silence = Duration::from_micros(WATCHDOG_US) * 5;
    eventually("the watchdog is not fed any more", PATIENCE, async || {
        !alive(&socket, silence).await
    })
    .await;
    fleet.node(0).kill_daemon().expect("killed");
    start_watched(fleet.node(0), &path);
    fleet.all_ready().await;
    assert!(alive(&socket, PATIENCE).await, "the next one lives");
    untouched(&mut fleet, &generations).await;
    fleet.leaves_nothing().await;
}

/// The tasks that a daemon of a fleet cannot do without.
#[cfg(debug_assertions)]
const ESSENTIAL: [&str; 16] = [
    "ownership",
    "membership",
    "fence orders",
    "orders",
    "announcer",
    "restarter",
    "clean-up",
    "end orders",
    "reconciler",
    "runtime health",
    "API",
    "admin API",
    "sessions acceptor",
    "sessions proxy",
    "peers acceptor",
    "peers proxy",
];

/// What one that is alone cannot do without beside them; in a fleet whoever drives the fence does it.
#[cfg(debug_assertions)]
const ESSENTIAL_ALONE: [&str; 1] = ["shim keeper"];

/// What starts the daemon anew, and how long that takes by itself: `WatchdogSec` and `RestartSec`.
#[cfg(debug_assertions)]
const UNIT: &str = include_str!("../../../../../deploy/systemd/conman.service");
#[cfg(debug_assertions)]
const UNIT_MS: u64 = 6_100;

/// What a node's daemon reads who is to hang or to panic from; builds for debugging do.
#[cfg(debug_assertions)]
struct Failpoint(std::path::PathBuf);

#[cfg(debug_assertions)]
impl Failpoint {
    /// `None` where it is not known how the binary was built.
    fn of(fleet: &Fleet) -> Option<Self> {
        use std::io::Write as _;
        if std::env::var_os("CONMAN_E2E_BINARY").is_some() {
            let _ = writeln!(
                std::io::stderr(),
                "skipped: no failpoints in a given binary"
            );
            return None;
        }
        Some(Self(fleet.cluster.layout().directory.join("failpoint")))
    }

    fn start(&self, node: &Node, socket: Option<&std::path::Path>) {
        let started = node.start_with(|serve| {
            if let Some(socket) = socket {
                watched(serve, socket);
            }
            serve.env("CONMAN_FAILPOINT_FILE", &self.0);
        });
        started.expect("started");
    }

    /// Written whole or not at all.
    fn set(&self, what: &str) {
        let new = self.0.with_extension("new");
        std::fs::write(&new, what).expect("written");
        std::fs::rename(new, &self.0).expect("renamed");
    }
}

#[cfg(debug_assertions)]
#[tokio::test]
async fn row_03_each_task_that_hangs_ends_the_signs_of_life_until_it_goes_on() {
    let builder = Cluster::builder().nodes(1).short();
    let Some(fleet) = Fleet::shared(builder).await else {
        return;
    };
    each_hangs(fleet, &ESSENTIAL).await;
}

#[cfg(debug_assertions)]
#[tokio::test]
#[ignore = "in acceptance: the form in a fleet stays"]
async fn row_03_each_task_that_hangs_on_a_node_of_its_own_ends_the_signs_of_life() {
    let builder = Cluster::builder().nodes(1).apart();
    let Some(fleet) = Fleet::start(builder).await else {
        return;
    };
    each_hangs(fleet, &ESSENTIAL_ALONE).await;
}

/// Has one after the other hang, and go on.
#[cfg(debug_assertions)]
async fn each_hangs(mut fleet: Fleet, tasks: &[&str]) {
    for line in ["WatchdogSec=6s", "RestartSec=100ms"] {
        assert!(UNIT.lines().any(|one| one == line), "`UNIT_MS` has {line}");
    }
    let generations = started(&mut fleet).await;
    fleet.node(0).kill_daemon().expect("killed");
    let path = fleet.cluster.layout().directory.join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket can be made");
    let Some(failpoint) = Failpoint::of(&fleet) else {
        return;
    };
    failpoint.start(fleet.node(0), Some(&path));
    fleet.all_ready().await;
    for task in tasks {
        assert!(alive(&socket, PATIENCE).await, "before {task} hangs");
        let begun = monotonic_ns();
        failpoint.set(task);
        // One's name may be within another's.
        let is_still = |line: &str| {
            let names = line.strip_prefix("STATUS=standing still: ");
            names.is_some_and(|names| names.split(", ").any(|name| name == *task))
        };
        let noticed = async { while !is_still(&told(&socket, task).await) {} };
        let noticed = timeout(PATIENCE, noticed).await;
        noticed.unwrap_or_else(|_| panic!("{task} hangs, and the daemon says that it lives"));
        within(
            10_000 - UNIT_MS,
            "from a task's hang to the daemon's last sign of life",
            begun,
            monotonic_ns(),
        );
        // It hangs until it is allowed to go on, so that nothing may say that the daemon lives.
        for _ in 0..3 {
            let line = told(&socket, task).await;
            assert!(is_still(&line), "{task} hangs: {line}");
        }
        failpoint.set("nobody");
    }
    assert!(alive(&socket, PATIENCE).await, "all go on");
    untouched(&mut fleet, &generations).await;
    fleet.leaves_nothing().await;
}

#[cfg(debug_assertions)]
#[tokio::test]
async fn row_03_a_task_that_panics_ends_the_daemon_and_the_next_one_adopts_all() {
    use std::os::unix::process::ExitStatusExt as _;

    const SIGABRT: i32 = 6;
    let builder = Cluster::builder().nodes(1).short();
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let generations = started(&mut fleet).await;
    let Some(failpoint) = Failpoint::of(&fleet) else {
        return;
    };
    for task in [
        "ownership",
        "membership",
        "fence orders",
        "reconciler",
        "restarter",
    ] {
        fleet.node(0).kill_daemon().expect("killed");
        failpoint.set("nobody");
        failpoint.start(fleet.node(0), None);
        fleet.all_ready().await;
        failpoint.set(&format!("panic {task}"));
        let status = eventually_some("the daemon ends", PATIENCE, async || {
            fleet.node(0).ended().expect("it can be looked after")
        })
        .await;
        assert_eq!(status.signal(), Some(SIGABRT), "{task}: {status}");
        let log = fleet.node(0).log();
        let message = format!("essential task ended: {task}, it panicked");
        assert!(log.contains(&message), "{message}: {log}");
    }
    fleet.node(0).kill_daemon().expect("killed");
    failpoint.set("nobody");
    failpoint.start(fleet.node(0), None);
    fleet.all_ready().await;
    untouched(&mut fleet, &generations).await;
    fleet.leaves_nothing().await;
}

/// The next line that the daemon tells.
#[cfg(debug_assertions)]
async fn told(socket: &UnixDatagram, task: &str) -> String {
    let mut bytes = [0; 4_096];
    let length = timeout(PATIENCE, socket.recv(&mut bytes)).await;
    let length = length.unwrap_or_else(|_| panic!("nothing is told of {task}"));
    let length = length.expect("the socket is open");
    String::from_utf8_lossy(&bytes[..length]).trim().to_owned()
}

/// Shorter than a service's, so that the test is.
const WATCHDOG_US: u64 = 600_000;

fn start_watched(node: &Node, socket: &std::path::Path) {
    let started = node.start_with(|serve| watched(serve, socket));
    started.expect("started");
}

fn watched(serve: &mut std::process::Command, socket: &std::path::Path) {
    serve.env("NOTIFY_SOCKET", socket);
    serve.env("WATCHDOG_USEC", WATCHDOG_US.to_string());
}

/// Whether the daemon tells within this time that it lives.
async fn alive(socket: &UnixDatagram, patience: Duration) -> bool {
    let told = async {
        let mut bytes = [0; 4_096];
        loop {
            let length = socket.recv(&mut bytes).await.expect("the socket is open");
            let text = String::from_utf8_lossy(&bytes[..length]);
            if text.lines().any(|line| line == "WATCHDOG=1") {
                return;
            }
        }
    };
    timeout(patience, told).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_shim_killed_leaves_its_containers_to_the_next_one() {
    let builder = Cluster::builder().nodes(1).short();
    let Some(mut fleet) = Fleet::start(builder).await else {
        return;
    };
    let generations = started(&mut fleet).await;
    let old = fleet.node(0).shim_pids();
    let bystander = Bystander::begin(&fleet, 0, &[0]).await;
    let begun = monotonic_ns();
    fleet.node(0).kill_shim().expect("killed");
    eventually("another shim stands", PATIENCE, async || {
        let now = fleet.node(0).shim_pids();
        !now.is_empty() && now.iter().all(|pid| !old.contains(pid))
    })
    .await;
    within(
        2_000,
        "from a shim's death to the next one",
        begun,
        monotonic_ns(),
    );
    untouched(&mut fleet, &generations).await;
    bystander.saw_nothing().await;
    // Both the old sessions and new ones can be ended: nothing leaked.
    let more = fleet.ensure(0, "more").await.generation.get();
    fleet.goes_on("more", more).await;
    for id in SESSIONS.into_iter().chain(["more", "bystander"]) {
        fleet.stop(0, id).await;
    }
    assert_eq!(fleet.node(0).session_processes(), []);
    fleet.leaves_nothing().await;
}

#[tokio::test]
#[ignore = "in acceptance: conman-e2e `native_crash::`; the shim alone stays"]
async fn row_25_shim_and_daemon_killed_together_leave_their_containers_to_the_next_ones() {
    let builder = Cluster::builder().nodes(1).short();
    let Some(mut fleet) = Fleet::start(builder).await else {
        return;
    };
    let generations = started(&mut fleet).await;
    fleet.node(0).kill_daemon().expect("killed");
    fleet.node(0).kill_shim().expect("killed");
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    untouched(&mut fleet, &generations).await;
    fleet.leaves_nothing().await;
}

/// How often the first node's daemon has renewed late, or too late.
async fn lapses(fleet: &Fleet) -> u64 {
    fleet.lapses(0, "late").await + fleet.closings(0).await
}

#[tokio::test]
async fn a_node_that_has_just_said_that_it_is_ready_takes_a_session() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let mut taken = 0;
    while taken < 5 {
        fleet.node(0).kill_daemon().expect("killed");
        fleet.node(0).start().expect("started");
        fleet.node(0).wait_ready().await.expect("ready");
        let before = lapses(&fleet).await;
        let id = format!("s{taken}");
        let path = format!("/v1/sessions/{id}?node_label=host%3Dn1");
        let (api, body) = (fleet.node(0).api(), json!({"template": TEMPLATE}));
        let answer = api.put(&path, &body).await;
        if answer.status.is_success() {
            let response: EnsureResponse = answer.expect(answer.status);
            fleet.goes_on(&id, response.session.generation.get()).await;
            taken += 1;
            continue;
        }
        // The machine may have stood still for longer than a fence lasts, or nearly so.
        let readiness = fleet.node(0).readiness().await;
        let lapsed = lapses(&fleet).await > before;
        assert!(
            readiness.is_err() || lapsed,
            "ready, and yet: {}",
            answer.text()
        );
    }
    fleet.judge();
}
