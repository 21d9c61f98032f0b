//! The conman that is measured.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use conman_e2e::IdRange;
use conman_linux::Cgroups;
use conman_proto::{
    EnsureResponse, PreemptReport, RuntimeKind, Session, SessionId, SessionState, StopReport,
};
use futures_util::{StreamExt, TryStreamExt, stream};
use http::Method;
use serde_json::json;
use tokio::process::{Child, Command};

use crate::docker::{Docker, image_name};
use crate::http_client::request_json;
use crate::{image, needs, plain};

const START_PATIENCE: Duration = Duration::from_secs(30);
/// Docker needs most of it: it removes hundreds of containers on a bridge slowly.
const CLEAN_UP_PATIENCE: Duration = Duration::from_secs(300);
/// Sessions for which a small range of user ids suffices, and the range for more: apart from the default range, which
/// the host's own conman may use.
const FEW: usize = 256;
const ALL_IDS: &str = "3221225472-4278190079";
/// The image's name in conman's store.
const IMAGE: &str = "conman-bench:plain";
const POLL: Duration = Duration::from_millis(50);

/// The conman that a benchmark runs.
pub(crate) struct Daemon {
    binary: PathBuf,
    directory: tempfile::TempDir,
    runtime: RuntimeKind,
    child: Child,
    api: String,
    pub(crate) sessions: String,
    pub(crate) instance: String,
    /// So that benchmarks of few sessions can run beside each other.
    _ids: Option<IdRange>,
}

impl Daemon {
    /// Starts `binary` with templates `loopback` (busybox asleep), `http` (its web server) and `echo` (this program's
    /// WebSocket echo server), and for Docker also `bridge` and `echo-bridge`. Other runtimes get the image from the
    /// archive.
    pub(crate) async fn start(
        binary: &Path,
        runtime: RuntimeKind,
        max_sessions: usize,
        archive: &Path,
    ) -> Result<Self> {
        let daemon =
            Self::with_templates(binary, runtime, max_sessions, &templates(runtime)).await?;
        if runtime != RuntimeKind::Docker
            && let Err(error) = daemon.import(archive, IMAGE).await
        {
            daemon.stop_all().await?;
            return Err(error);
        }
        Ok(daemon)
    }

    /// Starts `binary` with only these templates.
    pub(crate) async fn with_templates(
        binary: &Path,
        runtime: RuntimeKind,
        max_sessions: usize,
        templates: &str,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("making a temporary folder")?;
        let [listener, sessions] = free_ports()?.map(|port| format!("127.0.0.1:{port}"));
        // The admin socket needs no token, whatever the configuration.
        let api = format!("unix:{}/conman.sock", directory.path().display());
        let config = directory.path().join("conman.toml");
        let ids = (max_sessions <= FEW).then(IdRange::claim);
        let settings = settings(
            directory.path(),
            runtime,
            (max_sessions, ids.as_ref()),
            [&listener, &sessions],
        );
        std::fs::write(&config, settings + templates)
            .with_context(|| format!("writing {}", config.display()))?;
        let log = std::fs::File::create(directory.path().join("log")).context("making a log")?;
        let child = Command::new(binary)
            .args(["serve", "--config"])
            .arg(&config)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("sharing the log")?)
            .stderr(log)
            // The benchmark handles Ctrl-C at the terminal.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", binary.display()))?;
        let mut daemon = Self {
            binary: binary.to_owned(),
            directory,
            runtime,
            child,
            api,
            sessions,
            instance: String::new(),
            _ids: ids,
        };
        daemon.wait_ready().await?;
        let stored = std::fs::read_to_string(daemon.directory.path().join("state/instance"))
            .context("reading the instance id")?;
        let stored: serde_json::Value = serde_json::from_str(&stored)?;
        daemon.instance = stored["instance"].as_str().unwrap_or_default().to_owned();
        Ok(daemon)
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let ready = async {
            loop {
                if let Some(status) = self.child.try_wait().context("looking after conman")? {
                    bail!("conman did not start ({status}): {}", self.log());
                }
                if request_json::<serde_json::Value>(&self.api, Method::GET, "/readyz", None)
                    .await
                    .is_ok()
                {
                    return Ok(());
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(START_PATIENCE, ready).await {
            Ok(result) => result,
            Err(_) => bail!("conman is not ready after {} s", START_PATIENCE.as_secs()),
        }
    }

    pub(crate) fn api(&self) -> &str {
        &self.api
    }

    /// Its shim, if it has one.
    pub(crate) fn shim_pid(&self) -> Option<i32> {
        self.shim_pids().next()
    }

    /// The processes of its shim: those with this daemon's state directory and `shim` on their command lines.
    fn shim_pids(&self) -> impl Iterator<Item = i32> {
        let state = self.directory.path().display().to_string();
        let entries = std::fs::read_dir("/proc").into_iter().flatten();
        entries.filter_map(Result::ok).filter_map(move |entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line);
            let mut words = line.split('\0');
            let is_shim = words.nth(1) == Some("shim") && words.any(|word| word.contains(&state));
            is_shim.then_some(pid)
        })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("conman.sock")
    }

