//! Notices of Compute Engine's metadata server, by a server that behaves as its documentation
//! says, errors included.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::stage::{Daemon, Stage, eventually, idle, session};
use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use conman_node::{EmergencyThread, EnsureError, NOTICE_SOURCES, NoticeSourceOptions};
use conman_proto::{EndCause, NodeState, PreemptRequest, SessionState};
use tokio::sync::watch;

/// The metadata server, and what it was asked.
#[derive(Clone)]
struct Metadata {
    values: watch::Sender<HashMap<&'static str, &'static str>>,
    trouble: Arc<Mutex<Option<Trouble>>>,
    asked: Arc<Mutex<Vec<Asked>>>,
}

#[derive(Debug, Clone)]
struct Asked {
    key: String,
    last_etag: Option<String>,
    waits: bool,
    flavor: Option<String>,
}

#[derive(Debug, Clone, Copy)]
enum Trouble {
    Status(StatusCode),
    /// Somebody else answers at this address.
    NoFlavor,
    /// Far more than any value has.
    Endless,
    /// It does not wait for a change.
    Hasty,
}

impl Metadata {
    fn start(daemon: &tokio::runtime::Runtime) -> (Self, SocketAddr) {
        let values = HashMap::from([("preempted", "FALSE"), ("maintenance-event", "NONE")]);
        let metadata = Self {
            values: watch::Sender::new(values),
            trouble: Arc::default(),
            asked: Arc::default(),
        };
        let app = Router::new()
            .route("/computeMetadata/v1/instance/{key}", get(answer))
            .with_state(metadata.clone());
        let address = daemon.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
                .await
                .expect("bound");
            let address = listener.local_addr().expect("an address");
            tokio::spawn(async move { axum::serve(listener, app).await });
            address
        });
        (metadata, address)
    }

    fn set(&self, key: &'static str, value: &'static str) {
        self.values.send_modify(|values| {
            values.insert(key, value);
        });
    }

    fn make_trouble(&self, trouble: Option<Trouble>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        // Whoever waits is answered, and meets the trouble with the next question.
        self.values.send_modify(|_| {});
    }

    fn asked(&self, key: &str) -> Vec<Asked> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked
            .iter()
            .filter(|asked| asked.key == key)
            .cloned()
            .collect()
    }
}

