//! Signals that find the daemon still starting: they have their configured meaning.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use conman_e2e::{Conman, docker_shared, eventually, eventually_some};
use conman_linux::Signal;
use rustix::fs::OFlags;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// Holds a daemon up where it opens its state, before it adopts anything: the file that it reads
/// there has become a pipe.
struct HeldUp {
    file: PathBuf,
    kept: PathBuf,
}

impl HeldUp {
    fn before_the_start_of(conman: &Conman) -> Self {
        let file = conman.state_dir().join("instance");
        let kept = file.with_extension("kept");
        fs::rename(&file, &kept).expect("the file can be renamed");
        let made = Command::new("mkfifo").arg(&file).status();
        assert!(made.expect("mkfifo can be run").success());
        Self { file, kept }
    }

    /// Lets the daemon go on.
    async fn end(self) {
        let text = fs::read(&self.kept).expect("the file can be read");
        let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag");
        let mut pipe = eventually_some("the daemon reads", PATIENCE, async || {
            let mut options = File::options();
            let options = options.write(true).custom_flags(nonblocking);
            options.open(&self.file).ok()
        })
        .await;
        pipe.write_all(&text).expect("it fits into a pipe");
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        let _ = fs::rename(&self.kept, &self.file);
    }
}

/// Whether the process handles SIGTERM itself.
fn handles_sigterm(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = u64::from_str_radix(caught.unwrap_or_default().trim(), 16).unwrap_or(0);
    caught & (1 << (Signal::SIGTERM as i32 - 1)) != 0
}

/// Starts a daemon over a session that runs, and sends it SIGTERM before it can know of that.
async fn terminate_early(conman: &mut Conman) {
    conman.api().ensure("s", &json!({"template": "tiny"})).await;
    conman.crash();
    let held_up = HeldUp::before_the_start_of(conman);
    conman.spawn();
    let pid = conman.pid();
    eventually("SIGTERM is handled", PATIENCE, async || {
        handles_sigterm(pid)
    })
    .await;
    conman.signal(Signal::SIGTERM);
    held_up.end().await;
    let status = conman.wait_ended().await;
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn a_sigterm_before_adoption_preempts_what_an_earlier_daemon_left() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder()
        .set("preempt", "on_sigterm = \"preempt\"")
        .start(&docker)
        .await;
    terminate_early(&mut conman).await;
    assert_eq!(conman.processes(), []);
}

#[tokio::test]
async fn a_sigterm_before_adoption_leaves_the_sessions_to_the_next_daemon() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    terminate_early(&mut conman).await;
    conman.launch().await;
    let session = conman.api().session("s").await;
    let runs = conman.processes();
    assert!(
        runs.iter().any(|process| Some(process.pid) == session.pid),
        "{session:?} {runs:?}"
    );
}
