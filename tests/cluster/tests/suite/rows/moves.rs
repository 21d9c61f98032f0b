//! What a client sees of a session that moves in the middle of its commands.

use std::cell::Cell;
use std::time::Duration;

use conman_cluster::Cluster;
use conman_e2e::{Answer, eventually};
use conman_proto::{ExecResult, Session};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::fleet::{Fleet, PATIENCE};

/// How often the session moves.
const MOVES: usize = 3;
/// In which clients use it where it is.
const BETWEEN: Duration = Duration::from_secs(3);

/// The forms of a request about what is inside a session.
fn forms() -> Vec<(&'static str, Method, &'static str, Option<Value>)> {
    let command = || Some(json!({"command": ["sh", "-c", "sleep 0.3"]}));
    let file = "/v1/sessions/moves/files?path=%2Fetc%2Fhostname";
    vec![
        (
            "collected",
            Method::POST,
            "/v1/sessions/moves/exec",
            command(),
        ),
        (
            "streamed",
            Method::POST,
            "/v1/sessions/moves/exec?stream=true",
            command(),
        ),
        ("kept", Method::POST, "/v1/sessions/moves/execs", command()),
        ("list", Method::GET, "/v1/sessions/moves/execs", None),
        ("file", Method::GET, file, None),
        ("log", Method::GET, "/v1/sessions/moves/logs", None),
    ]
}

/// Whether the answer says what is so: done, to be tried again, or killed with the reason.
fn judge(form: &str, answer: &Answer) {
    let text = answer.text();
    assert!(!text.contains("is running, not running"), "{form}: {text}");
    if answer.status.is_success() {
        assert!(!text.contains("\"exit_code\":137"), "{form}: {text}");
        if form == "collected" {
            let result: ExecResult = answer.expect(StatusCode::OK);
            assert_eq!(result.exit_code, 0, "{text}");
        }
        return;
    }
    let problem = answer.problem();
    let is_known = match problem.slug() {
        "exec-failed" => problem.detail.contains("because"),
        // Of the log, a node that has just started the session has nothing.
        "log-not-kept" | "no-such-file" => true,
        // It may have been carried out.
        "node-silent" => true,
        _ => problem.retryable,
    };
    assert!(is_known, "{form}: {} {text}", answer.status);
}

/// Sends requests of a form until the session moves no longer, and one was served.
async fn keep_asking(fleet: &Fleet, form: usize, moves: &Cell<bool>) -> usize {
    let (mut served, begun) = (0, Instant::now());
    while moves.get() || (served == 0 && begun.elapsed() < PATIENCE) {
        for node in [0, 1] {
            let (name, method, path, body) = forms().swap_remove(form);
            let api = fleet.node(node).api();
            let asked = timeout(PATIENCE, api.try_send(method, path, body.as_ref())).await;
            if let Ok(answer) = asked.expect("an answer") {
                judge(name, &answer);
                served += usize::from(answer.status.is_success());
            }
        }
    }
    served
}

async fn drains(fleet: &Fleet, node: usize, drain: bool) {
    let path = match drain {
        true => "/v1/nodes/self/drain",
        false => "/v1/nodes/self/undrain",
    };
    let answer = fleet.node(node).admin().post(path, &json!({})).await;
    assert!(answer.status.is_success(), "{}", answer.text());
}

/// Moves the session from node to node, by a drain and at last by a preemption.
async fn move_about(fleet: &Fleet) {
    for round in 0..MOVES {
        let from = round % 2;
        match round == MOVES - 1 {
            true => drop(fleet.preempt(from).await),
            false => drains(fleet, from, true).await,
        }
        let other = fleet.node(1 - from);
        eventually("it runs on the other node", PATIENCE, async || {
            let answer = other.admin().get("/v1/sessions/moves").await;
            answer.status == StatusCode::OK && {
                let session: Session = answer.expect(StatusCode::OK);
                session.node == other.name() && session.state == conman_proto::SessionState::Running
            }
        })
        .await;
        tokio::time::sleep(BETWEEN).await;
        drains(fleet, from, false).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_files_and_logs_of_a_session_that_moves_are_done_or_may_be_repeated() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    fleet.others_drain(0, true).await;
    fleet.ensure_restarting(0, "moves").await;
    fleet.others_drain(0, false).await;
    let moves = Cell::new(true);
    let asking = futures_util::future::join_all(
        (0..forms().len()).map(|form| keep_asking(&fleet, form, &moves)),
    );
    let moving = async {
        move_about(&fleet).await;
        moves.set(false);
    };
    let (served, ()) = tokio::join!(asking, moving);
    for (form, served) in forms().iter().zip(served) {
        assert!(served > 0, "{} was never served", form.0);
    }
    fleet.leaves_nothing().await;
}
