//! The journal on a disk that refuses writes.

use std::sync::Arc;

use conman_proto::{Event, EventKind};
use futures_util::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use tempfile::TempDir;

use crate::database::tests::faults::Faults;
use crate::journal::queue::MAX_WAITING;
use crate::{Journal, NewEvent};

const FOREVER: i64 = i64::MAX;

fn journal() -> (TempDir, Arc<Faults>, Journal) {
    let dir = tempfile::tempdir().expect("a directory");
    let faults = Faults::install(&dir.path().join("journal.redb"));
    let journal = Journal::open(dir.path(), "node", 100_000).expect("it opens");
    (dir, faults, journal)
}

fn event(number: usize) -> NewEvent {
    NewEvent {
        at: Timestamp::now(),
        kind: EventKind::SessionReady,
        session: Some("a".parse().expect("an id")),
        generation: None,
        phase: None,
        cause: None,
        duration_ms: None,
        message: number.to_string(),
    }
}

/// Everything from the beginning up to an event with this message.
async fn read_until(journal: &Journal, last: &str) -> Vec<Event> {
    let mut follower = journal.follow(0);
    let mut events: Vec<Event> = Vec::new();
    while events.last().is_none_or(|event| event.message != last) {
        events.push(follower.next().await.expect("the journal is open"));
    }
    events
}

#[tokio::test]
async fn what_is_not_durable_is_not_shown_and_comes_exactly_once_when_the_disk_heals() {
    // Failures at different points of a commit, some of them after it became durable.
    for operations in 0..8 {
        let (_dir, faults, journal) = journal();
        journal.append(vec![event(0)]);
        journal.flush().await;
        faults.fail_after(operations, FOREVER);
        let mut follower = journal.follow(0);
        assert_eq!(follower.next().await.expect("stored").message, "0");

        journal.append(vec![event(1), event(2)]);
        journal.flush().await;
        let shown = journal.page(0, 10).await.expect("a page").events.len();
        assert_eq!(shown, 1, "after {operations} operations");
        let trouble = journal.trouble().expect("it is reported");
        assert!(trouble.contains("journal.redb"), "{trouble}");
        assert_eq!(
            follower.next().now_or_never(),
            None,
            "after {operations} operations"
        );

        faults.heal();
        journal.append(vec![event(3)]);
        let events = read_until(&journal, "3").await;
        assert_eq!(journal.trouble(), None);
        let messages: Vec<_> = events.iter().map(|event| event.message.as_str()).collect();
        assert_eq!(
            messages,
            ["0", "1", "2", "3"],
            "after {operations} operations"
        );
        for number in 1..=3 {
            assert_eq!(
                follower.next().await.expect("live").message,
                number.to_string()
            );
        }
    }
}

#[tokio::test]
async fn neither_appending_nor_reading_the_newest_waits_for_the_disk() {
    let (_dir, faults, journal) = journal();
    journal.append(vec![event(0)]);
    journal.flush().await;
    let stalled = faults.stall();
    for number in 1..1000 {
        journal.append(vec![event(number)]);
        let page = journal
            .page(0, 10)
            .now_or_never()
            .expect("it does not wait");
        assert_eq!(
            page.expect("a page").events.len(),
            1,
            "the others are not durable yet"
        );
    }
    drop(stalled);
    assert_eq!(read_until(&journal, "999").await.len(), 1000);
}

#[tokio::test]
async fn events_without_room_are_counted_where_they_are_missing() {
    let (_dir, faults, journal) = journal();
    faults.fail_after(0, FOREVER);
    journal.append(vec![event(0)]);
    // The writer has taken the first one and tries to write it.
    journal.flush().await;
    journal.append((1..=MAX_WAITING + 5).map(event).collect());
    journal.append((0..3).map(event).collect());
    faults.heal();
    journal.flush().await;
    while journal.page(0, 1).await.expect("a page").last_seq < MAX_WAITING as u64 + 2 {
        journal.flush().await;
        tokio::task::yield_now().await;
    }
    journal.append(vec![event(777_777)]);

    let events = read_until(&journal, "777777").await;
    let (before, after) = events.split_at(MAX_WAITING + 1);
    for (number, event) in before.iter().enumerate() {
        assert_eq!(event.message, number.to_string());
    }
    assert_eq!(after.len(), 2);
    assert_eq!(after[0].kind, EventKind::EventsLost);
    assert!(
        after[0].message.starts_with("8 events"),
        "{}",
        after[0].message
    );
}

#[tokio::test]
async fn what_a_full_disk_and_a_crash_lose_is_reported_to_readers() {
    let (dir, faults, journal) = journal();
    journal.append(vec![event(0)]);
    journal.flush().await;
    faults.fail_after(0, FOREVER);
    journal.append(vec![event(1)]);
    journal.flush().await;

    // What the next daemon finds after SIGKILL.
    let crashed = tempfile::tempdir().expect("a directory");
    for file in ["journal.redb", "journal-positions"] {
        std::fs::copy(dir.path().join(file), crashed.path().join(file)).expect("copied");
    }
    let next = Journal::open(crashed.path(), "node", 100_000).expect("it opens");
    next.append(vec![event(2)]);
    let events = read_until(&next, "2").await;
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    use EventKind::{EventsLost, SessionReady};
    assert_eq!(kinds, [SessionReady, EventsLost, SessionReady]);
    next.close().await;
    drop(next);

    // An orderly end loses nothing, also if nothing was written since the latest one.
    for _ in 0..2 {
        let next = Journal::open(crashed.path(), "node", 100_000).expect("it opens");
        assert_eq!(next.page(0, 10).await.expect("a page").events.len(), 3);
        next.close().await;
    }
    let next = Journal::open(crashed.path(), "node", 100_000).expect("it opens");
    next.append(vec![event(3)]);
    assert_eq!(read_until(&next, "3").await.len(), 4);
}
