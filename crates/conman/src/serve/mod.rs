//! `conman serve`: the daemon.
//!
//! The steps of the start consume the results of the previous steps, which fixes their order:
//! configuration → [`state::State`] (directory, lock, registry, journal, instance) →
//! [`listeners::Listeners`] (bound, not yet served) → the running node (everything adopted) →
//! images collected → served.
//!
//! Threads: the main tokio runtime (API, node), the data plane's, and the emergency thread.
//! Signals are handled on the emergency thread, so that SIGTERM works when everything else hangs.
//! A watch channel carries the stop order from there to the main task.

mod agent;
mod announce;
mod directory;
mod false_starts;
mod fleet;
mod gate;
mod host_room;
mod images;
mod listeners;
mod name;
pub(crate) mod network;
mod peers;
mod proxy;
mod readiness;
mod renewal;
mod runtimes;
mod service_manager;
mod signals;
mod stalls;
mod state;
mod template_reload;
mod trouble;
mod upkeep;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_api::{ApiState, Listener, ServeOptions, StreamPlaces, serve_tcp, serve_unix};
use conman_auth::{ApiGuard, ConnectTokens, TokenFile};
use conman_cli::ServeArgs;
use conman_core::naming::instance_cgroup;
use conman_core::placement::PlacementLimits;
use conman_core::retention::Retention;
use conman_core::{CgroupDriver, Instance, error_chain as chain};
use conman_fleet::{FleetMap, Locator, PeerClient, run_restarter};
use conman_linux::Cgroups;
use conman_net::SessionRules;
use conman_node::{EmergencyThread, Node, NodeOptions, UrlScheme};
use conman_vitals::essential;
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config, OnSigterm};
use false_starts::FalseStarts;
use listeners::Listeners;
use peers::Credentials;
use proxy::{origin_rules, start_proxy};
use readiness::NodeReadiness;
use renewal::Renewal;
use runtimes::Runtimes;
use signals::Signals;
use stalls::Stalls;
use state::State;
use template_reload::TemplateReload;
use upkeep::{install_metrics, keep_heap_small};

/// Names of the tasks that accept connections to the API.
const API: &str = "API";
const ADMIN_API: &str = "admin API";

