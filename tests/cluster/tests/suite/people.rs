//! The commands behind `cargo xtask cluster`, as people type them.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use conman_cluster::{Layout, leftovers, people, requirements};
use conman_e2e::{Api, eventually};
use conman_linux::ProcessIdentity;
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;

const PROGRAM: &str = env!("CARGO_BIN_EXE_conman-cluster");
/// Beside this program it finds this one.
const _: &str = env!("CARGO_BIN_EXE_witness");
const PATIENCE: Duration = Duration::from_secs(120);

/// Whose cluster it is: not people's, who may have one up.
fn own() -> i32 {
    i32::try_from(std::process::id()).expect("a process id")
}

fn program() -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["--owner", &own().to_string()]);
    command.env("CONMAN_E2E_BINARY", conman_e2e::binary());
    command
}

fn cluster(words: &[&str]) {
    let done = program().args(words).output();
    let done = done.expect("it can be run");
    assert!(
        done.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
}

/// What is up is removed, whatever becomes of the test.
struct Up;

impl Drop for Up {
    fn drop(&mut self) {
        let _ = program().arg("down").output();
    }
}

/// What a node answers, and how many processes its host has.
fn seen(layout: &Layout, name: &str) -> (String, usize) {
    let all = people::status(layout).into_iter();
    let one = all.into_iter().find(|one| one.host.name == name);
    let one = one.expect("it has this host");
    (one.answer, one.processes.len())
}

#[tokio::test]
async fn a_fleet_for_people_comes_up_bears_what_they_do_to_it_and_leaves_nothing() {
    let Some(_ready) = requirements() else { return };
    // Its ports are the same each time.
    let lock = std::env::temp_dir().join("conman-cluster.people");
    let lock = File::create(lock).expect("a file");
    lock.lock().expect("locked");
    // What fails to come up removes itself.
    cluster(&["up", "--nodes", "3", "--members", "1"]);
    let _up = Up;
    let layout = people::current(Some(own())).expect("it is up");
    let maker = ProcessIdentity::of(own()).expect("this process");
    assert_eq!(layout.owner, Some(maker), "by which it is swept");
    for name in ["n1", "n2"] {
        eventually("it is ready", PATIENCE, async || {
            seen(&layout, name).0 == "ready"
        })
        .await;
    }
    is_used(&layout).await;
    cluster(&["cut", "n1"]);
    eventually("the cut is felt", PATIENCE, async || {
        seen(&layout, "n1").0 != "ready"
    })
    .await;
    cluster(&["heal"]);
    eventually("it is back", PATIENCE, async || {
        seen(&layout, "n1").0 == "ready"
    })
    .await;
    cluster(&["kill", "n2"]);
    assert_eq!(seen(&layout, "n2").1, 0, "nothing runs there");
    cluster(&["start", "n2"]);
    eventually("it is started", PATIENCE, async || {
        seen(&layout, "n2").0 == "ready"
    })
    .await;
    cluster(&["down"]);
    assert_eq!(leftovers(&layout), []);
    assert!(people::current(Some(own())).is_err(), "none is up");
    let balancer = TcpStream::connect(layout.balancer_address()).await;
    assert!(balancer.is_err(), "HAProxy is gone");
}

/// What `up` suggests works: commands on a host, and an echo through HAProxy.
async fn is_used(layout: &Layout) {
    cluster(&["exec", "n1", "conman", "run", "alice", "--template", "echo"]);
    let names_it = "grep -q '\"n1\"' \"$CONMAN_CONFIG\"";
    cluster(&["exec", "n1", "sh", "-c", names_it]);
    if !people::has_balancer(layout) {
        return conman_e2e::lacks("haproxy is missing (package haproxy)");
    }
    let balancer = layout.balancer_address();
    let hello = json!({"hello": 1});
    let answer = Api::tcp(balancer).post("/s/alice/", &hello).await.text();
    assert!(answer.starts_with("this is alice"), "{answer}");
    assert!(answer.ends_with(&hello.to_string()), "{answer}");
    let url = format!("ws://{balancer}/s/alice/");
    let (mut socket, _) = connect_async(url).await.expect("a WebSocket");
    let first = socket.next().await.expect("a message").expect("whole");
    assert!(first.to_string().starts_with("this is alice"), "{first}");
    let message = Message::text("typed");
    socket.send(message.clone()).await.expect("sent");
    assert_eq!(
        socket.next().await.expect("a message").expect("whole"),
        message
    );
}
