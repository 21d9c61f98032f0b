//! The events of all nodes by way of any of them.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::time::Duration;

use axum::body::BodyDataStream;
use conman_auth::Scope;
use conman_proto::{Event, EventKind, EventPage};
use conman_registry::PeerStanding;
use futures_util::StreamExt as _;
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};

use super::world::{Node, World, two};
use crate::stage::{Api, PATIENCE};

/// As much as a clock may be ahead of a test's nodes, and what a slow machine takes until they
/// begin, without being beyond what nodes of a fleet bear of each other.
const AHEAD_MS: i64 = 20_000;

/// Server-sent events as they come, each with its id.
struct Events {
    body: BodyDataStream,
    text: String,
}

impl Events {
    async fn open(api: &Api, query: &str, last: Option<&str>) -> Self {
        let uri = format!("/v1/events{query}");
        let mut request = api.request(Scope::Read, Method::GET, &uri);
        if let Some(last) = last {
            let value = HeaderValue::from_str(last).expect("a header's value");
            request.headers_mut().insert("last-event-id", value);
        }
        let response = api.open(request).await;
        assert_eq!(response.status(), StatusCode::OK);
        let body = response.into_body().into_data_stream();
        let text = String::new();
        Self { body, text }
    }

    /// The next message: its id, and its event if it has one.
    async fn message(&mut self) -> (String, Option<Event>) {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                let field = |name: &str| {
                    let mut lines = block.lines();
                    lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
                };
                let Some(id) = field("id:") else { continue };
                let event = field("data:").map(|data| serde_json::from_str(&data).expect("JSON"));
                return (id, event);
            }
            let chunk = tokio::time::timeout(PATIENCE, self.body.next()).await;
            let chunk = chunk.expect("in time").expect("the stream goes on");
            self.text += std::str::from_utf8(&chunk.expect("whole")).expect("text");
        }
    }

    async fn next(&mut self) -> (String, Event) {
        loop {
            if let (id, Some(event)) = self.message().await {
                return (id, event);
            }
        }
    }

    /// Everything up to an event of this kind of that node.
    async fn until(&mut self, kind: EventKind, node: &str) -> Vec<(String, Event)> {
        let mut seen = Vec::new();
        loop {
            let (id, event) = self.next().await;
            let is_last = event.kind == kind && event.node == node;
            seen.push((id, event));
            if is_last {
                return seen;
            }
        }
    }
}

/// Starts a session on that node, whatever the others have room for.
async fn start(world: &World, nodes: [&Node; 2], on: usize, id: &str) {
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        world.announced(name, |node| node.draining = index != on);
    }
    let session = nodes[on].ensure(id).await.session;
    assert_eq!(session.node, ["a", "b"][on]);
}

/// Where nobody listens.
fn unused_address() -> SocketAddr {
    let nobody = StdListener::bind("127.0.0.1:0").expect("a free port");
    nobody.local_addr().expect("bound")
}

async fn page(node: &Node, query: &str) -> EventPage {
    let uri = format!("/v1/events?follow=false&limit=1000&{query}");
    node.api.get(&uri).await.json()
}

