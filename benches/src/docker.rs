//! Docker as its users use it, to compare with.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use conman_proto::RuntimeKind;
use futures_util::{StreamExt, TryStreamExt, stream};
use http::Method;
use tokio::process::Command;

use crate::http_client::request_json;
use crate::interruption::run_to_end;

/// Concurrent `docker run` while a benchmark is prepared.
const PARALLEL_RUNS: usize = 8;
const POLL: Duration = Duration::from_millis(50);

/// Docker as its users use it: the command line, and the API for queries. It has an image with
/// busybox and this program until this is dropped. Dropping this also removes all containers of this run, which
/// an interruption may have left.
#[derive(Debug)]
pub(crate) struct Docker {
    socket: PathBuf,
}

impl Drop for Docker {
    fn drop(&mut self) {
        let docker = |arguments: &[&str]| {
            let mut command = std::process::Command::new("docker");
            // The benchmark handles Ctrl-C at the terminal.
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
            command.args(arguments).stdin(Stdio::null()).output()
        };
        let filter = format!("label={}", run_label());
        if let Ok(listed) = docker(&["ps", "--all", "--quiet", "--no-trunc", "--filter", &filter]) {
            let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
            let mut remove = vec!["rm", "--force", "--volumes"];
            remove.extend(listed.split_whitespace());
            if remove.len() > 3 {
                // A failure shows in `docker ps`.
                let _ = docker(&remove);
            }
        }
        // What still uses the image was reported as left behind.
        let _ = docker(&["image", "rm", "--force", &image_name()]);
    }
}

/// The label of all containers of this run.
fn run_label() -> String {
    format!("dev.conman.bench.run={}", std::process::id())
}

/// The name of this run's image in Docker.
pub(crate) fn image_name() -> String {
    format!("conman-bench:{}", std::process::id())
}

impl Docker {
    /// Checks that Docker answers, and imports this archive as the image.
    ///
    /// # Errors
    /// When Docker is missing or does not answer.
    pub(crate) async fn with_image(archive: &Path) -> Result<Self> {
        docker_command(&["version"])
            .await
            .context("Docker does not answer; install the package docker.io and start `dockerd`")?;
        let archive = archive.display().to_string();
        docker_command(&["import", &archive, &image_name()]).await?;
        Ok(Self {
            socket: PathBuf::from("/var/run/docker.sock"),
        })
    }

    /// Like [`Self::with_image`]; `None` if there is no Docker and the runtime does without.
    pub(crate) async fn for_runtime(runtime: RuntimeKind, archive: &Path) -> Result<Option<Self>> {
        match (runtime, Self::with_image(archive).await) {
            (RuntimeKind::Docker, Err(why)) => Err(why),
            (_, docker) => Ok(docker.ok()),
        }
    }

    /// Number of containers with a label: running ones, or all.
    pub(crate) async fn count(&self, label: &str, all: bool) -> Result<usize> {
        let filters = serde_json::json!({ "label": [label] }).to_string();
        let filters: String = filters.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let path = format!("/containers/json?all={}&filters={filters}", u8::from(all));
        let socket = format!("unix:{}", self.socket.display());
        let containers: Vec<serde_json::Value> =
            request_json(&socket, Method::GET, &path, None).await?;
        Ok(containers.len())
    }

