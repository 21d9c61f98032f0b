//! Records of sessions that no node serves any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use conman_core::EndCause;
use conman_core::retention::Retention;
use conman_node::Node;
use conman_proto::{OnNodeLoss, ResolvedSpec, SessionId, SessionState};
use conman_registry::{
    Ending, Fleet as _, PeerStanding, Phases, Registry, Release, SessionRecord, Standing,
};
use conman_testkit::ModelFleet;

use super::member::{Member, PATIENCE, POLL_INTERVAL, id, secret};

const AT_ONCE: Retention = Retention {
    ended: Duration::ZERO,
    lost: Duration::ZERO,
};

/// Waits until the record has the given state.
async fn is_recorded(node: &Node, id: &SessionId, is: impl Fn(Option<&SessionRecord>) -> bool) {
    let becoming = async {
        loop {
            let record = node.sessions().record(id).await.expect("readable");
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

/// As while etcd elects a leader: all nodes are late then, in turn or often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_late_now_and_then_forgets_in_time_nevertheless() {
    /// More than the time between two delays.
    const KEPT: Retention = Retention {
        ended: Duration::from_secs(6),
        lost: Duration::from_secs(6),
    };
    /// The next check of its state comes sooner.
    const A_WHILE: Duration = Duration::from_secs(2);
    let (fleet, secret) = (ModelFleet::new(), secret());
    let a = Member::join_keeping(&fleet, "a", &secret, KEPT).await;
    a.start(&id("here")).await;
    let spec = a
        .node
        .sessions()
        .get(&id("here"))
        .expect("it is shown")
        .spec;
    let (registry, _gone) = fleet.join("gone");
    ends(&*registry, &id("old"), &spec).await;
    fleet.change("gone", |gone| gone.standing = PeerStanding::Fenced);
    let deadline = Instant::now() + PATIENCE;
    while a
        .node
        .sessions()
        .record(&id("old"))
        .await
        .expect("readable")
        .is_some()
    {
        assert!(Instant::now() < deadline, "it never goes");
        for standing in [Standing::Late, Standing::Live] {
            a.fleet.stand(standing);
            tokio::time::sleep(A_WHILE).await;
        }
    }
}

/// As in a fleet in which no daemon lives as long as records are kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_forgets_after_the_time_that_earlier_ones_left() {
    const HOUR: Duration = Duration::from_secs(3_600);
    const KEPT: Retention = Retention {
        ended: HOUR,
        lost: HOUR,
    };
    let left = PATIENCE / 12;
    let (fleet, secret) = (ModelFleet::new(), secret());
    let b = Member::join(&fleet, "b", &secret).await;
    b.start(&id("here")).await;
    let spec = b
        .node
        .sessions()
        .get(&id("here"))
        .expect("it is shown")
        .spec;
    let seen = Arc::clone(&b.fleet);
    drop(b);
    fleet.change("b", |b| b.standing = PeerStanding::Fenced);
    let long_ago = jiff::Timestamp::now() - 2 * HOUR;
    for (name, gone_for) in [
        ("listed", HOUR - left),
        ("forgotten", HOUR - left),
        ("later", HOUR - 10 * PATIENCE),
    ] {
        let (registry, _) = fleet.join(name);
        ended_at(&*registry, &id(name), &spec, long_ago).await;
        fleet.change(name, |gone| gone.standing = PeerStanding::Fenced);
        fleet.was_gone_for(name, gone_for);
    }
    let forgotten = seen.forget_node("forgotten").await;
    forgotten.expect("it owns nothing");
    let began = Instant::now();
    let a = Member::join_keeping(&fleet, "a", &secret, KEPT).await;
    for name in ["listed", "forgotten"] {
        is_recorded(&a.node, &id(name), |record| record.is_none()).await;
        assert!(began.elapsed() >= left, "{name} goes too early");
    }
    let record = a
        .node
        .sessions()
        .record(&id("later"))
        .await
        .expect("readable");
    assert!(record.is_some());
}

/// Creates a record of a session that has ended.
async fn ends(registry: &dyn Registry, id: &SessionId, spec: &ResolvedSpec) {
    ended_at(registry, id, spec, jiff::Timestamp::now()).await;
}

async fn ended_at(
    registry: &dyn Registry,
    id: &SessionId,
    spec: &ResolvedSpec,
    ended_at: jiff::Timestamp,
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