    pub(crate) fn pid(&self) -> Result<i32> {
        let pid = self.child.id().context("conman has ended")?;
        i32::try_from(pid).context("reading conman's pid")
    }

    /// The cgroup of all of this instance's containers, with Docker's cgroupfs driver.
    pub(crate) fn cgroup(&self) -> String {
        format!("/conman-{}", self.instance)
    }

    pub(crate) fn label(&self) -> String {
        format!("dev.conman.instance={}", self.instance)
    }

    /// Starts `count` sessions `{prefix}-N` of a template, some at a time, and waits until each runs.
    pub(crate) async fn open(
        &self,
        prefix: &str,
        template: &str,
        count: usize,
        parallel: usize,
        progress: impl Fn(usize),
    ) -> Result<Vec<Session>> {
        let mut sessions = Vec::with_capacity(count);
        let mut starts = stream::iter(0..count)
            .map(|number| self.open_one(format!("{prefix}-{number}"), template))
            .buffer_unordered(parallel);
        while let Some(session) = starts.try_next().await? {
            sessions.push(session);
            progress(sessions.len());
        }
        Ok(sessions)
    }

    pub(crate) async fn open_one(&self, id: String, template: &str) -> Result<Session> {
        let path = format!("/v1/sessions/{id}");
        let answer: EnsureResponse = request_json(
            &self.api,
            Method::PUT,
            &path,
            Some(&json!({ "template": template })),
        )
        .await?;
        if answer.session.state != SessionState::Running {
            let reason = answer.session.reason.unwrap_or_default();
            bail!("session {id} is {}: {reason}", answer.session.state);
        }
        Ok(answer.session)
    }

    pub(crate) async fn preempt(&self) -> Result<PreemptReport> {
        let body = json!({ "reason": "benchmark" });
        request_json(
            &self.api,
            Method::POST,
            "/v1/nodes/self/preempt",
            Some(&body),
        )
        .await
    }

    pub(crate) async fn readmit(&self) -> Result<()> {
        request_json::<serde_json::Value>(
            &self.api,
            Method::POST,
            "/v1/nodes/self/readmit",
            Some(&json!({})),
        )
        .await
        .map(drop)
    }

    pub(crate) async fn delete(&self, id: &SessionId) -> Result<()> {
        let path = format!("/v1/sessions/{id}");
        request_json::<StopReport>(&self.api, Method::DELETE, &path, None)
            .await
            .map(drop)
    }

    /// Ends what still runs, waits until nothing of this instance is left, stops the daemon.
    pub(crate) async fn stop(mut self, docker: Option<&Docker>) -> Result<()> {
        let Some(docker) = docker.filter(|_| self.runtime == RuntimeKind::Docker) else {
            return self.stop_all().await;
        };
        let listed: Result<conman_proto::SessionList> =
            request_json(&self.api, Method::GET, "/v1/sessions?limit=1000", None).await;
        for session in listed?.sessions {
            if !session.state.is_ended() {
                self.delete(&session.id).await?;
            }
        }
        let clean = async {
            while docker.count(&self.label(), true).await? > 0 {
                tokio::time::sleep(POLL).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(CLEAN_UP_PATIENCE, clean)
            .await
            .with_context(|| {
                format!("containers with label {} were left behind", self.label())
            })??;
        self.end().await
    }

    async fn end(&mut self) -> Result<()> {
        conman_linux::signal_process(self.pid()?, conman_linux::Signal::SIGTERM)
            .context("stopping conman")?;
        tokio::time::timeout(START_PATIENCE, self.child.wait())
            .await
            .context("conman did not stop")?
            .context("waiting for conman")?;
        self.remove_rules().await;
        Ok(())
    }

    /// conman leaves its rules for links to the next daemon; here there is none.
    async fn remove_rules(&self) {
        let table = format!("conman_{}", self.instance);
        // Without routed sessions there are no rules, and perhaps no nft.
        let _ = Command::new("nft")
            .args(["delete", "table", "inet", &table])
            .stderr(Stdio::null())
            .status()
            .await;
    }

    /// What `conman doctor` finds for as many sessions.
    pub(crate) async fn doctor(&self, target: usize) -> Result<serde_json::Value> {
        // Its exit status says whether the host is fit, which is a finding, too.
        let output = Command::new(&self.binary)
            .args(["doctor", "--json", "--target", &target.to_string()])
            .arg("--config")
            .arg(self.directory.path().join("conman.toml"))
            .output()
            .await
            .context("starting `conman doctor`")?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            format!("reading what `conman doctor` found: {}", errors.trim())
        })
    }

