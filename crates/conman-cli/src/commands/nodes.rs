//! `conman nodes`: lists nodes.

use comfy_table::{Cell, Color};
use conman_proto::{Node, NodeList, NodeState};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{ago, printable};

pub(super) async fn run(context: &Context) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<NodeList>(Method::GET, "/v1/nodes", None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let header = [
        "NAME", "STATE", "STARTED", "VERSION", "RUNTIME", "RUNNING", "STARTING", "STUCK", "MOST",
        "CONNS",
    ];
    let now = Timestamp::now();
    output.table(
        &header,
        answer
            .value
            .nodes
            .iter()
            .map(|node| row(node, now))
            .collect(),
    )?;
    for node in &answer.value.nodes {
        if let Some(host) = &node.host_limit
            && host.max_sessions < node.max_sessions
        {
            output.note(&format!(
                "{} has room for {} sessions: {} ({}) is {}; {}",
                printable(&node.name),
                host.max_sessions,
                printable(&host.limit.name),
                printable(&host.limit.bounds),
                host.limit.value,
                printable(&host.limit.remedy),
            ));
        }
        if let Some(error) = &node.runtime_error {
            output.warning(&format!(
                "{} cannot start sessions: {}",
                printable(&node.name),
                printable(error)
            ));
        }
    }
    Ok(Exit::Done)
}

/// A node's state as the API writes it.
pub(super) const fn state(state: NodeState) -> &'static str {
    match state {
        NodeState::Live => "live",
        NodeState::Recovering => "recovering",
        NodeState::Draining => "draining",
        NodeState::Preempted => "preempted",
    }
}

/// Sessions that the node takes, by its configuration or by what its host has room for.
fn most(node: &Node) -> u64 {
    let host = node.host_limit.as_ref();
    host.map_or(node.max_sessions, |host| {
        host.max_sessions.min(node.max_sessions)
    })
}

fn row(node: &Node, now: Timestamp) -> Vec<Cell> {
    let color = match node.state {
        NodeState::Live => Color::Green,
        NodeState::Recovering => Color::Yellow,
        NodeState::Draining => Color::Yellow,
        NodeState::Preempted => Color::Red,
    };
    vec![
        Cell::new(printable(&node.name)),
        Cell::new(state(node.state)).fg(color),
        Cell::new(ago(now, node.started_at)),
        Cell::new(printable(&node.version)),
        Cell::new(node.runtime),
        Cell::new(node.sessions_running),
        Cell::new(node.sessions_starting),
        Cell::new(node.sessions_stuck),
        Cell::new(most(node)),
        Cell::new(node.connections),
    ]
}
