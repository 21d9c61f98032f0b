//! The fleet of a way: hosts, etcd, HAProxy, and the nodes of that way.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_cluster::overlap::{CALM, journal};
use conman_cluster::{Balancer, Cluster, Engine, Forward, Layout, Ready};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http::Method;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::Way;
use super::old::Claims;
use crate::arguments::Storming;
use crate::http_client::Connection;

/// Bound on everything that must happen.
const PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(10);
/// Starts at a time.
const STARTS: usize = 8;

pub(super) struct Fleet {
    way: Way,
    /// This program, as a node of the old way.
    program: PathBuf,
    /// The nodes of the old way.
    old: Mutex<Vec<Option<Child>>>,
    /// From the machine to each of them.
    doors: Vec<Forward>,
    balancer: Balancer,
    engines: Vec<Engine>,
    cluster: Cluster,
}

impl Fleet {
    pub(super) async fn start(
        way: Way,
        conman: &Path,
        options: &Storming,
        ready: &Ready,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let builder = builder(conman, options)?;
        let builder = match way {
            Way::Old | Way::OldHold => builder.bare().docker_each(),
            Way::Docker => builder.docker_each(),
            Way::Native => builder,
        };
        let cluster = Cluster::start(&builder, ready, &program).await?;
        let balancer = Balancer::start(cluster.layout())?;
        let (any, [_, sessions]) = ((Ipv4Addr::LOCALHOST, 0).into(), Layout::listeners());
        let hosts = cluster.layout().node_hosts().into_iter();
        let doors = hosts.map(|host| {
            let namespace = cluster.layout().namespace_path(&host.name);
            Forward::open(&namespace, &[(any, sessions)])
        });
        let fleet = Self {
            way,
            program,
            old: Mutex::new((0..options.nodes).map(|_| None).collect()),
            doors: doors.collect::<Result<_>>()?,
            balancer,
            engines: cluster.engines(),
            cluster,
        };
        for node in 0..options.nodes {
            fleet.begin(node)?;
        }
        for node in 0..options.nodes {
            fleet.is_balanced(node).await?;
        }
        Ok(fleet)
    }

    pub(super) fn layout(&self) -> &Layout {
        self.cluster.layout()
    }

    /// Where clients connect.
    pub(super) fn front(&self) -> SocketAddr {
        self.balancer.address()
    }

    /// Lets conman know the sessions, on all nodes in turn. A node of the old way starts what a client asks for.
    pub(super) async fn open(&self, ids: &[String]) -> Result<()> {
        let nodes = self.cluster.nodes();
        let open = |(number, id): (usize, &String)| {
            // A label would tie the session to the node.
            let body = json!({ "template": CALM });
            let path = format!("/v1/sessions/{id}");
            async move {
                let answer = nodes[number % nodes.len()].api().put(&path, &body).await;
                ensure!(answer.status.is_success(), "{path}: {}", answer.text());
                anyhow::Ok(())
            }
        };
        if nodes.is_empty() {
            return Ok(());
        }
        let all = stream::iter(ids.iter().enumerate()).map(open);
        all.buffer_unordered(STARTS).try_collect().await
    }

    /// Tells a node that its machine will be gone.
    pub(super) async fn notice(&self, node: usize) -> Result<()> {
        if self.way.is_conman() {
            let body = json!({ "reason": "a storm" });
            let path = "/v1/nodes/self/preempt";
            let answer = self.cluster.nodes()[node].admin().post(path, &body).await;
            ensure!(answer.status.is_success(), "{}", answer.text());
            return Ok(());
        }
        let door = self.doors[node].addresses()[0];
        let mut node = Connection::open(&door.to_string()).await?;
        node.done(Method::POST, "/notice").await
    }

    /// The machine of a node is gone.
    pub(super) async fn lose(&self, node: usize) -> Result<()> {
        tokio::task::block_in_place(|| {
            if self.way.is_conman() {
                self.cluster.nodes()[node].lose()?;
            } else {
                self.kill_old(node)?;
            }
            let engine = self.engines.get(node);
            engine.map_or(Ok(()), Engine::lose)
        })?;
        if !self.way.is_conman() {
            self.claims()?.release_all(&name(node)).await?;
        }
        Ok(())
    }

    /// A machine in its place, under the same name. Returns when HAProxy sends it clients.
    pub(super) async fn replace(&self, node: usize) -> Result<()> {
        if let Some(engine) = self.engines.get(node) {
            tokio::task::block_in_place(|| engine.start())?;
        }
        self.begin(node)?;
        if self.way.is_conman() {
            let conman = &self.cluster.nodes()[node];
            conman.start()?;
            until("a node is readmitted", async || {
                let admin = conman.admin();
                let path = "/v1/nodes/self/readmit";
                let answer = admin.try_send(Method::POST, path, None).await;
                answer.is_ok_and(|answer| answer.status.is_success())
            })
            .await?;
            conman.wait_ready().await?;
        }
        self.is_balanced(node).await
    }

