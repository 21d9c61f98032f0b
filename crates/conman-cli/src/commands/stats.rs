//! `conman stats`: what sessions use.

use std::collections::BTreeSet;
use std::time::Duration;

use comfy_table::Cell;
use conman_proto::{Node, NodeList, SessionStats, StatsList};
use futures_util::future::join_all;
use http::Method;
use serde_json::json;

use super::Context;
use super::session_pages::{self, Filter};
use crate::args::{StatsArgs, StatsOrder};
use crate::client::{ClientError, Lines, PROMPT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, milliseconds, printable};
use crate::output::Output;

/// Time over which the use of processors is measured.
const INTERVAL: Duration = Duration::from_secs(1);

const PERCENT: f64 = 100.0;

pub(super) const HEADER: [&str; 10] = [
    "NAME",
    "CPU",
    "THROTTLED",
    "MEMORY",
    "LIMIT",
    "OOM KILLS",
    "PIDS",
    "READ",
    "WRITTEN",
    "NETWORK",
];

pub(super) async fn run(context: &Context, args: &StatsArgs) -> Result<Exit, Failure> {
    if args.follow {
        return follow(context, args).await;
    }
    let before = read(context, args).await?;
    if context.output.json {
        context.output.value(&json!({ "sessions": before }))?;
        return Ok(Exit::Done);
    }
    if before.is_empty() {
        context.output.note("no running sessions");
        context.output.table(&HEADER, Vec::new())?;
        return Ok(Exit::Done);
    }
    tokio::time::sleep(INTERVAL).await;
    let now = read(context, args).await?;
    let mut measured: Vec<_> = now
        .iter()
        .map(|stats| (before.iter().find(|earlier| earlier.id == stats.id), stats))
        .collect();
    if let Some(order) = args.sort {
        measured.sort_by(|one, other| {
            figure(order, other.0, other.1).total_cmp(&figure(order, one.0, one.1))
        });
    }
    let rows = measured.into_iter().map(|(before, now)| row(before, now));
    context.output.table(&HEADER, rows.collect())?;
    Ok(Exit::Done)
}

/// What sessions are sorted by; an unknown figure counts as nothing.
fn figure(order: StatsOrder, before: Option<&SessionStats>, now: &SessionStats) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "only compared")]
    let whole = |value: Option<u64>| value.unwrap_or_default() as f64;
    match order {
        StatsOrder::Cpu => cpu_percent(before, now).unwrap_or_default(),
        StatsOrder::Memory => whole(now.memory_bytes),
        StatsOrder::Pids => whole(now.pids),
        StatsOrder::Read => whole(now.read_bytes),
        StatsOrder::Written => whole(now.written_bytes),
    }
}

/// What a fleet's running sessions use, read at one time.
#[derive(Debug, Default)]
pub(super) struct FleetStats {
    pub(super) nodes: Vec<Node>,
    /// Each with its node.
    pub(super) sessions: Vec<(String, SessionStats)>,
    /// Why the sessions of some nodes are missing.
    pub(super) errors: Vec<String>,
}

pub(super) async fn read_fleet(context: &Context) -> Result<FleetStats, ClientError> {
    let client = &context.client;
    let nodes: NodeList = client.get("/v1/nodes").await?;
    let lists = nodes.nodes.iter().map(async |node| {
        let path = format!("/v1/nodes/{}/stats", encode(&node.name));
        let list = client.answer::<StatsList>(Method::GET, &path, None::<&()>, PROMPT);
        list.await.map(|list| list.value.sessions)
    });
    let mut fleet = FleetStats::default();
    for (node, list) in nodes.nodes.iter().zip(join_all(lists).await) {
        match list {
            Ok(list) => {
                let of_node = |stats| (node.name.clone(), stats);
                fleet.sessions.extend(list.into_iter().map(of_node));
            }
            // A node that is down has no running sessions.
            Err(error) => fleet.errors.push(format!("{}: {error}", node.name)),
        }
    }
    fleet.nodes = nodes.nodes;
    Ok(fleet)
}

