//! The journal as its readers see it.

use conman_proto::{EventKind, SessionId};
use conman_registry::{Journal, NewEvent};
use futures_util::StreamExt as _;
use jiff::Timestamp;

pub(crate) fn event(session: &str, number: usize) -> NewEvent {
    NewEvent {
        at: Timestamp::now(),
        kind: EventKind::SessionReady,
        session: Some(session.parse::<SessionId>().expect("an id")),
        generation: None,
        phase: None,
        duration_ms: None,
        message: format!("event {number}"),
    }
}

#[tokio::test]
async fn events_are_read_in_the_order_they_were_appended() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = Journal::open(dir.path(), "node", 100).expect("opens");
    journal.append((0..10).map(|number| event("a", number)).collect());
    journal.append((10..20).map(|number| event("b", number)).collect());
    journal.flush().await;
    let page = journal.page(0, 1000).await.expect("a page");
    let messages: Vec<_> = page
        .events
        .iter()
        .map(|event| event.message.clone())
        .collect();
    let expected: Vec<_> = (0..20).map(|number| format!("event {number}")).collect();
    assert_eq!(messages, expected);
    assert!(page.events.is_sorted_by(|a, b| a.seq < b.seq));
    assert!(!page.truncated);
    let timeline = journal
        .timeline(&"b".parse().expect("an id"))
        .await
        .expect("a timeline");
    assert_eq!(timeline.events.len(), 10);
    assert!(!timeline.truncated);
}

#[tokio::test]
async fn a_follower_sees_what_is_stored_and_then_what_comes() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = Journal::open(dir.path(), "node", 100_000).expect("opens");
    journal.append((0..3000).map(|number| event("a", number)).collect());
    journal.flush().await;
    let mut follower = journal.follow(0);
    for number in 0..3000 {
        let event = follower.next().await.expect("an event");
        assert_eq!(event.message, format!("event {number}"));
    }
    for number in 3000..3100 {
        journal.append(vec![event("a", number)]);
        let event = follower.next().await.expect("an event");
        assert_eq!(event.message, format!("event {number}"));
    }
    drop(journal);
    assert_eq!(follower.next().await, None);
}