    /// Waits until no container of a label runs, or exists.
    pub(crate) async fn wait_none(&self, label: &str, all: bool, patience: Duration) -> Result<()> {
        let gone = async {
            while self.count(label, all).await? > 0 {
                tokio::time::sleep(POLL).await;
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(patience, gone)
            .await
            .with_context(|| {
                format!(
                    "Docker still has containers of {label} after {} s",
                    patience.as_secs()
                )
            })?
    }

    /// The name of a runtime of Docker's that is gVisor, if there is one.
    pub(crate) async fn gvisor(&self) -> Result<Option<String>> {
        let listed = docker_command(&["info", "--format", "{{json .Runtimes}}"]).await?;
        let listed: serde_json::Value =
            serde_json::from_str(&listed).context("reading the runtimes of Docker")?;
        let runtimes = listed.as_object().into_iter().flatten();
        let mut gvisor = runtimes.filter(|(name, runtime)| {
            let path = runtime["path"].as_str().unwrap_or_default();
            name.contains("runsc") || path.ends_with("/runsc")
        });
        Ok(gvisor.next().map(|(name, _)| name.clone()))
    }

    /// Plain containers on Docker's bridge, below a separate cgroup, with more options of `docker run`.
    pub(crate) async fn run_plain(
        &self,
        label: &str,
        (cgroup, more): (&str, &[&str]),
        count: usize,
        progress: impl Fn(usize),
    ) -> Result<Vec<String>> {
        let mut ids = Vec::with_capacity(count);
        let options = [&["--cgroup-parent", cgroup][..], more].concat();
        let mut runs = stream::iter(0..count)
            .map(|_| self.run(label, &options, &["sleep", "1000000"]))
            .buffer_unordered(PARALLEL_RUNS);
        while let Some(id) = runs.try_next().await? {
            ids.push(id);
            progress(ids.len());
        }
        Ok(ids)
    }

    /// All containers of a label, running or not.
    pub(crate) async fn ids(&self, label: &str) -> Result<Vec<String>> {
        let filter = format!("label={label}");
        let listed =
            docker_command(&["ps", "--all", "--quiet", "--no-trunc", "--filter", &filter]).await?;
        Ok(listed.split_whitespace().map(str::to_owned).collect())
    }

    /// `docker kill` of all, in one command.
    pub(crate) async fn kill(&self, ids: &[String]) -> Result<()> {
        on_all(&["kill"], ids).await
    }

    /// `docker rm` of all, in one command.
    pub(crate) async fn remove(&self, ids: &[String]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        on_all(&["rm", "--force", "--volumes"], ids).await
    }

    /// A container's address on Docker's bridge.
    pub(crate) async fn address(&self, label: &str) -> Result<String> {
        let filter = format!("label={label}");
        let id = docker_command(&["ps", "--quiet", "--no-trunc", "--filter", &filter]).await?;
        let address = self
            .inspect(id.trim(), "{{.NetworkSettings.IPAddress}}")
            .await?;
        if address.is_empty() {
            bail!("the container of {label} has no address on Docker's bridge");
        }
        Ok(address)
    }

    /// A property of a container, by a template of `docker inspect`.
    pub(crate) async fn inspect(&self, id: &str, format: &str) -> Result<String> {
        let found = docker_command(&["inspect", "--format", format, id]).await?;
        Ok(found.trim().to_owned())
    }

    /// A container of the image with a label; its id.
    pub(crate) async fn run(
        &self,
        label: &str,
        options: &[&str],
        command: &[&str],
    ) -> Result<String> {
        let image = image_name();
        let run = run_label();
        let mut arguments = vec!["run", "--detach", "--label", label, "--label", &run];
        arguments.extend_from_slice(options);
        arguments.push(&image);
        arguments.extend_from_slice(command);
        let id = docker_command(&arguments).await?;
        Ok(id.trim().to_owned())
    }
}

async fn on_all(command: &[&str], ids: &[String]) -> Result<()> {
    let arguments: Vec<&str> = command
        .iter()
        .copied()
        .chain(ids.iter().map(String::as_str))
        .collect();
    docker_command(&arguments).await.map(drop)
}

async fn docker_command(arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("docker");
    command
        .args(arguments)
        // The benchmark handles Ctrl-C at the terminal.
        .process_group(0)
        .stdin(Stdio::null());
    let output = run_to_end(async move { command.output().await })
        .await
        .context("starting the docker command; is it installed?")?;
    if !output.status.success() {
        let shown = arguments
            .iter()
            .take(4)
            .copied()
            .collect::<Vec<_>>()
            .join(" ");
        bail!(
            "`docker {shown}` failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout).context("reading docker's answer")
}
