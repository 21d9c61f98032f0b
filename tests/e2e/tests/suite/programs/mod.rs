//! Programs that people run in sessions, from the distribution and from the indexes of Python and
//! npm. Each is preempted and found again by the next connection.

mod databases;
mod development;
mod editor;
mod generated_client;
mod images;
mod notebook;
mod python_web;
mod sudo;
mod terminals;
mod tls;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{Api, CLI_PATIENCE, Conman, native, programs_archive};
use conman_proto::{ExecResult, Node, NodeState, PreemptReport};
use http::StatusCode;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Root inside a session, as the files of its binds show it.
const SESSION_ROOT: u32 = 2_130_706_432;

/// Bound on the import of an image of hundreds of megabytes on a loaded machine.
const IMPORT_PATIENCE: Duration = Duration::from_secs(600);

/// A node whose sessions have an image with programs, and a directory each at `/work`.
struct Programs {
    conman: Conman,
    work: TempDir,
}

impl Programs {
    /// `templates` without their image and binds, which are the same for all.
    async fn start(image: &str, templates: &[(&str, &str)]) -> Option<Self> {
        let native = native()?;
        let archive = programs_archive(image)?;
        let work = TempDir::new().expect("a directory can be made");
        let path = work.path().display();
        let mut builder = Conman::builder()
            .set("binds", &format!("allow = [\"{path}\"]"))
            // JupyterLab's page is opened by its path, too.
            .set("listen", "browser_paths = true");
        for (name, lines) in templates {
            builder = builder.toml(&format!(
                "[templates.{name}]\nimage = \"programs:1\"\nstart_on_connect = true\n\
                 memory_bytes = 2147483648\npids = 512\nbinds = [\"{path}/{{id}}:/work\"]\n{lines}"
            ));
            let directory = work.path().join(name);
            std::fs::create_dir(&directory).expect("a directory can be made");
            give(&directory).expect("given to the session");
        }
        let conman = builder.start_native(&native).await;
        let mut import = conman.cli_command();
        import.args(["image", "import"]).arg(archive);
        finish(import.arg("programs:1"), IMPORT_PATIENCE).await;
        for (name, _) in templates {
            let started = conman.cli(&["run", name, "--template", name]).await;
            started.success();
        }
        Some(Self { conman, work })
    }

    fn api(&self) -> Api {
        self.conman.api()
    }

    /// The host's side of a session's `/work`.
    fn work(&self, id: &str) -> PathBuf {
        self.work.path().join(id)
    }

    async fn preempt(&self) {
        preempt(&self.conman).await;
    }

    /// The output of a shell's command line in a session.
    async fn shell(&self, id: &str, line: &str) -> String {
        let request = json!({"command": ["sh", "-c", line], "timeout_ms": 120_000});
        let path = format!("/v1/sessions/{id}/exec");
        let answer = self.api().post(&path, &request).await;
        let result: ExecResult = answer.expect(StatusCode::OK);
        assert_eq!(result.exit_code, 0, "{result:?}");
        result.stdout
    }
}

/// Kills every session as a preemption does, and lets the node serve again.
async fn preempt(conman: &Conman) {
    let api = conman.api();
    let report = api.post("/v1/nodes/self/preempt", &json!({})).await;
    let report: PreemptReport = report.expect(StatusCode::OK);
    assert_eq!(report.unreleased, []);
    assert_eq!(conman.processes(), []);
    let node = api.post("/v1/nodes/self/readmit", &json!({})).await;
    assert_eq!(node.expect::<Node>(StatusCode::OK).state, NodeState::Live);
}

/// A local port that leads to a port of a session.
struct Forward {
    port: u16,
    _process: Child,
}

impl Forward {
    async fn start(conman: &Conman, id: &str, port: u16) -> Self {
        let mut command = conman.cli_command();
        command.args(["forward", id, &format!("0:{port}")]);
        command.stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().expect("it starts");
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let line = lines.next_line().await.expect("read").expect("a line");
        let address = line.split(' ').next().and_then(|it| it.split(':').nth(1));
        let port = address.and_then(|port| port.parse().ok());
        Self {
            port: port.unwrap_or_else(|| panic!("no address in {line}")),
            _process: process,
        }
    }
}

/// Runs a program of the host to its end.
async fn run(command: &mut Command) -> String {
    finish(command, CLI_PATIENCE).await
}

async fn finish(command: &mut Command, patience: Duration) -> String {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(patience, command.output()).await;
    let output = output.expect("in time").expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {output:?}");
    text
}

/// Writes a file into a session's `/work`, as the session's root would own it.
fn write(path: &Path, text: &str) {
    let written = std::fs::write(path, text).and_then(|()| give(path));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// A bind shows files of the host's root as nobody's, which the session may not change.
fn give(path: &Path) -> std::io::Result<()> {
    std::os::unix::fs::chown(path, Some(SESSION_ROOT), Some(SESSION_ROOT))
}
