//! `conman serve`: the daemon.
//!
//! The steps of the start consume the results of the previous steps, which fixes their order:
//! configuration → [`state::LockedState`] (directory, lock, registry, journal, instance) →
//! [`listeners::Listeners`] (bound, not yet served) → [`node_start::StartedNode`] (everything adopted) →
//! images collected → served.
//!
//! Threads: the main tokio runtime (API, node), the data plane's, and the emergency thread.
//! Signals are handled on the emergency thread, so that SIGTERM works when everything else hangs.
//! A watch channel carries the stop order from there to the main task.

mod announce;
mod directory;
mod fabric;
mod fabric_file;
mod fleet;
mod gate;
mod host_room;
mod images;
mod listeners;
mod metric_help;
mod name;
pub(crate) mod network;
mod node_start;
mod peers;
mod proxy;
mod readiness;
mod registry_addresses;
mod renewal;
pub(crate) mod runtimes;
mod service_manager;
mod services;
mod signals;
mod state;
mod template_reload;
mod trouble;
mod upkeep;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_auth::{AdminToken, TokenFile};
use conman_cli::ServeArgs;
use conman_core::naming::instance_cgroup;
use conman_core::{CgroupDriver, error_chain as chain};
use conman_linux::Cgroups;
use conman_node::{HostStalls, Node};
use conman_shim::IdsTaken;
use conman_watchdog::CrashLoopBackoff;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::{self, Config, OnSigterm};
use crate::shim;
use listeners::Listeners;
use network::RunningNetwork;
use node_start::{StartedNode, take_over};
use peers::Credentials;
use renewal::Renewal;
use runtimes::Runtimes;
use services::{AuthSources, Services, Serving};
use signals::{Signals, Stopped};
use state::LockedState;
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
    let file = arguments.config.as_deref();
    if arguments.check {
        return check(file);
    }
    let settings = match Settings::load(file) {
        Ok(settings) => settings,
        Err(why) => {
            let _ = crate::fail(&why);
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    if let Err(why) = require_root() {
        let _ = crate::fail(&why);
        return ExitCode::from(EXIT_CONFIG);
    }
    crate::telemetry::init(settings.config.log_format);
    match start(arguments, settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let failed = crate::fail(&format!("{error:#}"));
            match error.is::<IdsTaken>() {
                true => ExitCode::from(EXIT_CONFIG),
                false => failed,
            }
        }
    }
}

/// `conman config check`: reports the mistakes that would stop `conman serve`.
pub(crate) fn check(file: Option<&Path>) -> ExitCode {
    match Settings::load(file) {
        Ok(settings) => {
            crate::tell(&format!("the configuration is valid: {}", settings.config));
            ExitCode::SUCCESS
        }
        Err(why) => {
            let _ = crate::fail(&why);
            ExitCode::from(EXIT_CONFIG)
        }
    }
}

/// The configuration and the files that it names, read before anything is made or bound.
struct Settings {
    config: Config,
    tokens: Option<Arc<TokenFile>>,
    credentials: Credentials,
}

impl Settings {
    fn load(file: Option<&Path>) -> Result<Self, String> {
        let config = config::load(file).map_err(|error| chain(&error))?;
        let tokens = config.tokens_file.as_ref().map(TokenFile::load).transpose();
        let tokens = tokens.map_err(|error| format!("`auth.tokens_file`: {}", chain(&error)))?;
        let credentials =
            peers::Credentials::load(&config).map_err(|error| format!("{error:#}"))?;
        Ok(Self {
            config,
            tokens: tokens.map(Arc::new),
            credentials,
        })
    }
}

/// Without root's rights no container can be made, whatever the runtime.
fn require_root() -> Result<(), String> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    Err(
        "`conman serve` makes containers, which needs root: run it as root, for example \
         `sudo conman serve`. Nothing was started"
            .to_owned(),
    )
}

