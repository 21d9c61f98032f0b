//! Lists the processes of a session, read for each request.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use conman_core::runtime_traits;
use conman_linux::ProcessEntry;
use conman_proto::{ProcessList, SessionProcess};
use conman_runtime::{ContainerKey, Runtime, RuntimeError};
use jiff::{SignedDuration, Timestamp};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Most processes of a list.
const MAX_LISTED: usize = 4_096;

/// Lists that are read at a time. The kernel may make the reader of a command line wait for the memory of a
/// process that hangs: such readers must not take every thread.
static READERS: Semaphore = Semaphore::const_new(4);

/// Longest wait for a list.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) async fn of_container(
    runtime: &Arc<dyn Runtime>,
    key: ContainerKey,
) -> Result<ProcessList, RuntimeError> {
    let (kind, subject) = (runtime.kind(), key.to_string());
    if !runtime_traits(kind).lists_processes {
        return Err(RuntimeError::Unsupported {
            runtime: kind,
            action: "list the processes of",
            subject,
            reason: "they are in its own kernel; run `ps` in it with `conman exec`".to_owned(),
        });
    }
    let timed_out = |_| RuntimeError::TimedOut {
        runtime: kind,
        action: "list the processes of",
        subject: subject.clone(),
        after_ms: u64::try_from(PATIENCE.as_millis()).unwrap_or(u64::MAX),
    };
    let runtime = Arc::clone(runtime);
    let read = async {
        // The semaphore is never closed.
        let reader = READERS.acquire().await;
        let read = tokio::task::spawn_blocking(move || {
            // Held by a reader that hangs.
            let _reader = reader;
            read(&*runtime, &key)
        });
        // It does not panic, and the daemon ends otherwise.
        read.await
            .unwrap_or_else(|error| Err(host_error(std::io::Error::other(error))))
    };
    timeout(PATIENCE, read).await.map_err(timed_out)?
}

fn host_error(source: std::io::Error) -> RuntimeError {
    RuntimeError::Host {
        action: "list the processes in",
        path: "/proc".into(),
        source,
    }
}

fn read(runtime: &dyn Runtime, key: &ContainerKey) -> Result<ProcessList, RuntimeError> {
    let now = Timestamp::now();
    let pids = runtime.pids(key).map_err(host_error)?;
    let truncated = pids.len() > MAX_LISTED;
    let mut entries = Vec::new();
    // An OCI runtime is in the container, and what it runs is in a namespace below.
    let least = match runtime_traits(runtime.kind()).runs_programs_itself {
        true => 0,
        false => 3,
    };
    for pid in pids.into_iter().take(MAX_LISTED) {
        // One that has ended meanwhile is left out, as is a later process with its pid.
        if let Ok(entry) = ProcessEntry::of(pid)
            && runtime.owns_pid(key, pid)
            && entry.namespaces >= least
        {
            entries.push((pid, entry));
        }
    }
    let inner: HashMap<i32, i32> = entries
        .iter()
        .map(|(pid, entry)| (*pid, entry.inner_pid))
        .collect();
    let mut processes: Vec<_> = entries
        .into_iter()
        .map(|(_, entry)| {
            let parent = inner.get(&entry.parent).copied();
            described(entry, parent, now)
        })
        .collect();
    processes.sort_by_key(|process| process.pid);
    Ok(ProcessList {
        processes,
        truncated,
    })
}

fn described(entry: ProcessEntry, parent: Option<i32>, now: Timestamp) -> SessionProcess {
    let age = SignedDuration::try_from(entry.age).unwrap_or(SignedDuration::ZERO);
    SessionProcess {
        pid: entry.inner_pid,
        parent,
        uid: entry.inner_uid,
        command: entry.command,
        state: entry.state.to_string(),
        threads: entry.threads,
        cpu_s: entry.cpu.as_secs_f64(),
        memory_bytes: entry.resident_bytes,
        started_at: now.checked_sub(age).unwrap_or(now),
    }
}
