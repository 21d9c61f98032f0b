//! What a process is and uses, for a list of processes.

use std::fs::File;
use std::io::{self, Read as _};
use std::time::Duration;

use procfs::process::Status;

use crate::proc_files::{Stat, read_proc};

/// Bytes of a command line that are read.
const COMMAND_BYTES: u64 = 4_096;

/// A process. Ids with `inner` are those in the namespaces that it lives in.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessEntry {
    pub inner_pid: i32,
    /// How many PID namespaces it is in: those of the reader and of the containers around it.
    pub namespaces: usize,
    /// In this PID namespace.
    pub parent: i32,
    /// `None` if its user namespace has no such id.
    pub inner_uid: Option<u32>,
    /// Program and arguments; a name in brackets if it has none.
    pub command: Vec<String>,
    /// As in proc(5).
    pub state: char,
    pub threads: u32,
    pub cpu: Duration,
    pub resident_bytes: u64,
    /// Since it was started, with the time that the host was suspended.
    pub age: Duration,
}

impl ProcessEntry {
    /// Reads it for the process that has this PID now. The kernel may make the reader wait for the process's
    /// memory: call it where that harms nothing.
    ///
    /// # Errors
    /// There is no such process, or it cannot be read.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat: Stat = read_proc(format!("/proc/{pid}/stat"))?;
        let status: Status = read_proc(format!("/proc/{pid}/status"))?;
        let mut command = Vec::new();
        let file = File::open(format!("/proc/{pid}/cmdline"))?;
        // That of a process whose memory is gone cannot be read.
        let _ = file.take(COMMAND_BYTES).read_to_end(&mut command);
        let ticks_per_s = procfs::ticks_per_second().max(1);
        let ticks = |ticks: u64| Duration::from_millis(ticks.saturating_mul(1_000) / ticks_per_s);
        Ok(Self {
            inner_pid: status
                .nspid
                .as_ref()
                .and_then(|pids| pids.last().copied())
                .unwrap_or(status.pid),
            namespaces: status.nspid.as_ref().map_or(1, Vec::len),
            parent: stat.ppid,
            inner_uid: inner_id(
                &std::fs::read_to_string(format!("/proc/{pid}/uid_map"))?,
                status.euid,
            ),
            command: words(&command, &stat.comm),
            state: stat.state,
            threads: u32::try_from(status.threads).unwrap_or(u32::MAX),
            cpu: ticks(stat.utime.saturating_add(stat.stime)),
            resident_bytes: status.vmrss.unwrap_or(0).saturating_mul(1_024),
            age: since_boot().saturating_sub(ticks(stat.starttime)),
        })
    }
}

fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).unwrap_or_default()
}

/// The id inside of a user namespace, whose map is read outside of it.
fn inner_id(map: &str, outer: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u32>);
        let mut next = || numbers.next()?.ok();
        let (inner, first, count) = (next()?, next()?, next()?);
        let offset = outer.checked_sub(first).filter(|offset| *offset < count)?;
        inner.checked_add(offset)
    })
}

/// The arguments, of which a process may have overwritten any.
fn words(command: &[u8], name: &str) -> Vec<String> {
    let command = command.strip_suffix(b"\0").unwrap_or(command);
    if command.is_empty() {
        return vec![format!("[{name}]")];
    }
    command
        .split(|byte| *byte == 0)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_as_it_is() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read line", ""])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("a child");
        let pid = i32::try_from(child.id()).expect("a pid");
        // Its command line changes while it is executed.
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let mut entry = ProcessEntry::of(pid).expect("it lives");
        while entry.command.len() != 4 && std::time::Instant::now() < deadline {
            entry = ProcessEntry::of(pid).expect("it lives");
        }
        assert_eq!(entry.command, ["sh", "-c", "read line", ""]);
        assert_eq!((entry.inner_pid, entry.threads), (pid, 1));
        assert_eq!(entry.parent.unsigned_abs(), std::process::id());
        assert_eq!(entry.inner_uid, Some(rustix::process::geteuid().as_raw()));
        assert!(entry.resident_bytes > 0 && entry.age < Duration::from_secs(60));
        child.kill().expect("it lives");
        let zombie = std::time::Instant::now() + Duration::from_secs(20);
        while ProcessEntry::of(pid).is_ok_and(|entry| entry.state != 'Z')
            && std::time::Instant::now() < zombie
        {
            std::thread::yield_now();
        }
        let entry = ProcessEntry::of(pid).expect("nobody has waited for it");
        assert_eq!(
            (&entry.command[..], entry.resident_bytes),
            (&["[sh]".to_owned()][..], 0)
        );
        child.wait().expect("it is a child");
        ProcessEntry::of(pid).expect_err("it is gone");
    }

    #[test]
    fn an_id_is_that_of_its_namespace() {
        let map = "         0     100000      65536\n     70000          5          1\n";
        for (outer, inner) in [
            (100_000, Some(0)),
            (165_535, Some(65_535)),
            (165_536, None),
            (99_999, None),
            (5, Some(70_000)),
        ] {
            assert_eq!(inner_id(map, outer), inner, "{outer}");
        }
        assert_eq!(inner_id("0 0 4294967295", 1_000), Some(1_000));
        assert_eq!(inner_id("nonsense", 0), None);
    }
}
