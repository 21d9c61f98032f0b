//! A file with the sessions that a drain has signalled: their exit while no daemon runs counts as ordered.
//!
//! Lines of JSON, each written before its signal is sent. A line that was cut by the daemon's death is
//! ignored: no signal was sent yet. Not synced, since a machine that crashes loses its sessions anyway. A
//! line never applies to a later life of its session, which has another generation, so only a later daemon
//! removes the file, when none of its sessions may still obey.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use conman_linux::remove_if_present;
use conman_runtime::ContainerKey;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::context::Context;
use crate::session::SessionHandle;

/// Longest file that is read. A line has some hundred bytes.
const MAX_BYTES: u64 = 64 << 20;

/// How long a signal waits for its line to be written.
const NOTE_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    session: conman_proto::SessionId,
    generation: conman_proto::Generation,
    #[serde(flatten)]
    signal: DrainSignal,
}

/// Why a session was signalled.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DrainSignal {
    pub(crate) why: String,
    /// End of its grace, in time since boot. A machine that reboots has lost its sessions.
    until_ms: u64,
}

impl DrainSignal {
    pub(crate) fn new(why: &str, grace_ms: u32) -> Self {
        Self {
            why: why.to_owned(),
            until_ms: now_ms().saturating_add(grace_ms.into()),
        }
    }

    /// Whether a session that still lives may be obeying.
    pub(crate) fn holds(&self) -> bool {
        now_ms() < self.until_ms
    }
}

fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let ms = u64::try_from(now.tv_nsec / 1_000_000).unwrap_or(0);
    seconds.saturating_mul(1_000).saturating_add(ms)
}

#[derive(Debug, Clone)]
pub(crate) struct SignalledSessions {
    file: PathBuf,
    /// Locked while a line is written, so that a disk that hangs blocks one thread only.
    writing: Arc<Mutex<()>>,
}

impl SignalledSessions {
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self {
            file: state_dir.join("drain-told.jsonl"),
            writing: Arc::default(),
        }
    }

    /// Notes why a session is signalled, before it is. Waits for a slow disk for a bounded time.
    pub(crate) async fn note(&self, key: &ContainerKey, signal: DrainSignal) -> io::Result<()> {
        let line = Line {
            session: key.session.clone(),
            generation: key.generation,
            signal,
        };
        let text = serde_json::to_string(&line).map_err(io::Error::other)?;
        let path = self.file.clone();
        let append = async {
            let writing = Arc::clone(&self.writing).lock_owned().await;
            let append = move || {
                let _writing = writing;
                let mut options = File::options();
                let mut file = options.append(true).create(true).mode(0o600).open(path)?;
                // On a new line, even after one that was cut.
                file.write_all(format!("\n{text}\n").as_bytes())
            };
            spawn_blocking(append).await.map_err(io::Error::other)?
        };
        let slow = |_| io::Error::new(ErrorKind::TimedOut, "the disk does not answer in time");
        timeout(NOTE_PATIENCE, append).await.map_err(slow)?
    }

    /// Returns all signalled sessions, and why. Blocks on the disk.
    pub(crate) fn read(&self) -> io::Result<HashMap<ContainerKey, DrainSignal>> {
        let file = match File::open(&self.file) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HashMap::new()),
            file => file?,
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        let lines = text.split(|byte| *byte == b'\n');
        Ok(lines
            .filter_map(|line| serde_json::from_slice::<Line>(line).ok())
            .map(|line| {
                let key = ContainerKey::new(line.session, line.generation);
                (key, line.signal)
            })
            .collect())
    }

    /// Removes the file, before the first note of a daemon. Blocks on the disk.
    pub(crate) fn clear(&self) -> io::Result<()> {
        remove_if_present(&self.file)
    }
}

/// For the next daemon, in case this one ends before the program does.
pub(super) async fn note_signalled(context: &Context, handle: &SessionHandle, signal: DrainSignal) {
    let Some(generation) = handle.generation() else {
        return;
    };
    let key = ContainerKey::new(handle.id.clone(), generation);
    if let Err(error) = context.drain.signalled.note(&key, signal).await {
        tracing::warn!(
            session = %handle.id,
            %error,
            "cannot save that the drain signalled the session; if this daemon ends before it, the \
             session counts as having exited"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn key(id: &str) -> ContainerKey {
        ContainerKey::new(id.parse().expect("an id"), conman_proto::Generation::FIRST)
    }

    #[tokio::test]
    async fn a_line_that_was_cut_costs_only_itself() {
        let dir = tempfile::tempdir().expect("a directory");
        let signalled = SignalledSessions::new(dir.path());
        assert!(signalled.read().expect("none yet").is_empty());
        let signal = || DrainSignal::new("drained: new kernel", 60_000);
        signalled.note(&key("ann"), signal()).await.expect("noted");
        let whole = fs::read(&signalled.file).expect("read");
        let cut = &whole[..whole.len() - 5];
        fs::write(&signalled.file, [&whole[..], cut].concat()).expect("cut");
        signalled.note(&key("ben"), signal()).await.expect("noted");
        let all = signalled.read().expect("read");
        assert_eq!(all.len(), 2, "{all:?}");
        let ben = &all[&key("ben")];
        assert!(ben.holds() && ben.why == "drained: new kernel", "{ben:?}");
        signalled.clear().expect("cleared");
        assert!(signalled.read().expect("none").is_empty());
    }

    #[tokio::test]
    async fn a_disk_that_hangs_delays_no_signal_for_long() {
        let dir = tempfile::tempdir().expect("a directory");
        let signalled = SignalledSessions::new(dir.path());
        let hangs = Arc::clone(&signalled.writing).lock_owned().await;
        let signal = || DrainSignal::new("drained: new kernel", 60_000);
        let slow = signalled.note(&key("ann"), signal()).await;
        let slow = slow.expect_err("its signal waits no longer");
        assert_eq!(slow.kind(), ErrorKind::TimedOut);
        drop(hangs);
        signalled.note(&key("ben"), signal()).await.expect("noted");
    }
}
