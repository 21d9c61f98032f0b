use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::binary;

/// Starts of `conman` that are timed.
const STARTS: u32 = 10;
/// How long one takes on a machine with two processors and nothing else to do.
const USUAL: Duration = Duration::from_millis(10);
/// More would only hide that something hangs.
const MOST: u32 = 8;
/// Set where the machine does nothing else, so that what is measured is judged as it is.
const QUIET_MACHINE: &str = "CONMAN_CLUSTER_QUIET";

/// Returns how many times as long as usual this machine takes: what this program measured when it first asked,
/// 1 to 8. Bounds of tests are multiples of it, so that a slow machine or other programs on it fail no test.
///
/// # Panics
/// When `conman` cannot be started.
pub fn slowness() -> u32 {
    static MEASURED: OnceLock<u32> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        if std::env::var_os(QUIET_MACHINE).is_some() {
            return 1;
        }
        let begun = Instant::now();
        for _ in 0..STARTS {
            let started = Command::new(binary()).arg("--version").output();
            started.expect("conman starts");
        }
        let times = begun.elapsed().as_millis() / (USUAL * STARTS).as_millis();
        u32::try_from(times).unwrap_or(MOST).clamp(1, MOST)
    })
}
