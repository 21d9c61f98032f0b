//! A client that a public generator makes from `proto/openapi.json`, unchanged.

use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_e2e::{Conman, ROOT, native};
use tokio::process::Command;

use super::{finish, run};

const GENERATOR: &str = "openapi-python-client==0.29.1";
/// Bound on an installation from the package index.
const INSTALL_PATIENCE: Duration = Duration::from_secs(300);

/// Uses each kind of request and body once: `client.py URL ARCHIVE IMAGE`, with the token in the environment.
const PROGRAM: &str = r#"
import io, os, sys
from conman_client import AuthenticatedClient
from conman_client.api.events import get_timeline
from conman_client.api.exec_ import exec_
from conman_client.api.files import list_files, read_file, write_file
from conman_client.api.images import add_image, list_images
from conman_client.api.nodes import list_nodes, list_templates
from conman_client.api.sessions import (ensure_session, get_logs, get_session, list_sessions,
                                        make_connect_token, stop_session, update_session)
from conman_client.models import (EnsureResponse, ExecRequest, Problem, PullRequest, SessionPatch,
                                  SessionPatchLabels, SessionRequest, SessionState)
from conman_client.types import File

url, archive, image = sys.argv[1:]
client = AuthenticatedClient(base_url=url, token=os.environ["TOKEN"])

def done(answer):
    assert answer.status_code < 300, (answer.status_code, answer.content)
    return answer.parsed

with open(archive, "rb") as file:
    added = done(add_image.sync_detailed(client=client, name="generated:1", body=File(payload=file)))
assert "generated:1" in added.names, added
assert {"generated:1", image} <= {name for one in done(list_images.sync_detailed(client=client)).images for name in one.names}

started = done(ensure_session.sync_detailed("alice", client=client, body=SessionRequest(template="idle")))
assert isinstance(started, EnsureResponse) and started.state == SessionState.RUNNING, started
labels = SessionPatchLabels.from_dict({"team": "a"})
done(update_session.sync_detailed("alice", client=client, body=SessionPatch(labels=labels)))
found = done(list_sessions.sync_detailed(client=client, label=["team=a"], state=[SessionState.RUNNING]))
assert [one.id for one in found.sessions] == ["alice"], found

result = done(exec_.sync_detailed("alice", client=client, body=ExecRequest(command=["echo", "hello"])))
assert (result.exit_code, result.stdout) == (0, "hello\n"), result
content = File(payload=io.BytesIO(b"1,2\n"))
done(write_file.sync_detailed("alice", client=client, path="/tmp/data.csv", body=content))
read = done(read_file.sync_detailed("alice", client=client, path="/tmp/data.csv"))
assert read.payload.read() == b"1,2\n"
entries = done(list_files.sync_detailed("alice", client=client, path="/tmp")).entries
assert "data.csv" in [entry.name for entry in entries], entries

assert done(make_connect_token.sync_detailed("alice", client=client)).token
assert done(get_timeline.sync_detailed("alice", client=client))
done(get_logs.sync_detailed("alice", client=client))
assert len(done(list_nodes.sync_detailed(client=client)).nodes) == 1
assert "idle" in [one.name for one in done(list_templates.sync_detailed(client=client)).templates]

missing = get_session.sync_detailed("nobody", client=client)
assert missing.status_code == 404 and isinstance(missing.parsed, Problem), missing
assert missing.parsed.detail and missing.parsed.title, missing.parsed
pull = add_image.sync_detailed(client=client, body=PullRequest(pull="Foo"))
assert pull.status_code == 422 and isinstance(pull.parsed, Problem), pull
assert done(stop_session.sync_detailed("alice", client=client)).state == SessionState.STOPPED
print("all answered")
"#;

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn a_generated_python_client_is_complete_and_works() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .start_native(&native)
        .await;
    let directory = conman.directory();
    let client = generate(directory).await;
    let token = std::fs::read_to_string(directory.join("admin.token")).expect("a token");
    let mut program = Command::new(directory.join("venv/bin/python"));
    program
        .args(["-c", PROGRAM])
        .arg(format!("http://{}", conman.api_address()))
        .arg(directory.join("root.tar"))
        .arg(ROOT)
        .env("PYTHONPATH", client)
        .env("TOKEN", token.trim());
    assert_eq!(run(&mut program).await, "all answered\n");
}

/// Makes a client, in which nothing may be missing.
async fn generate(directory: &Path) -> PathBuf {
    let environment = directory.join("venv");
    let mut make = Command::new("python3");
    run(make.args(["-m", "venv"]).arg(&environment)).await;
    let mut install = Command::new(environment.join("bin/pip"));
    install.args(["install", "--quiet", GENERATOR]);
    finish(&mut install, INSTALL_PATIENCE).await;
    let description = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto/openapi.json");
    let client = directory.join("client");
    let path = std::env::var("PATH").unwrap_or_default();
    let mut generator = Command::new(environment.join("bin/openapi-python-client"));
    generator
        // Any part of the description that it does not understand.
        .args(["generate", "--fail-on-warning", "--path"])
        .arg(description)
        .arg("--output-path")
        .arg(&client)
        // It formats the client with a program of its own environment.
        .env("PATH", format!("{}/bin:{path}", environment.display()));
    finish(&mut generator, INSTALL_PATIENCE).await;
    client
}