/// One session, or all of the fleet's.
async fn read(context: &Context, args: &StatsArgs) -> Result<Vec<SessionStats>, Failure> {
    if let Some(id) = &args.id {
        let path = format!("/v1/sessions/{id}/stats");
        return Ok(vec![context.client.get(&path).await?]);
    }
    let fleet = read_fleet(context).await?;
    for error in fleet.errors {
        context.output.warning(&printable(&error));
    }
    let mut sessions: Vec<_> = fleet.sessions.into_iter().map(|(_, stats)| stats).collect();
    sessions.sort_by(|one, other| one.id.cmp(&other.id));
    if !args.label.is_empty() {
        let mut filter = Filter::not_ended();
        filter.labels.clone_from(&args.label);
        let (labelled, _) = session_pages::all(context, &filter).await?;
        let ids: BTreeSet<_> = labelled.into_iter().map(|session| session.id).collect();
        sessions.retain(|stats| ids.contains(&stats.id));
    }
    Ok(sessions)
}

/// A line a second until the session ends.
async fn follow(context: &Context, args: &StatsArgs) -> Result<Exit, Failure> {
    let client = &context.client;
    let Some(id) = &args.id else {
        return Err(Failure::usage("--follow needs a session"));
    };
    let path = format!("/v1/sessions/{id}/stats?stream=true");
    let response = client.stream(&path, "application/x-ndjson").await?;
    let mut lines = Lines::new(response.into_body());
    let mut before: Option<SessionStats> = None;
    while let Some(line) = lines
        .next()
        .await
        .map_err(|error| client.stream_error(error))?
    {
        if context.output.json {
            Output::raw_stdout(&[&line[..], b"\n"].concat())?;
            continue;
        }
        let stats: SessionStats = serde_json::from_slice(&line)
            .map_err(|error| client.not_understood(error.to_string()))?;
        if let Some(before) = &before {
            context
                .output
                .table(&HEADER, vec![row(Some(before), &stats)])?;
        }
        before = Some(stats);
    }
    Ok(Exit::Done)
}

/// The processor time between two readings, in percent of one processor.
pub(super) fn cpu_percent(before: Option<&SessionStats>, now: &SessionStats) -> Option<f64> {
    let before = before?;
    let cpu = now.cpu_s? - before.cpu_s?;
    let time = now.at.duration_since(before.at).as_secs_f64();
    // A counter that fell belongs to another start.
    (time > 0.0 && cpu >= 0.0).then_some(cpu / time * PERCENT)
}

/// The figures of a session in the order of [`HEADER`].
pub(super) fn cells(cpu_percent: Option<f64>, now: &SessionStats) -> [String; HEADER.len()] {
    let size = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), bytes);
    let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |it| it.to_string());
    let network = match (now.received_bytes, now.sent_bytes) {
        (Some(received), Some(sent)) => format!(
            "{} in, {} out",
            bytes(received + now.proxy_received_bytes),
            bytes(sent + now.proxy_sent_bytes)
        ),
        _ => "-".to_owned(),
    };
    [
        now.id.to_string(),
        cpu_percent.map_or_else(|| "-".to_owned(), |share| format!("{share:.1} %")),
        now.throttled_s
            .map_or_else(|| "-".to_owned(), |it| milliseconds(it * 1e3)),
        size(now.memory_bytes),
        size(now.memory_limit_bytes),
        number(now.oom_kills),
        format!("{} of {}", number(now.pids), now.pids_limit),
        size(now.read_bytes),
        size(now.written_bytes),
        network,
    ]
}

fn row(before: Option<&SessionStats>, now: &SessionStats) -> Vec<Cell> {
    let cells = cells(cpu_percent(before, now), now);
    cells.into_iter().map(Cell::new).collect()
}
