//! What is told of all nodes and their sessions.

use conman_proto::{EnsureResponse, Node, SessionList, SessionOwnership, SessionState, Timeline};
use conman_registry::PeerStanding;
use http::Method;

use super::world::{nowhere, two};
use crate::stage::session;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listing_shows_every_nodes_sessions_and_a_page_at_a_time() {
    let (world, a, b) = two().await;
    for (node, id) in [(&a, "a1"), (&b, "b1"), (&a, "c1"), (&b, "d1")] {
        node.ensure(id).await;
    }
    let ids = |list: &SessionList| -> Vec<String> {
        list.sessions
            .iter()
            .map(|session| session.id.to_string())
            .collect()
    };
    let all: SessionList = a.api.get("/v1/sessions").await.json();
    assert_eq!(ids(&all), ["a1", "b1", "c1", "d1"]);
    assert_eq!(all.next, None);
    let of = |name: &str| -> Vec<String> {
        let own = all.sessions.iter().filter(|session| session.node == name);
        own.map(|session| session.id.to_string()).collect()
    };
    for (query, wanted) in [("node=b", of("b")), ("node=self", of("a"))] {
        let some: SessionList = a.api.get(&format!("/v1/sessions?{query}")).await.json();
        assert_eq!(ids(&some), wanted, "{query}");
    }
    let first: SessionList = a.api.get("/v1/sessions?limit=3").await.json();
    assert_eq!(ids(&first), ["a1", "b1", "c1"]);
    let next = first.next.expect("there is more");
    let rest: SessionList = a
        .api
        .get(&format!("/v1/sessions?cursor={next}"))
        .await
        .json();
    assert_eq!(ids(&rest), ["d1"]);
    // What cannot be read is no session, and no reason to show none.
    assert_eq!(rest.warnings, [""; 0]);
    let unreadable = "e1".parse().expect("an id");
    world
        .fleet
        .cannot_read(&unreadable, "the record at session/e1");
    let all: SessionList = a.api.get("/v1/sessions").await.json();
    assert_eq!(ids(&all).len(), 4);
    assert_eq!(all.warnings, ["the record at session/e1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeline_names_as_takers_the_nodes_alone_that_have_the_sessions_labels() {
    let (world, a, b) = two().await;
    world.announced("b", |b| {
        b.labels.insert("pool".to_owned(), "gpu".to_owned());
    });
    let body = r#"{"template": "idle", "node_labels": {"pool": "gpu"}}"#;
    let answer = a.api.call(Method::PUT, &session("alice"), body).await;
    assert_eq!(answer.json::<EnsureResponse>().session.node, "b");
    b.api.call(Method::DELETE, &session("alice"), "").await;
    let uri = format!("{}/timeline", session("alice"));
    let timeline: Timeline = a.api.get(&uri).await.json();
    let fleet = timeline.fleet.expect("of a fleet");
    assert_eq!(fleet.ownership, SessionOwnership::Released);
    assert_eq!(fleet.takers, ["b"]);
    assert_eq!(fleet.refused.len(), 1);
    assert_eq!(fleet.refused[0].node, "a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeline_has_what_every_node_knows_and_names_those_that_cannot_be_asked() {
    let (world, a, b) = two().await;
    let first = world.start_on_b(&b, "alice").await;
    b.api.call(Method::DELETE, &session("alice"), "").await;
    world.announced("b", |b| b.draining = true);
    let second = a.ensure("alice").await.session;
    assert_eq!((first.node.as_str(), second.node.as_str()), ("b", "a"));

    let uri = format!("{}/timeline", session("alice"));
    for node in [&a, &b] {
        let timeline: Timeline = node.api.get(&uri).await.json();
        let of = |name: &str| timeline.events.iter().any(|event| event.node == name);
        assert!(of("a") && of("b"), "{timeline:?}");
        assert!(timeline.events.is_sorted_by_key(|event| event.at));
        let phases = timeline.phases.iter();
        assert!(!timeline.phases.is_empty());
        assert!(
            phases
                .clone()
                .all(|phase| phase.generation == second.generation)
        );
        let fleet = timeline.fleet.expect("of a fleet");
        assert_eq!(fleet.ownership, SessionOwnership::Owned);
        assert_eq!(
            (fleet.node.as_deref(), fleet.unreachable_nodes.len()),
            (Some("a"), 0)
        );
    }
    let local: Timeline = a.api.get(&format!("{uri}?local=true")).await.json();
    assert!(local.events.iter().all(|event| event.node == "a"));
    assert_eq!(local.fleet, None);

    // What it knows is missing, and what becomes of its sessions is told all the same.
    let nowhere = nowhere();
    let address = nowhere.trim_start_matches("https://").to_owned();
    world.announced("a", |a| a.peer_url = Some(nowhere));
    for (standing, ownership, part) in [
        (PeerStanding::Silent, SessionOwnership::Owned, address),
        // Nobody asks a node that is gone.
        (
            PeerStanding::Fenced,
            SessionOwnership::Lost,
            "declared dead".to_owned(),
        ),
    ] {
        world.change("a", |a| a.standing = standing);
        let timeline: Timeline = b.api.get(&uri).await.json();
        assert!(timeline.events.iter().all(|event| event.node == "b"));
        let fleet = timeline.fleet.expect("of a fleet");
        assert_eq!(fleet.ownership, ownership);
        assert_eq!(fleet.unreachable_nodes.len(), 1);
        assert!(fleet.unreachable_nodes[0].why.contains(&part), "{fleet:?}");
    }
    let timeline: Timeline = b.api.get(&uri).await.json();
    let fleet = timeline.fleet.expect("of a fleet");
    let why: Vec<_> = fleet
        .refused
        .iter()
        .map(|refused| refused.node.as_str())
        .collect();
    assert_eq!(why, ["a", "b"], "{fleet:?}");

    let unknown = a.api.get("/v1/sessions/nobody/timeline").await;
    assert_eq!(unknown.problem().slug(), "no-such-session");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_node_that_is_not_heard_of_is_shown_as_running() {
    let (world, a, b) = two().await;
    world.start_on_b(&b, "alice").await;
    let view = b.api.node.status().view();
    assert_eq!(view.sessions_running, 1);
    world.announced("b", |b| b.view = Some(view));
    for (standing, frozen, why) in [
        (PeerStanding::Silent, 1, "silent"),
        (PeerStanding::Fenced, 0, "lost"),
    ] {
        world.change("b", |b| b.standing = standing);
        let list: SessionList = a.api.get("/v1/sessions").await.json();
        let shown = &list.sessions[0];
        assert_eq!(shown.state, SessionState::Frozen);
        assert!(
            shown.reason.as_deref().is_some_and(|it| it.contains(why)),
            "{shown:?}"
        );
        let node: Node = a.api.get("/v1/nodes/b").await.json();
        assert_eq!((node.sessions_running, node.sessions_frozen), (0, frozen));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_the_registry_does_not_answer_lists_its_own_sessions_and_says_so() {
    let (world, a, b) = two().await;
    world.start_on_b(&b, "alice").await;
    world.fleet.cut("b");
    let list: SessionList = b.api.get("/v1/sessions").await.json();
    let states: Vec<_> = list.sessions.iter().map(|one| one.state).collect();
    assert_eq!(states, [SessionState::Frozen]);
    assert!(
        list.warnings[0].contains("only sessions of node b"),
        "{list:?}"
    );
    let node: Node = b.api.get("/v1/nodes/self").await.json();
    assert_eq!((node.sessions_running, node.sessions_frozen), (0, 1));
    let of_a: SessionList = a.api.get("/v1/sessions").await.json();
    assert_eq!(of_a.warnings, [""; 0]);
}
