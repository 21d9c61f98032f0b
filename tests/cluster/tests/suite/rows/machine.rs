//! Machines that vanish, with and without a word.

use std::time::Duration;

use conman_cluster::Cluster;
use conman_cluster::overlap::{TEMPLATE, monotonic_ns};
use conman_e2e::{Answer, eventually, eventually_some};
use conman_linux::Signal;
use conman_proto::{EnsureResponse, NodeList, NodeStanding};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::json;
use tokio::time::sleep;

use super::client::Client;
use super::fleet::{Fleet, PATIENCE, measured, within};
use super::load::{Asked, Bystander, Load};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_19_no_notice_has_every_session_taken_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(3).short()).await else {
        return;
    };
    let mut old = Vec::new();
    for id in ["a", "b", "c", "d", "e", "f"] {
        let generation = fleet.ensure_on(0, id).await.generation.get();
        fleet.goes_on(id, generation).await;
        old.push((id, generation));
    }
    let served = fleet.serve_on(0, "served").await;
    let mut client = Client::connect(&fleet, 1, "served").await;
    // By its own node, and by one that the fault does not befall either.
    let bystander = Bystander::begin(&fleet, 2, &[1, 2]).await;
    let begun = monotonic_ns();
    fleet.node(0).lose().expect("lost");
    let next = client.comes_back().await;
    within(
        fleet.served_again_ms(),
        "from a machine's end to the next one's greeting",
        begun,
        monotonic_ns(),
    );
    assert!(next > served, "generation {next} after {served}");
    for (number, (id, generation)) in old.iter().enumerate() {
        let new = fleet
            .ensure_after(1 + number % 2, id, 0)
            .await
            .generation
            .get();
        let life = fleet.goes_on(id, new).await;
        assert!(new >= *generation);
        if new > *generation {
            measured(
                "from a machine's end to a session's first line",
                begun,
                life.first_ns,
            );
        }
    }
    bystander.saw_nothing().await;
    fleet.judge();
    // It comes back and has nothing of them.
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    for (id, _) in old {
        let lives = fleet.lives(id);
        let newest = lives.last().expect("it lived").generation;
        fleet.is_one(0, id, newest).await;
    }
    fleet.leaves_nothing().await;
}

/// Asks a node once for a witness on the first one.
async fn asked_for_on_the_first(fleet: &Fleet, asked: usize, id: &str) -> Option<Answer> {
    let path = format!(
        "/v1/sessions/{id}?node_label=host%3D{}",
        fleet.node(0).name()
    );
    let body = json!({"template": TEMPLATE});
    fleet.ask(asked, Method::PUT, &path, Some(&body)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: conman-node `preemption::`; row 20 stays"]
async fn row_20_notice_twice_is_one_and_a_cancelled_one_admits_again() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(3).short()).await else {
        return;
    };
    let old = fleet.ensure_on(0, "s").await.generation.get();
    fleet.goes_on("s", old).await;
    let served = fleet.serve_on(0, "served").await;
    let mut there = Client::connect(&fleet, 0, "served").await;
    let mut elsewhere = Client::connect(&fleet, 1, "served").await;
    let bystander = Bystander::begin(&fleet, 2, &[1, 2]).await;
    fleet.preempt(0).await;
    fleet.preempt(0).await;
    let next = elsewhere.comes_back().await;
    assert!(next > served, "generation {next} after {served}");
    assert_eq!(there.comes_back().await, next);
    assert_eq!(fleet.node(0).session_processes(), []);
    let last = fleet.life("s", old).expect("it wrote").last_ns;
    let new = fleet.ensure_after(1, "s", old).await.generation.get();
    let life = fleet.goes_on("s", new).await;
    measured(
        "from the last line to the first elsewhere",
        last,
        life.first_ns,
    );
    let refused = asked_for_on_the_first(&fleet, 1, "more").await;
    let refused = refused.expect("an answer");
    assert!(!refused.status.is_success(), "{}", refused.text());
    let readmitted = fleet
        .node(0)
        .admin()
        .send(Method::POST, "/v1/nodes/self/readmit", None)
        .await;
    assert_eq!(readmitted.status, StatusCode::OK, "{}", readmitted.text());
    fleet.all_ready().await;
    // Others know it, too.
    let more = eventually_some(
        "it admits what another one asks for",
        PATIENCE,
        async || {
            let answer = asked_for_on_the_first(&fleet, 1, "more").await?;
            answer
                .status
                .is_success()
                .then(|| answer.expect::<EnsureResponse>(answer.status).session)
        },
    )
    .await;
    assert_eq!(more.node, fleet.node(0).name());
    fleet.goes_on("more", more.generation.get()).await;
    bystander.saw_nothing().await;
    fleet.leaves_nothing().await;
}

