//! The steps.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use conman_cluster::Cut;
use conman_proto::{DrainReport, DrainState, PreemptReport};
use http::StatusCode;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::Storm;

const QUORUM_LOST: Duration = Duration::from_secs(20);
const QUORUM_LOST_SHORT: Duration = Duration::from_secs(5);
/// How long etcd is without the member that led.
const WITHOUT_LEADER: Duration = Duration::from_secs(5);
/// How long a node stays cordoned.
const CORDONED: Duration = Duration::from_secs(5);

/// What happens to the fleet; a number names the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A preemption, after which the node is switched off.
    Preempt(usize),
    /// A drain, after which the node is switched off.
    Drain(usize),
    Cordon(usize),
    /// SIGTERM to the daemon with `preempt.on_sigterm = "leave"`, and a new daemon.
    Restart(usize),
    /// SIGKILL to the daemon, and a new one.
    Kill(usize),
    /// The node disappears without a word, but HAProxy notices at once that its connections end.
    Lose(usize),
    /// The node loses its power: no connection ends.
    PowerCut(usize),
    EtcdLeaderLost,
    QuorumLost(Duration),
}

impl Step {
    pub(super) fn all(nodes: usize, short: bool) -> Vec<Self> {
        let (preemptions, drains, losses) = if short { (1, 1, 1) } else { (10, 3, 2) };
        let preemptions = (0..preemptions).map(|number| Self::Preempt(number % nodes));
        let drains = (0..drains).map(|number| Self::Drain((number + 1) % nodes));
        let losses = (0..losses).flat_map(|number| {
            [
                Self::Lose((number + 2) % nodes),
                Self::PowerCut(number % nodes),
            ]
        });
        let quorum_lost = if short {
            QUORUM_LOST_SHORT
        } else {
            QUORUM_LOST
        };
        preemptions
            .chain(drains)
            .chain([Self::Cordon(0)])
            .chain((0..nodes).map(Self::Restart))
            .chain((0..nodes).map(Self::Kill))
            .chain(losses)
            .chain([Self::EtcdLeaderLost, Self::QuorumLost(quorum_lost)])
            .collect()
    }

    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Preempt(_) => "preemption, then off",
            Self::Drain(_) => "drain, then off",
            Self::Cordon(_) => "cordon and uncordon",
            Self::Restart(_) => "restart of the daemon",
            Self::Kill(_) => "SIGKILL of the daemon",
            Self::Lose(_) => "loss of a node",
            Self::PowerCut(_) => "power cut of a node",
            Self::EtcdLeaderLost => "loss of etcd's leader",
            Self::QuorumLost(_) => "loss of etcd's quorum",
        }
    }

    /// Whether clients must see nothing but 1012.
    pub(super) fn is_planned(self) -> bool {
        match self {
            Self::Preempt(_) | Self::Drain(_) | Self::Cordon(_) | Self::Restart(_) => true,
            Self::Kill(_)
            | Self::Lose(_)
            | Self::PowerCut(_)
            | Self::EtcdLeaderLost
            | Self::QuorumLost(_) => false,
        }
    }

    /// Whether sessions move in good order.
    pub(super) fn moves(self) -> bool {
        matches!(self, Self::Preempt(_) | Self::Drain(_))
    }

    /// Carries it out. Returns after what time every client was served again, for a loss.
    pub(super) async fn run(self, storm: &Storm) -> Result<Option<Duration>> {
        match self {
            Self::Preempt(node) => preempt(storm, node).await?,
            Self::Drain(node) => drain(storm, node).await?,
            Self::Cordon(node) => {
                order(storm, node, "cordon").await?;
                sleep(CORDONED).await;
                order(storm, node, "uncordon").await?;
                storm.is_balanced(node).await?;
            }
            Self::Restart(node) => {
                storm.node(node).end_daemon().await?;
                storm.returns(node, None).await?;
            }
            Self::Kill(node) => {
                tokio::task::block_in_place(|| storm.node(node).kill_daemon())?;
                storm.returns(node, None).await?;
            }
            Self::Lose(node) => return lose(storm, node).await.map(Some),
            Self::PowerCut(node) => return cut_power(storm, node).await.map(Some),
            Self::EtcdLeaderLost => {
                let leader = storm.cluster.leader().await?;
                let member = &storm.cluster.members()[leader];
                tokio::task::block_in_place(|| member.kill())?;
                sleep(WITHOUT_LEADER).await;
                member.start()?;
                storm.cluster.leader().await?;
            }
            Self::QuorumLost(lasts) => {
                // All but one: never a majority of several.
                let members = storm.cluster.members();
                let members = &members[..members.len().div_ceil(2)];
                for member in members {
                    tokio::task::block_in_place(|| member.kill())?;
                }
                sleep(lasts).await;
                for member in members {
                    member.start()?;
                }
                storm.cluster.leader().await?;
                for node in storm.cluster.nodes() {
                    node.wait_ready().await?;
                }
            }
        }
        Ok(None)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.kind())?;
        match self {
            Self::Preempt(node)
            | Self::Drain(node)
            | Self::Cordon(node)
            | Self::Restart(node)
            | Self::Kill(node)
            | Self::Lose(node)
            | Self::PowerCut(node) => write!(formatter, " (n{})", node + 1),
            Self::EtcdLeaderLost | Self::QuorumLost(_) => Ok(()),
        }
    }
}