    /// Imports an image into conman's store.
    pub(crate) async fn import(&self, archive: &Path, name: &str) -> Result<()> {
        let output = Command::new(&self.binary)
            .arg("--socket")
            .arg(self.directory.path().join("conman.sock"))
            .args(["image", "import"])
            .arg(archive)
            .arg(name)
            .output()
            .await
            .context("starting `conman image import`")?;
        if !output.status.success() {
            bail!(
                "`conman image import` failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    /// Ends everything at once, waits until nothing is left, stops the daemon.
    pub(crate) async fn stop_all(mut self) -> Result<()> {
        if !conman_observer::alive_below(&self.cgroup()).is_empty() {
            self.preempt().await?;
        }
        let clean = self.clean().await;
        self.end().await.and(clean)
    }

    /// After a preemption: waits until nothing of the sessions is left.
    pub(crate) async fn clean(&self) -> Result<()> {
        let cgroups = Cgroups::detect().context("finding the cgroup hierarchies")?;
        // A preempted node removes nothing, because its machine stops; this one continues.
        self.readmit().await?;
        // Containers made ahead end with the daemon.
        let left = || {
            let mut left = cgroups.children(&self.cgroup());
            left.retain(|name| !name.starts_with("ahead_"));
            left
        };
        let clean = async {
            while !left().is_empty() {
                tokio::time::sleep(POLL).await;
            }
        };
        if tokio::time::timeout(CLEAN_UP_PATIENCE, clean)
            .await
            .is_err()
        {
            let left = left();
            bail!(
                "{} cgroups were left behind below {}",
                left.len(),
                self.cgroup()
            );
        }
        Ok(())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    /// A daemon that did not become ready may have started its shim.
    fn drop(&mut self) {
        for pid in self.shim_pids() {
            // One that has ended already is what this is for.
            let _ = conman_linux::signal_process(pid, conman_linux::Signal::SIGKILL);
        }
    }
}

/// Ports that were free a moment ago.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut listeners = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").context("finding a port")?;
        *port = listener.local_addr().context("reading a port")?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

fn settings(
    directory: &Path,
    runtime: RuntimeKind,
    (max_sessions, ids): (usize, Option<&IdRange>),
    [api, sessions]: [&str; 2],
) -> String {
    let ids = ids.map_or_else(|| format!("{ALL_IDS:?}"), IdRange::value);
    let directory = directory.display();
    let gvisor = match runtime {
        RuntimeKind::Gvisor => gvisor_settings(),
        _ => String::new(),
    };
    format!(
        r#"[node]
state_dir = "{directory}/state"
runtime = "{runtime}"
id_range = {ids}

[listen]
api = "{api}"
sessions = "{sessions}"
admin = "{directory}/conman.sock"

[limits]
max_sessions = {max_sessions}
max_connections = 20000

{gvisor}"#
    )
}

/// Where gVisor is, for the configuration: the one in PATH, which is compared with.
pub(crate) fn gvisor_settings() -> String {
    let path = needs::find("runsc");
    let section = path.map(|path| {
        format!(
            "[runtimes.gvisor]\nkind = \"oci\"\npath = \"{}\"\n",
            path.display()
        )
    });
    section.unwrap_or_default()
}

fn templates(runtime: RuntimeKind) -> String {
    let image = match runtime {
        RuntimeKind::Docker => image_name(),
        RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) | RuntimeKind::Process => {
            IMAGE.to_owned()
        }
    };
    let cpus = match runtime {
        // `runsc` alone has no cgroups: a limit would slow the start of the session's kernel only in sessions.
        RuntimeKind::Gvisor => String::new(),
        RuntimeKind::Native | RuntimeKind::Oci(_) | RuntimeKind::Docker | RuntimeKind::Process => {
            format!("cpus = {}\n", plain::CPUS)
        }
    };
    let http = format!(
        "command = {}\nport = 8080\nmemory_bytes = {}\npids = {}\n{cpus}",
        json!(image::COMMAND),
        plain::MEMORY_BYTES,
        plain::PIDS
    );
    let asleep = "command = [\"sleep\", \"1000000\"]\n";
    let echo = "command = [\"/bin/conman-bench\", \"echo\", \"--listen\", \"0.0.0.0:8080\"]\nport = 8080\n\
                memory_bytes = 4294967296\n";
    let bridge = "network = \"bridge\"\n";
    let all = [
        ("loopback", asleep, ""),
        ("http", http.as_str(), ""),
        ("echo", echo, ""),
        ("bridge", asleep, bridge),
        ("echo-bridge", echo, bridge),
    ];
    let here = all
        .into_iter()
        .filter(|(_, _, network)| network.is_empty() || runtime == RuntimeKind::Docker);
    here.map(|(name, program, network)| {
        format!("[templates.{name}]\nimage = \"{image}\"\n{program}{network}\n")
    })
    .collect()
}
