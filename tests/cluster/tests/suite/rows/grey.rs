//! An etcd that is slow or refuses: nothing is frozen without need, and little is asked of it.

mod half;

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use conman_cluster::overlap::monotonic_ns;
use conman_cluster::{Cluster, Delay, Member};
use conman_e2e::eventually;
use http::Method;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::events::kill_sessions_of;
use super::fleet::{Fleet, PATIENCE, is_quiet, measured, momentary};

/// Above every generation that these tests use up.
const FLOOR: u64 = 10_000;
/// More writes than a short test's fleet makes.
const FOREIGN_WRITES: usize = 600;

/// Round trips below a third of the default F, as the matrix has them.
const SLOW_MS: [u64; 3] = [300, 600, 1_200];
/// Several renewals.
const SHORT: Duration = Duration::from_secs(8);
const TEN_MINUTES: Duration = Duration::from_secs(600);
/// A quota that is used up for so long freezes nobody; how much longer it may be, so that a renewal
/// follows in time.
const FULL_FOR: (Duration, Duration) = (Duration::from_secs(4), Duration::from_millis(300));
/// The same on a loaded machine, where the renewal follows later, and so does each step of the test.
const FULL_FOR_LOADED: (Duration, Duration) =
    (Duration::from_millis(2_500), Duration::from_secs(1));
/// A loaded machine that stands still for seconds closes a fence, too, but not each time.
const ATTEMPTS: u32 = 8;
/// Beyond F, so that everything is frozen.
const FULL_TOO_LONG: Duration = Duration::from_secs(15);
const FULL_FOR_A_MINUTE: Duration = Duration::from_secs(60);
/// Requests of one node that an etcd in trouble may get in a second.
const MAX_REQUESTS: u64 = 5;

fn modified(file: &Path) -> SystemTime {
    let metadata = fs::metadata(file).expect("a file");
    metadata.modified().expect("its time")
}

fn is_long() -> bool {
    std::env::var_os("CONMAN_CLUSTER_LONG").is_some()
}

/// Has a node reach etcd by a path that can be made slow.
fn slow_path(fleet: &Fleet, node: usize) -> Delay {
    let layout = fleet.cluster.layout();
    let (member, host) = (&fleet.cluster.members()[0], fleet.node(node).host());
    let namespace = layout.namespace_path(&host.name);
    let delay = Delay::open(&namespace, member.host().etcd()).expect("a path");
    let config = layout.host_directory(&host.name).join("conman.toml");
    let text = std::fs::read_to_string(&config).expect("readable");
    let (direct, slow) = (member.host().etcd(), delay.address());
    let text = text.replace(&format!("http://{direct}"), &format!("http://{slow}"));
    assert!(text.contains(&slow.to_string()), "{text}");
    std::fs::write(&config, text).expect("written");
    fleet.node(node).kill_daemon().expect("killed");
    fleet.node(node).start().expect("started");
    delay
}

async fn set_full(member: &Member, full: bool) {
    let status = member.post("/v3/maintenance/status", &json!({})).await;
    let status = status.expect("it answers");
    let own = status["header"]["member_id"].as_str().expect("a number");
    let action = if full { "ACTIVATE" } else { "DEACTIVATE" };
    let alarm = json!({"action": action, "memberID": own, "alarm": "NOSPACE"});
    let set = member.post("/v3/maintenance/alarm", &alarm).await;
    assert!(set.is_some(), "the alarm is set");
}

