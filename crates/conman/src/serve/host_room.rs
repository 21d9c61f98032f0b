//! Checks periodically how many sessions the host has room for. The node refuses more, and names
//! the limit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use conman_core::CgroupDriver;
use conman_core::naming::instance_cgroup;
use conman_doctor::{Check, Footprint, Host, Site, room};
use conman_node::{HostLimit, Node, SessionsHandle, StatusHandle};
use conman_proto::{LimitMet, RuntimeKind};

use crate::config::Config;
use crate::doctor;

/// Pause between checks while starts are refused: a full resource may become free.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);

/// The subject of the checks.
struct Subject {
    kind: RuntimeKind,
    footprint: Footprint,
    folders: Vec<String>,
}

/// Checks once, so that the first start is judged, and then for as long as the daemon runs.
pub(super) async fn watch(config: &Config, node: &Node) {
    let Some(every) = config.limits.check_host_every else {
        return;
    };
    let state_dir = config.state_dir.to_string_lossy().into_owned();
    let subjects: Vec<Subject> = config
        .runtimes()
        .into_iter()
        .map(|kind| Subject {
            kind,
            footprint: doctor::footprint(kind, false, config),
            folders: doctor::folders(kind, &state_dir),
        })
        .collect();
    let mut watch = Watch {
        latest: BTreeMap::new(),
        subjects: Arc::new(subjects),
        sessions: node.sessions().clone(),
        status: node.status().clone(),
        cgroup: instance_cgroup(node.instance(), CgroupDriver::Cgroupfs),
        max_sessions: config.limits.node.max_sessions,
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
    subjects: Arc<Vec<Subject>>,
    sessions: SessionsHandle,
    status: StatusHandle,
    cgroup: String,
    max_sessions: usize,
}

impl Watch {
    /// The limits that apply.
    async fn look(&mut self) -> Vec<(RuntimeKind, HostLimit)> {
        let before = self.sessions.occupancy().settled;
        let (subjects, cgroup, max_sessions) = (
            Arc::clone(&self.subjects),
            self.cgroup.clone(),
            self.max_sessions,
        );
        let looked = tokio::task::spawn_blocking(move || {
            let host = Host::this();
            let wanted = max_sessions.saturating_sub(before) as u64;
            let look = |subject: &Subject| {
                let folders: Vec<&str> = subject.folders.iter().map(String::as_str).collect();
                let site = Site {
                    folders: &folders,
                    cgroup: Some(&cgroup),
                    alive: Some(before as u64),
                    // Advice alone depends on it.
                    proxy_buffer_bytes: 0,
                };
                let check = room(&host, &subject.footprint, wanted, &site);
                (subject.kind, check)
            };
            subjects.iter().map(look).collect::<Vec<_>>()
        });
        // It does not panic; without an answer the last result holds.
        let mut binding = Vec::new();
        let looked = looked.await.unwrap_or_default();
        let after = self.sessions.occupancy().live;
        for (kind, check) in looked {
            let former = self.latest.remove(&kind);
            let limit = check.map(|check| host_limit(before, after, former, &check));
            if let Some(limit) = &limit {
                self.latest.insert(kind, limit.max_sessions);
            }
            self.status.limit_by_host(kind, limit.clone());
            binding.extend(limit.map(|limit| (kind, limit)));
        }
        binding
    }
}

fn host_limit(before: usize, after: usize, former: Option<usize>, check: &Check) -> HostLimit {
    let further = usize::try_from(check.binds_at.unwrap_or_default()).unwrap_or(usize::MAX);
    let remedy = check.remedy.as_ref();
    HostLimit {
        max_sessions: places(before, after, former, further),
        met: LimitMet {
            name: check.name.to_owned(),
            bounds: check.bounds.to_owned(),
            value: check.value.unwrap_or_default(),
            used: check.used.unwrap_or_default(),
            remedy: remedy.map_or_else(String::new, conman_doctor::Remedy::to_text),
        },
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
