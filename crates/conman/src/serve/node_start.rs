//! Starts the node: it joins its fleet, and takes over what an earlier daemon left.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use conman_auth::ConnectTokens;
use conman_fleet::require_acceptance;
use conman_net::{HostNetlink, SessionRules};
use conman_node::{EmergencyThread, Node, NodeOptions, UrlScheme};
use conman_peer::PeerClient;

use super::listeners::Listeners;
use super::network::{self, RunningNetwork};
use super::peers::Credentials;
use super::runtimes::Runtimes;
use super::signals::Signals;
use super::state::LockedState;
use super::{EarlyStart, fleet, name};
use crate::config::{Config, OnSigterm};

/// A node that has taken over what an earlier daemon left, and does not serve yet.
pub(super) struct StartedNode {
    pub(super) node: Arc<Node>,
    pub(super) listeners: Listeners,
    pub(super) connect_tokens: Arc<ConnectTokens>,
    pub(super) runtimes: Runtimes,
    pub(super) network: Option<RunningNetwork>,
}

/// Joins the fleet, and takes over what an earlier daemon left. Returns `None` if a signal ends the daemon
/// before that.
pub(super) async fn take_over(
    config: &Config,
    state: &LockedState,
    credentials: &Credentials,
    listeners: Listeners,
    early: &mut EarlyStart<'_>,
) -> Result<Option<StartedNode>> {
    let (starts, name) = (early.starts, early.records.name.take());
    let on_sigterm = config.preempt.on_sigterm;
    let netlink = HostNetlink::default();
    let rules = network::session_rules(config, &netlink).await?;
    let network = network::open(config, state, netlink, &rules).await?;
    let mut runtimes = Runtimes::open(config, state, &network.containers)?;
    let netlink = network.netlink.clone();
    // Its first sweep deletes links that no runtime has adopted.
    let network = network.run();
    // Before the node joins its fleet, which may take long: a notice that arrives meanwhile is kept.
    let emergency = EmergencyThread::start(&config.preempt.notice_sources)?;
    let joining = async {
        let listeners = fleet::join(config, &*state.fleet, listeners).await?;
        remember(name).await?;
        starts.inspect(|starts| starts.joined());
        let client = PeerClient::new(credentials.dialer(&config.name));
        let accepted = require_acceptance(&*state.fleet, &client).await;
        accepted.context("this node does not stay in the fleet")?;
        let connect_tokens = connect_tokens(config, state, credentials).await?;
        anyhow::Ok((listeners, Arc::new(connect_tokens)))
    };
    let what = "the node had joined its fleet";
    let joined = unless_ended(&mut early.signals, what, joining).await?;
    let Some((listeners, connect_tokens)) = joined else {
        starts.inspect(|starts| starts.stopped());
        // Nothing was taken over yet: there is no node to preempt, only what the shim keeps.
        if on_sigterm == OnSigterm::Preempt {
            fleet::preempt_unjoined(config, &state.instance).await;
        }
        return Ok(None);
    };
    let address = listeners.sessions_address;
    let links = (rules, netlink);
    let starting = start_node(config, state, emergency, &runtimes, address, links);
    let started = match on_sigterm {
        // An interrupted step is as after a crash; the next daemon completes it.
        OnSigterm::Leave => {
            let what = "running sessions were taken over";
            unless_ended(&mut early.signals, what, starting).await?
        }
        // It needs to know what runs, so the signal is kept until then.
        OnSigterm::Preempt => Some(starting.await?),
    };
    let Some(node) = started else {
        starts.inspect(|starts| starts.stopped());
        listeners.admin.path.remove();
        return Ok(None);
    };
    runtimes.open_fence(node.sessions()).await;
    runtimes.keep_shim(config, &state.watchdog);
    Ok(Some(StartedNode {
        node,
        listeners,
        connect_tokens,
        runtimes,
        network,
    }))
}

/// Returns the result of a step of the start, or `None` if a signal to end comes first. The step is polled
/// first: a node outside a fleet joins at once, and after an earlier signal it has to find the containers that a
/// previous daemon left.
async fn unless_ended<T>(
    signals: &mut Signals,
    what: &str,
    step: impl Future<Output = Result<T>>,
) -> Result<Option<T>> {
    tokio::select! {
        biased;
        // If the signal comes first, the process ends.
        done = step => done.map(Some),
        // Cancel safe: a signal stays pending until it is read.
        name = signals.ending.next() => {
            tracing::info!("stopping: {name}, before {what}");
            Ok(None)
        }
    }
}

/// Keeps the node's name for later starts, once it is known that no other node has it.
async fn remember(name: Option<name::Settled>) -> Result<()> {
    let Some(name) = name else {
        return Ok(());
    };
    let remembering = tokio::task::spawn_blocking(|| name.remember());
    let remembered = remembering.await;
    remembered.context("cannot remember the node's name")
}

/// A token that one node makes must be valid on every other. So its key comes from the fleet's
/// secret, which exists only in files of the nodes, or else from the registry.
async fn connect_tokens(
    config: &Config,
    state: &LockedState,
    credentials: &Credentials,
) -> Result<ConnectTokens> {
    if let Some(secret) = &credentials.secret {
        return Ok(ConnectTokens::of_fleet(Arc::clone(secret)));
    }
    let shared = fleet::shared_key(&*state.fleet).await;
    match shared.context("cannot get the fleet's key of connect tokens from the registry")? {
        Some(key) => Ok(ConnectTokens::of_shared_key(&key)),
        None => ConnectTokens::open(&config.state_dir, state.instance.as_str())
            .context("cannot open the key of connect tokens"),
    }
}

async fn start_node(
    config: &Config,
    state: &LockedState,
    emergency: EmergencyThread,
    runtimes: &Runtimes,
    sessions: SocketAddr,
    (rules, netlink): (Arc<SessionRules>, HostNetlink),
) -> Result<Arc<Node>> {
    let mut options = NodeOptions::new(
        config.name.clone(),
        state.instance.clone(),
        config.state_dir.clone(),
        config.policy.clone(),
    );
    options.labels = config.fleet.labels.clone();
    options.session_rules = rules;
    options.netlink = netlink;
    options.limits = config.limits.node.clone();
    let listen = &config.listen;
    options.urls = listen.urls.clone().unwrap_or_else(|| local_urls(sessions));
    options.browser_urls = match listen.urls {
        None if !listen.browser_paths => {
            UrlScheme::host("http", &format!("{}:{}", listen.domain, sessions.port()))
        }
        _ => options.urls.clone(),
    };
    options.preempt_budget_ms = config.preempt.budget_ms;
    options.shutdown_delay = config.shutdown_delay;
    options.standing = state.fleet.standing();
    options.watchdog = state.watchdog.clone();
    options.egress = config.net.egress.clone();
    options.egress.talk = super::fabric::names(config, state);
    Node::start(
        options,
        emergency,
        Arc::clone(&state.registry),
        Arc::clone(&state.journal),
        runtimes.all(),
    )
    .await
    .context("cannot take over what an earlier conman left")
}

/// The sessions listener's address for a client on this machine.
fn local_urls(mut sessions: SocketAddr) -> UrlScheme {
    if sessions.ip().is_unspecified() {
        sessions.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    UrlScheme::path(&format!("http://{sessions}"))
}