/// Exit code for an invalid configuration, as for wrong usage of the command line.
pub(crate) const EXIT_CONFIG: u8 = 2;
/// The first descriptor after standard input, output and error.
const FIRST_OTHER_FD: u32 = 3;
/// As in the unit file: the daemon is killed last except for the shim
/// (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "-900";
/// Time for open tunnels and requests when the daemon stops.
const PROXY_PATIENCE: Duration = Duration::from_secs(5);
pub(crate) fn run(arguments: &ServeArgs) -> ExitCode {
    let config = match config::load(arguments.config.as_deref()) {
        Ok(config) => config,
        Err(error) => {
            let _ = crate::fail(&chain(&error));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    // With the configuration, so that a mistake is reported before anything is made or bound.
    let tokens = match config.tokens_file.as_ref().map(TokenFile::load).transpose() {
        Ok(tokens) => tokens.map(Arc::new),
        Err(error) => {
            let _ = crate::fail(&format!("`auth.tokens_file`: {}", chain(&error)));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let credentials = match peers::Credentials::load(&config) {
        Ok(credentials) => credentials,
        Err(error) => {
            let _ = crate::fail(&format!("{error:#}"));
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    crate::telemetry::init(config.log_format);
    match start(arguments, config, tokens, credentials) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => crate::fail(&format!("{error:#}")),
    }
}

fn start(
    arguments: &ServeArgs,
    mut config: Config,
    tokens: Option<Arc<TokenFile>>,
    credentials: Credentials,
) -> Result<()> {
    let (mut name, mut stalls) = (None, None);
    if config.shared.is_some() {
        crate::state_dir::prepare(&config.state_dir)?;
        name = Some(name::settle(&mut config));
        stalls = Some(Stalls::open(&config.state_dir));
    }
    if let (Some(shared), Some(stalls)) = (&mut config.shared, &stalls)
        && shared.derives_takeover
    {
        shared.timing = shared.timing.derive_takeover(stalls.longest_ms());
    }
    let credentials = credentials.derive(&config.name)?;
    // The shim outlives this process and must not inherit its descriptors.
    conman_linux::close_on_exec_from(FIRST_OTHER_FD).context("cannot mark descriptors")?;
    let (soft, _) = conman_linux::raise_nofile().context("cannot raise the limit of open files")?;
    protect_from_oom_killer();
    // On the way of each request, next to sessions that compute.
    if let Err(error) = conman_linux::run_in_short_slices() {
        tracing::warn!(%error, "the daemon has the kernel's default time slices");
    }
    tracing::info!("{config}, {soft} open files at most");
    let policy = &config.policy;
    tracing::info!(
        memory_bytes = policy.default_memory_bytes,
        pids = policy.default_pids.min(policy.max_pids),
        open_files = conman_runtime::SESSION_OPEN_FILES,
        cpus = policy.default_cpus.or(policy.max_cpus),
        total_cpus = config.limits.total_cpus,
        "default limits of sessions"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("conman-main")
        .build()
        .context("cannot start the tokio runtime")?;
    // First of all: a SIGTERM during the start must have its configured meaning, instead of ending
    // the process at once.
    let mut signals = {
        let _entered = runtime.enter();
        Signals::listen().context("cannot watch for signals")?
    };
    let shared = config.shared.as_ref();
    let starts = shared.map(|shared| {
        let takeover = Duration::from_millis(shared.timing.takeover_ms);
        FalseStarts::new(&config.state_dir, takeover)
    });
    if let Some(starts) = &starts
        && !runtime.block_on(starts.wait_unless_ended(&mut signals.ending))
    {
        if config.preempt.on_sigterm == OnSigterm::Preempt {
            let instance = crate::state_dir::instance(&config.state_dir)?;
            runtime.block_on(preempt_unjoined(&config, &instance));
        }
        return Ok(());
    }
    let state = State::open(&config, arguments.generation_floor)?;
    let fleet = Arc::clone(&state.fleet);
    let result = runtime.block_on(async {
        let listeners = Listeners::bind(&config).await?;
        let access = (tokens, credentials);
        let starting = (name, stalls, starts.as_ref());
        serve(config, state, listeners, access, signals, starting).await
    });
    // The registry joins automatically, whatever else fails.
    if let (Err(_), Some(starts)) = (&result, &starts)
        && fleet.standing().borrow().is_ready()
    {
        starts.joined();
    }
    // A blocked thread must not delay the exit.
    runtime.shutdown_background();
    result
}

/// Makes the OOM killer prefer sessions to the daemon, also if no service manager has set its
/// score.
fn protect_from_oom_killer() {
    let file = "/proc/self/oom_score_adj";
    let present = std::fs::read_to_string(file).unwrap_or_default();
    if present.trim().parse::<i32>().is_ok_and(|score| score < 0) {
        return;
    }
    if let Err(error) = std::fs::write(file, OOM_SCORE) {
        tracing::warn!(%error, "the OOM killer may choose the daemon: it lacks CAP_SYS_RESOURCE");
    }
}

async fn serve(
    config: Config,
    state: State,
    listeners: Listeners,
    (tokens, credentials): (Option<Arc<TokenFile>>, Credentials),
    mut signals: Signals,
    (name, stalls, starts): (Option<name::Settled>, Option<Stalls>, Option<&FalseStarts>),
) -> Result<()> {
    let metrics = install_metrics()?;
    keep_heap_small();
    let images = images::keeper(&state.images, &config.images)?;
    let on_sigterm = config.preempt.on_sigterm;
    let rules = network::session_rules(&config).await?;
    let network = network::open(&config, &state.instance).await?;
    let native = network.native(&rules);
    let mut runtimes = Runtimes::open(&config, &state, native, &rules)?;
    // Its first sweep deletes links that no runtime has adopted.
    let network = network.run();
    // Before the node joins its fleet, which may take long: a notice that arrives meanwhile is kept.
    let emergency = EmergencyThread::start(&config.preempt.notice_sources)?;
    let joining = async {
        let listeners = fleet::join(&config, &*state.fleet, listeners).await?;
        // Not a name that another node has.
        if let Some(name) = name {
            let remembering = tokio::task::spawn_blocking(|| name.remember());
            remembering
                .await
                .context("cannot remember the node's name")?;
        }
        starts.inspect(|starts| starts.joined());
        let connect_tokens = connect_tokens(&config, &state, &credentials).await?;
        anyhow::Ok((listeners, Arc::new(connect_tokens)))
    };
    let (listeners, connect_tokens) = tokio::select! {
        // A node outside a fleet has joined already, and an earlier signal must find what a
        // previous daemon left.
        biased;
        // The listeners are dropped with it, as is the process.
        joined = joining => joined?,
        // Nothing was taken over yet: there is no node to preempt, only what the shim keeps.
        name = signals.ending.next() => {
            tracing::info!("stopping: {name}, before the node had joined its fleet");
            starts.inspect(|starts| starts.stopped());
            if on_sigterm == OnSigterm::Preempt {
                preempt_unjoined(&config, &state.instance).await;
            }
            return Ok(());
        }
    };
    let node = tokio::select! {
        started = start_node(&config, &state, emergency, &runtimes, listeners.sessions_address, rules) => started?,
        // An interrupted step is as after a crash; the next daemon completes it. A preemption needs
        // to know what runs, so it keeps the signal until then.
        name = signals.ending.next(), if on_sigterm == OnSigterm::Leave => {
            tracing::info!("stopping: {name}, before running sessions were taken over");
            starts.inspect(|starts| starts.stopped());
            listeners.admin.path.remove();
            return Ok(());
        }
    };
    runtimes.open_fence(node.sessions()).await;
    runtimes.keep_shim(&config, &state.vitals);
    let obeying = state
        .orders
        .as_ref()
        .map(|orders| fleet::obey(Arc::clone(orders), &node, &state.vitals));
    images::collect(&images, &config.images);
    host_room::watch(&config, &node).await;
    if let (Some(stalls), Some(shared)) = (stalls, &config.shared) {
        stalls.watch(&shared.timing, node.status().clone())?;
    }
    let closing = CancellationToken::new();
    let renewal = Renewal::run(&credentials, closing.clone());
    let stopped = signals::watch(
        signals,
        node.preemption(),
        on_sigterm,
        signals::Reloads {
            tokens: tokens.clone(),
            renewal,
            templates: TemplateReload::new(&config, &node),
        },
    );
    let fleet = &state.fleet;
    if config.shared.is_some() || listeners.peers.is_some() {
        announce::run(
            &config,
            node.status(),
            fleet,
            &state.vitals,
            closing.clone(),
        );
    }
    let map = listeners.peers.is_some().then(|| {
        let fleet = Arc::clone(fleet);
        let client = PeerClient::new(credentials.dialer(&config.name));
        // However many wait for one node, half of the connections are left for the others.
        let limits = &config.limits;
        let waiting = limits.node.max_held.min(limits.max_api_connections / 2);
        let map = FleetMap::new(fleet, client, PlacementLimits::default());
        Arc::new(map.waiting(waiting.max(1)).leaving(node.leave()))
    });
    let locator = map.as_ref().map(|map| {
        let dialer = credentials.dialer(&config.name);
        Locator::new(
            Arc::clone(&node),
            Arc::clone(map),
            dialer,
            config.limits.node.max_held,
            closing.clone(),
        )
    });
    if let Some(locator) = &locator {
        run_restarter(
            locator,
            &state.vitals,
            Retention::default(),
            closing.clone(),
        );
    }
    let readiness = NodeReadiness::new(&node, &state.vitals);
    let proxy = start_proxy(
        &config,
        &listeners,
        (&node, readiness.clone(), locator),
        &tokens,
        &connect_tokens,
        &state.vitals,
    )?;
    if let Some(address) = config.listen.agent {
        agent::run(address, &config.state_dir, readiness, closing.clone()).await?;
    }
    let api_address = listeners
        .api
        .local_addr()
        .context("cannot read the API's address")?;
    let guard = ApiGuard::new(
        tokens,
        listeners.host_rules(&config, api_address)?,
        origin_rules(&config)?,
    );
    let api = ApiState {
        node: Arc::clone(&node),
        guard: Arc::new(guard),
        fleet: map,
        connect_tokens,
        images,
        metrics,
        streams: StreamPlaces::default(),
        closing: closing.clone(),
    };
    let options = ServeOptions {
        max_connections: config.limits.max_api_connections,
        ..ServeOptions::default()
    };
    // Only the server holds the listener, so that the kernel refuses clients once it has stopped.
    drop(listeners.sessions);
    let peers = listeners.peers.map(|socket| {
        let listener = socket.listen()?;
        let router = conman_api::router(api.clone(), Listener::Peers);
        let serving = (router, options.clone(), closing.clone());
        peers::start(
            &config,
            listener,
            &credentials,
            node.access(),
            serving,
            &state.vitals,
        )
    });
    let peers = peers.transpose()?;
    let tcp = serve_tcp(
        listeners.api,
        conman_api::router(api.clone(), Listener::Tcp),
        options.clone(),
        closing.clone(),
        state.vitals.task(API),
    );
    let admin = serve_unix(
        listeners.admin.listener,
        conman_api::router(api, Listener::Admin),
        options,
        closing.clone(),
        state.vitals.task(ADMIN_API),
    );
    let servers = [
        tokio::spawn(essential(API, tcp)),
        tokio::spawn(essential(ADMIN_API, admin)),
    ];
    tracing::info!(
        api = %api_address, sessions = %listeners.sessions_address,
        admin = %config.listen.admin.display(), "ready"
    );
    starts.inspect(|starts| starts.started());
    service_manager::ready();
    service_manager::watch(
        node.status().clone(),
        node.preemption(),
        state.vitals.clone(),
    );
    let why = stopped.wait().await;
    tracing::info!("stopping: {why}");
    service_manager::stopping(why);
    // A preemption has had its time already.
    if on_sigterm == OnSigterm::Leave {
        node.announce_stop().await;
    }
    // Tunnels and streams first; the listeners accept nothing more from here on.
    closing.cancel();
    let peers_end = async {
        if let Some(peers) = peers {
            peers.shutdown(PROXY_PATIENCE).await;
        }
    };
    tokio::join!(
        proxy.shutdown(PROXY_PATIENCE),
        peers_end,
        node.close_through(PROXY_PATIENCE)
    );
    for server in servers {
        server.await.context("a listener's task panicked")?;
    }
    if let Some(obeying) = obeying {
        obeying.abort();
    }
    // After a preemption nothing is left to stop; otherwise the containers stay.
    node.shutdown(true).await;
    runtimes.close().await;
    if let Some(network) = network {
        network.close().await;
    }
    remove_empty_cgroup(&node);
    listeners.admin.path.remove();
    drop(state);
    Ok(())
}

/// Kills what an earlier daemon left, if the machine stops before this daemon has taken it over.
async fn preempt_unjoined(config: &Config, instance: &Instance) {
    let budget = Duration::from_millis(config.preempt.budget_ms.into());
    fleet::preempt_unjoined(instance, budget).await;
}

/// Removes the cgroup of all of this installation's containers, once there are none. Not earlier:
/// a container might be starting in it.
fn remove_empty_cgroup(node: &Node) {
    if node.status().view().sessions() > 0 {
        return;
    }
    let path = instance_cgroup(node.instance(), CgroupDriver::Cgroupfs);
    match Cgroups::detect() {
        Ok(cgroups) => {
            for error in cgroups.remove_tree(&path) {
                tracing::warn!(%error, "cannot remove an empty cgroup");
            }
        }
        Err(error) => tracing::warn!(%error, "cannot look for the cgroup {path}"),
    }
}

/// A token that one node makes must be valid on every other. So its key comes from the fleet's
/// secret, which exists only in files of the nodes, or else from the registry.
async fn connect_tokens(
    config: &Config,
    state: &State,
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
    state: &State,
    emergency: EmergencyThread,
    runtimes: &Runtimes,
    sessions: SocketAddr,
    rules: Arc<SessionRules>,
) -> Result<Arc<Node>> {
    let mut options = NodeOptions::new(
        config.name.clone(),
        state.instance.clone(),
        config.state_dir.clone(),
        config.policy.clone(),
    );
    options.session_rules = rules;
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
    options.vitals = state.vitals.clone();
    options.egress = config.net.egress.clone();
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
