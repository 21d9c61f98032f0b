//! Every way in which a node leaves or is lost, one after the other, and what clients see of each.

mod report;
mod steps;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_cluster::overlap::{CALM as CALM_WITNESS, Tail, journal};
use conman_cluster::{Balancer, Cluster, Node, Ready};
use conman_proto::SessionList;
use http::{Method, StatusCode};
use serde_json::json;
use tokio::time::{Instant, sleep};

use self::report::EveryWay;
use self::steps::Step;
use super::clients::Clients;
use super::{fleet, tell};
use crate::arguments::Storming;
use crate::report::Report;

/// A client's patience with a handshake: longer than any node is replaced.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Bound on everything that must happen, beyond the takeover time.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Between two steps.
const CALM: Duration = Duration::from_secs(1);

/// Makes a fleet behind HAProxy, and takes it through all steps.
///
/// # Errors
/// When a fleet cannot be made, or does not recover from a step.
pub(super) async fn run(conman: &Path, options: &Storming, ready: &Ready) -> Result<Report> {
    let short = options.short;
    tell("making members of etcd, nodes and HAProxy");
    let builder = fleet::builder(conman, options)?;
    let program = std::env::current_exe().context("finding this program")?;
    let cluster = Cluster::start(&builder, ready, &program).await?;
    let balancer = Balancer::start(cluster.layout())?;
    let storm = Storm {
        clients: Clients::new(balancer.address(), ATTEMPT),
        cluster,
        balancer,
    };
    for node in 0..options.nodes {
        storm.is_balanced(node).await?;
    }
    tell(&format!(
        "starting {} sessions and their clients",
        options.sessions
    ));
    let ids = storm.start_sessions(options.sessions).await?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    storm.clients.connect(&ids, &mut random);
    let mut tail = Tail::open(&journal(storm.cluster.layout()))?;
    storm.all_are_served(&BTreeMap::new()).await?;
    sleep(CALM).await;

    let mut report = EveryWay::new(options.sessions, builder.timing().takeover_ms);
    for step in Step::all(options.nodes, short) {
        storm.clients.begin_step();
        let began = Instant::now();
        let served_after = step.run(&storm).await.with_context(|| step.to_string())?;
        storm
            .all_are_served(&BTreeMap::new())
            .await
            .with_context(|| step.to_string())?;
        sleep(CALM).await;
        let seen = storm.clients.end_step();
        tell(&report.add(step, began.elapsed(), served_after, seen));
    }
    report.judge(&tail.catch_up()?);
    report.finish()
}

/// A fleet behind HAProxy, and its clients.
struct Storm {
    clients: Clients,
    cluster: Cluster,
    balancer: Balancer,
}

impl Storm {
    fn node(&self, node: usize) -> &Node {
        &self.cluster.nodes()[node]
    }

    /// Sessions on all nodes in turn.
    async fn start_sessions(&self, count: usize) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        for number in 0..count {
            let id = format!("w{number}");
            let node = self.node(number % self.cluster.nodes().len());
            // A label would tie the session to the node.
            let body = json!({"template": CALM_WITNESS});
            let answer = node.api().put(&format!("/v1/sessions/{id}"), &body).await;
            ensure!(answer.status.is_success(), "{id}: {}", answer.text());
            ids.push(id);
        }
        Ok(ids)
    }

    /// Returns the sessions of a node, with their generations. A session's environment does not show where
    /// it is: it stays that of the node that made the session.
    async fn sessions_on(&self, node: usize) -> BTreeMap<String, u64> {
        let path = format!("/v1/sessions?limit=1000&node={}", self.node(node).name());
        let answer = self.node(node).admin().get(&path).await;
        let list = answer.expect::<SessionList>(StatusCode::OK).sessions;
        let ids = list.into_iter();
        ids.map(|one| (one.id.to_string(), one.generation.get()))
            .collect()
    }

    /// Waits until every client is connected to a session, and none to one of `gone`, which have ended.
    /// Returns when that was.
    async fn all_are_served(&self, gone: &BTreeMap<String, u64>) -> Result<Instant> {
        let what = "every client is served";
        self.until(what, async || self.clients.are_served(gone))
            .await?;
        Ok(Instant::now())
    }

    /// Waits until HAProxy sends the node clients again.
    async fn is_balanced(&self, node: usize) -> Result<()> {
        let name = self.node(node).name();
        let what = format!("HAProxy takes {name} for UP");
        self.until(&what, async || {
            let status = self.balancer.status(name);
            status.is_ok_and(|status| status.starts_with("UP"))
        })
        .await
    }

    /// Starts the daemon of a node, cancels what made it leave, and waits until it has clients again.
    async fn returns(&self, node: usize, cancel: Option<&str>) -> Result<()> {
        self.node(node).start()?;
        if let Some(cancel) = cancel {
            let path = format!("/v1/nodes/self/{cancel}");
            self.until(cancel, async || {
                let asked = self.node(node).admin();
                let answer = asked.try_send(Method::POST, &path, None).await;
                answer.is_ok_and(|answer| answer.status.is_success())
            })
            .await?;
        }
        self.node(node).wait_ready().await?;
        self.is_balanced(node).await
    }

    async fn until(&self, what: &str, mut look: impl AsyncFnMut() -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !look().await {
            if Instant::now() > deadline {
                bail!(
                    "waited {PATIENCE:?} in vain for this: {what}; {}",
                    self.clients.state()
                );
            }
            sleep(POLL).await;
        }
        Ok(())
    }
}
