//! The spec that tests vary.

use std::collections::BTreeMap;

use conman_proto::{Bandwidth, IdleAction, Network, OnNodeLoss, ResolvedSpec, RuntimeKind};

/// A resolved spec of this image that sets nothing else but what every spec must have.
#[must_use]
pub fn resolved_spec(runtime: RuntimeKind, image: &str) -> ResolvedSpec {
    ResolvedSpec {
        template: None,
        runtime,
        image: image.to_owned(),
        command: Vec::new(),
        args: Vec::new(),
        env: BTreeMap::new(),
        port: None,
        ports: Vec::new(),
        strip_prefix: true,
        ready_path: None,
        ready_timeout_s: 60,
        network: Network::Loopback,
        egress: Vec::new(),
        talk: Vec::new(),
        bandwidth: Bandwidth::default(),
        memory_bytes: None,
        disk_bytes: None,
        disk_inodes: None,
        cpus: None,
        pids: 128,
        ptys: 0,
        ptys_when_asked: false,
        labels: BTreeMap::new(),
        binds: Vec::new(),
        idle_timeout_s: 0,
        idle_action: IdleAction::Stop,
        max_lifetime_s: 0,
        expires_at: None,
        preempt_signal: None,
        preempt_grace_ms: 0,
        stop_signal: None,
        stop_grace_ms: 0,
        init: runtime == RuntimeKind::Native,
        tty: false,
        log_streams: false,
        own_filters: false,
        sys: false,
        without_ipc: false,
        pool: 0,
        durable: false,
        new_privs: false,
        on_node_loss: OnNodeLoss::Wait,
        restarted: None,
        node_labels: BTreeMap::new(),
    }
}
