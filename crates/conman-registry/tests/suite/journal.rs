//! The journal as its readers see it.

use std::path::Path;
use std::sync::Arc;

use conman_proto::{Event, EventKind, Generation};
use conman_registry::{Journal, NewEvent};
use futures_util::{FutureExt as _, StreamExt as _};
use jiff::{SignedDuration, Timestamp};

use crate::support::{generation, id};

pub(crate) fn event(session: &str, number: usize) -> NewEvent {
    NewEvent {
        at: Timestamp::now(),
        kind: EventKind::SessionReady,
        session: Some(id(session)),
        generation: None,
        phase: None,
        cause: None,
        duration_ms: None,
        message: format!("event {number}"),
    }
}

fn events(session: &str, numbers: std::ops::Range<usize>) -> Vec<NewEvent> {
    numbers.map(|number| event(session, number)).collect()
}

fn messages(events: &[Event]) -> Vec<&str> {
    events.iter().map(|event| event.message.as_str()).collect()
}

fn open(dir: &Path, max_events: u64) -> Journal {
    Journal::open(dir, "node", max_events).expect("the journal opens")
}

async fn append(journal: &Journal, events: Vec<NewEvent>) {
    journal.append(events);
    journal.flush().await;
}

/// Every event there is, read in pages of that size.
async fn all(journal: &Journal, page: usize) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    loop {
        let after = events.last().map_or(0, |event| event.seq);
        let next = journal.page(after, page).await.expect("a page").events;
        if next.is_empty() {
            return events;
        }
        events.extend(next);
    }
}

#[tokio::test]
async fn events_are_read_in_the_order_they_were_appended() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 100);
    append(&journal, events("a", 0..10)).await;
    append(&journal, events("b", 10..20)).await;
    let page = journal.page(0, 1000).await.expect("a page");
    let expected: Vec<_> = (0..20).map(|number| format!("event {number}")).collect();
    assert_eq!(messages(&page.events), expected);
    assert!(page.events.is_sorted_by(|a, b| a.seq < b.seq));
    assert!(page.events.iter().all(|event| event.node == "node"));
    assert!(!page.truncated);
    assert_eq!(page.last_seq, page.events[19].seq);
}

#[tokio::test]
async fn pages_from_memory_and_from_disk_are_the_same() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 100_000);
    append(&journal, events("a", 0..3000)).await;
    let live = all(&journal, 1000).await;
    assert_eq!(live.len(), 3000);
    assert_eq!(all(&journal, 7).await, live);
    drop(journal);
    // After a restart nothing is in memory.
    let journal = open(dir.path(), 100_000);
    assert_eq!(all(&journal, 1000).await, live);
    for (after, limit) in [(0, 0), (0, 5), (1500, 1000), (2990, 50), (3000, 5)] {
        let page = journal.page(after, limit).await.expect("a page");
        let expected: Vec<_> = live
            .iter()
            .filter(|event| event.seq > after)
            .take(limit.max(1))
            .cloned()
            .collect();
        assert_eq!(page.events, expected, "{limit} after {after}");
    }
}

#[tokio::test]
async fn positions_grow_across_restarts_and_nothing_appended_is_lost_by_an_orderly_end() {
    let dir = tempfile::tempdir().expect("a directory");
    for round in 0..5 {
        let journal = open(dir.path(), 1000);
        journal.append(events("a", round * 10..round * 10 + 10));
    }
    let read = all(&open(dir.path(), 1000), 1000).await;
    let expected: Vec<_> = (0..50).map(|number| format!("event {number}")).collect();
    assert_eq!(messages(&read), expected);
    assert!(read.is_sorted_by(|a, b| a.seq < b.seq));
}

#[tokio::test]
async fn positions_that_were_shown_are_not_used_again_when_the_last_events_are_lost() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("journal.redb");
    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 0..10)).await;
    drop(journal);
    let earlier = std::fs::read(&path).expect("read");
    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 10..20)).await;
    let shown = journal.page(0, 1000).await.expect("a page").last_seq;
    drop(journal);
    std::fs::write(&path, earlier).expect("the last events are lost");

    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 20..21)).await;
    let read = all(&journal, 1000).await;
    assert_eq!(
        read.last().map(|event| event.message.as_str()),
        Some("event 20")
    );
    assert!(read.last().is_some_and(|event| event.seq > shown));
}