async fn answer(
    State(metadata): State<Metadata>,
    Path(key): Path<String>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let asked = Asked {
        key: key.clone(),
        last_etag: query.get("last_etag").cloned(),
        waits: query
            .get("wait_for_change")
            .is_some_and(|value| value == "true"),
        flavor: headers
            .get("metadata-flavor")
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned),
    };
    metadata
        .asked
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(asked.clone());
    if asked.flavor.as_deref() != Some("Google") {
        return StatusCode::FORBIDDEN.into_response();
    }
    let read_trouble = || {
        *metadata
            .trouble
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    let mut values = metadata.values.subscribe();
    let value_of = |values: &HashMap<&'static str, &'static str>| values.get(&*key).copied();
    let etag_of = |value: &str| format!("etag&{value}");
    if asked.waits && read_trouble().is_none() {
        let bound: u64 = query
            .get("timeout_sec")
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        let changed = values.wait_for(|values| {
            let value = value_of(values).unwrap_or_default();
            let troubled = metadata
                .trouble
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .is_some();
            troubled || asked.last_etag.as_deref() != Some(&etag_of(value))
        });
        let _ = tokio::time::timeout(Duration::from_secs(bound), changed).await;
    }
    let Some(value) = value_of(&metadata.values.borrow()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let flavor = [("metadata-flavor", HeaderValue::from_static("Google"))];
    let etag = [(
        "etag",
        HeaderValue::from_str(&etag_of(value)).expect("a header"),
    )];
    match read_trouble() {
        Some(Trouble::Status(status)) => (status, flavor, value).into_response(),
        Some(Trouble::NoFlavor) => (etag, value).into_response(),
        Some(Trouble::Endless) => {
            (flavor, etag, format!("{value}{}", " ".repeat(1 << 20))).into_response()
        }
        Some(Trouble::Hasty) | None => (flavor, etag, value).into_response(),
    }
}

/// A node that watches a metadata server, and that server on threads of its own.
struct Scene {
    daemon: Daemon,
    metadata: Metadata,
    _server: tokio::runtime::Runtime,
}

fn set_up(stage: &Stage) -> Scene {
    let (server, metadata, address) = serve();
    let emergency = watching(&format!("http://{address}"));
    Scene {
        daemon: stage.boot_after(emergency),
        metadata,
        _server: server,
    }
}

fn serve() -> (tokio::runtime::Runtime, Metadata, SocketAddr) {
    let server = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a tokio runtime");
    let (metadata, address) = Metadata::start(&server);
    (server, metadata, address)
}

/// An emergency thread that watches a metadata server.
fn watching(endpoint: &str) -> EmergencyThread {
    let kind = NOTICE_SOURCES.iter().find(|kind| kind.name == "gce");
    let source = NoticeSourceOptions {
        kind: *kind.expect("it is known"),
        is_on: true,
        setting: vec![endpoint.to_owned()],
    };
    EmergencyThread::start(&[source]).expect("a thread")
}

fn await_node(daemon: &Daemon, state: NodeState) {
    eventually("the node's state", || {
        (daemon.node.status().view().state == state).then_some(())
    });
}

#[test]
fn a_notice_preempts_and_its_withdrawal_admits_again() {
    let stage = Stage::new();
    let Scene {
        daemon, metadata, ..
    } = &set_up(&stage);
    daemon.start("alice", &idle());
    let waits = |key| {
        eventually("both values to be waited for", || {
            metadata.asked(key).into_iter().find(|asked| asked.waits)
        })
    };
    let asked = waits("preempted");
    assert_eq!(asked.last_etag.as_deref(), Some("etag&FALSE"));
    assert_eq!(asked.flavor.as_deref(), Some("Google"));
    waits("maintenance-event");

    metadata.set("preempted", "TRUE");
    let shown = daemon.await_state("alice", SessionState::Stopped);
    assert!(
        shown
            .reason
            .as_deref()
            .is_some_and(|r| r.contains("Compute Engine")),
        "{shown:?}"
    );
    assert_eq!(stage.alive(), 0);
    // The report that the notice got; this one comes too late to be anything but a duplicate.
    let report = daemon.run(
        daemon
            .node
            .preemption()
            .preempt(&PreemptRequest::default(), "late"),
    );
    assert_eq!(report.expect("a report").source, "gce");
}

#[test]
fn a_notice_that_arrives_before_the_node_is_up_is_acted_on() {
    let stage = Stage::new();
    let earlier = stage.boot();
    earlier.start("alice", &idle());
    earlier.vanish();
    let (_server, metadata, address) = serve();
    metadata.set("preempted", "TRUE");
    let emergency = watching(&format!("http://{address}"));
    eventually("the notice to arrive", || {
        metadata
            .asked("preempted")
            .iter()
            .any(|asked| asked.waits)
            .then_some(())
    });

    let daemon = stage.boot_after(emergency);
    let shown = daemon.await_state("alice", SessionState::Stopped);
    let cause = shown.end.map(|end| end.cause);
    assert_eq!(cause, Some(EndCause::Preempted), "{:?}", shown.reason);
    assert_eq!(stage.alive(), 0);
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
    let refused = daemon.run(
        daemon
            .node
            .sessions()
            .ensure(&session("bob"), &idle(), true),
    );
    assert!(matches!(refused, Err(EnsureError::Preempted { .. })));
}

#[test]
fn a_notice_that_is_withdrawn_before_the_node_is_up_kills_nothing() {
    let stage = Stage::new();
    let earlier = stage.boot();
    earlier.start("alice", &idle());
    let alive = stage.alive();
    earlier.vanish();
    let (_server, metadata, address) = serve();
    metadata.set("preempted", "TRUE");
    let emergency = watching(&format!("http://{address}"));
    let waiting = || {
        let asked = metadata.asked("preempted");
        asked.iter().filter(|asked| asked.waits).count()
    };
    eventually("the notice to arrive", || (waiting() > 0).then_some(()));
    metadata.set("preempted", "FALSE");
    eventually("its withdrawal to arrive", || (waiting() > 1).then_some(()));

    let daemon = stage.boot_after(emergency);
    daemon.await_state("alice", SessionState::Running);
    assert_eq!(stage.alive(), alive);
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
}

#[test]
fn a_withdrawn_notice_admits_sessions_again() {
    let stage = Stage::new();
    let Scene {
        daemon, metadata, ..
    } = &set_up(&stage);
    metadata.set("preempted", "TRUE");
    await_node(daemon, NodeState::Preempted);
    metadata.set("preempted", "FALSE");
    await_node(daemon, NodeState::Live);
    daemon.start("alice", &idle());
}

#[test]
fn host_maintenance_that_ends_the_machine_preempts_and_one_that_migrates_it_does_not() {
    let stage = Stage::new();
    let Scene {
        daemon, metadata, ..
    } = &set_up(&stage);
    daemon.start("alice", &idle());
    let heard = |count| {
        eventually("the value to be heard", || {
            (metadata.asked("maintenance-event").len() >= count).then_some(())
        });
    };
    heard(2);
    metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE");
    heard(3);
    assert_eq!(daemon.show("alice").state, SessionState::Running);
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE");
    await_node(daemon, NodeState::Preempted);
    // The other value still says that nothing is wrong, and does not undo it.
    metadata.set("preempted", "TRUE");
    metadata.set("preempted", "FALSE");
    metadata.set("maintenance-event", "NONE");
    await_node(daemon, NodeState::Live);
}

#[test]
fn an_operators_preemption_is_not_undone_by_the_metadata_server() {
    let stage = Stage::new();
    let Scene {
        daemon, metadata, ..
    } = &set_up(&stage);
    metadata.set("preempted", "TRUE");
    await_node(daemon, NodeState::Preempted);
    daemon
        .run(
            daemon
                .node
                .preemption()
                .preempt(&PreemptRequest::default(), "api"),
        )
        .expect("a report");
    let before = metadata.asked("preempted").len();
    metadata.set("preempted", "FALSE");
    eventually("the withdrawal to be heard", || {
        (metadata.asked("preempted").len() > before).then_some(())
    });
    assert_eq!(daemon.node.status().view().state, NodeState::Preempted);
    let readmitted = daemon.run(daemon.node.preemption().readmit());
    readmitted.expect("the order is carried out");
    await_node(daemon, NodeState::Live);
}

#[test]
fn a_repeated_notice_does_not_undo_what_an_operator_said_since() {
    let stage = Stage::new();
    let Scene {
        daemon, metadata, ..
    } = &set_up(&stage);
    metadata.set("preempted", "TRUE");
    await_node(daemon, NodeState::Preempted);
    let readmitted = daemon.run(daemon.node.preemption().readmit());
    readmitted.expect("the order is carried out");
    await_node(daemon, NodeState::Live);
    let before = metadata.asked("preempted").len();
    metadata.make_trouble(Some(Trouble::Hasty));
    eventually("the notice to be repeated", || {
        (metadata.asked("preempted").len() > before + 1).then_some(())
    });
    assert_eq!(daemon.node.status().view().state, NodeState::Live);
    daemon.start("alice", &idle());
}

#[test]
fn trouble_is_waited_out_and_what_changed_meanwhile_is_heard() {
    for trouble in [
        Trouble::Status(StatusCode::SERVICE_UNAVAILABLE),
        Trouble::Status(StatusCode::NOT_FOUND),
        Trouble::Endless,
        Trouble::NoFlavor,
    ] {
        let stage = Stage::new();
        let Scene {
            daemon, metadata, ..
        } = &set_up(&stage);
        eventually("the first answer", || {
            metadata
                .asked("preempted")
                .iter()
                .any(|asked| asked.waits)
                .then_some(())
        });
        metadata.make_trouble(Some(trouble));
        let before = metadata.asked("preempted").len();
        metadata.set("preempted", "TRUE");
        eventually("another try", || {
            (metadata.asked("preempted").len() > before + 1).then_some(())
        });
        assert_eq!(
            daemon.node.status().view().state,
            NodeState::Live,
            "{trouble:?}"
        );
        metadata.make_trouble(None);
        await_node(daemon, NodeState::Preempted);
    }
}

#[test]
fn without_a_metadata_server_the_node_serves_all_the_same() {
    let stage = Stage::new();
    // Nobody listens on this port (tcpmux), and if somebody does, it is no metadata server.
    let daemon = stage.boot_after(watching("http://127.0.0.1:1"));
    daemon.start("alice", &idle());
    assert!(daemon.node.sessions().get(&session("alice")).is_some());
}
