//! The network of sessions with links: opened before anything that needs it, kept while the daemon runs.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use conman_core::Instance;
use conman_core::egress::{EgressPattern, special_networks};
use conman_net::{Class, InterfacePools, Plane, PlaneOptions, RuleSet, RulesKeeper, class_of};
use conman_proto::Network;
use conman_runtime::NativeNetwork;
use conman_vitals::essential;

use crate::config::Config;

/// Names of the essential tasks.
const RULES: &str = "network rules";
const SWEEP: &str = "network sweep";

/// The host's side of sessions' links.
pub(super) struct HostNetwork {
    native: NativeNetwork,
    rules: Option<RulesKeeper>,
}

/// Opens the network, and applies the rules for its pool if the configuration has one. Refuses a host that
/// cannot have it before anything is changed.
pub(super) async fn open(config: &Config, instance: &Instance) -> Result<HostNetwork> {
    let mut native = NativeNetwork {
        interfaces: Arc::new(InterfacePools::new(config.net.interfaces.clone())),
        name_servers: name_servers(config),
        host_name_servers: host_name_servers(config),
        ..NativeNetwork::default()
    };
    let Some(networks) = config.net.pool else {
        return Ok(HostNetwork {
            native,
            rules: None,
        });
    };
    let options = PlaneOptions {
        mtu: config.net.mtu,
        ..PlaneOptions::new(instance.as_str(), networks)
    };
    let context = "cannot use `[net]` on this host";
    let mut rules = RulesKeeper::check(instance.as_str(), &rule_set(config))
        .await
        .context(context)?;
    native.plane = Some(Arc::new(Plane::open(&options).context(context)?));
    rules.apply().await.context(context)?;
    Ok(HostNetwork {
        native,
        rules: Some(rules),
    })
}

impl HostNetwork {
    /// The runtime's view.
    pub(super) fn native(&self) -> NativeNetwork {
        self.native.clone()
    }

    /// Keeps the rules, and deletes links that have no owner. To be called once all living links are adopted.
    pub(super) fn run(self) {
        if let (Some(plane), Some(mut rules)) = (self.native.plane, self.rules) {
            tokio::spawn(essential(RULES, async move { rules.keep().await }));
            tokio::spawn(essential(SWEEP, async move { plane.sweep().await }));
        }
    }
}

/// Those that the host uses; on the usual port, because a resolv.conf names no other.
fn host_name_servers(config: &Config) -> Vec<IpAddr> {
    let servers = config.net.egress.dns.iter();
    let given: Vec<IpAddr> = servers
        .filter(|server| server.port() == 53)
        .map(SocketAddr::ip)
        .collect();
    if !given.is_empty() {
        return given;
    }
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("nameserver"));
    lines.filter_map(|rest| rest.trim().parse().ok()).collect()
}

/// Those on the usual port that a session can reach.
fn name_servers(config: &Config) -> Vec<IpAddr> {
    let servers = config.net.egress.dns.iter();
    let reachable = servers.filter(|server| server.port() == 53 && !server.ip().is_loopback());
    reachable.map(SocketAddr::ip).collect()
}

fn rule_set(config: &Config) -> RuleSet {
    let templates = config.policy.templates.iter();
    let classes = templates
        .filter(|(_, template)| template.request.network == Some(Network::Routed))
        .map(|(name, template)| {
            class(name, template.request.egress.as_deref().unwrap_or_default())
        });
    let special = &config.net.egress.special;
    RuleSet {
        classes: classes.collect(),
        dns: name_servers(config),
        special: special_networks()
            .iter()
            .chain(&special.more)
            .copied()
            .collect(),
        allowed: special.allowed.clone(),
    }
}

/// What a template's `egress` allows. Names were refused with the configuration.
fn class(template: &str, egress: &[String]) -> Class {
    let mut class = Class {
        number: class_of(template),
        internet: false,
        networks: Vec::new(),
    };
    for pattern in egress.iter().filter_map(|text| text.parse().ok()) {
        match pattern {
            EgressPattern::Internet => class.internet = true,
            EgressPattern::Network { network, port } => class.networks.push((network, port)),
            EgressPattern::Name { .. } => {}
        }
    }
    class
}
