//! What sessions use, read when somebody asks.

use std::sync::Arc;

use conman_linux::network_bytes;
use conman_proto::{SessionId, SessionState, SessionStats};
use conman_runtime::{ContainerKey, Runtime};
use jiff::Timestamp;

use crate::context::Context;
use crate::error::AccessError;
use crate::session::SessionHandle;

const MICROS_PER_S: f64 = 1e6;

/// One running session.
pub(crate) async fn of_session(
    handle: Arc<SessionHandle>,
    runtime: &Arc<dyn Runtime>,
) -> Result<SessionStats, AccessError> {
    let (id, state) = (handle.id.clone(), handle.state());
    let read = read_all(vec![(handle, Arc::clone(runtime))]).await;
    read.into_iter()
        .next()
        .ok_or(AccessError::NotRunning { id, state })
}

/// Every running session of the node, ordered by id.
pub(crate) async fn of_node(context: &Context) -> Vec<SessionStats> {
    let sessions = context.sessions.shown_after(None);
    let running = sessions.into_iter().filter_map(|handle| {
        let runs = handle.state() == SessionState::Running;
        let runtime = context.runtime(handle.spec().runtime).filter(|_| runs)?;
        Some((handle, Arc::clone(runtime)))
    });
    read_all(running.collect()).await
}

/// Reads files of the kernel on another thread: ten for each session.
async fn read_all(sessions: Vec<(Arc<SessionHandle>, Arc<dyn Runtime>)>) -> Vec<SessionStats> {
    let read = move || {
        sessions
            .iter()
            .filter_map(|(handle, runtime)| read(handle, &**runtime))
            .collect()
    };
    // It does not panic, and the daemon ends otherwise.
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

fn read(handle: &SessionHandle, runtime: &dyn Runtime) -> Option<SessionStats> {
    let (generation, pid) = {
        let view = handle.view.borrow();
        (view.generation?, view.process.as_ref()?.pid())
    };
    let id: SessionId = handle.id.clone();
    let key = ContainerKey {
        session: id.clone(),
        generation,
    };
    let usage = runtime.usage(&key);
    // A process that has ended, or another one with its number, does not belong to the container.
    let network = runtime
        .owns_pid(&key, pid)
        .then(|| network_bytes(pid))
        .flatten();
    let spec = handle.spec();
    Some(SessionStats {
        id,
        at: Timestamp::now(),
        cpu_s: usage.cpu_us.map(seconds),
        throttled_s: usage.throttled_us.map(seconds),
        throttled_count: usage.throttled,
        memory_bytes: usage.memory_bytes,
        memory_limit_bytes: spec.memory_bytes,
        oom_kills: usage.oom_kills,
        pids: usage.pids,
        pids_limit: spec.pids.into(),
        read_bytes: usage.read_bytes,
        written_bytes: usage.written_bytes,
        received_bytes: network.map(|(received, _)| received),
        sent_bytes: network.map(|(_, sent)| sent),
        disk_limit_bytes: spec.disk_bytes,
    })
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn seconds(micros: u64) -> f64 {
    micros as f64 / MICROS_PER_S
}