    /// How long `count` plain `docker run`s take on one node, in seconds.
    pub(super) async fn bare_runs(&self, count: usize) -> Result<f64> {
        let engine = self.engines.first().context("a Docker Engine")?;
        let (host, cgroup) = (engine.socket(), engine.cgroup());
        let host = format!("unix://{}", host.display());
        let docker = |words: Vec<String>| {
            let mut command = tokio::process::Command::new("docker");
            command.args(["--host", &host]).args(words);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            async move {
                let output = command.output().await.context("starting docker")?;
                ensure!(output.status.success(), "docker failed: {}", output.status);
                anyhow::Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
            }
        };
        let run = ["run", "--detach", "--init", "--cgroup-parent", &cgroup];
        let run = run
            .into_iter()
            .chain([conman_cluster::IMAGE, "sleep", "1000000"]);
        let run: Vec<String> = run.map(str::to_owned).collect();
        let begun = Instant::now();
        let ids: Vec<String> = stream::iter(0..count)
            .map(|_| docker(run.clone()))
            .buffer_unordered(STARTS)
            .try_collect()
            .await?;
        let took_s = begun.elapsed().as_secs_f64();
        let remove = ["rm", "--force"].map(str::to_owned).into_iter();
        docker(remove.chain(ids).collect()).await?;
        Ok(took_s)
    }

    /// Starts the process of a node of the old way.
    fn begin(&self, node: usize) -> Result<()> {
        if self.way.is_conman() {
            return Ok(());
        }
        let (layout, engine) = (self.layout(), &self.engines[node]);
        let [_, listen] = Layout::listeners();
        let mut command = layout.command(&name(node), &self.program);
        command.args(["old-node", "--name", &name(node)]);
        command.args(["--listen", &listen.to_string()]);
        for (index, host) in layout.node_hosts().iter().enumerate() {
            if index != node {
                let door = SocketAddr::from((host.address, listen.port()));
                command.args(["--peer", &format!("{}={door}", host.name)]);
            }
        }
        let member = self.cluster.members().first().context("a member of etcd")?;
        command.args(["--etcd", &member.host().etcd().to_string()]);
        command.arg("--docker").arg(engine.socket());
        command.args([
            "--image",
            conman_cluster::IMAGE,
            "--cgroup",
            &engine.cgroup(),
        ]);
        let journal = journal(layout);
        let shared = journal.parent().context("a file lies in a folder")?;
        let bind = format!("{}:/shared", shared.display());
        command.args(["--bind", &bind]);
        command.args((self.way == Way::OldHold).then_some("--hold"));
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting a node of the old way")?;
        self.old()[node] = Some(child);
        Ok(())
    }

    fn kill_old(&self, node: usize) -> Result<()> {
        if let Some(mut child) = self.old()[node].take() {
            child.kill().context("killing a node of the old way")?;
            child.wait().context("waiting for a node of the old way")?;
        }
        Ok(())
    }

    /// No panic can happen while it is held.
    fn old(&self) -> std::sync::MutexGuard<'_, Vec<Option<Child>>> {
        self.old.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claims(&self) -> Result<Claims> {
        let member = self.cluster.members().first().context("a member of etcd")?;
        Ok(Claims::new(member.address()))
    }

    /// Waits until HAProxy sends the node clients.
    async fn is_balanced(&self, node: usize) -> Result<()> {
        let name = name(node);
        until(&format!("HAProxy takes {name} for UP"), async || {
            let status = self.balancer.status(&name);
            status.is_ok_and(|status| status.starts_with("UP"))
        })
        .await
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in self.old().iter_mut().flatten() {
            // The namespace's processes are killed in any case.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What the fleets of all ways have in common.
pub(super) fn builder(conman: &Path, options: &Storming) -> Result<conman_cluster::Builder> {
    let agent = SocketAddr::from((Ipv4Addr::LOCALHOST, conman_cluster::AGENT_PORT));
    let nodes = u8::try_from(options.nodes).context("too many nodes")?;
    let members = u8::try_from(options.members).context("too many members")?;
    let budget_ms = options.budget().as_millis();
    Ok(Cluster::builder()
        .binary(conman)
        .nodes(nodes)
        .members(members)
        .set("listen", &format!("agent = \"{agent}\""))
        .set("preempt", &format!("budget_ms = {budget_ms}"))
        .set("limits", "max_sessions = 1000"))
}

fn name(node: usize) -> String {
    format!("n{}", node + 1)
}

/// Looks until it is so.
pub(super) async fn until(what: &str, mut look: impl AsyncFnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !look().await {
        if Instant::now() > deadline {
            bail!("waited {PATIENCE:?} in vain for this: {what}");
        }
        sleep(POLL).await;
    }
    Ok(())
}