/// The daemon that gets the notice has not joined yet, for etcd is out of its reach.
#[tokio::test]
async fn row_20_a_notice_before_a_daemon_has_joined_kills_what_an_earlier_one_left() {
    let builder = Cluster::builder().nodes(1).short();
    let builder = builder.set("preempt", "on_sigterm = \"preempt\"");
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    for id in ["a", "b"] {
        let generation = fleet.ensure(0, id).await.generation.get();
        fleet.goes_on(id, generation).await;
    }
    fleet.node(0).kill_daemon().expect("killed");
    fleet.cut_off(0);
    fleet.node(0).start().expect("started");
    eventually("it says that it has not joined", PATIENCE, async || {
        let readiness = fleet.node(0).readiness().await;
        readiness.is_err_and(|why| why.contains("not joined"))
    })
    .await;
    // Of each session its init and its program.
    assert_eq!(fleet.node(0).session_processes().len(), 4);
    fleet.node(0).signal_daemon(Signal::SIGTERM).expect("sent");
    eventually("the daemon has ended", PATIENCE, async || {
        matches!(fleet.node(0).ended(), Ok(Some(_)))
    })
    .await;
    assert_eq!(fleet.node(0).session_processes(), []);
    fleet.leaves_nothing().await;
}

/// Takes a release build for its figure: `CONMAN_E2E_BINARY`.
const API_P99: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: six nodes take all of a machine; two of three nodes stay"]
async fn row_21_a_third_of_the_nodes_preempted_at_once_leaves_every_session_served() {
    const SESSIONS: usize = 24;
    // All of the matrix's thirty nodes only where somebody has the time and the machine.
    let thirty = std::env::var_os("CONMAN_CLUSTER_THIRTY").is_some();
    let (nodes, preempted) = if thirty { (30, 9) } else { (6, 2) };
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(nodes).short()).await else {
        return;
    };
    let nodes = usize::from(nodes);
    let mut generations = Vec::new();
    for number in 0..SESSIONS {
        let id = format!("s{number}");
        let node = number % nodes;
        let generation = fleet.ensure_on(node, &id).await.generation.get();
        fleet.goes_on(&id, generation).await;
        generations.push((id, generation));
    }
    let ids = |from: usize| -> Vec<String> {
        let chosen = generations.iter().enumerate();
        let chosen = chosen.filter(|(number, _)| number % nodes >= from);
        chosen.map(|(_, (id, _))| id.clone()).collect()
    };
    let asked = Asked {
        nodes: (preempted..nodes).collect(),
        sessions: ids(0),
        running: ids(preempted),
    };
    let others: Vec<usize> = asked.nodes.clone();
    let load = Load::begin(&fleet, asked);
    let bystander = Bystander::begin(&fleet, nodes - 1, &others).await;
    let begun = monotonic_ns();
    join_all((0..preempted).map(|node| fleet.preempt(node))).await;
    for (number, (id, generation)) in generations.iter().enumerate() {
        let first = number % nodes;
        let now = if first < preempted {
            let node = preempted + number % (nodes - preempted);
            let now = fleet.ensure_after(node, id, *generation).await;
            now.generation.get()
        } else {
            *generation
        };
        fleet.is_one(first, id, now).await;
    }
    measured(
        "from the first notice until all are served",
        begun,
        monotonic_ns(),
    );
    bystander.saw_nothing().await;
    let taken = load.end("the API while nodes are preempted").await;
    if thirty {
        assert!(taken.p99 < API_P99, "{taken:?}");
    }
    for node in 0..preempted {
        assert_eq!(fleet.node(node).session_processes(), []);
    }
    fleet.leaves_nothing().await;
}