fn start(arguments: &ServeArgs, settings: Settings) -> Result<()> {
    let Settings {
        mut config,
        tokens,
        credentials,
    } = settings;
    let records = FleetRecords::apply(&mut config)?;
    let credentials = credentials.derive(&config.name)?;
    let open_files = prepare_process()?;
    tracing::info!("{config}, {open_files} open files at most");
    log_session_limits(&config);
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
    if config.shared.is_some() || config.has_native_containers() {
        shim::check_ids(&config)?;
    }
    // Before anything measures: what is set without a recorder is lost.
    let metrics = {
        let _entered = runtime.enter();
        install_metrics()?
    };
    let shared = config.shared.as_ref();
    let starts = shared.map(|shared| {
        let takeover = Duration::from_millis(shared.timing.takeover_ms);
        CrashLoopBackoff::new(&config.state_dir, takeover)
    });
    if let Some(starts) = &starts
        && !runtime.block_on(starts.wait(signals.ending.next(), service_manager::goes_on))
    {
        if config.preempt.on_sigterm == OnSigterm::Preempt {
            let instance = crate::state_dir::instance(&config.state_dir)?;
            runtime.block_on(fleet::preempt_unjoined(&config, &instance));
        }
        return Ok(());
    }
    let state = LockedState::open(&config, arguments.generation_floor)?;
    let fleet = Arc::clone(&state.fleet);
    let result = runtime.block_on(async {
        let listeners = Listeners::bind(&config).await?;
        let auth = AuthSources {
            tokens,
            administrator: administrator(&config)?,
            credentials,
        };
        let early = EarlyStart {
            signals,
            records,
            starts: starts.as_ref(),
            metrics,
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

/// The token that lets root use the API; it needs the directory of the admin socket.
fn administrator(config: &Config) -> Result<Option<Arc<AdminToken>>> {
    if config.open_loopback {
        tracing::warn!(
            api = %config.listen.api,
            "`auth.loopback` is \"open\": every user of this machine is an administrator of conman"
        );
        return Ok(None);
    }
    let token = AdminToken::open(&config.listen.admin_token())?;
    tracing::info!(path = %token.path().display(), "clients of the API need a token; the administrator's is in this file");
    Ok(Some(Arc::new(token)))
}

/// What a node of a fleet has recorded at earlier starts.
#[derive(Default)]
struct FleetRecords {
    name: Option<name::Settled>,
    stalls: Option<HostStalls>,
}

impl FleetRecords {
    /// Opens the records, if the node is in a fleet, and sets the name and the takeover time of its
    /// configuration by them.
    fn apply(config: &mut Config) -> Result<Self> {
        if config.shared.is_none() {
            return Ok(Self::default());
        }
        crate::state_dir::prepare(&config.state_dir)?;
        let boot_id = conman_linux::boot_id().context("cannot read the id of this boot")?;
        let name = name::settle(config, boot_id);
        let stalls = HostStalls::open(&config.state_dir);
        if let Some(shared) = &mut config.shared
            && shared.derives_takeover
        {
            shared.timing = shared.timing.derive_takeover(stalls.longest_ms());
        }
        Ok(Self {
            name,
            stalls: Some(stalls),
        })
    }
}

/// Prepares what the kernel keeps for this process. Returns how many files it may open.
fn prepare_process() -> Result<u64> {
    // The shim outlives this process and must not inherit its descriptors.
    conman_linux::close_on_exec_from(FIRST_OTHER_FD).context("cannot mark descriptors")?;
    let (soft, _) = conman_linux::raise_nofile().context("cannot raise the limit of open files")?;
    protect_from_oom_killer();
    // On the way of each request, next to sessions that compute.
    if let Err(error) = conman_linux::run_in_short_slices() {
        tracing::warn!(%error, "the daemon has the kernel's default time slices");
    }
    Ok(soft)
}

fn log_session_limits(config: &Config) {
    let policy = &config.policy;
    tracing::info!(
        memory_bytes = policy.default_memory_bytes,
        pids = policy.default_pids.min(policy.max_pids),
        open_files = conman_runtime::SESSION_OPEN_FILES,
        cpus = policy.default_cpus.or(policy.max_cpus),
        total_cpus = config.limits.total_cpus,
        "default limits of sessions"
    );
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
    records: FleetRecords,
    starts: Option<&'a CrashLoopBackoff>,
    metrics: PrometheusHandle,
}

async fn serve(
    mut config: Config,
    state: LockedState,
    listeners: Listeners,
    auth: AuthSources,
    mut early: EarlyStart<'_>,
) -> Result<()> {
    registry_addresses::add(&mut config).await;
    keep_heap_small();
    let images = images::keeper(&state.images, &config.images)?;
    let credentials = &auth.credentials;
    let Some(started) = take_over(&config, &state, credentials, listeners, &mut early).await?
    else {
        return Ok(());
    };
    let StartedNode {
        node,
        listeners,
        connect_tokens,
        mut runtimes,
        network,
    } = started;
    let orders = state.orders.as_ref().map(Arc::clone);
    let obeying = orders.map(|orders| fleet::obey(orders, &node, &state.watchdog));
    images::collect(&images, &config.images);
    host_room::watch(&config, &node).await;
    if let (Some(stalls), Some(shared)) = (early.records.stalls, &config.shared) {
        stalls
            .watch(&shared.timing, node.status().clone())
            .context("cannot watch for stalls of this host")?;
    }
    let closing = CancellationToken::new();
    let reloads = signals::Reloads {
        tokens: auth.tokens.clone(),
        renewal: Renewal::run(&auth.credentials, closing.clone()),
        templates: TemplateReload::new(&config, &node),
    };
    let on_sigterm = config.preempt.on_sigterm;
    let stopped = signals::watch(early.signals, node.preemption(), on_sigterm, reloads);
    if config.shared.is_some() || listeners.peers.is_some() {
        let (status, watchdog) = (node.status(), &state.watchdog);
        announce::run(&config, status, &state.fleet, watchdog, closing.clone());
    }
    let services = Services {
        config: &config,
        state: &state,
        node: &node,
        auth: &auth,
        connect_tokens,
        images,
        metrics: early.metrics,
        closing,
    };
    let serving = services.start(listeners).await?;
    early.starts.inspect(|starts| starts.started());
    run_until(stopped, &node, &state).await;
    // A preemption has had its time already.
    if on_sigterm == OnSigterm::Leave {
        node.announce_stop().await;
    }
    stop(serving, obeying, &node, &mut runtimes, network).await?;
    drop(state);
    Ok(())
}

/// Stops what answers, then the node, then the helpers of its sessions.
async fn stop(
    serving: Serving,
    obeying: Option<JoinHandle<()>>,
    node: &Node,
    runtimes: &mut Runtimes,
    network: Option<RunningNetwork>,
) -> Result<()> {
    // Tunnels and streams first.
    let admin = serving.stop(node).await?;
    if let Some(obeying) = obeying {
        obeying.abort();
    }
    // After a preemption nothing is left to stop; otherwise the containers stay.
    node.shutdown(true).await;
    runtimes.close().await;
    if let Some(network) = network {
        network.close().await;
    }
    remove_empty_cgroup(node);
    admin.remove();
    Ok(())
}

/// Returns once the daemon is to stop.
async fn run_until(stopped: Stopped, node: &Node, state: &LockedState) {
    service_manager::ready();
    let status = node.status().clone();
    service_manager::watch(status, node.preemption(), state.watchdog.clone());
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