/// Unary requests that a member has begun so far.
async fn requests(member: &Member) -> u64 {
    let text = member.gateway().send(Method::GET, "/metrics", None).await;
    let text = text.text();
    let counted = text.lines().filter(|line| {
        line.starts_with("grpc_server_started_total{") && line.contains(r#"grpc_type="unary""#)
    });
    let counts = counted.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    counts.map(|count| count as u64).sum()
}

/// Lets an etcd with this round trip be for a while, in which no fence closes.
async fn closes_no_fence(fleet: &Fleet, round_trip_ms: u64) {
    let attempts = if is_quiet() { 1 } else { ATTEMPTS };
    for _ in 0..attempts {
        let before = fleet.closings(0).await;
        sleep(if is_long() { TEN_MINUTES } else { SHORT }).await;
        if fleet.closings(0).await == before {
            return;
        }
    }
    panic!("the fence closes at a round trip of {round_trip_ms} ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_41_and_42_etcd_that_is_slow_or_full_freezes_nothing_before_its_time() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(1).members(1)).await else {
        return;
    };
    let delay = slow_path(&fleet, 0);
    fleet.all_ready().await;
    let generation = fleet.ensure(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    for round_trip_ms in SLOW_MS {
        delay.set_round_trip(round_trip_ms);
        closes_no_fence(&fleet, round_trip_ms).await;
    }
    // What is asked of the fleet is slow, and done.
    let slow = fleet.ensure(0, "slow").await.generation.get();
    delay.set_round_trip(0);
    fleet.goes_on("slow", slow).await;

    full_for_a_while(&fleet).await;

    set_full(fleet.cluster.members().first().expect("one"), true).await;
    let (full_at, first) = (Instant::now(), requests(&fleet.cluster.members()[0]).await);
    fleet
        .stands_still("w", generation, Duration::from_secs(1))
        .await;
    let until = if is_long() {
        FULL_FOR_A_MINUTE
    } else {
        FULL_TOO_LONG
    };
    tokio::time::sleep_until(full_at + until).await;
    let asked = requests(&fleet.cluster.members()[0]).await - first;
    // A machine that is busy looks later than it meant to. One second is that of what was under way.
    let seconds = full_at.elapsed().as_secs() + 1;
    assert!(
        asked <= MAX_REQUESTS * (seconds + 1),
        "{asked} requests in less than {seconds} s"
    );
    measured(
        "requests to a full etcd in a thousand seconds",
        0,
        asked * 1_000_000_000 / seconds,
    );
    set_full(&fleet.cluster.members()[0], false).await;
    let healed = monotonic_ns();
    let life = fleet.goes_on("w", generation).await;
    momentary(
        2_000,
        "from the end of a full quota until a session runs again",
        life.gap_end_ns.saturating_sub(healed),
    );
    assert_eq!(fleet.lives("w").len(), 1, "it was restarted");
    fleet.leaves_nothing().await;
}

/// A quota that is full for less than ownership lasts freezes nothing.
async fn full_for_a_while(fleet: &Fleet) {
    let member = &fleet.cluster.members()[0];
    let (shortest, late) = match is_quiet() {
        true => FULL_FOR,
        false => FULL_FOR_LOADED,
    };
    let mut times = Vec::new();
    for _ in 0..ATTEMPTS {
        let before = fleet.closings(0).await;
        // The time that is left to the node is F then.
        fleet.renews(0).await;
        let begun = Instant::now();
        set_full(member, true).await;
        tokio::time::sleep_until(begun + shortest).await;
        set_full(member, false).await;
        let full_for = begun.elapsed();
        fleet.renews(0).await;
        let closed = fleet.closings(0).await > before;
        // A busy machine empties it later than it meant to, perhaps too late.
        let in_time = full_for < shortest + late;
        if in_time && !closed {
            measured(
                "a full quota",
                0,
                u64::try_from(full_for.as_nanos()).expect("short"),
            );
            return;
        }
        assert!(
            !(in_time && is_quiet()),
            "the fence closes: full for {full_for:?}"
        );
        times.push((full_for, closed));
    }
    panic!("the fence closes, or etcd could not be emptied in time: {times:?}");
}

#[tokio::test]
async fn row_47_etcd_restored_while_every_daemon_was_stopped_is_refused_and_the_procedure_works() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).members(1).short()).await
    else {
        return;
    };
    let first = fleet.ensure_on(0, "s").await.generation.get();
    fleet.goes_on("s", first).await;
    let file = fleet.cluster.layout().directory.join("snapshot");
    let member = &fleet.cluster.members()[0];
    member.save_snapshot(&file).expect("saved");
    // The shim knows a later generation of it than the snapshot, and that it is dead.
    fleet.stop(0, "s").await;
    let later = fleet.ensure_on(0, "s").await.generation.get();
    assert!(later > first);
    fleet.goes_on("s", later).await;
    let saved = modified(&file);
    for node in [0, 1] {
        let name = fleet.node(node).name();
        let memory = fleet
            .cluster
            .layout()
            .state_dir(name)
            .join("etcd-seen.json");
        eventually("it has saved what it knows of etcd", PATIENCE, async || {
            modified(&memory) > saved
        })
        .await;
        fleet.node(node).end_daemon().await.expect("ended");
    }
    kill_sessions_of(&fleet, 0);
    let member = &fleet.cluster.members()[0];
    member.restore_snapshot(&file).expect("restored");
    member.start().expect("started");
    fleet.cluster.leader().await.expect("it leads");
    for _ in 0..FOREIGN_WRITES {
        let foreign = json!({"key": "Zm9yZWlnbg==", "value": "Zm9yZWlnbg=="});
        let member = &fleet.cluster.members()[0];
        member.post("/v3/kv/put", &foreign).await.expect("written");
    }
    for node in [1, 0] {
        fleet.node(node).start().expect("started");
        eventually("it refuses that etcd", PATIENCE, async || {
            let readiness = fleet.node(node).readiness().await;
            let words = ["gone back", "--generation-floor"];
            readiness.is_err_and(|why| words.iter().all(|word| why.contains(word)))
        })
        .await;
    }
    for node in [0, 1] {
        fleet.node(node).end_daemon().await.expect("ended");
    }
    for node in [0, 1] {
        let accepting = fleet.node(node).start_with(|serve| {
            serve.args(["--generation-floor", &FLOOR.to_string()]);
        });
        accepting.expect("started");
    }
    // None has ended: the first try works.
    fleet.all_ready().await;
    let generation = fleet.ensure_after(1, "s", FLOOR).await.generation.get();
    fleet.goes_on("s", generation).await;
    fleet.leaves_nothing().await;
}
