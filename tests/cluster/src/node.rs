//! One conman node: its daemon, its shim and what they run.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use conman_e2e::Api;
use conman_linux::Signal;
use conman_observer::{ProcEntry, alive_below, slowness};
use http::{Method, StatusCode};

use crate::builder::log_tail;
use crate::command::run;
use crate::etcd::{detached, log_file};
use crate::forward::Forward;
use crate::holdings::Holdings;
use crate::layout::{Host, Layout};
use crate::{leftovers, process};

/// Bound on a daemon's way to readiness on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(50);
/// Lines of a log that tell why it ended.
const TAIL: usize = 20;
/// Bound on one look at `/readyz`.
const PROBE: Duration = Duration::from_secs(5);

/// A conman node on a host of its own.
#[derive(Debug)]
pub struct Node {
    host: Host,
    layout: Arc<Layout>,
    forward: Forward,
    daemon: Mutex<Option<Child>>,
}

impl Node {
    pub(crate) fn new(layout: &Arc<Layout>, index: usize, host: Host) -> Result<Self> {
        let namespace = layout.namespace_path(&host.name);
        Ok(Self {
            forward: Forward::open(&namespace, &forwarded(layout, index))?,
            layout: Arc::clone(layout),
            host,
            daemon: Mutex::new(None),
        })
    }

    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.host.name
    }

    /// The API over TCP.
    #[must_use]
    pub fn api(&self) -> Api {
        Api::tcp(self.api_address())
    }

    /// Where this machine reaches the API.
    #[must_use]
    pub fn api_address(&self) -> SocketAddr {
        self.forward.addresses()[0]
    }

    /// Raw HTTP to the sessions' listener.
    #[must_use]
    pub fn sessions(&self) -> Api {
        Api::tcp(self.forward.addresses()[1])
    }

    /// Where this machine reaches the sessions' listener.
    #[must_use]
    pub fn sessions_address(&self) -> SocketAddr {
        self.forward.addresses()[1]
    }

    /// The API over the admin socket, which no cut concerns.
    #[must_use]
    pub fn admin(&self) -> Api {
        Api::unix(&self.layout.socket(&self.host.name))
    }

    /// Starts the daemon without waiting for anything.
    ///
    /// # Errors
    /// When it cannot be started or one runs already.
    pub fn start(&self) -> Result<()> {
        let mut daemon = self.child();
        if daemon.is_some() {
            bail!("the daemon of {} runs already", self.host.name);
        }
        *daemon = Some(spawn(&self.layout, &self.host.name)?);
        Ok(())
    }

    /// Starts the daemon with further arguments or an environment.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(&self, change: impl FnOnce(&mut Command)) -> Result<()> {
        let mut daemon = self.child();
        if daemon.is_some() {
            bail!("the daemon of {} runs already", self.host.name);
        }
        let mut serve = self.serve()?;
        change(&mut serve);
        *daemon = Some(serve.spawn().context("cannot start conman")?);
        Ok(())
    }

    /// A daemon of this node, for a second one beside the first.
    ///
    /// # Errors
    /// When its log cannot be written.
    pub fn serve(&self) -> Result<Command> {
        serve(&self.layout, &self.host.name)
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Errors
    /// When the daemon ends instead, or is not ready in time.
    pub async fn wait_ready(&self) -> Result<()> {
        let patience = PATIENCE * slowness();
        let deadline = Instant::now() + patience;
        let mut latest = "no answer".to_owned();
        while Instant::now() < deadline {
            if let Some(status) = self.ended()? {
                bail!(
                    "the daemon of {} has ended instead ({status}); its log ends with\n{}",
                    self.host.name,
                    log_tail(&self.layout, &self.host.name, TAIL)
                );
            }
            match self.readiness().await {
                Ok(()) => return Ok(()),
                Err(why) => latest = why,
            }
            tokio::time::sleep(POLL).await;
        }
        bail!(
            "{} is not ready after {patience:?}: {latest}",
            self.host.name
        )
    }

    /// Whether it is ready, and why not.
    ///
    /// # Errors
    /// What it says.
    pub async fn readiness(&self) -> Result<(), String> {
        let api = self.admin();
        let asked = api.try_send(Method::GET, "/readyz", None);
        match tokio::time::timeout(PROBE, asked).await {
            Ok(Ok(answer)) if answer.status == StatusCode::OK => Ok(()),
            Ok(Ok(answer)) => Err(answer.text()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }

    /// How the daemon has ended, if it has.
    ///
    /// # Errors
    /// When it cannot be looked after.
    pub fn ended(&self) -> Result<Option<ExitStatus>> {
        match &mut *self.child() {
            Some(daemon) => daemon.try_wait().context("cannot look after a daemon"),
            None => Ok(None),
        }
    }

    /// The daemon's process, while it was not killed.
    #[must_use]
    pub fn daemon_pid(&self) -> Option<i32> {
        let daemon = self.child();
        daemon
            .as_ref()
            .and_then(|daemon| i32::try_from(daemon.id()).ok())
    }

    /// The processes of the shim: itself, its launcher, one that is just being made.
    #[must_use]
    pub fn shim_pids(&self) -> Vec<i32> {
        let residents = process::residents(&self.layout.namespace_path(&self.host.name));
        let shims = residents.into_iter().filter(|one| one.is_conman("shim"));
        shims.map(|one| one.pid).collect()
    }

    /// Sends the daemon a signal.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub fn signal_daemon(&self, signal: Signal) -> Result<()> {
        let pid = self.daemon_pid();
        pid.map_or(Ok(()), |pid| process::signal(pid, signal).map(drop))
    }

    /// Where its shim is asked; none before its first start.
    #[must_use]
    pub fn shim_socket(&self) -> Option<PathBuf> {
        let instance = leftovers::instance(&self.layout, &self.host.name)?;
        Some(leftovers::run_directory(&instance).join("shim.sock"))
    }

    /// Sends the shim's processes a signal.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub fn signal_shim(&self, signal: Signal) -> Result<()> {
        for pid in self.shim_pids() {
            process::signal(pid, signal)?;
        }
        Ok(())
    }

    /// SIGKILL to the daemon, and the wait for its end. The shim and the sessions live on.
    ///
    /// # Errors
    /// When it does not end.
    pub fn kill_daemon(&self) -> Result<()> {
        if let Some(mut daemon) = self.child().take() {
            daemon.kill().context("cannot kill a daemon")?;
            daemon.wait().context("cannot wait for a daemon")?;
        }
        Ok(())
    }

    /// SIGTERM to the daemon, and the wait for its end. The sessions live on, and the shim with them.
    ///
    /// # Errors
    /// When it does not end in time, or ends with an error.
    pub async fn end_daemon(&self) -> Result<()> {
        self.signal_daemon(Signal::SIGTERM)?;
        let patience = PATIENCE * slowness();
        let deadline = Instant::now() + patience;
        while self.daemon_pid().is_some() {
            if let Some(status) = self.ended()? {
                *self.child() = None;
                // It had not begun to listen for signals.
                let at_once = status.signal() == Some(Signal::SIGTERM as i32);
                ensure!(
                    status.success() || at_once,
                    "the daemon of {} has failed on SIGTERM ({status}); its log ends with\n{}",
                    self.host.name,
                    log_tail(&self.layout, &self.host.name, TAIL)
                );
            } else if Instant::now() > deadline {
                bail!(
                    "the daemon of {} has not ended {patience:?} after SIGTERM; its log ends with\n{}",
                    self.host.name,
                    log_tail(&self.layout, &self.host.name, TAIL)
                );
            } else {
                tokio::time::sleep(POLL).await;
            }
        }
        Ok(())
    }

    /// Has the next daemon be one of the fleet, of a node that [was alone](crate::Builder::alone_at_first).
    ///
    /// # Errors
    /// When it was not.
    pub fn join_fleet(&self) -> Result<()> {
        let (layout, name) = (&self.layout, &self.host.name);
        fs::rename(fleet_config_path(layout, name), config_path(layout, name))
            .with_context(|| format!("cannot have {name} join"))
    }

    /// Has the shim go on as its program anew.
    ///
    /// # Errors
    /// When there is none, or it stays what it is.
    pub fn replace_shim(&self) -> Result<()> {
        let name = &self.host.name;
        let mut replace = Command::new(self.layout.binary(name));
        replace.args(["shim", "--replace", "--state-dir"]);
        run(replace.arg(self.layout.state_dir(name))).map(drop)
    }

    /// SIGKILL to the shim's processes.
    ///
    /// # Errors
    /// When they do not die.
    pub fn kill_shim(&self) -> Result<()> {
        process::kill(self.shim_pids())
    }

    /// The machine is gone at once: every process of it is killed, and what was in its memory is
    /// lost. Its disk stays.
    ///
    /// # Errors
    /// When something does not die.
    pub fn lose(&self) -> Result<()> {
        self.kill_daemon()?;
        lose(&self.layout, &self.host.name)
    }

    /// The cgroup that all of its sessions are in, once it has run.
    #[must_use]
    pub fn cgroup(&self) -> Option<String> {
        let instance = leftovers::instance(&self.layout, &self.host.name)?;
        Some(leftovers::cgroup(&instance))
    }

    /// The processes of its sessions that still run.
    #[must_use]
    pub fn session_processes(&self) -> Vec<ProcEntry> {
        let below = |cgroup: String| alive_below(&cgroup);
        self.cgroup().map(below).unwrap_or_default()
    }

    /// What it has of the kernel's now.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub fn holdings(&self) -> Result<Holdings> {
        Holdings::of(&self.layout, &self.host.name)
    }

    /// What the node's daemons have logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(log_path(&self.layout, &self.host.name)).unwrap_or_default()
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.kill_daemon();
    }
}

