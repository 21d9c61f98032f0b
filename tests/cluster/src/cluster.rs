//! A running cluster of a test's.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_e2e::IdRange;
use conman_linux::{ProcessIdentity, Signal};
use conman_observer::slowness;
use tokio::time::{Instant, sleep};

use crate::builder::{Builder, begin, import, log_tail};
use crate::cut::{self, Cut};
use crate::docker;
use crate::engine::Engine;
use crate::etcd::Member;
use crate::layout::Layout;
use crate::leftovers;
use crate::network;
use crate::node::Node;
use crate::requirements::Ready;
use crate::slots::Turn;

/// Where a client's settings could come from.
pub(crate) const CLIENT_VARIABLES: [&str; 3] = ["CONMAN_URL", "CONMAN_SOCKET", "CONMAN_TOKEN_FILE"];

/// Bound on an election, on a loaded machine.
const ELECTION: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// Lines of a log that a failed test prints.
const TAIL: usize = 80;

/// Nodes and members of etcd on hosts of their own; all of it goes when this is dropped.
#[derive(Debug)]
pub struct Cluster {
    // Daemons and members end before what they stand on is removed.
    nodes: Vec<Node>,
    members: Vec<Member>,
    ground: Ground,
}

/// What is removed last.
#[derive(Debug)]
struct Ground {
    layout: Arc<Layout>,
    ids: Vec<IdRange>,
    _turn: Turn,
}

impl Cluster {
    /// What a cluster is to be like.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Makes one and waits until every node is ready.
    ///
    /// `witness` is the program of the same name, of this package.
    ///
    /// # Errors
    /// When something of it cannot be made, or does not become ready.
    pub async fn start(builder: &Builder, ready: &Ready, witness: &Path) -> Result<Self> {
        let cluster = Self::start_cold(builder, ready, witness).await?;
        for node in &cluster.nodes {
            node.wait_ready().await?;
        }
        Ok(cluster)
    }

    /// The same without the wait for ready nodes; they have their images nevertheless.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_cold(builder: &Builder, ready: &Ready, witness: &Path) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let turn = Turn::take().await?;
        leftovers::sweep()?;
        let pid = std::process::id();
        let tag = format!("{pid}-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let (mut layout, ids) = begin(builder, tag, builder.conman())?;
        let own = i32::try_from(pid).context("a process id")?;
        layout.owner = Some(ProcessIdentity::of(own).context("this process")?);
        layout.save()?;
        let layout = Arc::new(layout);
        let mut cluster = Self {
            nodes: Vec::new(),
            members: Vec::new(),
            ground: Ground {
                layout: Arc::clone(&layout),
                ids,
                _turn: turn,
            },
        };
        network::make(&layout)?;
        let archive = builder.prepare(&layout, &ready.native, witness)?;
        for host in layout.member_hosts() {
            let arguments = builder.arguments(&layout, &host);
            let member = Member::new(&layout, host, arguments)?;
            member.start()?;
            cluster.members.push(member);
        }
        if !cluster.members.is_empty() {
            cluster.leader().await?;
        }
        if builder.bare {
            return Ok(cluster);
        }
        for (index, host) in layout.node_hosts().into_iter().enumerate() {
            let node = Node::new(&layout, index, host)?;
            node.start()?;
            cluster.nodes.push(node);
        }
        for node in &cluster.nodes {
            node.wait_ready().await?;
            import(&layout, node.name(), &archive)?;
        }
        Ok(cluster)
    }

    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.ground.layout
    }

    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The Docker Engine of each node, where [each has one](Builder::docker_each).
    #[must_use]
    pub fn engines(&self) -> Vec<Engine> {
        let layout = &self.ground.layout;
        let hosts = layout.node_hosts().into_iter();
        let engines = hosts.map(|host| Engine::new(layout, host));
        engines.filter(|_| layout.docker_each).collect()
    }

    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The index of the member that leads, once one does.
    ///
    /// # Errors
    /// When none does in time.
    pub async fn leader(&self) -> Result<usize> {
        let patience = ELECTION * slowness();
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            for (index, member) in self.members.iter().enumerate() {
                if member.leads().await == Some(true) {
                    return Ok(index);
                }
            }
            sleep(POLL).await;
        }
        bail!("etcd has no leader after {patience:?}")
    }

    /// Loses packets from now on.
    ///
    /// # Errors
    /// When nftables refuses.
    pub fn cut(&self, cut: &Cut) -> Result<()> {
        cut.make(self.layout())
    }

    /// Takes one cut back; others stay, even those of the same packets.
    ///
    /// # Errors
    /// When it was not made, or nftables refuses.
    pub fn mend(&self, cut: &Cut) -> Result<()> {
        cut.mend(self.layout())
    }

    /// Takes a node's link away: no packet leaves or reaches its address any more.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unplug(&self, node: usize) -> Result<()> {
        network::set_link(self.layout(), self.nodes[node].name(), false)
    }

    /// Gives it back.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn plug(&self, node: usize) -> Result<()> {
        network::set_link(self.layout(), self.nodes[node].name(), true)
    }

    /// Cuts a node off every etcd member, in both directions.
    ///
    /// # Errors
    /// When nftables refuses.
    pub fn cut_from_etcd(&self, node: usize) -> Result<()> {
        for member in &self.members {
            let (one, other) = (self.nodes[node].host(), member.host());
            self.cut(&Cut::Between(one.clone(), other.clone()))?;
        }
        Ok(())
    }

    /// Sends the cluster's own Docker a signal.
    ///
    /// # Errors
    /// When there is none.
    pub fn signal_docker(&self, signal: Signal) -> Result<()> {
        let sent = docker::signal(self.layout(), signal)?;
        ensure!(sent, "the cluster has no Docker of its own that runs");
        Ok(())
    }

    /// What the cluster's own Docker answers to a command of `docker`.
    ///
    /// # Errors
    /// When it refuses, or there is none.
    pub fn ask_docker(&self, words: &[&str]) -> Result<String> {
        docker::ask(self.layout(), words)
    }

    /// SIGKILL to the cluster's own Docker; its containers live on.
    ///
    /// # Errors
    /// When it does not die.
    pub fn kill_docker(&self) -> Result<()> {
        docker::kill(self.layout())
    }

    /// Starts it again.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn start_docker(&self) -> Result<()> {
        let layout = Arc::clone(&self.ground.layout);
        let started = tokio::task::spawn_blocking(move || docker::start(&layout));
        started.await.context("a thread ended")?
    }

    /// Takes every cut back.
    ///
    /// # Errors
    /// When nftables refuses.
    pub fn heal(&self) -> Result<()> {
        cut::heal(self.layout())
    }
}

impl Drop for Ground {
    #[expect(clippy::print_stderr, reason = "what cannot be removed must be told")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in self.layout.node_hosts() {
                let tail = log_tail(&self.layout, &host.name, TAIL);
                eprintln!("--- the log of {} ends with\n{tail}\n---", host.name);
            }
        }
        match leftovers::remove(&self.layout) {
            Err(error) if std::thread::panicking() => {
                eprintln!("a cluster was left behind: {error:#}");
            }
            // A test that leaves something on the machine has failed.
            Err(error) => panic!("a cluster was left behind: {error:#}"),
            Ok(()) => {}
        }
        for ids in &self.ids {
            ids.wait_until_unused();
        }
    }
}
