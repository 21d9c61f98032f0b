//! What the node's watch of the host's room probes: the limits that `conman doctor` reads.

use std::sync::Arc;

use conman_core::CgroupDriver;
use conman_core::naming::instance_cgroup;
use conman_doctor::{Check, Footprint, Host, Site, room};
use conman_node::{FoundRoom, Node, watch_host_room};
use conman_proto::{LimitMet, RuntimeKind};

use crate::config::Config;
use crate::doctor;

/// The subject of the checks.
struct Subject {
    kind: RuntimeKind,
    footprint: Footprint,
    folders: Vec<String>,
}

/// Watches the host's room, if it is configured.
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
    let cgroup = instance_cgroup(node.instance(), CgroupDriver::Cgroupfs);
    let probe = move |present: usize, wanted: usize| {
        let host = Host::this();
        let look = |subject: &Subject| {
            let folders: Vec<&str> = subject.folders.iter().map(String::as_str).collect();
            let site = Site {
                folders: &folders,
                cgroup: Some(&cgroup),
                alive: Some(present as u64),
                // Advice alone depends on it.
                proxy_buffer_bytes: 0,
            };
            FoundRoom {
                runtime: subject.kind,
                limit: room(&host, &subject.footprint, wanted as u64, &site).map(binding),
            }
        };
        subjects.iter().map(look).collect()
    };
    watch_host_room(
        node,
        every,
        config.limits.node.max_sessions,
        Arc::new(probe),
    )
    .await;
}

/// The limit that binds, and how many further sessions it leaves room for.
fn binding(check: Check) -> (LimitMet, usize) {
    let further = usize::try_from(check.binds_at.unwrap_or_default()).unwrap_or(usize::MAX);
    let remedy = check.remedy.as_ref();
    let met = LimitMet {
        name: check.name.to_owned(),
        bounds: check.bounds.to_owned(),
        value: check.value.unwrap_or_default(),
        used: check.used.unwrap_or_default(),
        remedy: remedy.map_or_else(String::new, conman_doctor::Remedy::to_text),
    };
    (met, further)
}
