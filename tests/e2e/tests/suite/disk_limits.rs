//! What sessions may take of the disk, and what happens to those that take more.

use std::io::Write as _;
use std::time::Duration;

use conman_e2e::{Conman, ROOT, eventually, eventually_some, native};
use conman_linux::{CgroupLayout, Disk, ProjectQuotas};
use conman_proto::{ExecResult, Node, Readiness, SessionState};
use http::StatusCode;
use serde_json::json;
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);

/// More than the limit of 64 MiB, a while after the start.
const WRITE: &str = "sleep 1; dd if=/dev/zero of=/big bs=1M count=100; sleep 1000000";

/// The same into a file that has no name any more.
const WRITE_NAMELESS: &str =
    "sleep 1; exec 3>/big; rm /big; dd if=/dev/zero bs=1M count=100 >&3; sleep 1000000";

const MAKE_FILES: &str =
    "sleep 1; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); : > /tmp/$i; done; sleep 1000000";

#[tokio::test]
async fn a_session_beyond_its_disk_limit_is_ended_with_the_reason_and_no_other() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    if ProjectQuotas::of(&conman.state_dir()).is_some() {
        let why = "the file system enforces project quotas, so no session exceeds them";
        let _ = writeln!(std::io::stderr(), "skipped: {why}");
        return;
    }
    let api = conman.api();
    let limits = json!({"disk_bytes": 64 << 20, "disk_inodes": 1_024});
    let limited = |mut request: serde_json::Value| {
        for (field, value) in limits.as_object().expect("an object") {
            request[field] = value.clone();
        }
        request
    };
    api.ensure("bystander", &limited(json!({"template": "web"})))
        .await;
    let modest = "dd if=/dev/zero of=/big bs=1M count=40; sleep 1000000";
    let sh = |script: &str| limited(json!({"image": ROOT, "command": ["sh", "-c", script]}));
    api.ensure("modest", &sh(modest)).await;
    let cases = [
        ("writes", WRITE, "of 64 MiB (disk_bytes)"),
        ("nameless", WRITE_NAMELESS, "of 64 MiB (disk_bytes)"),
        ("files", MAKE_FILES, "more than 1024 files"),
    ];
    for (id, script, _) in cases {
        api.ensure(id, &sh(script)).await;
    }
    for (id, _, words) in cases {
        let ended = eventually_some("it is ended", PATIENCE, async || {
            let session = api.session(id).await;
            session.state.is_ended().then_some(session)
        })
        .await;
        assert_eq!(ended.state, SessionState::Failed, "{ended:?}");
        let reason = ended.reason.unwrap_or_default();
        assert!(reason.starts_with("disk limit exceeded"), "{reason}");
        assert!(reason.contains(words), "{reason}");
    }
    for id in ["bystander", "modest"] {
        assert_eq!(api.session(id).await.state, SessionState::Running, "{id}");
    }
    let answer = conman.sessions().get("/s/bystander/").await;
    assert_eq!(answer.text(), "hello\n");
    // One that did nothing since it was last measured is measured again as soon as it writes.
    let more = json!({"command": ["dd", "if=/dev/zero", "of=/more", "bs=1M", "count=40"]});
    // It may end before the command does.
    let _ = api.post("/v1/sessions/modest/exec", &more).await;
    eventually("it is ended", PATIENCE, async || {
        api.session("modest").await.state == SessionState::Failed
    })
    .await;
}

#[tokio::test]
async fn a_session_gets_no_more_of_the_disk_than_its_rate() {
    let Some(native) = native() else { return };
    let layout = CgroupLayout::detect().expect("readable");
    // State directories are below this one.
    let disk = Disk::of(&std::env::temp_dir()).expect("readable");
    if !layout.limits_io() || disk.is_none() {
        let why = "no io controller, or a file system that is not on one disk";
        let _ = writeln!(std::io::stderr(), "skipped: {why}");
        return;
    }
    let conman = Conman::builder()
        .set("limits", "io_write_bytes_per_s = 1048576")
        .start_native(&native)
        .await;
    let api = conman.api();
    let idle = json!({"image": ROOT, "command": ["sleep", "1000000"]});
    api.ensure("writer", &idle).await;
    let write = "dd if=/dev/zero of=/file bs=1M count=3 oflag=direct";
    let begun = Instant::now();
    let command = json!({"command": ["sh", "-c", write]});
    let done: ExecResult = api
        .post("/v1/sessions/writer/exec", &command)
        .await
        .expect(StatusCode::OK);
    assert_eq!(done.exit_code, 0, "{}", done.stderr);
    // The third mebibyte is written after two seconds.
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(1_500), "{took:?}");
}

#[tokio::test]
async fn while_the_disk_is_short_sessions_are_refused_and_the_node_says_why() {
    let Some(native) = native() else { return };
    // No disk has as much.
    let conman = Conman::builder()
        .set("limits", "disk_reserve_bytes = 1152921504606846976")
        .start_native(&native)
        .await;
    let api = conman.api();
    eventually_some("the node has looked", PATIENCE, async || {
        let node: Node = api.get("/v1/nodes/self").await.expect(StatusCode::OK);
        node.host_limit
    })
    .await;
    let refused = api
        .put("/v1/sessions/web", &json!({"template": "web"}))
        .await;
    let problem = refused.problem();
    assert_eq!((problem.status, problem.slug()), (503, "host-full"));
    assert_eq!(problem.limit.expect("it is named").name, "disk space");
    let ready: Readiness = api.get("/readyz").await.expect(StatusCode::OK);
    let short = |warning: &String| warning.starts_with("the disk is short");
    assert!(ready.warnings.iter().any(short), "{:?}", ready.warnings);
    let nodes = conman.cli(&["nodes"]).await;
    let said = format!("{}{}", nodes.stdout, nodes.stderr);
    assert!(said.contains("disk_reserve_bytes"), "{said}");
}