async fn order(storm: &Storm, node: usize, what: &str) -> Result<()> {
    let path = format!("/v1/nodes/self/{what}");
    let answer = storm.node(node).admin().post(&path, &json!({})).await;
    ensure!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

async fn preempt(storm: &Storm, node: usize) -> Result<()> {
    let gone = storm.sessions_on(node).await;
    let body = json!({"reason": "a storm"});
    let admin = storm.node(node).admin();
    let answer = admin.post("/v1/nodes/self/preempt", &body).await;
    ensure!(answer.status.is_success(), "{}", answer.text());
    let report: PreemptReport =
        serde_json::from_slice(&answer.body).context("cannot understand a preemption's report")?;
    ensure!(
        report.through == 0 && report.unreleased.is_empty(),
        "not safe to switch off: {report:?}"
    );
    switch_off(storm, node, &gone).await?;
    storm.returns(node, Some("readmit")).await
}

async fn drain(storm: &Storm, node: usize) -> Result<()> {
    let gone = storm.sessions_on(node).await;
    order(storm, node, "drain").await?;
    let admin = storm.node(node).admin();
    let mut report: Option<DrainReport> = None;
    storm
        .until("the node is drained", async || {
            let answer = admin.get("/v1/nodes/self/drain").await;
            let now: DrainReport = answer.expect(StatusCode::OK);
            let is_drained = now.state == DrainState::Drained;
            report = Some(now);
            is_drained
        })
        .await?;
    ensure!(
        report
            .as_ref()
            .is_some_and(|report| report.through == 0 && report.remaining == 0),
        "not safe to switch off: {report:?}"
    );
    switch_off(storm, node, &gone).await?;
    storm.returns(node, Some("undrain")).await
}

async fn switch_off(storm: &Storm, node: usize, gone: &BTreeMap<String, u64>) -> Result<()> {
    let name = storm.node(node).name();
    let status = storm.balancer.status(name)?;
    ensure!(
        !status.starts_with("UP"),
        "{name} is not safe to switch off: HAProxy takes it for {status}"
    );
    tokio::task::block_in_place(|| storm.node(node).lose())?;
    storm.all_are_served(gone).await.map(drop)
}

/// No packet leaves or arrives any more, so that nobody is notified; then all of it is dead.
async fn lose(storm: &Storm, node: usize) -> Result<Duration> {
    let gone = storm.sessions_on(node).await;
    let own = storm.node(node).host().clone();
    let others = storm.cluster.layout().hosts().into_iter();
    let cuts: Vec<Cut> = others
        .filter(|other| *other != own)
        .map(|other| Cut::Between(own.clone(), other))
        .collect();
    for cut in &cuts {
        storm.cluster.cut(cut)?;
    }
    // Until the last cut it could renew its ownership.
    let lost_at = Instant::now();
    tokio::task::block_in_place(|| storm.node(node).lose())?;
    let served_at = storm.all_are_served(&gone).await?;
    for cut in &cuts {
        storm.cluster.mend(cut)?;
    }
    storm.returns(node, None).await?;
    Ok(served_at.duration_since(lost_at))
}

/// The link is taken away first, so that HAProxy and clients see no end of their connections either.
async fn cut_power(storm: &Storm, node: usize) -> Result<Duration> {
    let gone = storm.sessions_on(node).await;
    storm.cluster.unplug(node)?;
    let lost_at = Instant::now();
    tokio::task::block_in_place(|| storm.node(node).lose())?;
    // Clients of sessions elsewhere are silent until HAProxy closes them.
    let name = storm.node(node).name();
    storm
        .until("HAProxy closes the clients of the node", async || {
            storm.balancer.connections(name).is_ok_and(|open| open == 0)
        })
        .await?;
    let served_at = storm.all_are_served(&gone).await?;
    storm.cluster.plug(node)?;
    storm.returns(node, None).await?;
    Ok(served_at.duration_since(lost_at))
}
