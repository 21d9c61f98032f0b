//! The HTTP API against schemathesis, which makes up requests from the API's own description and
//! holds each answer against it.
//!
//! It has its share of Docker for minutes on a busy machine. Tests run in the order of their names, so those of
//! `docker_trouble`, which want all of Docker, have run before: while one waits, nobody else gets a share.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use conman_e2e::{Conman, docker_shared, eventually};
use conman_proto::{Session, SessionList};
use http::StatusCode;
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// Bound on one run, in seconds: several times of what it takes on a busy machine.
const RUN_SECONDS: &str = "600";
/// Bound on making the environment, in seconds: an index that hangs is no index.
const INSTALL_SECONDS: &str = "300";

/// Requests that are made up for each operation, in addition to those that cover the description.
const EXAMPLES: &str = "10";
const MANY_EXAMPLES: &str = "50";
/// Fewer, where every one may end all that runs.
const PREEMPTIONS: &str = "5";
/// Operations that are not tried.
const UNDESCRIBED: &str = "^(cordon_node|get_node_stats|uncordon_node|read_file|write_file|remove_file|list_files|watch_files|make_directory|move_file|signal_session|pause_session|connect_port|restart_session|resume_session|get_stats|create_session|update_session|attach|attach_exec|list_execs|start_exec|get_exec|end_exec|signal_exec|list_links|attach_link|detach_link)$";

/// The same requests every time.
const SEED: &str = "1";

#[tokio::test]
async fn made_up_requests_get_the_answers_that_the_description_promises() {
    answers_are_as_described(EXAMPLES).await;
}

#[tokio::test]
#[ignore = "in acceptance: takes minutes; fewer requests are made up in the suite"]
async fn many_made_up_requests_get_the_answers_that_the_description_promises() {
    answers_are_as_described(MANY_EXAMPLES).await;
}

async fn answers_are_as_described(examples: &str) {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let python = match tokio::task::spawn_blocking(schemathesis).await {
        Ok(Ok(python)) => python,
        Ok(Err(why)) => {
            let _ = writeln!(std::io::stderr(), "skipped: {why}");
            return;
        }
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    };
    let mut conman = Conman::builder()
        .token("fuzz", "admin")
        // What is made up to be pulled is nowhere.
        .toml("[images]\nregistries = []")
        .start(&docker)
        .await;
    let api = conman.api().with_token(conman.token("fuzz"));

    // What `schemathesis/hooks.py` calls it.
    api.ensure("fuzzed", &json!({"template": "tiny"})).await;
    // Without preemptions at first: a preempted node refuses most of what there is to try.
    run(
        &conman,
        &python,
        &[
            "--max-examples",
            examples,
            "--exclude-operation-id",
            "preempt_node",
        ],
    )
    .await;
    let mut sessions = sessions(&api).await;
    sessions.retain(|session| session.id.as_str() != "fuzzed" && session.started_at.is_some());
    assert!(
        !sessions.is_empty(),
        "no made-up request has started a session"
    );
    run(
        &conman,
        &python,
        &[
            "--max-examples",
            PREEMPTIONS,
            "--include-operation-id-regex",
            "^(preempt_node|readmit_node|ensure_session)$",
        ],
    )
    .await;

    assert!(conman.ended().is_none(), "the daemon has ended");
    assert!(!conman.log().contains("panicked"), "the daemon panicked");
    let readmitted = api.post("/v1/nodes/self/readmit", &json!({})).await;
    assert_eq!(readmitted.status, StatusCode::OK, "{}", readmitted.text());
    for session in self::sessions(&api).await {
        api.stop(session.id.as_str()).await;
    }
    assert_eq!(conman.processes(), []);
    let instance = conman.instance();
    eventually("no container is left", PATIENCE, async || {
        docker.containers_of(&instance).await.is_empty()
    })
    .await;
    api.ensure("s", &json!({"template": "tiny"})).await;
}

/// Every session that is shown, ended ones included.
async fn sessions(api: &conman_e2e::Api) -> Vec<Session> {
    let mut sessions = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("/v1/sessions?limit=100{cursor}");
        let page: SessionList = api.get(&path).await.expect(StatusCode::OK);
        sessions.extend(page.sessions);
        match page.next {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return sessions,
        }
    }
}

/// Has schemathesis try the daemon.
///
/// # Panics
/// With what it printed, when an answer is not what it should be.
async fn run(conman: &Conman, python: &Path, arguments: &[&str]) {
    let mut command = tokio::process::Command::new("timeout");
    command
        .arg(RUN_SECONDS)
        .arg(python.with_file_name("schemathesis"))
        .arg("--config-file")
        .arg(repository("proto/schemathesis.toml"))
        .arg("run")
        .arg(format!("http://{}/v1/openapi.json", conman.api_address()))
        .arg("--header")
        .arg(format!("Authorization: Bearer {}", conman.token("fuzz")))
        .args(["--seed", SEED, "--generation-database", "none"])
        .args(["--continue-on-failure", "--no-color"])
        // Their descriptions do not yet list all statuses.
        .args(["--exclude-operation-id-regex", UNDESCRIBED])
        .args(arguments)
        .env("SCHEMATHESIS_HOOKS", own("schemathesis/hooks.py"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        // It keeps notes of its own where it runs.
        .current_dir(conman.directory())
        .kill_on_drop(true);
    let output = command.output().await.expect("schemathesis can be run");
    assert!(
        output.status.success(),
        "schemathesis found something ({}):\n{}",
        output.status,
        printed(&output)
    );
}

/// Python with schemathesis, made when it is missing; why it cannot be.
fn schemathesis() -> Result<PathBuf, String> {
    let wanted = own("schemathesis/requirements.txt");
    let wanted = fs::read_to_string(wanted).expect("the requirements can be read");
    let below = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let lock = File::create(below.join("schemathesis.lock")).expect("the lock can be made");
    flock(&lock, FlockOperation::LockExclusive).expect("the lock can be taken");
    let environment = below.join("schemathesis");
    let python = environment.join("bin/python3");
    // Written last: an environment without it, or with another one, is made anew.
    let installed = environment.join("installed.txt");
    if fs::read_to_string(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    if environment.exists() {
        fs::remove_dir_all(&environment).expect("a half-made environment can be removed");
    }
    install(&[
        "python3".into(),
        "-m".into(),
        "venv".into(),
        environment.into(),
    ])?;
    let requirements = own("schemathesis/requirements.txt");
    install(&[
        python.clone().into(),
        "-m".into(),
        "pip".into(),
        "install".into(),
        "--quiet".into(),
        "--requirement".into(),
        requirements.into(),
    ])?;
    fs::write(installed, wanted).expect("the environment can be written to");
    Ok(python)
}

fn install(command: &[OsString]) -> Result<(), String> {
    let output = Command::new("timeout")
        .arg(INSTALL_SECONDS)
        .args(command)
        .output()
        .expect("the timeout program can be run");
    if output.status.success() {
        return Ok(());
    }
    let text = printed(&output);
    let last = text.lines().rfind(|line| !line.trim().is_empty());
    Err(format!(
        "schemathesis cannot be installed from Python's package index: {}",
        last.unwrap_or("no reason given").trim()
    ))
}

fn printed(output: &Output) -> String {
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    text
}

/// A path of this package.
fn own(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn repository(path: &str) -> PathBuf {
    own("../..").join(path)
}
