//! A running conman, and everything that it must not leave behind.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use conman_linux::{Signal, signal_process};
use conman_observer::{ProcEntry, alive_below};
use http::{Method, StatusCode};
use tempfile::TempDir;

use crate::api::{Api, Endpoint};
use crate::builder::Builder;
use crate::cli::{self, CliOutput};
use crate::docker::{self, Docker};
use crate::id_range::IdRange;
use crate::port::Port;
use crate::small_disk::SmallDisk;
use crate::{eventually, eventually_some};

/// Bound on a daemon's start and end; adopting many containers on a busy machine included.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a cgroup is tried that is still in use.
const POLL: Duration = Duration::from_millis(20);
/// Time for a container that was being made when its daemon was killed to show.
const LATE_CREATE: Duration = Duration::from_millis(500);
/// Lines of the log that a failed test prints.
const TAIL: usize = 60;

/// One installation of conman and, most of the time, its running daemon.
#[derive(Debug)]
pub struct Conman {
    /// Dropped before the directory with it.
    state_disk: Option<SmallDisk>,
    directory: TempDir,
    ports: [Port; 2],
    ids: IdRange,
    tokens: Vec<(String, String)>,
    /// Whether Docker may have containers of this installation's.
    uses_docker: bool,
    daemon: Option<Child>,
}

impl Conman {
    /// What a conman is to be like.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// One with the harness's own templates and without tokens, ready.
    pub async fn start(docker: &Docker) -> Self {
        Self::builder().start(docker).await
    }

    pub(crate) fn new(
        directory: TempDir,
        (ports, ids): ([Port; 2], IdRange),
        tokens: Vec<(String, String)>,
        uses_docker: bool,
    ) -> Self {
        Self {
            state_disk: None,
            directory,
            ports,
            ids,
            tokens,
            uses_docker,
            daemon: None,
        }
    }

    /// Puts the state on a file system of its own, before the first start.
    pub(crate) fn mount_state(&mut self, options: &str) {
        let state = self.state_dir();
        fs::create_dir(&state).expect("made");
        self.state_disk = Some(SmallDisk::mount(&state, options));
    }

    /// Starts the daemon without waiting for anything.
    ///
    /// # Panics
    /// When one runs already.
    pub fn spawn(&mut self) {
        assert!(self.daemon.is_none(), "the daemon runs already");
        self.daemon = Some(self.serve().spawn().expect("conman starts"));
    }

    /// A daemon of this installation, its output appended to the log; for a second one.
    pub fn serve(&self) -> Command {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("the log can be written");
        let mut command = Command::new(crate::binary());
        command
            .arg("serve")
            .arg("--config")
            .arg(self.config_path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log can be shared"))
            .stderr(log)
            // A Ctrl-C at the terminal is the test's to handle, by dropping this.
            .process_group(0);
        command
    }

    /// Starts the daemon and waits until it is ready.
    ///
    /// # Panics
    /// When it ends instead, or is not ready in time.
    pub async fn launch(&mut self) {
        self.spawn();
        self.wait_ready().await;
    }

    /// Waits until `/readyz` says yes.
    ///
    /// # Panics
    /// When the daemon ends instead, or is not ready in time.
    pub async fn wait_ready(&mut self) {
        let api = self.api();
        eventually("the daemon is ready", PATIENCE, async || {
            assert!(self.ended().is_none(), "the daemon has ended instead");
            let answer = api.try_send(Method::GET, "/readyz", None).await;
            answer.is_ok_and(|answer| answer.status == StatusCode::OK)
        })
        .await;
    }

    /// How the daemon has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let daemon = self.daemon.as_mut().expect("a daemon was started");
        daemon.try_wait().expect("the daemon can be looked after")
    }

    /// The daemon's process id.
    ///
    /// # Panics
    /// When none was started.
    pub fn pid(&self) -> i32 {
        let daemon = self.daemon.as_ref().expect("a daemon was started");
        i32::try_from(daemon.id()).expect("a process id")
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) {
        signal_process(self.pid(), signal).expect("the daemon is there");
    }

