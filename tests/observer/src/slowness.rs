//! How slow the machine is, measured by starting a program.

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Starts that are timed.
const STARTS: u32 = 10;
/// More would only hide that something hangs.
const MOST: u32 = 8;
/// How long a start of a shell takes on a machine with two processors and nothing else to do.
const USUAL: Duration = Duration::from_micros(1_500);

/// Returns how many times as long as usual this machine takes: what this program measured when it first called
/// this, 1 to 8. Bounds of tests are multiples of it, so that a slow machine or other programs on it fail no test.
///
/// # Panics
/// When no shell can be started.
pub fn slowness() -> u32 {
    static MEASURED: OnceLock<u32> = OnceLock::new();
    *MEASURED.get_or_init(|| slowness_of(USUAL, Command::new("/bin/sh").args(["-c", ":"])))
}

/// Returns how many times as long as `usual` a start of a program takes, 1 to 8.
///
/// # Panics
/// When it cannot be started.
pub fn slowness_of(usual: Duration, program: &mut Command) -> u32 {
    program.stdin(Stdio::null()).stdout(Stdio::null());
    let begun = Instant::now();
    for _ in 0..STARTS {
        program.status().expect("the program starts");
    }
    let times = begun.elapsed().as_micros() / (usual * STARTS).as_micros();
    u32::try_from(times).unwrap_or(MOST).clamp(1, MOST)
}
