//! A bound on the clusters that tests run at a time on one machine, across processes.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::time::{Instant, sleep};

/// Each is three etcd members and some daemons with time-outs of seconds: more at a time on a small
/// machine would measure the machine.
const AT_A_TIME: usize = 1;
/// All tests of this kind together take less.
const PATIENCE: Duration = Duration::from_secs(3_600);
const POLL: Duration = Duration::from_millis(100);

/// The right to run a cluster; gone with the process at the latest.
#[derive(Debug)]
pub(crate) struct Turn {
    _lock: File,
}

impl Turn {
    /// Waits for one.
    pub(crate) async fn take() -> Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for number in 0..AT_A_TIME {
                let path = std::env::temp_dir().join(format!("conman-cluster.turn-{number}"));
                let lock = File::options()
                    .create(true)
                    .truncate(false)
                    .write(true)
                    .open(&path)
                    .with_context(|| format!("cannot open {}", path.display()))?;
                if lock.try_lock().is_ok() {
                    return Ok(Self { _lock: lock });
                }
            }
            if Instant::now() > deadline {
                bail!("other clusters on this machine do not come to an end");
            }
            sleep(POLL).await;
        }
    }
}
