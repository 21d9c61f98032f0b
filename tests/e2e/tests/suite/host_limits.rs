//! Limits of the host itself: told by `conman doctor`, and met by sessions that are refused by the
//! limit's name instead of failing in the middle of their start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conman_e2e::{Conman, docker_shared, eventually};
use conman_proto::{Node, SessionState};
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// Sessions that the limited cgroup still has room for.
const ROOM: u64 = 3;

/// Processes of an idle session: its init and its program.
const EACH: u64 = 2;

/// An image of the node's own store.
const IMAGE: &str = "busybox:own";

/// The cgroup above all sessions, in the hierarchy that counts processes.
fn pids_cgroup(instance: &str) -> Option<PathBuf> {
    [
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup/unified",
        "/sys/fs/cgroup",
    ]
    .into_iter()
    .map(|tree| Path::new(tree).join(format!("conman-{instance}")))
    .find(|cgroup| cgroup.join("pids.max").exists())
}

fn number(path: &Path) -> u64 {
    let text = fs::read_to_string(path).expect("it can be read");
    text.trim().parse().expect("a number")
}

fn archive(directory: &Path) -> Option<PathBuf> {
    let root = directory.join("root");
    fs::create_dir_all(root.join("bin")).expect("a directory");
    if fs::copy("/usr/bin/busybox", root.join("bin/busybox")).is_err() {
        return None;
    }
    std::os::unix::fs::symlink("busybox", root.join("bin/sleep")).expect("a link");
    let archive = directory.join("busybox.tar");
    let packed = Command::new("tar")
        .arg("-C")
        .arg(&root)
        .arg("-cf")
        .arg(&archive)
        .arg(".")
        .status();
    packed.expect("tar runs").success().then_some(archive)
}

fn skipped(why: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

async fn diagnosis(conman: &Conman) -> Value {
    let config = conman.config_path();
    let config = config.to_str().expect("text");
    let words = ["--json", "doctor", "--target", "100", "--config", config];
    let told = conman.cli(&words).await;
    serde_json::from_str(&told.stdout).unwrap_or_else(|error| panic!("{error}: {told:?}"))
}

fn check<'a>(diagnosis: &'a Value, name: &str) -> Option<&'a Value> {
    let checks = diagnosis["diagnosis"]["checks"].as_array().expect("checks");
    checks.iter().find(|check| check["name"] == name)
}

#[tokio::test]
async fn native_sessions_beyond_the_limit_of_their_cgroup_are_refused_by_its_name() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .set("node", "runtime = \"native\"")
        .set("limits", "check_host_s = 1")
        .toml(&format!(
            "[templates.own]\nimage = \"{IMAGE}\"\ncommand = [\"sleep\", \"1000000\"]"
        ))
        .start(&docker)
        .await;
    let Some(archive) = archive(conman.directory()) else {
        conman_e2e::lacks("busybox is missing (package busybox-static)");
        return;
    };
    let archive = archive.to_str().expect("text");
    conman
        .cli(&["image", "import", archive, IMAGE])
        .await
        .success();
    let api = conman.api();
    let own = json!({"template": "own"});
    api.ensure("first", &own).await;
    let Some(cgroup) = pids_cgroup(&conman.instance()) else {
        skipped("no hierarchy of cgroups counts processes");
        return;
    };
    let before = diagnosis(&conman).await;
    assert_eq!(check(&before, "sessions: pids.max"), None);

    let limit = number(&cgroup.join("pids.current")) + ROOM * EACH;
    fs::write(cgroup.join("pids.max"), limit.to_string()).expect("it can be limited");
    let host_limit = async || {
        let node: Node = api.get("/v1/nodes/self").await.expect(StatusCode::OK);
        node.host_limit
    };
    eventually("the node has seen the limit", PATIENCE, async || {
        host_limit()
            .await
            .is_some_and(|host| host.limit.name == "sessions: pids.max")
    })
    .await;
    assert_eq!(
        host_limit().await.map(|host| host.max_sessions),
        Some(1 + ROOM)
    );

    for number in 0..ROOM {
        let id = format!("s{number}");
        let started = api.ensure(&id, &own).await;
        assert_eq!(started.session.state, SessionState::Running);
    }
    let refused = api.put("/v1/sessions/beyond", &own).await;
    let problem = refused.problem();
    assert_eq!((problem.status, problem.slug()), (503, "host-full"));
    let met = problem.limit.expect("it is named");
    assert_eq!(
        (met.name.as_str(), met.value),
        ("sessions: pids.max", limit)
    );
    assert!(met.remedy.contains("pids.max"), "{met:?}");
    // Nothing was begun.
    let gone = api.get("/v1/sessions/beyond").await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);

    let told = diagnosis(&conman).await;
    let told_check = check(&told, "sessions: pids.max").expect("it is told");
    assert_eq!(told_check["value"], limit);
    assert_eq!(told_check["used"], limit);
    assert_eq!(told_check["binds_at"], 0);
    assert_eq!(told_check["verdict"], "binds");
    assert_eq!(told["fit"], false);
    assert_eq!(told["diagnosis"]["runtime"], "native");

    // What ends makes room, and so does a greater limit.
    api.stop("s0").await;
    eventually("there is room for one again", PATIENCE, async || {
        api.put("/v1/sessions/s0", &own).await.status == StatusCode::OK
    })
    .await;
    fs::write(cgroup.join("pids.max"), "max").expect("the limit can be lifted");
    eventually("there is room for all", PATIENCE, async || {
        api.put("/v1/sessions/beyond", &own).await.status == StatusCode::OK
    })
    .await;
    for id in ["first", "s0", "s1", "s2", "beyond"] {
        api.stop(id).await;
    }
}
