//! The journal: a stream that a client resumes, and a session's timeline.

use std::time::Duration;

use conman_e2e::{Conman, EventStream, docker_shared, eventually_some};
use conman_proto::{Event, EventKind, EventPage, Timeline};
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

fn is(event: &Event, kind: EventKind, id: &str) -> bool {
    event.kind == kind && event.session.as_ref().is_some_and(|own| own.as_str() == id)
}

#[tokio::test]
async fn events_go_on_after_the_last_one_seen_across_a_crash_without_gap_or_duplicate() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let mut stream = EventStream::open(&conman.api(), "/v1/events?after=0", None).await;
    let mut seen = Vec::new();
    for round in 0..3 {
        let id = format!("s{round}");
        let api = conman.api();
        api.ensure(&id, &json!({"template": "tiny"})).await;
        let last = loop {
            let event = stream.next().await.expect("the stream goes on");
            let (seq, ready) = (event.seq, is(&event, EventKind::SessionReady, &id));
            seen.push(event);
            if ready {
                break seq;
            }
        };
        // These events are missed: the crash comes in the middle of the stream.
        api.ensure(&format!("missed{round}"), &json!({"template": "tiny"}))
            .await;
        conman.restart_after_crash().await;
        stream = EventStream::open(&conman.api(), "/v1/events", Some(last)).await;
    }
    let api = conman.api();
    api.stop("s2").await;
    while !seen
        .iter()
        .any(|event| is(event, EventKind::SessionReleased, "s2"))
    {
        seen.push(stream.next().await.expect("the stream goes on"));
    }
    let numbers: Vec<u64> = seen.iter().map(|event| event.seq).collect();
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");

    // What came over four connections is what is in the journal.
    let page = api.get("/v1/events?follow=false&after=0&limit=1000").await;
    let page: EventPage = page.expect(StatusCode::OK);
    assert!(!page.truncated);
    let kept: Vec<u64> = page.events.iter().map(|event| event.seq).collect();
    assert_eq!(numbers, kept[..numbers.len()]);
    assert_eq!(seen, page.events[..seen.len()]);
    for round in 0..3 {
        let id = format!("s{round}");
        let ready = seen
            .iter()
            .filter(|event| is(event, EventKind::SessionReady, &id));
        assert_eq!(ready.count(), 1, "{id}");
    }
    let started = seen
        .iter()
        .filter(|event| event.kind == EventKind::NodeStarted);
    assert_eq!(started.count(), 4);
}

#[tokio::test]
async fn a_stream_of_one_session_has_its_events_only_and_in_the_order_of_its_life() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let mut stream = EventStream::open(&api, "/v1/events?session=s", None).await;
    for id in ["other", "s"] {
        api.ensure(id, &json!({"template": "tiny"})).await;
        api.stop(id).await;
    }
    let mut kinds = Vec::new();
    while kinds.last() != Some(&EventKind::SessionCleaned) {
        let event = stream.next().await.expect("the stream goes on");
        assert_eq!(event.session.map(String::from).as_deref(), Some("s"));
        kinds.push(event.kind);
    }
    let position = |kind| {
        let found = kinds.iter().position(|own| *own == kind);
        found.unwrap_or_else(|| panic!("{kind} is missing in {kinds:?}"))
    };
    let life = [
        EventKind::SessionClaimed,
        EventKind::SessionReady,
        EventKind::SessionKilled,
        EventKind::SessionDead,
        EventKind::SessionReleased,
        EventKind::SessionCleaned,
    ];
    assert!(life.map(position).is_sorted(), "{kinds:?}");
}

#[tokio::test]
async fn the_phases_of_a_timeline_follow_on_each_other_and_sum_to_the_whole_start() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let session = api
        .ensure("s", &json!({"template": "python"}))
        .await
        .session;
    let timeline: Timeline = eventually_some("the whole start is told", PATIENCE, async || {
        let timeline: Timeline = api
            .get("/v1/sessions/s/timeline")
            .await
            .expect(StatusCode::OK);
        let ready = timeline
            .events
            .iter()
            .any(|event| event.kind == EventKind::SessionReady);
        ready.then_some(timeline)
    })
    .await;
    let names: Vec<&str> = timeline
        .phases
        .iter()
        .map(|phase| phase.name.as_str())
        .collect();
    for name in ["claim", "create", "start", "ready"] {
        assert!(names.contains(&name), "{name} is missing in {names:?}");
    }
    assert!(
        timeline
            .phases
            .iter()
            .all(|phase| phase.generation == session.generation)
    );
    let sum: f64 = timeline.phases.iter().map(|phase| phase.duration_ms).sum();
    let whole = session
        .started_at
        .expect("it runs")
        .duration_since(session.created_at);
    let whole = whole.as_secs_f64() * 1_000.0;
    // The wall clock that the whole is told by may be set in between, hence "about".
    assert!(
        (sum - whole).abs() < 50.0 + whole * 0.1,
        "{sum} ms of {whole} ms: {names:?}"
    );
    // Each begins where the one before ends.
    for pair in timeline.phases.windows(2) {
        let begins = pair[1].started_at.duration_since(pair[0].started_at);
        let gap = begins.as_secs_f64() * 1_000.0 - pair[0].duration_ms;
        assert!(
            gap.abs() < 1.0,
            "{gap} ms between {} and {}",
            pair[0].name,
            pair[1].name
        );
    }
    assert_eq!(session.phases_ms.len(), names.len());
}

#[tokio::test]
async fn conman_why_tells_a_start_a_failure_and_a_stop() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "python"})).await;
    let runs = conman.cli(&["why", "s"]).await;
    assert!(runs.success().contains("running"), "{runs:?}");
    assert!(runs.stdout.contains("conman exec -it s"), "{runs:?}");
    api.stop("s").await;
    let stopped = conman.cli(&["why", "s"]).await;
    assert!(stopped.success().contains("stopped"), "{stopped:?}");

    let request = json!({"image": "no-such-image:ever"});
    let refused = api.put("/v1/sessions/bad", &request).await;
    assert_eq!(refused.status, StatusCode::UNPROCESSABLE_ENTITY);
    let failed = conman.cli(&["why", "bad"]).await;
    assert!(
        failed.success().contains("no-such-image:ever"),
        "{failed:?}"
    );
    let told = conman.cli(&["--json", "why", "bad"]).await;
    let told: Value = serde_json::from_str(told.success()).expect("it is JSON");
    assert!(told.to_string().contains("no-such-image:ever"), "{told}");
    assert_eq!(conman.cli(&["why", "nobody"]).await.code, Some(3));
}

#[tokio::test]
async fn conman_events_prints_the_past_and_resumes_behind_a_number() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("s", &json!({"template": "tiny"})).await;
    let all = conman.cli(&["--json", "events", "--no-follow"]).await;
    let parse = |text: &str| -> Vec<u64> {
        let events = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        events
            .map(|event| event["seq"].as_u64().expect("a number"))
            .collect()
    };
    let all = parse(all.success());
    assert!(all.len() >= 3, "{all:?}");
    let after = all[1].to_string();
    let rest = conman
        .cli(&["--json", "events", "--no-follow", "--after", &after])
        .await;
    let rest = parse(rest.success());
    assert_eq!(rest[..all.len() - 2], all[2..]);
}
