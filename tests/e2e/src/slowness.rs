//! How slow the machine is, measured by starting conman.

use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use conman_observer::slowness_of;

use crate::binary;

/// How long a start takes on a machine with two processors and nothing else to do.
const USUAL: Duration = Duration::from_millis(10);
/// Set where the machine does nothing else, so that what is measured is judged as it is.
const QUIET_MACHINE: &str = "CONMAN_CLUSTER_QUIET";

/// Returns how many times as long as usual this machine takes: what this program measured when it first asked,
/// 1 to 8. Bounds of tests are multiples of it, so that a slow machine or other programs on it fail no test.
///
/// # Panics
/// When `conman` cannot be started.
pub fn slowness() -> u32 {
    static MEASURED: OnceLock<u32> = OnceLock::new();
    *MEASURED.get_or_init(|| match std::env::var_os(QUIET_MACHINE) {
        Some(_) => 1,
        None => slowness_of(USUAL, Command::new(binary()).arg("--version")),
    })
}
