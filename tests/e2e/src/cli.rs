//! Runs conman's command line.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::time::timeout;

/// Bound on one run of the command line.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What a run of the command line came to.
#[derive(Debug, Clone)]
pub struct CliOutput {
    /// `None` after a signal.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl CliOutput {
    /// What it printed.
    ///
    /// # Panics
    /// When it failed.
    pub fn success(&self) -> &str {
        assert_eq!(self.code, Some(0), "{self:?}");
        &self.stdout
    }
}

/// Runs a command to its end with this standard input.
pub(crate) async fn run(mut command: Command, stdin: &str) -> CliOutput {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut child = command.spawn().expect("conman starts");
    let mut input = child.stdin.take().expect("it has a standard input");
    let text = stdin.to_owned();
    let writing = tokio::spawn(async move {
        // A command that does not read its input closes it.
        let _ = input.write_all(text.as_bytes()).await;
    });
    let output = timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("conman comes to an end")
        .expect("conman's output can be read");
    writing.abort();
    CliOutput {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
