//! `conman nodes`: lists nodes.

use std::borrow::Cow;
use std::time::Duration;

use comfy_table::{Cell, Color};
use conman_proto::{Node, NodeList, NodeRemoval, NodeStanding, NodeState, RuntimeKind};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::args::{NodeArgs, NodesArgs, NodesCommand};
use crate::client::{PROMPT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{ago, bytes, count, duration, printable};
use crate::output::Output;

const HEADER: [&str; 14] = [
    "NAME", "STATE", "ANSWERED", "STARTED", "VERSION", "RUNTIME", "RUNNING", "STARTING", "PAUSED",
    "FROZEN", "STUCK", "MOST", "CONNS", "THROUGH",
];

/// REACHES names the live nodes that the node does not reach, ANSWERED what has not answered it for a while of
/// etcd and its runtimes (the native one is the shim), THROUGH counts connections that pass through the node to sessions elsewhere, CPU is the share of time in
/// which some task waited for a processor, MEMORY the available memory, TAKEOVER the delay after its last
/// heartbeat until other nodes claim its sessions, STALL the longest time for which its host stood still.
const FLEET_HEADER: [&str; 21] = [
    "NAME",
    "STATE",
    "ANNOUNCED",
    "REACHES",
    "ANSWERED",
    "CPU",
    "MEMORY",
    "RUNNING",
    "STARTING",
    "PAUSED",
    "FROZEN",
    "STUCK",
    "MOST",
    "CONNS",
    "THROUGH",
    "TAKEOVER",
    "STALL",
    "RUNTIME",
    "VERSION",
    "STARTED",
    "LABELS",
];

/// An answer of this age is not named: they are expected every second.
const FRESH_MS: u64 = 3_000;

/// An unknown value.
const NOTHING: &str = "-";

pub(super) async fn run(context: &Context, args: &NodesArgs) -> Result<Exit, Failure> {
    match &args.command {
        Some(NodesCommand::Rm { node }) => forget(context, node).await,
        None => list(context).await,
    }
}

async fn forget(context: &Context, node: &str) -> Result<Exit, Failure> {
    let path = format!("/v1/nodes/{}", encode(node));
    let answer = context
        .client
        .answer::<NodeRemoval>(Method::DELETE, &path, None::<&()>, PROMPT)
        .await?;
    if context.output.json {
        context.output.value(&answer.raw)?;
    } else {
        let name = printable(&answer.value.name);
        context.output.line(&format!("{name} is forgotten"))?;
    }
    Ok(Exit::Done)
}

async fn list(context: &Context) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<NodeList>(Method::GET, "/v1/nodes", None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let now = Timestamp::now();
    let nodes = &answer.value.nodes;
    if nodes.iter().any(|node| node.fleet.is_some()) {
        let rows = nodes.iter().map(|node| fleet_row(node, now)).collect();
        output.table(&FLEET_HEADER, rows)?;
    } else {
        let rows = nodes.iter().map(|node| row(node, now)).collect();
        output.table(&HEADER, rows)?;
    }
    for warning in &answer.value.warnings {
        output.warning(&printable(warning));
    }
    for node in &answer.value.nodes {
        if let Some(host) = &node.host_limit
            && host.max_sessions < node.max_sessions
        {
            let text = format!(
                "{} has room for {} sessions: {} ({}) is {}; {}",
                printable(&node.name),
                host.max_sessions,
                printable(&host.limit.name),
                printable(&host.limit.bounds),
                host.limit.value,
                printable(&host.limit.remedy),
            );
            if host.max_sessions <= node.sessions() {
                output.warning(&text);
            } else {
                output.note(&text);
            }
        }
        warn_of_fleet(output, node);
        if let Some(text) = node.takeover.and_then(|takeover| takeover.warning()) {
            output.warning(&format!("{}: {text}", printable(&node.name)));
        }
        if let Some(error) = &node.runtime_error {
            output.warning(&format!(
                "{} cannot start sessions: {}",
                printable(&node.name),
                printable(error)
            ));
        }
        for other in &node.runtimes {
            if let Some(error) = other
                .error
                .as_ref()
                .filter(|_| other.runtime != node.runtime)
            {
                output.warning(&format!(
                    "{} cannot start sessions of its {} runtime: {}",
                    printable(&node.name),
                    other.runtime,
                    printable(error)
                ));
            }
        }
    }
    Ok(Exit::Done)
}

/// What is wrong between the node and the rest of its fleet.
fn warn_of_fleet(output: &Output, node: &Node) {
    let name = printable(&node.name);
    let fleet = node.fleet.as_ref();
    let unreached = printable(&node.unreached.join(", ")).into_owned();
    if fleet.is_some_and(|fleet| fleet.cut_off) {
        output.warning(&format!(
            "{name} is cut off from most nodes, which reach each other, and gets no new sessions; it reports \
             that it does not reach: {}",
            if unreached.is_empty() { "none" } else { &*unreached }
        ));
    } else if !unreached.is_empty() {
        output.warning(&format!("{name} does not reach {unreached}"));
    }
    if let Some(ahead_ms) = fleet.and_then(|fleet| fleet.clock_ahead_ms) {
        let by = duration(Duration::from_millis(ahead_ms.unsigned_abs()));
        let side = if ahead_ms > 0 { "ahead of" } else { "behind" };
        output.warning(&format!(
            "the clock of {name} is {by} {side} the fleet's: certificates, tokens and the times of events and \
             logs are wrong there; set its clock (NTP). Ownership does not depend on it"
        ));
    }
    if let Some(warning) = node.store.as_ref().and_then(|store| store.warning.as_ref()) {
        output.warning(&format!("{name}: {}", printable(warning)));
    }
}

/// The path of a node's resource.
pub(super) fn path(args: &NodeArgs, what: &str) -> String {
    let node = args.node.as_deref().unwrap_or("self");
    format!("/v1/nodes/{}/{what}", encode(node))
}

/// The node's name, for the beginning of a sentence.
pub(super) fn subject(args: &NodeArgs) -> Cow<'_, str> {
    args.node.as_deref().map_or("The node".into(), printable)
}

