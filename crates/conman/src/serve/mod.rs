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
mod services;
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
use conman_auth::{ConnectTokens, TokenFile};
use conman_cli::ServeArgs;
use conman_core::naming::instance_cgroup;
use conman_core::{CgroupDriver, error_chain as chain};
use conman_linux::Cgroups;
use conman_net::SessionRules;
use conman_node::{EmergencyThread, Node, NodeOptions, UrlScheme};
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config, OnSigterm};
use false_starts::FalseStarts;
use listeners::Listeners;
use peers::Credentials;
use renewal::Renewal;
use runtimes::Runtimes;
use services::{AuthSources, Services};
use signals::{Signals, Stopped};
use stalls::Stalls;
use state::State;
use template_reload::TemplateReload;
use upkeep::{install_metrics, keep_heap_small};

/// Exit code for an invalid configuration, as for wrong usage of the command line.
pub(crate) const EXIT_CONFIG: u8 = 2;
/// The first descriptor after standard input, output and error.
const FIRST_OTHER_FD: u32 = 3;
/// As in the unit file: the daemon is killed last except for the shim
/// (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "-900";

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
        let boot_id = conman_linux::boot_id().context("cannot read the id of this boot")?;
        name = name::settle(&mut config, boot_id);
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
            runtime.block_on(fleet::preempt_unjoined(&config, &instance));
        }
        return Ok(());
    }
    let state = State::open(&config, arguments.generation_floor)?;
    let fleet = Arc::clone(&state.fleet);
    let result = runtime.block_on(async {
        let listeners = Listeners::bind(&config).await?;
        let auth = AuthSources {
            tokens,
            credentials,
        };
        let early = EarlyStart {
            signals,
            name,
            stalls,
            starts: starts.as_ref(),
        };
        serve(config, state, listeners, auth, early).await
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

/// The results of the start before the registry was opened.
struct EarlyStart<'a> {
    signals: Signals,
    name: Option<name::Settled>,
    stalls: Option<Stalls>,
    starts: Option<&'a FalseStarts>,
}

async fn serve(
    config: Config,
    state: State,
    listeners: Listeners,
    auth: AuthSources,
    early: EarlyStart<'_>,
) -> Result<()> {
    let (mut signals, starts) = (early.signals, early.starts);
    let metrics = install_metrics()?;
    keep_heap_small();
    let images = images::keeper(&state.images, &config.images)?;
    let on_sigterm = config.preempt.on_sigterm;
    let rules = network::session_rules(&config).await?;
    let network = network::open(&config, &state.instance, &rules).await?;
    let mut runtimes = Runtimes::open(&config, &state, &network.native)?;
    // Its first sweep deletes links that no runtime has adopted.
    let network = network.run();
    // Before the node joins its fleet, which may take long: a notice that arrives meanwhile is kept.
    let emergency = EmergencyThread::start(&config.preempt.notice_sources)?;
    let joining = async {
        let listeners = fleet::join(&config, &*state.fleet, listeners).await?;
        remember(early.name).await?;
        starts.inspect(|starts| starts.joined());
        let connect_tokens = connect_tokens(&config, &state, &auth.credentials).await?;
        anyhow::Ok((listeners, Arc::new(connect_tokens)))
    };
    let what = "the node had joined its fleet";
    let Some((listeners, connect_tokens)) = unless_ended(&mut signals, what, joining).await? else {
        starts.inspect(|starts| starts.stopped());
        // Nothing was taken over yet: there is no node to preempt, only what the shim keeps.
        if on_sigterm == OnSigterm::Preempt {
            fleet::preempt_unjoined(&config, &state.instance).await;
        }
        return Ok(());
    };
    let address = listeners.sessions_address;
    let starting = start_node(&config, &state, emergency, &runtimes, address, rules);
    let started = match on_sigterm {
        // An interrupted step is as after a crash; the next daemon completes it.
        OnSigterm::Leave => {
            let what = "running sessions were taken over";
            unless_ended(&mut signals, what, starting).await?
        }
        // It needs to know what runs, so the signal is kept until then.
        OnSigterm::Preempt => Some(starting.await?),
    };
    let Some(node) = started else {
        starts.inspect(|starts| starts.stopped());
        listeners.admin.path.remove();
        return Ok(());
    };
    runtimes.open_fence(node.sessions()).await;
    runtimes.keep_shim(&config, &state.vitals);
    let orders = state.orders.as_ref().map(Arc::clone);
    let obeying = orders.map(|orders| fleet::obey(orders, &node, &state.vitals));
    images::collect(&images, &config.images);
    host_room::watch(&config, &node).await;
    if let (Some(stalls), Some(shared)) = (early.stalls, &config.shared) {
        stalls.watch(&shared.timing, node.status().clone())?;
    }
    let closing = CancellationToken::new();
    let reloads = signals::Reloads {
        tokens: auth.tokens.clone(),
        renewal: Renewal::run(&auth.credentials, closing.clone()),
        templates: TemplateReload::new(&config, &node),
    };
    let stopped = signals::watch(signals, node.preemption(), on_sigterm, reloads);
    if config.shared.is_some() || listeners.peers.is_some() {
        let (status, vitals) = (node.status(), &state.vitals);
        announce::run(&config, status, &state.fleet, vitals, closing.clone());
    }
    let services = Services {
        config: &config,
        state: &state,
        node: &node,
        auth: &auth,
        connect_tokens,
        images,
        metrics,
        closing,
    };
    let serving = services.start(listeners).await?;
    starts.inspect(|starts| starts.started());
    run_until(stopped, &node, &state).await;
    // A preemption has had its time already.
    if on_sigterm == OnSigterm::Leave {
        node.announce_stop().await;
    }
    // Tunnels and streams first.
    let admin = serving.stop(&node).await?;
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
    admin.remove();
    drop(state);
    Ok(())
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

/// Returns once the daemon is to stop.
async fn run_until(stopped: Stopped, node: &Node, state: &State) {
    service_manager::ready();
    let status = node.status().clone();
    service_manager::watch(status, node.preemption(), state.vitals.clone());
    let why = stopped.wait().await;
    tracing::info!("stopping: {why}");
    service_manager::stopping(why);
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
