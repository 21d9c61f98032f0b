//! What is shown while the disk with the daemon's state is full.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use conman_e2e::{Api, Conman, eventually, eventually_some, native};
use conman_proto::{EventKind, EventPage, Readiness, SessionList, SessionState};
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
const DISK: &str = "size=96m";
/// Enough for the disk watch to refuse starts before the last byte is used.
const RESERVE: &str = "disk_reserve_bytes = 4194304";

/// What a warning about each says.
const DISK_SHORT: &str = "disk is short";
const NOT_STORED: &str = "events are not stored";

#[tokio::test]
async fn row_40_a_full_disk_is_shown_as_it_is_and_no_event_is_missing_afterwards() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .state_on_tmpfs(DISK)
        .set("limits", RESERVE)
        .start_native(&native)
        .await;
    let api = conman.api();
    let pid = api
        .ensure("s", &json!({"template": "idle"}))
        .await
        .session
        .pid
        .expect("it runs");
    assert_eq!(warnings(&api).await, [""; 0]);

    let filler = conman.state_dir().join("filler");
    fill(&filler);
    let mut cordons = 0;
    let both = eventually_some("both are warned of", PATIENCE, async || {
        // Events that the journal has to store.
        for what in ["cordon", "uncordon"] {
            let path = format!("/v1/nodes/self/{what}");
            let answer = api.post(&path, &json!({})).await;
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        }
        cordons += 1;
        fill(&filler);
        let warnings = warnings(&api).await;
        let has = |part| warnings.iter().any(|warning| warning.contains(part));
        (has(DISK_SHORT) && has(NOT_STORED)).then_some(warnings)
    })
    .await;
    assert!(both.iter().any(|it| it.contains("journal")), "{both:?}");

    // The witness: the file system itself, and the session's process.
    let free = |path: &Path| {
        let seen = rustix::fs::statvfs(path).expect("it is there");
        seen.f_bavail * seen.f_frsize
    };
    eventually("the gauge is what df shows", PATIENCE, async || {
        let gauge = gauge(&api, "conman_disk_free_bytes").await;
        gauge == Some(free(&conman.state_dir()).to_string())
    })
    .await;
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    let list: SessionList = api.get("/v1/sessions").await.expect(StatusCode::OK);
    assert_eq!(list.sessions[0].state, SessionState::Running);
    let running = r#"conman_sessions{state="running"}"#;
    assert_eq!(gauge(&api, running).await.as_deref(), Some("1"));

    std::fs::remove_file(&filler).expect("removed");
    eventually("nothing is warned of", PATIENCE, async || {
        warnings(&api).await.is_empty()
    })
    .await;
    let page: EventPage = api
        .get("/v1/events?follow=false&limit=1000")
        .await
        .expect(StatusCode::OK);
    let of = |kind| {
        page.events
            .iter()
            .filter(|event| event.kind == kind)
            .count()
    };
    let seen = (of(EventKind::NodeCordoned), of(EventKind::EventsLost));
    assert_eq!(seen, (cordons, 0));
    api.stop("s").await;
}

/// Leaves not a byte.
fn fill(filler: &Path) {
    let file = File::options().create(true).append(true).open(filler);
    let mut file = file.expect("a file");
    for size in [1 << 20, 4 << 10] {
        while file.write_all(&vec![b'x'; size]).is_ok() {}
    }
}

async fn warnings(api: &Api) -> Vec<String> {
    let ready: Readiness = api.get("/readyz").await.expect(StatusCode::OK);
    ready.warnings
}

/// The value of a line of the metrics.
async fn gauge(api: &Api, name: &str) -> Option<String> {
    let metrics = api.send(Method::GET, "/metrics", None).await.text();
    let mut lines = metrics.lines();
    lines.find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
}