#[tokio::test]
async fn the_oldest_events_are_dropped_and_readers_are_told() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 100);
    append(&journal, events("gone", 0..10)).await;
    append(&journal, events("cut", 10..500)).await;
    append(&journal, events("whole", 500..550)).await;
    let page = journal.page(0, 1000).await.expect("a page");
    let expected: Vec<_> = (450..550).map(|number| format!("event {number}")).collect();
    assert_eq!(messages(&page.events), expected);
    assert!(page.truncated);
    let first = page.events[0].seq;
    assert!(!journal.page(first, 10).await.expect("a page").truncated);
    assert!(!journal.page(first - 1, 10).await.expect("a page").truncated);
    assert!(journal.page(first - 2, 10).await.expect("a page").truncated);

    for (session, count, truncated) in [
        ("gone", 0, true),
        ("cut", 50, true),
        ("whole", 50, false),
        ("unheard-of", 0, false),
    ] {
        let timeline = journal.timeline(&id(session)).await.expect("a timeline");
        assert_eq!(timeline.events.len(), count, "{session}");
        assert_eq!(timeline.truncated, truncated, "{session}");
    }
}

#[tokio::test]
async fn a_lowered_bound_drops_what_exceeds_it() {
    let dir = tempfile::tempdir().expect("a directory");
    append(&open(dir.path(), 1000), events("a", 0..1000)).await;
    let journal = open(dir.path(), 10);
    append(&journal, events("a", 1000..1001)).await;
    let expected: Vec<_> = (991..1001)
        .map(|number| format!("event {number}"))
        .collect();
    assert_eq!(messages(&all(&journal, 1000).await), expected);
}

#[tokio::test]
async fn sessions_that_left_the_journal_long_ago_take_no_room() {
    let dir = crate::support::dir_in_memory();
    let journal = open(dir.path(), 5);
    for number in 0..100 {
        append(&journal, vec![event(&format!("session-{number}"), number)]).await;
    }
    let dropped = |name: &str| {
        let name = id(name);
        let journal = &journal;
        async move { journal.timeline(&name).await.expect("a timeline").truncated }
    };
    assert!(
        dropped("session-94").await,
        "the last one that left is remembered"
    );
    assert!(
        !dropped("session-0").await,
        "the first one that left is forgotten"
    );
    assert!(!dropped("session-99").await, "the newest one is whole");
}

#[tokio::test]
async fn a_timeline_tells_the_phases_of_the_latest_start() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 1000);
    let at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(100);
    let phase = |name: &str, generation: Generation, duration_ms: f64| NewEvent {
        at,
        kind: EventKind::SessionPhase,
        session: Some(id("a")),
        generation: Some(generation),
        phase: Some(name.to_owned()),
        cause: None,
        duration_ms: Some(duration_ms),
        message: String::new(),
    };
    let (first, second) = (generation(1), generation(2));
    append(
        &journal,
        vec![
            phase("claim", first, 1.0),
            phase("create", first, 2.0),
            phase("claim", second, 3.5),
            NewEvent {
                session: Some(id("b")),
                ..phase("claim", generation(9), 7.0)
            },
            phase("create", second, 4000.0),
            NewEvent {
                generation: Some(second),
                ..event("a", 0)
            },
        ],
    )
    .await;
    let timeline = journal.timeline(&id("a")).await.expect("a timeline");
    assert_eq!(timeline.events.len(), 5);
    let phases: Vec<_> = timeline
        .phases
        .iter()
        .map(|phase| (phase.name.as_str(), phase.generation, phase.duration_ms))
        .collect();
    assert_eq!(phases, [("claim", second, 3.5), ("create", second, 4000.0)]);
    assert_eq!(
        timeline.phases[1].started_at,
        at - SignedDuration::from_secs(4)
    );
}

#[tokio::test]
async fn a_follower_sees_what_is_stored_and_then_what_comes() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 100_000);
    append(&journal, events("a", 0..3000)).await;
    let mut follower = journal.follow(0);
    for number in 0..3000 {
        let event = follower.next().await.expect("an event");
        assert_eq!(event.message, format!("event {number}"));
    }
    for number in 3000..3050 {
        journal.append(vec![event("a", number)]);
        let event = follower.next().await.expect("an event");
        assert_eq!(event.message, format!("event {number}"));
    }
    journal.append(events("a", 3050..3060));
    drop(journal);
    let rest: Vec<_> = follower.collect().await;
    assert_eq!(
        rest.len(),
        10,
        "an orderly end shows what it wrote, and ends the stream"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_follower_of_many_writers_sees_each_event_once_and_in_one_order() {
    const WRITERS: usize = 8;
    const EVENTS: usize = 500;
    let dir = tempfile::tempdir().expect("a directory");
    let journal = Arc::new(open(dir.path(), 100_000));
    let followers: Vec<_> = (0..4)
        .map(|_| tokio::spawn(journal.follow(0).take(WRITERS * EVENTS).collect::<Vec<_>>()))
        .collect();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let journal = Arc::clone(&journal);
            tokio::spawn(async move {
                for number in 0..EVENTS {
                    journal.append(vec![event(&format!("writer-{writer}"), number)]);
                    if number % 50 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.expect("no panic");
    }
    let stored = all_after_flush(&journal).await;
    for follower in followers {
        assert_eq!(follower.await.expect("no panic"), stored);
    }
    for writer in 0..WRITERS {
        let writer = id(&format!("writer-{writer}"));
        let own = stored
            .iter()
            .filter(|event| event.session.as_ref() == Some(&writer));
        assert!(
            own.map(|event| event.message.clone())
                .eq((0..EVENTS).map(|number| format!("event {number}"))),
            "the order of one writer is kept"
        );
    }
}

async fn all_after_flush(journal: &Journal) -> Vec<Event> {
    journal.flush().await;
    all(journal, 1000).await
}

#[tokio::test]
async fn a_follower_resumes_after_a_restart_where_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 0..20)).await;
    let seen: Vec<_> = journal.follow(0).take(15).collect().await;
    drop(journal);
    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 20..25)).await;
    let rest: Vec<_> = journal.follow(seen[14].seq).take(10).collect().await;
    let expected: Vec<_> = (15..25).map(|number| format!("event {number}")).collect();
    assert_eq!(messages(&rest), expected);
}

