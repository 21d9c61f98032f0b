//! `conman` as people type it at the second node.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::fleet::{Fleet, PATIENCE};

/// `conman` over that node's socket, unless its arguments say where; and what it prints.
pub(crate) fn conman(fleet: &Fleet, arguments: &[&str]) -> Child {
    let layout = fleet.cluster.layout();
    let mut command = Command::new(layout.binary("n2"));
    if arguments.first() != Some(&"--url") {
        command.arg("--socket").arg(layout.socket("n2"));
    }
    command.args(arguments).kill_on_drop(true);
    for variable in ["CONMAN_URL", "CONMAN_SOCKET", "CONMAN_TOKEN_FILE"] {
        command.env_remove(variable);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("conman starts")
}

/// Waits for the first line.
pub(crate) async fn began(child: &mut Child) {
    let mut lines = BufReader::new(child.stdout.as_mut().expect("an output")).lines();
    let line = timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("a line in time").expect("readable");
    assert_eq!(line.as_deref(), Some("up"));
}

/// How it ended, and what it told.
pub(crate) async fn told(mut child: Child) -> (Option<i32>, String) {
    let status = timeout(PATIENCE, child.wait()).await;
    let status = status.expect("it ends").expect("it can be waited for");
    let mut text = String::new();
    let mut errors = child.stderr.take().expect("an output");
    errors.read_to_string(&mut text).await.expect("text");
    (status.code(), text)
}

/// What it printed, once it has ended well or as is wanted.
pub(crate) async fn printed(fleet: &Fleet, arguments: &[&str], wanted: i32) -> String {
    let mut child = conman(fleet, arguments);
    let mut output = child.stdout.take().expect("an output");
    let mut text = String::new();
    let read = timeout(PATIENCE, output.read_to_string(&mut text)).await;
    read.expect("it ends").expect("text");
    let (code, errors) = told(child).await;
    assert_eq!(code, Some(wanted), "{arguments:?}: {text}{errors}");
    text
}

/// What it complained of in the end, having done nothing.
pub(crate) async fn refused(fleet: &Fleet, arguments: &[&str], wanted: i32) -> String {
    let (code, errors) = told(conman(fleet, arguments)).await;
    assert_eq!(code, Some(wanted), "{arguments:?}: {errors}");
    errors
}
