//! A program with several users: each connects to it through another node.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use conman_cluster::people::command;
use conman_cluster::{Cluster, Node, requirements};
use conman_e2e::{eventually, eventually_some, programs_archive};
use conman_proto::{EnsureResponse, PreemptReport, Session};
use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

const WITNESS: &str = env!("CARGO_BIN_EXE_witness");
/// Bound on anything that must come about, on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// The server keeps documents in its memory, so that after its end the clients must bring theirs.
const TEMPLATE: &str = r#"
[templates.room]
image = "programs:1"
port = 1234
start_on_connect = true
memory_bytes = 2147483648
env = { HOST = "127.0.0.1", PORT = "1234" }
command = ["/opt/web/bin/node", "/opt/web/node_modules/y-websocket/bin/server.js"]
"#;

/// Appends each line of its input to the shared document, and prints the document when it changes.
const CLIENT: &str = "
const Y = require('yjs');
const { WebsocketProvider } = require('y-websocket');
const document = new Y.Doc();
const words = document.getArray('words');
document.on('update', () => console.log(words.toArray().sort().join(' ')));
new WebsocketProvider(process.argv[2], 'notes', document,
    { WebSocketPolyfill: require('ws'), disableBc: true });
require('readline').createInterface({ input: process.stdin }).on('line', (word) => words.push([word]));
";

/// A user's program that edits the document through a node.
struct Client {
    input: ChildStdin,
    shown: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Client {
    fn start(web: &Path, node: &Node) -> Self {
        let mut program = Command::new(web.join("bin/node"));
        program.arg(web.join("client.js"));
        program.arg(format!("ws://{}/s/room", node.sessions_address()));
        program.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = program.kill_on_drop(true).spawn().expect("it starts");
        Self {
            input: process.stdin.take().expect("piped"),
            shown: BufReader::new(process.stdout.take().expect("piped")).lines(),
            _process: process,
        }
    }

    async fn writes(&mut self, word: &str) {
        let line = format!("{word}\n");
        self.input.write_all(line.as_bytes()).await.expect("sent");
    }

    async fn shows(&mut self, document: &str) {
        let showing = async {
            while let Some(line) = self.shown.next_line().await.expect("read") {
                if line == document {
                    return;
                }
            }
            panic!("the client has ended");
        };
        let shown = timeout(PATIENCE, showing).await;
        shown.unwrap_or_else(|_| panic!("the document is not `{document}`"));
    }
}

async fn room(node: &Node) -> Session {
    let answer = node.admin().get("/v1/sessions/room").await;
    answer.expect(StatusCode::OK)
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn a_document_of_yjs_is_shared_through_two_nodes_also_after_its_node_is_preempted() {
    let Some(archive) = programs_archive("web") else {
        return;
    };
    let Some(ready) = requirements() else { return };
    let builder = Cluster::builder().nodes(2).short().toml(TEMPLATE);
    let cluster = Cluster::start(&builder, &ready, Path::new(WITNESS)).await;
    let cluster = cluster.expect("a cluster");
    for node in cluster.nodes() {
        let words = [
            "conman",
            "image",
            "import",
            &archive.to_string_lossy(),
            "programs:1",
        ];
        let import = command(cluster.layout(), node.name(), &words.map(str::to_owned));
        let import = Command::from(import.expect("a host")).output().await;
        let import = import.expect("it runs");
        assert!(import.status.success(), "{import:?}");
    }
    let client = tempfile::tempdir().expect("a directory can be made");
    let mut unpack = Command::new("tar");
    unpack.arg("--extract").arg("--file").arg(&archive);
    unpack
        .arg("--directory")
        .arg(client.path())
        .arg("./opt/web");
    assert!(unpack.status().await.expect("tar runs").success());
    let web = client.path().join("opt/web");
    std::fs::write(web.join("client.js"), CLIENT).expect("written");

    let first = eventually_some("the room is open", PATIENCE, async || {
        let body = json!({"template": "room"});
        let answer = cluster.nodes()[0]
            .admin()
            .put("/v1/sessions/room", &body)
            .await;
        let is_open = answer.status.is_success();
        is_open.then(|| answer.expect::<EnsureResponse>(answer.status).session)
    })
    .await;
    let of_first = |node: &&Node| node.name() == first.node;
    let (owner, other): (Vec<_>, Vec<_>) = cluster.nodes().iter().partition(of_first);
    let (owner, other) = (owner[0], other[0]);

    let mut near = Client::start(&web, owner);
    let mut far = Client::start(&web, other);
    near.writes("a").await;
    far.writes("b").await;
    for client in [&mut near, &mut far] {
        client.shows("a b").await;
    }

    let preempted = owner
        .admin()
        .post("/v1/nodes/self/preempt", &json!({}))
        .await;
    let report: PreemptReport = preempted.expect(StatusCode::OK);
    assert_eq!(
        (report.unreleased, owner.session_processes()),
        (vec![], vec![])
    );
    // The clients connect again, which starts it.
    eventually("the room moves", PATIENCE, async || {
        let session = room(other).await;
        session.node == other.name() && session.generation > first.generation
    })
    .await;
    near.writes("c").await;
    far.writes("d").await;
    far.shows("a b c d").await;
    near.shows("a b c d").await;
}