fn keys(events: &[Event]) -> BTreeSet<(String, u64)> {
    let keys = events.iter().map(|event| (event.node.clone(), event.seq));
    keys.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_has_every_nodes_events_in_order_and_its_cursor_leads_on_at_any_node() {
    let (world, a, b) = two().await;
    start(&world, [&a, &b], 0, "alice").await;
    start(&world, [&a, &b], 1, "bob").await;
    let all = page(&a, "after=0").await;
    let nodes: BTreeSet<&str> = all.events.iter().map(|event| event.node.as_str()).collect();
    assert_eq!(nodes, BTreeSet::from(["a", "b"]));
    for name in ["a", "b"] {
        let own = all.events.iter().filter(|event| event.node == name);
        let seqs: Vec<u64> = own.map(|event| event.seq).collect();
        assert!(seqs.is_sorted(), "{name}: {seqs:?}");
    }
    assert_eq!(keys(&all.events).len(), all.events.len());

    start(&world, [&a, &b], 0, "carol").await;
    start(&world, [&a, &b], 1, "dave").await;
    let query = format!("after={}", all.cursor);
    let (by_a, by_b) = (page(&a, &query).await, page(&b, &query).await);
    let ready = |page: &EventPage| -> BTreeSet<String> {
        let ready = page
            .events
            .iter()
            .filter(|event| event.kind == EventKind::SessionReady);
        ready
            .filter_map(|event| Some(event.session.as_ref()?.to_string()))
            .collect()
    };
    let new = BTreeSet::from(["carol".to_owned(), "dave".to_owned()]);
    assert_eq!((ready(&by_a), ready(&by_b)), (new.clone(), new));
    assert!(keys(&by_a.events).is_disjoint(&keys(&all.events)));
    assert!(keys(&by_b.events).is_disjoint(&keys(&all.events)));

    // Bit by bit it is the same.
    let mut bits = Vec::new();
    let mut cursor = "0".to_owned();
    while bits.len() < all.events.len() {
        let uri = format!("/v1/events?follow=false&limit=3&after={cursor}");
        let next: EventPage = b.api.get(&uri).await.json();
        assert!(!next.events.is_empty());
        bits.extend(next.events);
        cursor = next.cursor;
    }
    assert!(keys(&bits).is_superset(&keys(&all.events)));
    assert_eq!(keys(&bits).len(), bits.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_tells_what_happens_on_any_node_and_goes_on_by_way_of_another() {
    let (world, a, b) = two().await;
    let mut events = Events::open(&a.api, "", None).await;
    let (first, event) = events.message().await;
    assert!(first.starts_with("f1-") && event.is_none(), "{first}");
    start(&world, [&a, &b], 1, "bob").await;
    let seen = events.until(EventKind::SessionReady, "b").await;
    let (last, _) = seen.last().expect("it is ready");
    drop(events);

    start(&world, [&a, &b], 0, "alice").await;
    let mut events = Events::open(&b.api, "", Some(last)).await;
    let more = events.until(EventKind::SessionReady, "a").await;
    let of = |events: &[(String, Event)]| -> Vec<Event> {
        events.iter().map(|(_, event)| event.clone()).collect()
    };
    assert!(keys(&of(&more)).is_disjoint(&keys(&of(&seen))));
    let alice = more.iter().filter(|(_, event)| {
        let session = event.session.as_ref();
        session.is_some_and(|id| id.as_str() == "alice")
    });
    let stored = page(&a, "after=0&session=alice").await;
    assert_eq!(alice.count(), stored.events.len());
    // Before its first event, too, a stream is one that can be gone on with.
    let mut events = Events::open(&b.api, "", Some(&first)).await;
    let all = events.until(EventKind::SessionReady, "a").await;
    assert!(keys(&of(&all)).is_superset(&keys(&of(&seen))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_cannot_be_asked_is_named_and_what_it_did_meanwhile_follows() {
    let (world, a, b) = two().await;
    let mut url = None;
    let address = unused_address();
    world.announced("b", |b| {
        url = b.peer_url.replace(format!("https://{address}"));
    });
    let mut events = Events::open(&a.api, "", None).await;
    let (_, missing) = events.next().await;
    assert_eq!(
        (missing.kind, missing.node.as_str()),
        (EventKind::NodeUnreachable, "b")
    );
    let shown = page(&a, "after=0").await;
    let told = shown.events.iter().find(|event| event.node == "b");
    let told = told.expect("it is told of");
    assert_eq!(told.kind, EventKind::NodeUnreachable);
    assert!(
        told.message.contains(&address.to_string()),
        "{}",
        told.message
    );
    start(&world, [&a, &b], 1, "bob").await;
    world.announced("b", |b| b.peer_url = url);
    let (_, back) = events.next().await;
    assert_eq!(
        (back.kind, back.node.as_str()),
        (EventKind::NodeReached, "b")
    );
    let seen = events.until(EventKind::SessionReady, "b").await;
    let claimed = |(_, event): &(String, Event)| event.kind == EventKind::SessionClaimed;
    assert!(seen.iter().any(claimed), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_joins_is_told_of_from_its_first_event() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    let mut events = Events::open(&a.api, "", None).await;
    events.message().await;
    let b = Node::join(&world, "b").await;
    let seen = events.until(EventKind::NodeStarted, "b").await;
    assert!(!seen.is_empty());
    drop(b);
}

/// Whoever gave the position has a clock that is ahead of all nodes here, which is theirs being behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_position_is_told_of_from_its_first_event_though_its_clock_is_behind() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    let ahead = jiff::Timestamp::now().as_millisecond() + AHEAD_MS;
    let mut events = Events::open(&a.api, "", Some(&format!("f1-{ahead:x}"))).await;
    events.message().await;
    let b = Node::join(&world, "b").await;
    let seen = events.until(EventKind::NodeStarted, "b").await;
    let of_b = seen.iter().filter(|(_, event)| event.node == "b");
    let seqs: Vec<u64> = of_b.map(|(_, event)| event.seq).collect();
    assert_eq!(seqs.first(), Some(&1), "{seqs:?}");
    // Told once it has a position, which leads on behind them.
    let (last, _) = seen.last().expect("it has started");
    start(&world, [&a, &b], 1, "bob").await;
    let mut events = Events::open(&a.api, "", Some(last)).await;
    let more = events.until(EventKind::SessionReady, "b").await;
    let more = more.iter().filter(|(_, event)| event.node == "b");
    assert!(
        more.into_iter()
            .all(|(_, event)| !seqs.contains(&event.seq))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_with_many_streams_is_told_to_end_one_and_keeps_nobody_else_out() {
    let (_world, a, _b) = two().await;
    let mut streams = Vec::new();
    let refusal = loop {
        assert!(streams.len() < 100, "there is no bound");
        let request = a.api.request(Scope::Read, Method::GET, "/v1/events");
        let response = a.api.open(request).await;
        if response.status() != StatusCode::OK {
            break response;
        }
        streams.push(response);
    };
    assert_eq!(refusal.status(), StatusCode::TOO_MANY_REQUESTS);
    let body = refusal
        .into_body()
        .collect()
        .await
        .expect("whole")
        .to_bytes();
    let problem: conman_proto::Problem = serde_json::from_slice(&body).expect("a problem");
    assert_eq!(problem.slug(), "too-many-own-streams");
    assert!(
        problem.retryable && problem.detail.contains("end one"),
        "{problem:?}"
    );
    for (scope, uri) in [
        (Scope::Frontend, "/v1/events"),
        (Scope::Read, "/v1/events?local=true"),
    ] {
        let request = a.api.request(scope, Method::GET, uri);
        let response = a.api.open(request).await;
        assert_eq!(response.status(), StatusCode::OK, "{scope:?} {uri}");
    }
    streams.pop();
    let request = a.api.request(Scope::Read, Method::GET, "/v1/events");
    assert_eq!(a.api.open(request).await.status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_nodes_events_can_be_asked_for_and_what_a_node_brings_is_answered_by_one_alone() {
    let (world, a, _b) = two().await;
    for (query, node) in [
        ("node=b", "b"),
        ("node=self", "a"),
        ("node=a", "a"),
        ("local=true", "a"),
    ] {
        let page = page(&a, &format!("after=0&{query}")).await;
        let nodes: BTreeSet<&str> = page
            .events
            .iter()
            .map(|event| event.node.as_str())
            .collect();
        assert_eq!(nodes, BTreeSet::from([node]), "{query}");
    }
    let mut own = Events::open(&a.api, "?local=true&after=0", None).await;
    let (id, event) = own.next().await;
    assert_eq!(id, event.seq.to_string());
    for (query, slug) in [
        ("node=nobody", "no-such-node"),
        ("node=b&local=true", "bad-query"),
        ("after=f1-x", "bad-query"),
        ("after=x", "bad-query"),
    ] {
        let answer = a.api.get(&format!("/v1/events?follow=false&{query}")).await;
        assert_eq!(answer.problem().slug(), slug, "{query}");
    }
    let client = world.client("a");
    let request = Request::get("/v1/events?follow=false&after=0")
        .header("x-conman-caller", "read test")
        .body(Empty::<bytes::Bytes>::new());
    let to = world.address_of_b();
    let answer = client.request(&to, request.expect("a request")).await;
    let body = answer.expect("an answer").into_body().collect().await;
    let page: EventPage = serde_json::from_slice(&body.expect("whole").to_bytes()).expect("JSON");
    assert!(
        page.events.iter().all(|event| event.node == "b"),
        "{page:?}"
    );
}

/// Names of nodes that are gone stay known for a day, and there may be more of them than a position
/// has room for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_are_gone_keep_no_other_out_and_are_not_told_of() {
    let world = World::new();
    let a = Node::join(&world, "a").await;
    for number in 0..260 {
        let name = format!("gone-{number}");
        let _ = world.fleet.join(&name);
        world.change(&name, |gone| gone.standing = PeerStanding::Fenced);
    }
    let _z = Node::join(&world, "z").await;
    let nodes = |events: &[Event]| -> BTreeSet<String> {
        events.iter().map(|event| event.node.clone()).collect()
    };
    let both = BTreeSet::from(["a".to_owned(), "z".to_owned()]);
    assert_eq!(nodes(&page(&a, "after=0").await.events), both);
    // Who asks for one of them is told what became of it.
    let named = page(&a, "after=0&node=gone-7").await.events;
    let message = &named.first().expect("it is told of").message;
    assert!(message.contains("declared dead"), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_told_to_be_missing_and_declared_dead_is_told_to_be_back() {
    let (world, a, b) = two().await;
    let mut url = None;
    world.announced("b", |b| {
        url = b.peer_url.replace(format!("https://{}", unused_address()));
    });
    let mut events = Events::open(&a.api, "", None).await;
    events.until(EventKind::NodeUnreachable, "b").await;
    world.change("b", |b| b.standing = PeerStanding::Fenced);
    // Longer than between two looks at which nodes there are.
    tokio::time::sleep(Duration::from_secs(3)).await;
    start(&world, [&a, &b], 0, "alice").await;
    let told = events.until(EventKind::SessionReady, "a").await;
    assert!(told.iter().all(|(_, event)| event.node == "a"), "{told:?}");
    world.change("b", |b| b.standing = PeerStanding::Live);
    world.announced("b", |b| b.peer_url = url);
    start(&world, [&a, &b], 1, "bob").await;
    let seen = events.until(EventKind::SessionReady, "b").await;
    let of_b = seen.iter().filter(|(_, event)| event.node == "b");
    let kinds: Vec<EventKind> = of_b.map(|(_, event)| event.kind).collect();
    assert_eq!(kinds.first(), Some(&EventKind::NodeReached), "{kinds:?}");
}