#[tokio::test]
async fn a_follower_that_lags_beyond_the_bound_is_told_of_the_hole() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 100);
    append(&journal, events("a", 0..10)).await;
    let mut follower = journal.follow(0);
    for number in 0..10 {
        assert_eq!(
            follower.next().await.expect("an event").message,
            format!("event {number}")
        );
    }
    append(&journal, events("a", 10..1000)).await;
    let hole = follower.next().await.expect("a hole");
    assert_eq!(hole.kind, EventKind::EventsLost);
    let mut last = hole.seq;
    for number in 900..1000 {
        let event = follower.next().await.expect("an event");
        assert_eq!(event.message, format!("event {number}"));
        assert!(event.seq > last);
        last = event.seq;
    }
    assert_eq!(follower.next().now_or_never(), None, "then it waits");

    // One that begins at the beginning takes what there is; one that resumes is told.
    let first = journal.follow(0).next().await.expect("an event");
    assert_eq!(first.message, "event 900");
    let first = journal.follow(3).next().await.expect("an event");
    assert_eq!(first.kind, EventKind::EventsLost);
}

#[tokio::test]
async fn long_texts_are_cut_between_two_characters() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 10);
    let long = NewEvent {
        message: format!("x{}", "ä".repeat(10_000)),
        phase: Some("ö".repeat(1_000)),
        duration_ms: Some(f64::NAN),
        ..event("a", 0)
    };
    append(&journal, vec![long]).await;
    let read = &all(&journal, 10).await[0];
    assert_eq!(read.message.len(), 4095);
    assert_eq!(read.phase.as_ref().map(String::len), Some(64));
    assert_eq!(read.duration_ms, None);
}

#[tokio::test]
async fn a_position_that_this_journal_never_had_begins_with_what_is_missing() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 1000);
    append(&journal, events("a", 0..3)).await;
    let page = journal.page(1 << 50, 10).await.expect("a page");
    assert_eq!((page.events.len(), page.truncated), (3, true));
    let followed: Vec<_> = journal.follow(1 << 50).take(4).collect().await;
    assert_eq!(followed[0].kind, EventKind::EventsLost);
    assert_eq!(followed[1..], page.events[..]);
}

#[tokio::test]
async fn a_timeline_has_the_freezes_between_a_sessions_start_and_its_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = open(dir.path(), 1000);
    let of = |kind, session: Option<&str>| NewEvent {
        kind,
        session: session.map(id),
        generation: session.map(|_| generation(7)),
        ..event("a", 0)
    };
    use EventKind::{
        NodeCordoned, NodeFrozen, NodeThawed, SessionClaimed, SessionReady, SessionReleased,
    };
    let happened = [
        of(NodeFrozen, None),
        of(SessionClaimed, Some("a")),
        of(NodeCordoned, None),
        of(NodeFrozen, None),
        of(SessionReady, Some("b")),
        of(NodeThawed, None),
        of(SessionReleased, Some("a")),
        of(NodeFrozen, None),
    ];
    append(&journal, happened.to_vec()).await;
    let kinds = async |session| -> Vec<EventKind> {
        let timeline = journal.timeline(&id(session)).await.expect("a timeline");
        timeline.events.iter().map(|event| event.kind).collect()
    };
    let of_a = [SessionClaimed, NodeFrozen, NodeThawed, SessionReleased];
    assert_eq!(kinds("a").await, of_a);
    assert_eq!(kinds("b").await, [SessionReady, NodeThawed, NodeFrozen]);
    assert_eq!(kinds("c").await, []);
}
