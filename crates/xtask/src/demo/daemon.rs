//! The demo's conman: temporary state, free ports, everything removed at the end.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{Daemon, output, target_dir, wait_until};
use crate::setup::DEMO_IMAGE;

const START_PATIENCE: Duration = Duration::from_secs(30);
/// Sessions are killed at once; Docker takes long to remove their containers.
const STOP_PATIENCE: Duration = Duration::from_secs(30);
const DEFAULT_API_PORT: u16 = 7700;

/// What `--docker` adds.
const ON_DOCKER: &str = r#"
[templates.egress]
image = "DEMO_IMAGE"
runtime = "docker"
command = ["python3", "-m", "http.server", "8080", "--directory", "/srv"]
port = 8080
network = "bridge"
"#;

/// A running conman.
pub(crate) struct Conman {
    directory: tempfile::TempDir,
    daemon: Daemon,
    /// Some sessions are on Docker.
    pub(crate) docker: bool,
    pub(crate) api: String,
    pub(crate) sessions: String,
    /// Where a package registry is served, in the egress list of the template `installer`. Not
    /// 127.0.0.1, which programs exempt from proxies.
    pub(crate) registry: TcpListener,
}

impl Conman {
    pub(crate) fn start(docker: bool) -> Result<Self> {
        let directory = tempfile::tempdir().context("making a temporary folder")?;
        let [api, sessions] = ports()?.map(|port| format!("127.0.0.1:{port}"));
        let registry = TcpListener::bind("127.0.0.2:0").context("listening on 127.0.0.2")?;
        let listed = registry.local_addr().context("reading a port")?.to_string();
        let config = directory.path().join("conman.toml");
        fs::write(
            &config,
            configuration(directory.path(), [&api, &sessions, &listed], docker),
        )
        .with_context(|| format!("writing {}", config.display()))?;
        let log = File::create(directory.path().join("conman.log")).context("making a log file")?;
        let mut command = Command::new(binary());
        command
            .arg("serve")
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null());
        command
            .stdout(log.try_clone().context("sharing the log")?)
            .stderr(log)
            .process_group(0);
        let daemon = Daemon::start("conman", &mut command, STOP_PATIENCE)?;
        let mut conman = Self {
            directory,
            daemon,
            docker,
            api,
            sessions,
            registry,
        };
        conman.wait_ready()?;
        Ok(conman)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let url = format!("http://{}/readyz", self.api);
        let ready = wait_until(START_PATIENCE, || {
            if let Some(status) = self.daemon.ended()? {
                bail!("conman did not start ({status}): {}", self.log_tail());
            }
            let probe = Command::new("curl")
                .args(["--silent", "--fail", &url])
                .output();
            Ok(probe.is_ok_and(|probe| probe.status.success()))
        })?;
        if !ready {
            bail!(
                "conman is not ready after {} s: {}",
                START_PATIENCE.as_secs(),
                self.log_tail()
            );
        }
        Ok(())
    }

    /// Runs one client command of conman against this daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Result<Output> {
        output(
            Command::new(binary())
                .arg("--socket")
                .arg(self.socket())
                .args(arguments),
        )
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("conman.sock")
    }

    /// The administrator's token, which the daemon made.
    pub(crate) fn token_file(&self) -> PathBuf {
        self.directory.path().join("admin.token")
    }

    pub(crate) fn log_file(&self) -> PathBuf {
        self.directory.path().join("conman.log")
    }

    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.daemon.ended()
    }

    /// Ends every session, then the daemon.
    pub(crate) fn stop(mut self) -> Result<()> {
        let ended = if self.ended()?.is_none() {
            // A preempted node removes nothing, because its machine stops; this one continues.
            self.command(&["readmit"])
                .and_then(|_| self.command(&["rm", "--all", "--yes"]))
                .map(drop)
        } else {
            Ok(())
        };
        let swept = match self.docker {
            true => self.wait_for_clean_up(),
            false => Ok(()),
        };
        let stopped = self.daemon.stop();
        // The shim outlives its daemon.
        let state_dir = self.directory.path().join("state");
        let shim = output(
            Command::new(binary())
                .args(["shim", "--stop", "--state-dir"])
                .arg(&state_dir),
        );
        ended.and(swept).and(stopped).and(shim.map(drop))
    }

    /// Docker removes containers slowly; the daemon must not be stopped before that is done.
    fn wait_for_clean_up(&self) -> Result<()> {
        let stored = fs::read_to_string(self.directory.path().join("state/instance"))
            .context("reading the instance id")?;
        let stored: serde_json::Value = serde_json::from_str(&stored)?;
        let instance = stored["instance"].as_str().unwrap_or_default();
        let label = format!("label=dev.conman.instance={instance}");
        let list = ["ps", "--all", "--quiet", "--filter", &label];
        let clean = wait_until(STOP_PATIENCE, || {
            Ok(output(Command::new("docker").args(list))?.stdout.is_empty())
        })?;
        if !clean {
            bail!("containers were left behind; remove them with `docker rm` (filter: {label})");
        }
        Ok(())
    }

    fn log_tail(&self) -> String {
        let text = fs::read_to_string(self.log_file()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }
}

pub(crate) fn binary() -> PathBuf {
    target_dir().join("debug/conman")
}

/// The documented ports if they are free, otherwise others.
fn ports() -> Result<[u16; 2]> {
    let listen = |port| TcpListener::bind(("127.0.0.1", port));
    let held =
        [DEFAULT_API_PORT, DEFAULT_API_PORT + 1].map(|port| listen(port).or_else(|_| listen(0)));
    let [api, sessions] = held;
    let port = |listener: std::io::Result<TcpListener>| -> Result<u16> {
        Ok(listener
            .context("finding a free port")?
            .local_addr()
            .context("reading a port")?
            .port())
    };
    Ok([port(api)?, port(sessions)?])
}

fn configuration(directory: &Path, [api, sessions, registry]: [&str; 3], docker: bool) -> String {
    let directory = directory.display();
    let on_docker = match docker {
        true => ON_DOCKER.replace("DEMO_IMAGE", DEMO_IMAGE),
        false => String::new(),
    };
    format!(
        r#"[node]
state_dir = "{directory}/state"
runtime = "native"
id_range = "4278190080-4294901759" # apart from the default range, which the host's own conman may use

[listen]
api = "{api}"
sessions = "{sessions}"
admin = "{directory}/conman.sock"

[templates.python]
image = "{DEMO_IMAGE}"
command = ["python3", "-m", "http.server", "8080", "--directory", "/srv"]
port = 8080
memory_bytes = 268435456
cpus = 0.5
pids = 128
start_on_connect = true

[templates.console]
image = "{DEMO_IMAGE}"
command = ["websocketd", "--port=8080", "--staticdir=/srv", "--passenv=CONMAN_SESSION_ID,CONMAN_GENERATION,PATH", "/srv/console.sh"]
port = 8080
memory_bytes = 268435456
pids = 128

[templates.installer]
image = "{DEMO_IMAGE}"
command = ["sleep", "1000000"]
egress = ["{registry}", "internet"]

[templates.tiny]
image = "{DEMO_IMAGE}"
command = ["sleep", "1000000"]
{on_docker}"#
    )
}