/// Which addresses of the machine lead to which of the node's listeners.
pub(crate) fn forwarded(layout: &Layout, index: usize) -> [(SocketAddr, SocketAddr); 2] {
    let (here, there) = (layout.machine_addresses(index), Layout::listeners());
    [(here[0], there[0]), (here[1], there[1])]
}

/// Starts a daemon; the process is `conman` itself.
pub(crate) fn spawn(layout: &Layout, node: &str) -> Result<Child> {
    let spawned = serve(layout, node)?.spawn();
    spawned.with_context(|| format!("cannot start conman on {node}"))
}

fn serve(layout: &Layout, node: &str) -> Result<Command> {
    let log = log_file(&log_path(layout, node))?;
    let mut command = detached(&layout.namespace_path(node), layout.binary(node));
    command
        .arg("serve")
        .arg("--config")
        .arg(config_path(layout, node))
        // Also why a connection was cut.
        .env("RUST_LOG", "info,conman_proxy=debug")
        .stdout(log.try_clone().context("cannot share a log")?)
        .stderr(log);
    Ok(command)
}

/// Kills what a node runs besides a daemon that is somebody's child, and all of its memory.
pub(crate) fn lose(layout: &Layout, node: &str) -> Result<()> {
    process::kill_residents(&layout.namespace_path(node))?;
    let Some(instance) = leftovers::instance(layout, node) else {
        return Ok(());
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut problems = Vec::new();
        leftovers::end_sessions(&instance, &mut problems);
        if problems.is_empty() {
            break;
        }
        if Instant::now() > deadline {
            bail!("sessions of {node} do not end: {}", problems.join("; "));
        }
        std::thread::park_timeout(POLL);
    }
    let run = leftovers::run_directory(&instance);
    if run.exists() {
        conman_linux::remove_tree(&run)
            .with_context(|| format!("cannot remove {}", run.display()))?;
    }
    Ok(())
}

pub(crate) fn log_path(layout: &Layout, node: &str) -> PathBuf {
    layout.host_directory(node).join("conman.log")
}

pub(crate) fn config_path(layout: &Layout, node: &str) -> PathBuf {
    layout.host_directory(node).join("conman.toml")
}

/// What becomes the configuration of a node that is alone at first.
pub(crate) fn fleet_config_path(layout: &Layout, node: &str) -> PathBuf {
    layout.host_directory(node).join("conman.fleet.toml")
}