/// The shim stands still with the order to start; by the time that it reads it, the session is
/// another node's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_24_container_created_after_its_client_gave_up_never_runs_beside_a_newer_one() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    // So that the template's image is open and nothing else takes time.
    let first = fleet.ensure_on(0, "first").await.generation.get();
    fleet.goes_on("first", first).await;
    fleet.stop(0, "first").await;

    let bystander = Bystander::begin(&fleet, 1, &[1]).await;
    fleet.node(0).signal_shim(Signal::SIGSTOP).expect("stopped");
    let answer = fleet.try_ensure_on(0, "late").await;
    assert!(answer.is_none_or(|answer| !answer.status.is_success()));
    // With nothing running there, the fence has nothing to do that it misses.
    fleet.cut_off(0);
    let new = fleet.ensure_after(1, "late", 0).await.generation.get();
    fleet.goes_on("late", new).await;
    fleet
        .node(0)
        .signal_shim(Signal::SIGCONT)
        .expect("continued");
    sleep(Duration::from_millis(fleet.timing().takeover_ms)).await;
    fleet.goes_on("late", new).await;
    fleet.cluster.heal().expect("healed");
    let healed = monotonic_ns();
    fleet.all_ready().await;
    eventually("what came late is gone", PATIENCE, async || {
        fleet.node(0).session_processes().is_empty()
    })
    .await;
    within(
        10_000,
        "from healing until what came late is gone",
        healed,
        monotonic_ns(),
    );
    fleet.goes_on("late", new).await;
    bystander.saw_nothing().await;
    fleet.leaves_nothing().await;
}

/// As `systemctl stop conman conman-shim` does, for as long as another node needs to claim what is
/// there: nobody is left who would freeze it then.
#[tokio::test]
async fn what_runs_where_daemon_and_shim_are_stopped_runs_no_more_when_it_is_taken_over() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let old = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", old).await;
    let node = fleet.node(0);
    node.end_daemon().await.expect("ended");
    node.signal_shim(Signal::SIGTERM).expect("told to end");
    eventually("the shim has ended", PATIENCE, async || {
        fleet.node(0).shim_pids().is_empty()
    })
    .await;
    assert!(!fleet.node(0).session_processes().is_empty(), "it is dead");
    let new = fleet.ensure_after(1, "w", old).await.generation.get();
    fleet.goes_on("w", new).await;
    fleet.judge();
    fleet.node(0).start().expect("started");
    fleet.all_ready().await;
    eventually("what was taken over is gone", PATIENCE, async || {
        fleet.node(0).session_processes().is_empty()
    })
    .await;
    fleet.goes_on("w", new).await;
    fleet.leaves_nothing().await;
}

/// As `systemctl restart conman-shim` does.
#[tokio::test]
#[ignore = "in acceptance: daemon and shim stopped together stay; conman-shim `standing_still::`"]
async fn what_runs_goes_on_where_the_shim_alone_is_stopped() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    let old = fleet.node(0).shim_pids();
    fleet
        .node(0)
        .signal_shim(Signal::SIGTERM)
        .expect("told to end");
    eventually("another shim stands", PATIENCE, async || {
        let now = fleet.node(0).shim_pids();
        !now.is_empty() && now.iter().all(|pid| !old.contains(pid))
    })
    .await;
    fleet.goes_on("w", generation).await;
    fleet.judge();
    fleet.leaves_nothing().await;
}

#[tokio::test]
async fn a_session_of_a_lost_node_is_deleted_through_a_preempted_one() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "w").await.generation.get();
    fleet.goes_on("w", generation).await;
    fleet.preempt(1).await;
    fleet.node(0).lose().expect("killed");
    eventually("n1 is fenced", PATIENCE, async || {
        let list: NodeList = fleet
            .node(1)
            .admin()
            .get("/v1/nodes")
            .await
            .expect(StatusCode::OK);
        let mut nodes = list.nodes.into_iter().filter_map(|node| node.fleet);
        nodes.any(|node| node.standing == NodeStanding::Fenced)
    })
    .await;
    let api = fleet.node(1).api();
    let deleted = api.send(Method::DELETE, "/v1/sessions/w", None).await;
    assert_eq!(deleted.status, StatusCode::OK, "{}", deleted.text());
    let gone = api.get("/v1/sessions/w").await;
    assert_eq!(gone.status, StatusCode::OK, "{}", gone.text());
    assert!(gone.text().contains("stopped"), "{}", gone.text());
    fleet.leaves_nothing().await;
}
