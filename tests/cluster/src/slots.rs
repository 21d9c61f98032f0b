//! A bound on the clusters that tests run at a time on one machine, across processes.

use std::fs::File;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tokio::time::{Instant, sleep};

/// Each is a member of etcd or three, and some daemons with time-outs of seconds. Most of the time they
/// wait for these time-outs, which several clusters can do at a time.
const AT_A_TIME: usize = 4;
/// On a quiet machine: figures are judged there.
const AT_A_TIME_QUIET: usize = 1;
/// All tests of this kind together take less.
const PATIENCE: Duration = Duration::from_secs(3_600);
/// Set where the machine does nothing else, so that what is measured can be judged.
pub const QUIET_MACHINE: &str = "CONMAN_CLUSTER_QUIET";
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
        let places = match std::env::var_os(QUIET_MACHINE) {
            Some(_) => AT_A_TIME_QUIET,
            None => AT_A_TIME,
        };
        loop {
            for number in 0..places {
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
