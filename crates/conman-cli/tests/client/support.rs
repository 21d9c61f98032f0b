//! A daemon that answers as each test tells it, on a Unix socket of its own, and the real client
//! process before it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::{Json, Router};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::process::Command;

/// Longer than anything here takes; a test that hangs fails instead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A fake daemon; gone when it is dropped.
pub(crate) struct Daemon {
    dir: TempDir,
    server: tokio::task::JoinHandle<()>,
}

impl Daemon {
    pub(crate) fn start(router: Router) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(dir.path().join("socket")).expect("bound");
        let server = tokio::spawn(async move {
            axum::serve(listener, router).await.expect("served");
        });
        Self { dir, server }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// The client with `words`, told of this daemon.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        command(&self.socket(), words)
    }

    /// Runs the client to its end.
    pub(crate) async fn run(&self, words: &[&str]) -> Outcome {
        outcome(self.command(words)).await
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The client, without anything of this process's environment that it would heed.
pub(crate) fn client(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_conman-client"));
    command.args(words).kill_on_drop(true).stdin(Stdio::null());
    for name in [
        "CONMAN_SOCKET",
        "CONMAN_URL",
        "CONMAN_TOKEN_FILE",
        "NO_COLOR",
    ] {
        command.env_remove(name);
    }
    command
}

pub(crate) fn command(socket: &Path, words: &[&str]) -> Command {
    let mut command = client(words);
    command.env("CONMAN_SOCKET", socket);
    command
}

/// What came of a command.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// Standard output, which must be exactly one JSON value.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Standard error, which must be one problem.
    #[track_caller]
    pub(crate) fn problem(&self) -> conman_proto::Problem {
        serde_json::from_str(&self.stderr).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

pub(crate) async fn outcome(mut command: Command) -> Outcome {
    let output = tokio::time::timeout(PATIENCE, command.output())
        .await
        .expect("the client ends")
        .expect("the client runs");
    Outcome {
        code: output.status.code().expect("not ended by a signal"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

/// A response with problem details.
pub(crate) fn problem(status: u16, slug: &str, detail: &str) -> Response {
    problem_with(status, slug, detail, json!([]))
}

pub(crate) fn problem_with(status: u16, slug: &str, detail: &str, errors: Value) -> Response {
    let body = json!({
        "type": format!("urn:conman:problem:{slug}"),
        "title": "It was refused",
        "status": status,
        "detail": detail,
        "errors": errors,
        "retryable": false,
    });
    let status = StatusCode::from_u16(status).expect("a status");
    (
        status,
        [(header::CONTENT_TYPE, "application/problem+json")],
        body.to_string(),
    )
        .into_response()
}

/// A route that shows the session `alice`, which is another generation on another node from the
/// second look on.
pub(crate) fn moving() -> MethodRouter {
    let looks = Arc::new(AtomicUsize::new(0));
    get(move || {
        let mut shown = session("alice", "running");
        if looks.fetch_add(1, Ordering::Relaxed) > 0 {
            shown["generation"] = 8.into();
            shown["node"] = "n2".into();
        }
        async move { Json(shown) }
    })
}

/// A session as the API writes it.
pub(crate) fn session(id: &str, state: &str) -> Value {
    json!({
        "id": id,
        "state": state,
        "spec": {
            "template": "python", "runtime": "docker", "image": "python:demo",
            "command": ["python3"], "args": [], "env": {}, "port": 8080, "ready_path": null,
            "ready_timeout_s": 60, "network": "loopback", "memory_bytes": 268_435_456,
            "cpus": null, "pids": 128, "labels": {"team": "a"}, "binds": [],
            "idle_timeout_s": 600, "max_lifetime_s": 0, "preempt_signal": null,
            "preempt_grace_ms": 0,
        },
        "url": format!("http://{id}.localhost:7701/"),
        "node": "n1",
        "runtime": "docker",
        "generation": 7,
        "pid": 4711,
        "port": 8080,
        "network": "loopback",
        "template": "python",
        "created_at": "2026-03-01T12:00:00Z",
        "started_at": "2026-03-01T12:00:01Z",
        "phases_ms": {"create": 100.0, "start": 200.0},
        "connections": 2,
        "field_of_a_newer_daemon": true,
    })
}

/// `value` with other fields.
pub(crate) fn with(mut value: Value, fields: Value) -> Value {
    let (Some(object), Value::Object(fields)) = (value.as_object_mut(), fields) else {
        panic!("both are objects");
    };
    object.extend(fields);
    value
}