/// Whether the node may be switched off, as a sentence.
pub(super) fn passing(through: u64) -> String {
    match through {
        0 => "Nothing passes through it any more: it can be switched off.".to_owned(),
        _ => format!(
            "{} to sessions elsewhere would be cut if it were switched off.",
            count(through, "connection")
        ),
    }
}

/// The command that reverts another one.
pub(super) fn command(verb: &str, args: &NodeArgs) -> String {
    match args.node.as_deref() {
        Some(node) => format!("`conman {verb} {}`", printable(node)),
        None => format!("`conman {verb}`"),
    }
}

/// Sends a request that answers with the node, and prints the node's state.
pub(super) async fn change(
    context: &Context,
    args: &NodeArgs,
    what: &str,
) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<Node>(Method::POST, &path(args, what), None::<&()>, PROMPT)
        .await?;
    if context.output.json {
        context.output.value(&answer.raw)?;
    } else {
        let node = answer.value;
        let (name, state) = (printable(&node.name), node.state.as_str());
        context.output.line(&format!("{name} is {state}"))?;
    }
    Ok(Exit::Done)
}

/// Most sessions of the node, by its configuration or by its host's limits.
fn most(node: &Node) -> u64 {
    let host = node.host_limit.as_ref();
    host.map_or(node.max_sessions, |host| {
        host.max_sessions.min(node.max_sessions)
    })
}

/// The node's state in the fleet if that is more important than its own report.
pub(in crate::commands) fn shown_state(node: &Node) -> (&'static str, Color) {
    let standing = node.fleet.as_ref().map(|fleet| fleet.standing);
    match standing {
        Some(standing @ (NodeStanding::Joining | NodeStanding::Late)) => {
            return (standing.as_str(), Color::Yellow);
        }
        Some(standing @ (NodeStanding::Silent | NodeStanding::Fenced)) => {
            return (standing.as_str(), Color::Red);
        }
        Some(NodeStanding::Live) | None => {}
    }
    if node.fleet.as_ref().is_some_and(|fleet| fleet.cut_off) {
        return ("cut-off", Color::Red);
    }
    let color = match node.state {
        NodeState::Live => Color::Green,
        NodeState::Recovering | NodeState::Cordoned | NodeState::Draining | NodeState::Stopping => {
            Color::Yellow
        }
        NodeState::Preempted => Color::Red,
    };
    (node.state.as_str(), color)
}

