//! The memory of a process.

use std::future::Future;
use std::time::Duration;

/// How often a process is measured.
const POLL: Duration = Duration::from_millis(20);

/// The process's resident memory in bytes, as `/proc/<pid>/status` tells it.
///
/// # Panics
/// When there is no such process.
pub fn resident_bytes(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: u64 = kib
        .expect("a living process has VmRSS")
        .parse()
        .expect("a number");
    kib * 1024
}

/// What a future comes to, and the most resident memory that the process had meanwhile.
pub async fn peak_resident_bytes<T>(pid: i32, work: impl Future<Output = T>) -> (T, u64) {
    let mut peak = resident_bytes(pid);
    let mut work = std::pin::pin!(work);
    loop {
        // The work is polled again after a measurement; nothing of it is lost.
        let done = tokio::time::timeout(POLL, work.as_mut()).await;
        peak = peak.max(resident_bytes(pid));
        if let Ok(value) = done {
            return (value, peak);
        }
    }
}
