//! The network of sessions with links: opened before anything that needs it, kept while the daemon runs.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use conman_core::egress::{EgressPattern, special_networks};
use conman_core::{Instance, error_chain};
use conman_net::{
    Class, Fabric, HostNetlink, InterfacePools, Plane, PlaneOptions, Refusals, RuleSet,
    RulesKeeper, SessionRules, class_of,
};
use conman_proto::SessionRequest;
use conman_runtime::ContainerNetwork;
use conman_watchdog::essential;
use ipnet::IpNet;
use tokio::task::JoinHandle;

use super::fabric::{self, FabricTask};
use super::state::LockedState;
use crate::config::Config;

/// Names of the essential tasks.
const RULES: &str = "network rules";
const SWEEP: &str = "network sweep";
const FABRIC: &str = "fabric";

/// Where the host's name servers are: a container on Docker's bridge uses the second one's if the first one's are
/// on the host's loopback.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

const UNUSABLE: &str = "cannot use `[net]` on this host";

/// What this host lacks for the networks of the configuration; `None` if it needs nothing for them. Changes
/// nothing.
pub(crate) async fn missing(config: &Config, instance: &str) -> Option<Vec<String>> {
    let mut problems = Vec::new();
    if let Some(networks) = config.net.pool {
        let checked = RulesKeeper::check(instance, &rule_set(config)).await;
        problems.extend(checked.err().map(|error| error_chain(&error)));
        let found = Plane::problems(&PlaneOptions::new(instance, networks)).await;
        problems.extend(found.iter().map(|problem| error_chain(problem)));
    } else if !needs_session_rules(config) {
        return None;
    }
    if let (Some(_), Some(settings)) = (&config.net.pool, &config.net.fabric) {
        let more = fabric::missing(config, settings, instance).await;
        // What both pools lack is named once.
        problems.extend(
            more.into_iter()
                .filter(|one| !problems.contains(one))
                .collect::<Vec<_>>(),
        );
    }
    let rules = build_session_rules(config, HostNetlink::default());
    let checked = rules.check().await;
    problems.extend(checked.err().map(|error| error_chain(&error)));
    Some(problems)
}

/// The rules inside sessions. Refuses a host that cannot have them if a template needs them.
pub(super) async fn session_rules(
    config: &Config,
    netlink: &HostNetlink,
) -> Result<Arc<SessionRules>> {
    let rules = build_session_rules(config, netlink.clone());
    if needs_session_rules(config) {
        rules.check().await.context(UNUSABLE)?;
    }
    Ok(Arc::new(rules))
}

pub(super) fn needs_session_rules(config: &Config) -> bool {
    let templates = config.policy.templates.values();
    let mut networks = templates.filter_map(|template| template.request.network.as_ref());
    networks.any(|network| {
        let traits = network.traits();
        traits.leads_out && !traits.shares_host
    })
}

fn build_session_rules(config: &Config, netlink: HostNetlink) -> SessionRules {
    let special = &config.net.egress.special;
    let resolvers = RESOLVERS
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok());
    let refusals = Refusals {
        networks: special.more.clone(),
        allowed: special.allowed.clone(),
        dns: name_servers(config)
            .into_iter()
            .chain(resolvers.flat_map(|text| servers_in(&text)))
            .collect(),
    };
    let fabric = config.net.fabric.iter();
    let fabric: Vec<IpNet> = fabric.flat_map(|fabric| fabric.pool.networks()).collect();
    SessionRules::new(netlink, refusals, &classes(config), &fabric)
}

fn servers_in(resolver: &str) -> Vec<IpAddr> {
    let servers = resolver
        .lines()
        .filter_map(|line| line.strip_prefix("nameserver"));
    servers
        .filter_map(|server| server.trim().parse().ok())
        .collect()
}

/// The host's side of sessions' links.
pub(super) struct HostNetwork {
    instance: Instance,
    pub(super) netlink: HostNetlink,
    /// The runtimes' view.
    pub(super) containers: ContainerNetwork,
    rules: Option<RulesKeeper>,
    fabric: Option<FabricTask>,
}

/// The network with a pool while the daemon runs.
pub(super) struct RunningNetwork {
    instance: Instance,
    plane: Arc<Plane>,
    keeper: JoinHandle<()>,
    fabric: Option<(Arc<Fabric>, JoinHandle<()>)>,
}

