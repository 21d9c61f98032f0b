use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::process::Command;

use crate::BUSYBOX_IMAGE;
use crate::http_client::json_over_unix;

/// Concurrent `docker run` while a benchmark is prepared.
const PARALLEL_RUNS: usize = 8;
const POLL: Duration = Duration::from_millis(50);

/// Docker as its users use it: the command line, and the API for queries.
#[derive(Debug)]
pub(crate) struct Docker {
    socket: PathBuf,
}

impl Docker {
    /// Checks that Docker answers and has the image.
    pub(crate) async fn new(image: &str) -> Result<Self> {
        let docker = Self {
            socket: PathBuf::from("/var/run/docker.sock"),
        };
        docker_command(&["version"]).await.context(
            "Docker does not answer; `cargo xtask setup` in conman's repository installs and starts it",
        )?;
        docker_command(&["image", "inspect", image]).await.with_context(|| {
            format!("the image {image} is missing; `cargo xtask setup` in conman's repository makes it")
        })?;
        Ok(docker)
    }

    /// Number of containers with a label: running ones, or all.
    pub(crate) async fn count(&self, label: &str, all: bool) -> Result<usize> {
        let filters = serde_json::json!({ "label": [label] }).to_string();
        let filters: String = filters.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let path = format!("/containers/json?all={}&filters={filters}", u8::from(all));
        let containers: Vec<serde_json::Value> = json_over_unix(&self.socket, &path).await?;
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

    /// Plain containers on Docker's bridge, below a separate cgroup.
    pub(crate) async fn run_plain(
        &self,
        label: &str,
        cgroup: &str,
        count: usize,
        progress: impl Fn(usize),
    ) -> Result<Vec<String>> {
        let mut ids = Vec::with_capacity(count);
        let mut runs = stream::iter(0..count)
            .map(|_| async move {
                let arguments = [
                    "run",
                    "--detach",
                    "--init",
                    "--label",
                    label,
                    "--cgroup-parent",
                    cgroup,
                    BUSYBOX_IMAGE,
                    "sleep",
                    "1000000",
                ];
                docker_command(&arguments)
                    .await
                    .map(|output| output.trim().to_owned())
            })
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
        on_all(&["rm", "--force", "--volumes"], ids).await
    }

    /// A container's address on Docker's bridge.
    pub(crate) async fn address(&self, label: &str) -> Result<String> {
        let filter = format!("label={label}");
        let id = docker_command(&["ps", "--quiet", "--no-trunc", "--filter", &filter]).await?;
        let format = "{{.NetworkSettings.IPAddress}}";
        let address = docker_command(&["inspect", "--format", format, id.trim()]).await?;
        let address = address.trim();
        if address.is_empty() {
            bail!("the container of {label} has no address on Docker's bridge");
        }
        Ok(address.to_owned())
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
    let output = Command::new("docker")
        .args(arguments)
        // The benchmark handles Ctrl-C at the terminal.
        .process_group(0)
        .stdin(Stdio::null())
        .output()
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