    /// Ends the daemon as a crash would, at once. Its containers live on.
    pub fn crash(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().expect("the daemon can be killed");
            daemon.wait().expect("the daemon can be waited for");
        }
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Panics
    /// When the daemon does not end in time.
    pub async fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait_ended().await
    }

    /// Waits until the daemon has ended.
    ///
    /// # Panics
    /// When it does not in time.
    pub async fn wait_ended(&mut self) -> ExitStatus {
        let status = eventually_some("the daemon ends", PATIENCE, async || self.ended()).await;
        self.daemon = None;
        status
    }

    /// A crash, and a new daemon that is ready.
    pub async fn restart_after_crash(&mut self) {
        self.crash();
        self.launch().await;
    }

    /// The API over TCP.
    pub fn api(&self) -> Api {
        Api::new(Endpoint::Tcp(self.api_address()))
    }

    /// The API over the admin socket.
    pub fn admin(&self) -> Api {
        Api::new(Endpoint::Unix(self.socket_path()))
    }

    /// Raw HTTP to the sessions listener.
    pub fn sessions(&self) -> Api {
        Api::new(Endpoint::Tcp(self.sessions_address()))
    }

    pub fn api_address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports[0].number))
    }

    pub fn sessions_address(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.ports[1].number))
    }

    /// A bearer token that the builder was told to make.
    ///
    /// # Panics
    /// When it was not.
    pub fn token(&self, name: &str) -> &str {
        let known = self.tokens.iter().find(|(known, _)| known == name);
        &known.expect("the token was asked for").1
    }

    /// A run of conman's command line against this daemon's admin socket.
    pub async fn cli(&self, arguments: &[&str]) -> CliOutput {
        self.cli_with_input(arguments, "").await
    }

    /// The same with a standard input.
    pub async fn cli_with_input(&self, arguments: &[&str], stdin: &str) -> CliOutput {
        let mut command = self.cli_command();
        command.args(arguments);
        cli::run(command, stdin).await
    }

    /// `conman --socket …`, for runs that are not simply to their end.
    pub fn cli_command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(crate::binary());
        command.arg("--socket").arg(self.socket_path());
        for variable in ["CONMAN_URL", "CONMAN_SOCKET", "CONMAN_TOKEN_FILE"] {
            command.env_remove(variable);
        }
        command
    }

    /// A directory of this installation's own, for whatever a test needs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn config_path(&self) -> PathBuf {
        self.directory.path().join("conman.toml")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub fn socket_path(&self) -> PathBuf {
        self.directory.path().join("conman.sock")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("conman.log")
    }

    /// Everything that the daemons have logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The random id of this installation.
    ///
    /// # Panics
    /// Before the first daemon has made it.
    pub fn instance(&self) -> String {
        self.known_instance().expect("the daemon has made its id")
    }

    fn known_instance(&self) -> Option<String> {
        let text = fs::read_to_string(self.state_dir().join("instance")).ok()?;
        let stored: serde_json::Value = serde_json::from_str(&text).ok()?;
        stored["instance"].as_str().map(str::to_owned)
    }

    /// The processes of all this installation's sessions, as the kernel shows them.
    pub fn processes(&self) -> Vec<ProcEntry> {
        alive_below(&format!("/conman-{}", self.instance()))
    }

    #[expect(clippy::print_stderr, reason = "a failed test tells what it knows")]
    fn print_log(&self) {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        eprintln!("--- the daemon's log ends with\n{}\n---", tail.join("\n"));
    }

    /// The process id of the shim that the daemon was connected to last, living or not.
    ///
    /// # Panics
    /// When there was none.
    pub fn shim_pid(&self) -> i32 {
        let log = self.log();
        let connected = log.rsplit_once("connected to the shim pid=");
        let (_, rest) = connected.expect("the daemon has told of its shim");
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        let pid = digits.and_then(|digits| digits.parse().ok());
        pid.expect("a process id")
    }

    /// Runs `conman shim --stop`: its exit code and what it said.
    pub fn stop_shim(&self) -> (Option<i32>, String) {
        self.order_shim("--stop")
    }

    /// Runs `conman shim` with an order for the shim that runs.
    pub fn order_shim(&self, order: &str) -> (Option<i32>, String) {
        // One that serves instead of ending shows as 137.
        let output = Command::new("timeout")
            .args(["--signal=KILL", "60"])
            .arg(crate::binary())
            .args(["shim", order, "--config"])
            .arg(self.config_path())
            .output()
            .expect("conman can be run");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        (output.status.code(), said)
    }

    /// Where the shim of this installation is reached.
    pub fn shim_directory(&self) -> PathBuf {
        Path::new("/run").join(format!("conman-{}", self.instance()))
    }

    /// Kills what runs, and then has Docker remove what is left: killing through Docker would
    /// take minutes.
    fn sweep(&self) {
        let Some(instance) = self.known_instance() else {
            return;
        };
        for process in self.processes() {
            let _ = signal_process(process.pid, Signal::SIGKILL);
        }
        // Whatever the harness was told: a test may have configured another runtime.
        if self.shim_directory().exists() {
            self.sweep_shim();
        }
        if self.uses_docker {
            remove_containers(&instance);
            // dockerd may still have been making one that the killed daemon had asked for.
            std::thread::park_timeout(LATE_CREATE);
            remove_containers(&instance);
        }
        remove_cgroups(&instance);
    }

    /// Ends the shim, and kills what its last starts bring forth meanwhile.
    #[expect(clippy::print_stderr, reason = "what cannot be ended must be told")]
    fn sweep_shim(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (code, said) = self.stop_shim();
            if code == Some(0) {
                return;
            }
            if Instant::now() > deadline {
                eprintln!("the shim was left behind: {said}");
                return;
            }
            for process in self.processes() {
                let _ = signal_process(process.pid, Signal::SIGKILL);
            }
            std::thread::park_timeout(POLL);
        }
    }
}

#[expect(clippy::print_stderr, reason = "what cannot be removed must be told")]
fn remove_containers(instance: &str) {
    let label = docker::instance_filter(instance);
    let listed = docker::output(&["ps", "--all", "--quiet", "--filter", &label]);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let ids: Vec<&str> = listed.split_whitespace().collect();
    for some in ids.chunks(50) {
        let removed = docker::output(&[&["rm", "--force", "--volumes"], some].concat());
        if !removed.status.success() {
            let why = String::from_utf8_lossy(&removed.stderr).into_owned();
            // The daemon that was killed may have asked for the same removal.
            if !why.contains("already in progress") && !why.contains("No such container") {
                eprintln!("containers of {instance} were left behind: {why}");
            }
        }
    }
}

/// Removes what Docker made around its containers' own cgroups.
#[expect(clippy::print_stderr, reason = "what cannot be removed must be told")]
fn remove_cgroups(instance: &str) {
    let Ok(cgroups) = conman_linux::Cgroups::detect() else {
        return;
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let errors = cgroups.remove_tree(&format!("/conman-{instance}"));
        if errors.is_empty() {
            return;
        }
        if Instant::now() > deadline {
            eprintln!("cgroups of {instance} were left behind: {errors:?}");
            return;
        }
        // The kernel takes a moment to let go of processes that are dead.
        std::thread::park_timeout(POLL);
    }
}

impl Drop for Conman {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if std::thread::panicking() {
            self.print_log();
        }
        self.sweep();
        self.ids.wait_until_unused();
    }
}