fn row(node: &Node, now: Timestamp) -> Vec<Cell> {
    let (state, color) = shown_state(node);
    let mut row = vec![
        Cell::new(printable(&node.name)),
        Cell::new(state).fg(color),
        Cell::new(answered(node, 0)),
        Cell::new(ago(now, node.started_at)),
        Cell::new(printable(&node.version)),
        Cell::new(node.runtime),
    ];
    row.extend(counts(node));
    row
}

/// What has not answered the node for a while.
fn answered(node: &Node, announced_ago_ms: u64) -> String {
    let store = node
        .store
        .as_ref()
        .map(|store| ("etcd".to_owned(), store.answered_ago_ms));
    let runtimes = node.runtimes.iter().map(|one| {
        let name = match one.runtime {
            RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) => "shim".to_owned(),
            other => other.to_string(),
        };
        (name, one.answered_ago_ms)
    });
    let late = store
        .into_iter()
        .chain(runtimes)
        .filter_map(|(name, ago_ms)| match ago_ms {
            None => Some(format!("{name} never")),
            Some(ago_ms) => (ago_ms > FRESH_MS).then(|| {
                let ago = Duration::from_millis(ago_ms.saturating_add(announced_ago_ms));
                format!("{name} {} ago", duration(ago))
            }),
        });
    let late: Vec<String> = late.collect();
    match late.is_empty() {
        true if node.store.is_none() && node.runtimes.is_empty() => NOTHING.to_owned(),
        true => "just now".to_owned(),
        false => late.join(", "),
    }
}

fn counts(node: &Node) -> [Cell; 8] {
    [
        node.sessions_running,
        node.sessions_starting,
        node.sessions_paused,
        node.sessions_frozen,
        node.sessions_stuck,
        most(node),
        node.connections,
        node.through,
    ]
    .map(Cell::new)
}

fn fleet_row(node: &Node, now: Timestamp) -> Vec<Cell> {
    let fleet = node.fleet.as_ref();
    let or_nothing = |text: Option<String>| Cell::new(text.unwrap_or_else(|| NOTHING.to_owned()));
    // A node that has not announced itself is shown only with its name.
    let told = fleet.and_then(|fleet| fleet.announced_ago_ms);
    let load = fleet
        .and_then(|fleet| fleet.load)
        .filter(|_| told.is_some());
    let is_known = !node.version.is_empty();
    let known = |text: String| or_nothing(is_known.then_some(text));
    let (state, color) = shown_state(node);
    let mut row = vec![
        Cell::new(printable(&node.name)),
        Cell::new(state).fg(color),
        or_nothing(told.map(|ms| match ms / 1_000 {
            0 => "just now".to_owned(),
            _ => format!("{} ago", duration(Duration::from_millis(ms))),
        })),
        known(match &node.unreached[..] {
            [] => "all".to_owned(),
            [one] => format!("not {}", printable(one)),
            several => format!("not {}", count(several.len() as u64, "node")),
        }),
        known(answered(node, told.unwrap_or(0))),
        or_nothing(load.map(|load| format!("{:.0} %", load.cpu_pressure_percent))),
        or_nothing(load.map(|load| {
            let (free, all) = (load.memory_available_bytes, load.memory_total_bytes);
            format!("{} of {}", bytes(free), bytes(all))
        })),
    ];
    row.extend(match is_known {
        true => counts(node),
        false => [NOTHING; 8].map(Cell::new),
    });
    row.extend(match node.takeover {
        Some(takeover) => [takeover.takeover_ms, takeover.longest_stall_ms]
            .map(|ms| Cell::new(format!("{ms} ms"))),
        None => [NOTHING; 2].map(Cell::new),
    });
    row.extend([
        known(node.runtime.to_string()),
        known(printable(&node.version).into_owned()),
        known(ago(now, node.started_at)),
        or_nothing(fleet.filter(|fleet| !fleet.labels.is_empty()).map(|fleet| {
            let labels = fleet.labels.iter();
            let labels: Vec<_> = labels
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            printable(&labels.join(",")).into_owned()
        })),
    ]);
    row
}
