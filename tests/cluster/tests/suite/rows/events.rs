//! What is told of a fleet in trouble: nothing is lost, nothing is told twice, and an ending stays what
//! it was.

use std::time::Duration;

use conman_cluster::Cluster;
use conman_cluster::overlap::monotonic_ns;
use conman_e2e::{EventStream, eventually, eventually_some};
use conman_linux::{PidFd, Signal};
use conman_proto::{Event, EventKind, EventPage, Session, SessionState};
use http::{Method, StatusCode};

use super::fleet::{Fleet, PATIENCE, measured};

/// A witness that has not written for so long stands still: fifty times its pause.
const QUIET: Duration = Duration::from_secs(1);

/// Everything up to an event of this kind, of a node or of a session.
pub(crate) async fn until(stream: &mut EventStream, kind: EventKind, of: &str) -> Vec<Event> {
    let mut seen = Vec::new();
    loop {
        let event = stream.next().await.expect("the stream goes on");
        let session = event.session.as_ref().map(ToString::to_string);
        let is_last = event.kind == kind && (event.node == of || session.as_deref() == Some(of));
        seen.push(event);
        if is_last {
            return seen;
        }
    }
}

/// What a node's own journal holds.
async fn journal(fleet: &Fleet, node: usize, query: &str) -> Vec<Event> {
    let path = format!("/v1/events?follow=false&local=true&limit=1000&after=0{query}");
    let answer = fleet.node(node).admin().get(&path).await;
    let page: EventPage = answer.expect(StatusCode::OK);
    page.events
}

/// Of what a node has recorded between the first and the last that were seen of it, nothing is missing
/// and nothing was told twice.
pub(crate) async fn each_once(fleet: &Fleet, node: usize, seen: &[Event]) {
    let name = fleet.node(node).name();
    let recorded = |event: &&Event| {
        let is_note = matches!(
            event.kind,
            EventKind::NodeUnreachable | EventKind::NodeReached
        );
        event.node == name && !is_note
    };
    let told = seen.iter().filter(recorded);
    let told: Vec<u64> = told.map(|event| event.seq).collect();
    let (first, last) = (told[0], told[told.len() - 1]);
    let kept = journal(fleet, node, "").await;
    let kept = kept.iter().map(|event| event.seq);
    let kept: Vec<u64> = kept.filter(|seq| (first..=last).contains(seq)).collect();
    assert_eq!(told, kept, "each once, in its order");
}

/// Ends a session's program, which nobody has asked for.
pub(crate) fn kill_sessions_of(fleet: &Fleet, node: usize) {
    let processes = fleet.node(node).session_processes();
    assert_ne!(processes, []);
    for process in processes {
        // The first one's death may have taken the others.
        if let Ok(process) = PidFd::open(process.pid) {
            process.kill().expect("killed");
        }
    }
}

/// Waits until a node's daemon has a session's death certificate.
pub(crate) async fn has_seen_the_end(fleet: &Fleet, node: usize, id: &str) {
    eventually("its daemon has seen the end", PATIENCE, async || {
        let events = journal(fleet, node, &format!("&session={id}")).await;
        let mut kinds = events.iter().map(|event| event.kind);
        kinds.any(|kind| kind == EventKind::SessionDead)
    })
    .await;
}

/// Waits for the record of a session's end, which is all that the second node knows of it.
pub(crate) async fn was_killed(fleet: &Fleet, id: &str) {
    fleet.all_ready().await;
    let path = format!("/v1/sessions/{id}");
    let ended = eventually_some("the end is recorded", PATIENCE, async || {
        let answer = fleet.ask(1, Method::GET, &path, None).await?;
        if answer.status != StatusCode::OK {
            return None;
        }
        let session: Session = answer.expect(StatusCode::OK);
        let ended = [SessionState::Stopped, SessionState::Failed];
        ended.contains(&session.state).then_some(session)
    })
    .await;
    let reason = ended.reason.clone().unwrap_or_default();
    assert!(reason.contains("exit code 137"), "{ended:?}");
}

#[tokio::test]
async fn row_02_events_of_others_go_on_beside_a_daemon_that_stands_still_and_its_own_follow() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(3).short()).await else {
        return;
    };
    let mut stream = EventStream::open(&fleet.node(0).api(), "/v1/events", None).await;
    let before = fleet.ensure_on(2, "before").await.generation.get();
    fleet.goes_on("before", before).await;
    let mut seen = until(&mut stream, EventKind::SessionReady, "before").await;

    fleet
        .node(2)
        .signal_daemon(Signal::SIGSTOP)
        .expect("stopped");
    // Nobody has noticed yet; then everybody has.
    for id in ["soon", "later"] {
        let generation = fleet.ensure_on(1, id).await.generation.get();
        let ready = monotonic_ns();
        fleet.goes_on(id, generation).await;
        seen.extend(until(&mut stream, EventKind::SessionReady, id).await);
        measured(
            "from an answer to its event beside a silent node",
            ready,
            monotonic_ns(),
        );
        let told = |event: &Event| event.kind == EventKind::NodeUnreachable && event.node == "n3";
        if id == "soon" && !seen.iter().any(told) {
            seen.extend(until(&mut stream, EventKind::NodeUnreachable, "n3").await);
        }
    }
    // What its daemon learns of once it goes on.
    fleet.stands_still("before", before, QUIET).await;
    kill_sessions_of(&fleet, 2);
    fleet
        .node(2)
        .signal_daemon(Signal::SIGCONT)
        .expect("continued");
    seen.extend(until(&mut stream, EventKind::NodeReached, "n3").await);
    fleet.all_ready().await;
    let after = fleet.ensure_on(2, "after").await.generation.get();
    fleet.goes_on("after", after).await;
    seen.extend(until(&mut stream, EventKind::SessionReady, "after").await);

    each_once(&fleet, 2, &seen).await;
    fleet.leaves_nothing().await;
}

/// The daemon sees the end while it cannot record it, and the record is what others know it by.
#[tokio::test]
async fn row_12_an_ending_without_etcd_is_recorded_as_what_it_was_once_there_is_one() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = fleet.ensure_on(0, "s").await.generation.get();
    fleet.goes_on("s", generation).await;
    fleet.cluster.cut_from_etcd(0).expect("cut");
    fleet.stands_still("s", generation, QUIET).await;
    kill_sessions_of(&fleet, 0);
    has_seen_the_end(&fleet, 0, "s").await;
    fleet.cluster.heal().expect("healed");
    was_killed(&fleet, "s").await;
    fleet.leaves_nothing().await;
}
