//! Checks periodically how many sessions the host has room for. The node refuses more, and names
//! the limit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::{LimitMet, RuntimeKind};

use crate::host_limits::HostLimit;
use crate::node::Node;
use crate::sessions::SessionsHandle;
use crate::status::StatusHandle;

/// Pause between checks while starts are refused: a full resource may become free.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// What a probe has found for the sessions of one runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundRoom {
    pub runtime: RuntimeKind,
    /// The limit that binds first, and how many further sessions it leaves room for; `None` if none binds.
    pub limit: Option<(LimitMet, usize)>,
}

/// Reads the host's limits: given how many sessions have a container, and how many more there may be. It may
/// block.
pub type RoomProbe = Arc<dyn Fn(usize, usize) -> Vec<FoundRoom> + Send + Sync>;

/// Probes once, so that the first start is judged, and then for as long as the daemon runs.
pub async fn watch_host_room(node: &Node, every: Duration, max_sessions: usize, probe: RoomProbe) {
    let mut watch = Watch {
        latest: BTreeMap::new(),
        probe,
        sessions: node.sessions().clone(),
        status: node.status().clone(),
        max_sessions,
    };
    for (kind, limit) in watch.look().await {
        tracing::warn!(
            runtime = %kind, limit = limit.met.name, value = limit.met.value,
            remedy = limit.met.remedy,
            "the host has room for {} sessions, fewer than limits.max_sessions; see \
             `conman doctor`", limit.max_sessions
        );
    }
    tokio::spawn(async move {
        loop {
            tokio::select! {
                // Cancel safe: a dropped sleep is started again.
                () = tokio::time::sleep(every) => {}
                // Cancel safe: the next call returns what this one missed.
                () = watch.status.host_limit_met() => tokio::time::sleep(REFUSED_PAUSE).await,
            }
            watch.look().await;
        }
    });
}

struct Watch {
    /// The number of sessions that the host has room for by the last check, if a limit binds.
    latest: BTreeMap<RuntimeKind, usize>,
    probe: RoomProbe,
    sessions: SessionsHandle,
    status: StatusHandle,
    max_sessions: usize,
}

impl Watch {
    /// The limits that apply.
    async fn look(&mut self) -> Vec<(RuntimeKind, HostLimit)> {
        let before = self.sessions.occupancy().settled;
        let wanted = self.max_sessions.saturating_sub(before);
        let probe = Arc::clone(&self.probe);
        let looked = tokio::task::spawn_blocking(move || probe(before, wanted));
        // It does not panic; without an answer the last result holds.
        let mut binding = Vec::new();
        let looked = looked.await.unwrap_or_default();
        let after = self.sessions.occupancy().live;
        for FoundRoom { runtime, limit } in looked {
            let former = self.latest.remove(&runtime);
            let limit = limit.map(|(met, further)| HostLimit {
                max_sessions: places(before, after, former, further),
                met,
            });
            if let Some(limit) = &limit {
                self.latest.insert(runtime, limit.max_sessions);
            }
            self.status.limit_by_host(runtime, limit.clone());
            binding.extend(limit.map(|limit| (runtime, limit)));
        }
        binding
    }
}

/// Returns how many sessions the host has room for, from those that had a container before a check, those that
/// live after it, and how many further ones it has found room for.
///
/// The check may have counted the sessions that were starting, or not, so that the answer is a range. The former
/// answer holds if it is within: otherwise a start at the time of the check would take two places, and another one
/// would be refused. Without a former answer such sessions are counted twice rather than not at all.
fn places(before: usize, after: usize, former: Option<usize>, further: usize) -> usize {
    let least = before.saturating_add(further);
    let most = after.saturating_add(further).max(least);
    former.map_or(least, |former| former.clamp(least, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_starts_during_a_check_takes_one_place() {
        // Four places: one is taken, a second one is being taken, and is counted or not.
        assert_eq!(places(1, 2, Some(4), 2), 4);
        assert_eq!(places(1, 2, Some(4), 3), 4);
        // It has taken three.
        assert_eq!(places(1, 2, Some(4), 0), 2);
        assert_eq!(places(1, 2, None, 2), 3);
        // Nothing starts.
        assert_eq!(places(2, 2, Some(9), 2), 4);
        assert_eq!(places(2, 2, Some(1), 2), 4);
    }
}
