//! What sessions use, read when somebody asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use conman_linux::{PidFd, ResourceUsage, host_oom_kills, network_bytes};
use conman_proto::{SessionState, SessionStats};
use conman_runtime::{ContainerKey, RunningContainer, Runtime};
use jiff::Timestamp;

use crate::access::not_running;
use crate::context::Context;
use crate::error::AccessError;
use crate::session::SessionHandle;

const MICROS_PER_S: f64 = 1e6;

/// One running session.
pub(crate) async fn of_session(
    handle: Arc<SessionHandle>,
    runtime: &Arc<dyn Runtime>,
) -> Result<SessionStats, AccessError> {
    let read = read_all(vec![(Arc::clone(&handle), Arc::clone(runtime))]).await;
    read.into_iter().next().ok_or_else(|| not_running(&handle))
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

/// A session and the init of its container.
type Running = (Arc<SessionHandle>, Arc<PidFd>);

/// Reads files of the kernel on another thread: up to ten for each session.
async fn read_all(sessions: Vec<(Arc<SessionHandle>, Arc<dyn Runtime>)>) -> Vec<SessionStats> {
    let read = move || {
        let of_one = sessions.chunk_by(|(_, one), (_, other)| Arc::ptr_eq(one, other));
        of_one.flat_map(read_runtime).collect()
    };
    // It does not panic, and the daemon ends otherwise.
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

/// Sessions of one runtime.
fn read_runtime(sessions: &[(Arc<SessionHandle>, Arc<dyn Runtime>)]) -> Vec<SessionStats> {
    let Some((_, runtime)) = sessions.first() else {
        return Vec::new();
    };
    let host_kills = host_oom_kills();
    let handles = sessions.iter().map(|(handle, _)| handle);
    let running = handles.filter_map(|handle| running(handle, host_kills));
    let (running, containers): (Vec<_>, Vec<_>) = running.unzip();
    let usages = runtime.usages(&containers);
    let read = running.into_iter().zip(usages);
    read.map(|(running, usage)| {
        running.0.oom_kills.learn(host_kills, usage.oom_kills);
        stats(&running, usage)
    })
    .collect()
}

/// `host_kills`: processes that the host has killed because memory ran out.
fn running(
    handle: &Arc<SessionHandle>,
    host_kills: Option<u64>,
) -> Option<(Running, RunningContainer)> {
    let view = handle.view.borrow();
    let key = ContainerKey::new(handle.id.clone(), view.generation?);
    let process = Arc::clone(view.process.as_ref()?);
    drop(view);
    let container = RunningContainer {
        key,
        init: process.pid(),
        has_cpu_limit: handle.spec().cpus.is_some(),
        oom_kills: handle.oom_kills.known(host_kills),
    };
    Some(((Arc::clone(handle), process), container))
}

fn stats((handle, process): &Running, usage: ResourceUsage) -> SessionStats {
    let spec = handle.spec();
    let network = match handle.may_have_links.load(Ordering::Relaxed) {
        // The interfaces are the node's, and count what all its programs send and receive.
        _ if spec.network.traits().shares_host => None,
        true => network_bytes(process.pid())
            // Another process may have the number of one that has ended.
            .filter(|_| process.is_dead().is_ok_and(|is_dead| !is_dead)),
        false => Some((0, 0)),
    };
    let (proxy_received_bytes, proxy_sent_bytes) = handle.traffic.carried();
    SessionStats {
        id: handle.id.clone(),
        at: Timestamp::now(),
        cpu_s: usage.cpu_us.map(seconds),
        throttled_s: usage.throttled_us.map(seconds),
        throttled_count: usage.throttled,
        memory_bytes: usage.memory_bytes,
        memory_limit_bytes: spec.memory_bytes,
        oom_kills: usage.oom_kills,
        // Its own, as its spec limits them.
        pids: usage
            .pids
            .map(|pids| pids.saturating_sub(u64::from(spec.has_own_init()))),
        pids_limit: spec.pids.into(),
        read_bytes: usage.read_bytes,
        written_bytes: usage.written_bytes,
        received_bytes: network.map(|(received, _)| received),
        sent_bytes: network.map(|(_, sent)| sent),
        proxy_received_bytes,
        proxy_sent_bytes,
        disk_limit_bytes: spec.disk_bytes,
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 microseconds are 285 years"
)]
fn seconds(micros: u64) -> f64 {
    micros as f64 / MICROS_PER_S
}

#[cfg(test)]
mod tests {
    use conman_proto::{Network, ResolvedSpec};

    use super::*;
    use crate::session::View;
    use crate::session_table::tests::spec;

    #[test]
    fn traffic_of_the_node_is_not_reported_as_that_of_a_session() {
        let own = i32::try_from(std::process::id()).expect("a process id");
        let process = Arc::new(PidFd::open(own).expect("this process"));
        let counted = |network: Network, is_adopted: bool| {
            let spec = ResolvedSpec { network, ..spec() };
            let id = "alice".parse().expect("an id");
            let handle = SessionHandle::new(id, spec, View::starting());
            if is_adopted {
                handle.may_have_links.store(true, Ordering::Relaxed);
            }
            let stats = stats(&(handle, Arc::clone(&process)), ResourceUsage::default());
            assert_eq!(stats.received_bytes.is_some(), stats.sent_bytes.is_some());
            stats.received_bytes.is_some()
        };
        for is_adopted in [false, true] {
            assert!(!counted(Network::Host, is_adopted));
            assert!(counted(Network::Routed, is_adopted));
            assert!(counted(Network::Loopback, is_adopted));
        }
    }
}