/// Opens the network, and applies the rules for its pool if the configuration has one. Refuses a host that
/// cannot have it before anything is changed.
pub(super) async fn open(
    config: &Config,
    state: &LockedState,
    netlink: HostNetlink,
    rules: &Arc<SessionRules>,
) -> Result<HostNetwork> {
    let instance = state.instance.clone();
    let interfaces = InterfacePools::new(netlink.clone(), config.net.interfaces.clone());
    let mut containers = ContainerNetwork {
        interfaces: Arc::new(interfaces),
        name_servers: name_servers(config),
        host_name_servers: host_name_servers(config),
        host_allowed: config.tokens_file.is_some(),
        rules: Arc::clone(rules),
        ..ContainerNetwork::default()
    };
    let Some(networks) = config.net.pool else {
        return Ok(HostNetwork {
            instance,
            netlink,
            containers,
            rules: None,
            fabric: None,
        });
    };
    let (fabric, parts) = match (&config.net.fabric, &state.parts) {
        (Some(settings), Some(registry)) => {
            let host = (&instance, netlink.clone());
            let classes = classes(config);
            let opened = fabric::open(config, settings, host, registry, &classes).await;
            let opened = opened.context(UNUSABLE)?;
            (Some(opened.0), Some(opened.1))
        }
        _ => (None, None),
    };
    let options = PlaneOptions {
        mtu: config.net.mtu,
        parts,
        ..PlaneOptions::new(instance.as_str(), networks)
    };
    let mut rules = RulesKeeper::check(instance.as_str(), &rule_set(config))
        .await
        .context(UNUSABLE)?;
    let plane = Plane::open(&options, netlink.clone()).await;
    containers.plane = Some(Arc::new(plane.context(UNUSABLE)?));
    if let Some(fabric) = &fabric {
        rules.fill_with(fabric.elements());
    }
    rules.apply().await.context(UNUSABLE)?;
    Ok(HostNetwork {
        instance,
        netlink,
        containers,
        rules: Some(rules),
        fabric,
    })
}

impl HostNetwork {
    /// Keeps the rules, and deletes links that have no owner. To be called once all living links are adopted.
    /// `None` without a pool.
    pub(super) fn run(self) -> Option<RunningNetwork> {
        let (plane, mut rules) = (self.containers.plane?, self.rules?);
        let keeper = tokio::spawn(essential(RULES, async move { rules.keep().await }));
        let swept = Arc::clone(&plane);
        tokio::spawn(essential(SWEEP, async move { swept.sweep().await }));
        let fabric = self.fabric.map(|task| {
            let (fabric, plane) = (Arc::clone(&task.fabric), Arc::clone(&plane));
            let task = tokio::spawn(essential(FABRIC, async move { task.run(plane).await }));
            (fabric, task)
        });
        Some(RunningNetwork {
            instance: self.instance,
            plane,
            keeper,
            fabric,
        })
    }
}

impl RunningNetwork {
    /// Removes the host's rules if no session has a link. Call it once nothing more is started.
    pub(super) async fn close(self) {
        if !self.plane.has_links().await.is_ok_and(|has| !has) {
            return;
        }
        if let Some((fabric, task)) = self.fabric {
            task.abort();
            // It was aborted.
            let _ = task.await;
            if let Err(error) = fabric.remove().await {
                tracing::warn!(%error, "cannot remove the routes of the fabric");
            }
        }
        self.keeper.abort();
        // It was aborted.
        let _ = self.keeper.await;
        if let Err(error) = RulesKeeper::remove(self.instance.as_str()).await {
            tracing::warn!(%error, "cannot remove the host's rules for sessions");
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
    servers_in(&std::fs::read_to_string(RESOLVERS[0]).unwrap_or_default())
}

/// Those on the usual port that a session can reach.
fn name_servers(config: &Config) -> Vec<IpAddr> {
    let servers = config.net.egress.dns.iter();
    let reachable = servers.filter(|server| server.port() == 53 && !server.ip().is_loopback());
    reachable.map(SocketAddr::ip).collect()
}

/// What the templates with a routed network allow.
pub(super) fn classes(config: &Config) -> Vec<Class> {
    let templates = config.policy.templates.iter();
    templates
        .filter(|(_, template)| {
            let network = template.request.network.as_ref();
            network.is_some_and(|network| network.traits().routed)
        })
        .map(|(name, template)| class(name, &template.request))
        .collect()
}

fn rule_set(config: &Config) -> RuleSet {
    let special = &config.net.egress.special;
    RuleSet {
        classes: classes(config),
        dns: name_servers(config),
        special: special_networks()
            .iter()
            .chain(&special.more)
            .copied()
            .collect(),
        allowed: special.allowed.clone(),
        fabric: config
            .net
            .fabric
            .as_ref()
            .map(|settings| fabric::rules(config, settings)),
    }
}

/// What a template's `egress` and `talk` allow. Names were refused with the configuration.
fn class(template: &str, request: &SessionRequest) -> Class {
    // As they are in a spec: in order, without duplicates.
    let groups: BTreeSet<&String> = request.talk.iter().flatten().collect();
    let mut class = Class {
        number: class_of(template),
        internet: false,
        networks: Vec::new(),
        groups: groups.into_iter().cloned().collect(),
    };
    let egress = request.egress.iter().flatten();
    for pattern in egress.filter_map(|text| text.parse().ok()) {
        match pattern {
            EgressPattern::Internet => class.internet = true,
            EgressPattern::Network { network, port } => class.networks.push((network, port)),
            EgressPattern::Name { .. } => {}
        }
    }
    class
}
