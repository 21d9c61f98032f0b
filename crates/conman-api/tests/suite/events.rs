//! The event stream resumes where it was, also on a daemon that was started anew.

use crate::stage::{Api, PATIENCE, Stage, session};
use axum::body::{Body, BodyDataStream};
use conman_auth::Scope;
use conman_proto::{Event, EventKind, EventPage};
use futures_util::StreamExt as _;
use http::{Method, StatusCode};

/// Server-sent events as they come.
struct Events {
    body: BodyDataStream,
    text: String,
}

impl Events {
    async fn open(api: &Api, query: &str, last: Option<u64>) -> Self {
        let uri = format!("/v1/events{query}");
        let mut request = api.request(Scope::Read, Method::GET, &uri);
        if let Some(last) = last {
            request.headers_mut().insert("last-event-id", last.into());
        }
        let response: http::Response<Body> = api.open(request).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self {
            body: response.into_body().into_data_stream(),
            text: String::new(),
        }
    }

    /// The next event; `None` at the stream's end.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_owned();
                self.text = rest.to_owned();
                let field = |name: &str| {
                    block
                        .lines()
                        .find_map(|line| line.strip_prefix(name))
                        .map(str::trim)
                };
                let Some(data) = field("data:") else { continue };
                let event: Event = serde_json::from_str(data).expect("an event");
                assert_eq!(field("id:"), Some(event.seq.to_string().as_str()));
                return Some(event);
            }
            let chunk = tokio::time::timeout(PATIENCE, self.body.next())
                .await
                .expect("in time")?;
            let chunk = chunk.expect("the stream is whole");
            self.text += std::str::from_utf8(&chunk).expect("text");
        }
    }

    async fn until(&mut self, kind: EventKind) -> Event {
        loop {
            let event = self.next().await.expect("the stream goes on");
            if event.kind == kind {
                return event;
            }
        }
    }
}

#[tokio::test]
async fn a_stream_resumes_without_gap_or_repetition_after_a_restart() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let mut events = Events::open(&api, "?after=0", None).await;
    api.start("a").await;
    let seen = events.until(EventKind::SessionReady).await;
    api.call(Method::DELETE, &session("a"), "").await;
    api.closing.cancel();
    while events.next().await.is_some() {}
    api.node.shutdown(true).await;
    drop((events, api));

    let api = stage.boot().await;
    let mut events = Events::open(&api, "", Some(seen.seq)).await;
    let mut resumed = Vec::new();
    while resumed.last().map(|event: &Event| event.kind) != Some(EventKind::NodeStarted) {
        resumed.push(events.next().await.expect("the stream goes on"));
    }
    let kinds: Vec<_> = resumed.iter().map(|event| event.kind).collect();
    for kind in [EventKind::SessionReleased, EventKind::NodeStopping] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let uri = format!("/v1/events?follow=false&after={}", seen.seq);
    let stored: EventPage = api.get(&uri).await.json();
    assert_eq!(resumed[..], stored.events[..resumed.len()]);
}

#[tokio::test]
async fn a_stream_without_position_begins_with_what_happens_next() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("before").await;
    api.node.journal().flush().await;
    let mut events = Events::open(&api, "", None).await;
    api.start("after").await;
    let first = events.next().await.expect("an event");
    assert_eq!(first.session.expect("of a session").as_str(), "after");
}

#[tokio::test]
async fn a_stream_of_one_session_leaves_out_the_others() {
    let stage = Stage::new();
    let api = stage.boot().await;
    let mut events = Events::open(&api, "?session=b&after=0", None).await;
    api.start("a").await;
    api.start("b").await;
    loop {
        let event = events.next().await.expect("the stream goes on");
        assert_eq!(event.session.expect("of a session").as_str(), "b");
        if event.kind == EventKind::SessionReady {
            break;
        }
    }
}

#[tokio::test]
async fn a_position_that_this_journal_never_had_begins_with_what_is_missing() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.node.journal().flush().await;
    let mut events = Events::open(&api, "", Some(1 << 50)).await;
    for kind in [EventKind::EventsLost, EventKind::NodeStarted] {
        assert_eq!(events.next().await.expect("an event").kind, kind);
    }
    let uri = format!("/v1/events?follow=false&after={}", 1_u64 << 50);
    let page: EventPage = api.get(&uri).await.json();
    assert_eq!(page.events[0].kind, EventKind::NodeStarted);
    assert!(page.truncated);
}

#[tokio::test]
async fn pages_hold_what_was_asked_for() {
    let stage = Stage::new();
    let api = stage.boot().await;
    api.start("a").await;
    api.call(Method::DELETE, &session("a"), "").await;
    // Clean-up goes on behind the answer, and ends the session's story.
    let mut stream = Events::open(&api, "?after=0", None).await;
    stream.until(EventKind::SessionCleaned).await;
    api.node.journal().flush().await;
    let page = async |query: &str| -> EventPage {
        api.get(&format!("/v1/events?follow=false&{query}"))
            .await
            .json()
    };
    let all = page("").await;
    assert!(all.events.len() > 5 && !all.truncated);
    let of_session = all
        .events
        .iter()
        .filter(|event| event.session.is_some())
        .count();
    assert_eq!(page("session=a").await.events.len(), of_session);
    assert_eq!(page("session=a&limit=2").await.events.len(), 2);
    assert_eq!(page("session=b").await.events.len(), 0);
    let phases = page("kind=session_phase").await.events;
    assert!(!phases.is_empty());
    let is_phase = |event: &Event| event.kind == EventKind::SessionPhase;
    assert!(phases.iter().all(is_phase) && !all.events.iter().any(is_phase));
    let two = page("kind=session_ready&kind=session_dead&limit=2").await;
    let kinds: Vec<_> = two.events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::SessionReady, EventKind::SessionDead]);
    let wrong = api.get("/v1/events?follow=false&kind=session_redy").await;
    assert_eq!(wrong.status, StatusCode::BAD_REQUEST);
    let last = page(&format!("after={}", all.events[1].seq)).await;
    assert_eq!(last.events[..], all.events[2..]);
}
