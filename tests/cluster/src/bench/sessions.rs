//! The sessions that are to move, all on one node.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use conman_proto::Session;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http::Method;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{OTHERS, Options};
use crate::cluster::Cluster;
use crate::node::Node;
use crate::overlap::SERVING;

/// Starts at a time.
const PARALLEL: usize = 8;
/// Bound on nodes' news of each other.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// The session of a client.
pub(super) fn witness(number: usize) -> String {
    format!("w{number}")
}

/// Starts them while no other node takes any.
pub(super) async fn start(cluster: &Cluster, options: &Options) -> Result<()> {
    let nodes = cluster.nodes();
    for other in OTHERS {
        order(&nodes[other], "/v1/nodes/self/drain").await?;
    }
    known(nodes, true).await?;
    let api = nodes[0].api();
    let all = (0..options.sessions).map(|number| {
        let api = api.clone();
        async move {
            let (id, template) = if number < options.clients {
                (witness(number), SERVING)
            } else {
                (format!("idle{number}"), "idle")
            };
            let body = json!({"template": template});
            let answer = api.put(&format!("/v1/sessions/{id}"), &body).await;
            ensure!(answer.status.is_success(), "{id}: {}", answer.text());
            Ok(())
        }
    });
    stream::iter(all)
        .buffer_unordered(PARALLEL)
        .try_collect::<()>()
        .await?;
    for other in OTHERS {
        let strays = nodes[other].session_processes();
        ensure!(strays.is_empty(), "sessions of another node: {strays:?}");
        order(&nodes[other], "/v1/nodes/self/undrain").await?;
    }
    known(nodes, false).await
}

/// How long each phase of the new containers' starts took, in milliseconds.
pub(super) async fn phases(
    cluster: &Cluster,
    clients: usize,
) -> Result<BTreeMap<String, Vec<f64>>> {
    let api = cluster.nodes()[OTHERS[0]].api();
    let mut phases: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for number in 0..clients {
        let path = format!("/v1/sessions/{}", witness(number));
        let answer = api.get(&path).await;
        ensure!(answer.status.is_success(), "{path}: {}", answer.text());
        let session: Session =
            serde_json::from_slice(&answer.body).context("cannot understand a session")?;
        for (phase, ms) in session.phases_ms {
            phases.entry(phase).or_default().push(ms);
        }
    }
    Ok(phases)
}

async fn order(node: &Node, path: &str) -> Result<()> {
    let answer = node.admin().send(Method::POST, path, None).await;
    let status = answer.status;
    ensure!(status.is_success(), "{}: {}", node.name(), answer.text());
    Ok(())
}

/// Waits until every node knows of every other one whether it takes sessions.
async fn known(nodes: &[Node], draining: bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut all = true;
        for node in nodes {
            let list = node.admin().get("/v1/nodes").await.json();
            all &= OTHERS.iter().all(|other| {
                let listed = list["nodes"].as_array().into_iter().flatten();
                let mut found = listed.filter(|one| one["name"] == nodes[*other].name());
                found.any(|one| one["fleet"]["draining"] == draining)
            });
        }
        if all {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("nodes do not hear of each other that draining is {draining}");
        }
        sleep(POLL).await;
    }
}
