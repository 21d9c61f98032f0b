//! Tests of how events of other nodes are read.

use conman_auth::{Caller, CallerOrigin, Scope};
use conman_core::placement::PlacementLimits;
use conman_fleet::FleetMap;
use conman_peer::{Dialer, PeerClient};
use conman_proto::{Event, EventKind};
use conman_testkit::ModelFleet;
use jiff::Timestamp;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::events::EventFilter;

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A page with an event that a node named `new` wrote, as it is sent.
fn page() -> String {
    let event = Event {
        seq: 7,
        at: Timestamp::now(),
        kind: EventKind::NodeStarted,
        node: "new".to_owned(),
        session: None,
        generation: None,
        phase: None,
        cause: None,
        duration_ms: None,
        message: "started".to_owned(),
    };
    let page = EventPage {
        events: vec![event],
        last_seq: 7,
        cursor: "7".to_owned(),
        truncated: false,
        complete: true,
    };
    serde_json::to_string(&page).expect("JSON")
}

/// What is reported of node `old` if such events come from its address, with these fields in the
/// answer. The nodes do not authenticate by name.
async fn told_at_its_address(fields: &str) -> News {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let page = page();
    let length = format!("content-length: {}\r\n", page.len());
    let answer = format!("HTTP/1.1 200 OK\r\n{fields}{length}\r\n{page}");
    let answering = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let answer = answer.clone();
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4_096]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
                // Until the other end is closed.
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
        }
    });
    let fleet = ModelFleet::new();
    let (_, seen) = fleet.join("me");
    let _ = fleet.join("old");
    fleet.announced("old", |old| {
        old.peer_url = Some(format!("http://{address}"))
    });
    let client = PeerClient::new(Dialer::new("me", None));
    let map = FleetMap::new(seen, client, PlacementLimits::default());
    let events = FleetEvents {
        map: Arc::new(map),
        only: None,
        filter: EventFilter::default(),
        caller: Caller {
            name: "a test".to_owned(),
            scope: Scope::Read,
            origin: CallerOrigin::Token,
        },
    };
    let request = events.request((0, 0), STREAM_PAGE);
    let mut news = follow(&Arc::new(events), &Arc::from("old"), request, false);
    let told = timeout(PATIENCE, news.next()).await.expect("in time");
    answering.abort();
    let (node, told) = told.expect("it has not left");
    assert_eq!(&*node, "old");
    told
}

#[tokio::test]
async fn what_a_node_wrote_under_a_former_name_is_told() {
    let told = told_at_its_address("x-conman-node: old\r\n").await;
    let News::Event(event) = &told else {
        panic!("{told:?}");
    };
    assert_eq!((&*event.node, event.seq), ("new", 7));
}

#[tokio::test]
async fn what_another_node_tells_at_its_address_is_not_told_as_its_own() {
    let told = told_at_its_address("x-conman-node: new\r\n").await;
    let News::Note(missing) = &told else {
        panic!("{told:?}");
    };
    assert_eq!(missing.kind, EventKind::NodeUnreachable);
    let why = &missing.message;
    assert!(why.contains("node `new` answers"), "{why}");
}
