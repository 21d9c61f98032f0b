//! `conman stats`: what sessions use.

use std::time::Duration;

use comfy_table::Cell;
use conman_proto::{NodeList, SessionStats, StatsList};
use http::Method;
use serde_json::json;

use super::Context;
use crate::args::StatsArgs;
use crate::client::{Lines, PROMPT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, milliseconds};
use crate::output::Output;

/// Time over which the use of processors is measured.
const INTERVAL: Duration = Duration::from_secs(1);

const PERCENT: f64 = 100.0;

const HEADER: [&str; 10] = [
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
        return Ok(Exit::Done);
    }
    tokio::time::sleep(INTERVAL).await;
    let now = read(context, args).await?;
    let rows = now.iter().map(|stats| {
        let earlier = before.iter().find(|earlier| earlier.id == stats.id);
        row(earlier, stats)
    });
    context.output.table(&HEADER, rows.collect())?;
    Ok(Exit::Done)
}

/// One session, or all of the fleet's.
async fn read(context: &Context, args: &StatsArgs) -> Result<Vec<SessionStats>, Failure> {
    let client = &context.client;
    if let Some(id) = &args.id {
        let path = format!("/v1/sessions/{id}/stats");
        return Ok(vec![client.get(&path).await?]);
    }
    let nodes: NodeList = client.get("/v1/nodes").await?;
    let mut sessions = Vec::new();
    for node in &nodes.nodes {
        let path = format!("/v1/nodes/{}/stats", encode(&node.name));
        let list = client.answer::<StatsList>(Method::GET, &path, None::<&()>, PROMPT);
        match list.await {
            Ok(list) => sessions.extend(list.value.sessions),
            // A node that is down has no running sessions.
            Err(error) => context.output.warning(&format!("{}: {error}", node.name)),
        }
    }
    sessions.sort_by(|one, other| one.id.cmp(&other.id));
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

fn row(before: Option<&SessionStats>, now: &SessionStats) -> Vec<Cell> {
    let size = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), bytes);
    let number = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |it| it.to_string());
    let share = before.and_then(|before| {
        let cpu = now.cpu_s? - before.cpu_s?;
        let time = now.at.duration_since(before.at).as_secs_f64();
        (time > 0.0 && cpu >= 0.0).then_some(cpu / time * PERCENT)
    });
    let network = match (now.received_bytes, now.sent_bytes) {
        (Some(received), Some(sent)) => format!("{} in, {} out", bytes(received), bytes(sent)),
        _ => "-".to_owned(),
    };
    vec![
        Cell::new(&now.id),
        Cell::new(share.map_or_else(|| "-".to_owned(), |share| format!("{share:.1} %"))),
        Cell::new(
            now.throttled_s
                .map_or_else(|| "-".to_owned(), |it| milliseconds(it * 1e3)),
        ),
        Cell::new(size(now.memory_bytes)),
        Cell::new(size(now.memory_limit_bytes)),
        Cell::new(number(now.oom_kills)),
        Cell::new(format!("{} of {}", number(now.pids), now.pids_limit)),
        Cell::new(size(now.read_bytes)),
        Cell::new(size(now.written_bytes)),
        Cell::new(network),
    ]
}
