//! Records of sessions that no node serves any more.

use std::time::{Duration, Instant};

use conman_core::EndCause;
use conman_core::retention::Retention;
use conman_node::Node;
use conman_proto::{OnNodeLoss, ResolvedSpec, SessionId, SessionState};
use conman_registry::{Ending, Fleet as _, PeerStanding, Phases, Registry, Release, SessionRecord};
use conman_testkit::ModelFleet;
use jiff::Timestamp;

use super::member::{Member, PATIENCE, POLL_INTERVAL, id, secret};

const AT_ONCE: Retention = Retention {
    ended: Duration::ZERO,
    lost: Duration::ZERO,
};

/// Waits until the record has the given state.
async fn is_recorded(node: &Node, id: &SessionId, is: impl Fn(Option<&SessionRecord>) -> bool) {
    until("it is so", async || {
        let record = node.sessions().record(id).await.expect("readable");
        is(record.as_ref())
    })
    .await;
}

async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let becoming = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let became = tokio::time::timeout(PATIENCE, becoming).await;
    assert!(became.is_ok(), "never: {what}");
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
    b.node
        .sessions()
        .stop(&stopped, "a test")
        .await
        .expect("stopped");
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let keeping = Member::join(&fleet, "a", &secret).await;
    // The node that restarts it has read all records before.
    keeping.runs(&back).await;
    let record = keeping
        .node
        .sessions()
        .record(&stopped)
        .await
        .expect("readable");
    assert!(record.is_some_and(|record| record.state.is_ended()));
    fleet.announced("a", |a| a.draining = true);
    let c = Member::join_keeping(&fleet, "c", &secret, AT_ONCE).await;
    is_recorded(&c.node, &stopped, |record| record.is_none()).await;
    is_recorded(&c.node, &waits, |record| {
        record.is_some_and(|record| record.state.end_cause() == Some(EndCause::Deleted))
    })
    .await;
    // It is released first.
    let deadline = Instant::now() + PATIENCE;
    while c.node.sessions().get(&waits).map(|session| session.state) != Some(SessionState::Stopped)
    {
        assert!(
            Instant::now() < deadline,
            "{:?}",
            c.node.sessions().get(&waits)
        );
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    assert!(keeping.node.sessions().is_live(&back));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_lost_long_ago_is_forgotten_once_it_owns_nothing() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    a.start(&id("here")).await;
    let spec = a
        .node
        .sessions()
        .get(&id("here"))
        .expect("it is shown")
        .spec;
    let (owner, _) = fleet.join("owner");
    let lost = owner.claim(&id("lost"), &spec).await.expect("claimed");
    let long_ago = Timestamp::now() - Duration::from_hours(25);
    let lately = Timestamp::now() - Duration::from_hours(23);
    for (name, fenced_at) in [("owner", long_ago), ("gone", long_ago), ("late", lately)] {
        let (registry, _) = fleet.join(name);
        ended_at(&*registry, &id(name), &spec, long_ago).await;
        fleet.change(name, |lost| {
            (lost.standing, lost.fenced_at) = (PeerStanding::Fenced, Some(fenced_at));
        });
    }
    let listed = || -> Vec<String> {
        let peers = a.fleet.peers();
        peers.iter().map(|peer| peer.name.clone()).collect()
    };
    until("it is forgotten", async || {
        !listed().contains(&"gone".to_owned())
    })
    .await;
    for name in ["owner", "gone"] {
        is_recorded(&a.node, &id(name), |record| record.is_none()).await;
    }
    let record = a.node.sessions().record(&id("late")).await;
    assert!(record.expect("readable").is_some());
    assert_eq!(listed(), ["a", "late", "owner"]);
    // Another node takes what it owns.
    let record = a.node.sessions().record(&lost.id).await;
    assert!(
        record
            .expect("readable")
            .is_some_and(|record| !record.state.is_ended())
    );
    a.start(&lost.id).await;
    until("it is, too", async || listed() == ["a", "late"]).await;
}

/// Creates a record of a session that has ended.
async fn ends(registry: &dyn Registry, id: &SessionId, spec: &ResolvedSpec) {
    ended_at(registry, id, spec, Timestamp::now()).await;
}

async fn ended_at(
    registry: &dyn Registry,
    id: &SessionId,
    spec: &ResolvedSpec,
    ended_at: Timestamp,
) {
    let claimed = registry.claim(id, spec).await.expect("claimed");
    let ending = Ending {
        failed: false,
        cause: Some(EndCause::Exited),
        failed_phase: None,
        reason: "exited".to_owned(),
        exit_code: Some(0),
        ended_at,
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
    /// Five times as many as are removed after one scan.
    const RECORDS: usize = 1_000;
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join_keeping(&fleet, "a", &secret, AT_ONCE).await;
    a.start(&id("here")).await;
    let spec = a
        .node
        .sessions()
        .get(&id("here"))
        .expect("it is shown")
        .spec;
    let (registry, _gone) = fleet.join("gone");
    for number in 0..RECORDS {
        ends(&*registry, &id(&format!("s-{number}")), &spec).await;
    }
    fleet.change("gone", |gone| gone.standing = PeerStanding::Fenced);
    let deadline = Instant::now() + 2 * PATIENCE;
    while !registry.list().await.expect("listed").is_empty() {
        assert!(Instant::now() < deadline, "some never go");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    assert!(a.node.sessions().is_live(&id("here")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_failed_to_forget_goes_later() {
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join(&fleet, "a", &secret).await;
    let (kept, left) = (id("kept"), id("left"));
    a.start(&kept).await;
    a.node
        .sessions()
        .stop(&kept, "a test")
        .await
        .expect("stopped");
    let spec = a.node.sessions().get(&kept).expect("it is shown").spec;
    let (registry, _) = fleet.join("a");
    ends(&*registry, &left, &spec).await;
    // A node that sees another one go reads all records soon.
    let _gone = fleet.join("gone");
    fleet.change("gone", |gone| gone.standing = PeerStanding::Fenced);
    is_recorded(&a.node, &left, |record| record.is_none()).await;
    let record = a.node.sessions().record(&kept).await.expect("readable");
    assert!(record.is_some());
}
