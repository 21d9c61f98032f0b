//! What sessions of a runtime are compared with: containers of Docker, with gVisor for gVisor's sessions if Docker has
//! it, or else of the OCI runtime by itself.

mod oci;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use conman_proto::RuntimeKind;

pub(crate) use oci::{Network, Oci, OciContainers};

use crate::docker::Docker;
use crate::http_client::Connection;
use crate::image;

/// Limits of every session and of every container that it is compared with.
pub(crate) const MEMORY_BYTES: u64 = 64 << 20;
pub(crate) const CPUS: f64 = 0.5;
pub(crate) const PIDS: u32 = 32;

/// Bound on the first answer of a container.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(1);

/// The kind of containers that sessions are compared with.
#[derive(Debug, Clone)]
pub(crate) enum Plain {
    /// With this runtime of Docker's, or its default.
    Docker(Option<String>),
    Oci(Oci),
}

impl Plain {
    /// Those for sessions of a runtime.
    ///
    /// # Errors
    /// When this machine has none of them: why not.
    pub(crate) async fn of(runtime: RuntimeKind, docker: Option<&Docker>) -> Result<Self> {
        let is_gvisor = runtime == RuntimeKind::Gvisor;
        let oci = if is_gvisor { Oci::Runsc } else { Oci::Crun };
        match docker {
            Some(_) if !is_gvisor => return Ok(Self::Docker(None)),
            Some(docker) => {
                if let Some(name) = docker.gvisor().await? {
                    return Ok(Self::Docker(Some(name)));
                }
            }
            None => {}
        }
        match oci.missing() {
            None => Ok(Self::Oci(oci)),
            Some(why) => bail!("nothing to compare with: {why}"),
        }
    }

    pub(crate) fn name(&self) -> String {
        match self {
            Self::Docker(None) => "Docker".to_owned(),
            Self::Docker(Some(runtime)) => format!("Docker with {runtime}"),
            Self::Oci(oci) => format!("{} alone", oci.program()),
        }
    }

    /// The arguments of `docker run` that choose the runtime.
    pub(crate) fn docker_arguments(&self) -> Vec<&str> {
        match self {
            Self::Docker(Some(runtime)) => vec!["--runtime", runtime.as_str()],
            Self::Docker(None) | Self::Oci(_) => Vec::new(),
        }
    }
}

/// Waits for the page of a web server that is starting.
pub(crate) async fn first_answer(address: &str) -> Result<()> {
    let asked = async {
        loop {
            if let Ok(mut connection) = Connection::open(address).await
                && connection
                    .text("/")
                    .await
                    .is_ok_and(|page| page == image::PAGE)
            {
                return;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(ANSWER_PATIENCE, asked)
        .await
        .with_context(|| format!("{address} does not answer"))
}

/// How long containers take from the command to their first answer, one after the other, in milliseconds.
pub(crate) async fn starts(
    plain: &Plain,
    docker: Option<&Docker>,
    root: &Path,
    count: usize,
) -> Result<Vec<f64>> {
    match plain {
        Plain::Docker(_) => {
            let docker = docker.context("Docker does not run")?;
            let label = format!("dev.conman.bench=start-{}", std::process::id());
            let times = docker_starts(plain, docker, &label, count).await;
            docker.remove(&docker.ids(&label).await?).await?;
            times
        }
        Plain::Oci(oci) => {
            let mut containers = OciContainers::new(*oci, Network::Host, root, "start")?;
            let times = oci_starts(&mut containers, count).await;
            containers.remove().await;
            times
        }
    }
}

/// As its users start one: with a published port, and limits.
async fn docker_starts(
    plain: &Plain,
    docker: &Docker,
    label: &str,
    count: usize,
) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let [port] = crate::daemon::free_ports()?;
        let (memory, pids, cpus) = (MEMORY_BYTES.to_string(), PIDS.to_string(), CPUS.to_string());
        let published = format!("127.0.0.1:{port}:8080");
        let mut options = plain.docker_arguments();
        options.extend(["--memory", &memory, "--pids-limit", &pids, "--cpus", &cpus]);
        options.extend(["--publish", &published]);
        let begun = Instant::now();
        let id = docker.run(label, &options, &image::COMMAND).await?;
        first_answer(&format!("127.0.0.1:{port}")).await?;
        times.push(crate::kill::milliseconds(begun.elapsed()));
        docker.remove(&[id]).await?;
    }
    Ok(times)
}

async fn oci_starts(containers: &mut OciContainers, count: usize) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let [port] = crate::daemon::free_ports()?;
        let address = format!("127.0.0.1:{port}");
        let begun = Instant::now();
        containers
            .run(&["httpd", "-f", "-p", &address, "-h", "/srv"])
            .await?;
        first_answer(&address).await?;
        times.push(crate::kill::milliseconds(begun.elapsed()));
        containers.remove().await;
    }
    Ok(times)
}

/// Neither Docker nor an OCI runtime removes a cgroup that it was given; this one is empty at this point.
pub(crate) fn remove_cgroups(mark: &str) {
    if let Ok(cgroups) = conman_linux::Cgroups::detect() {
        // At worst an empty folder in a pseudo file system stays, which is no failure.
        let _ = cgroups.remove_tree(&format!("/{mark}"));
    }
}
