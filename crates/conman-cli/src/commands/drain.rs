//! `conman drain`, `conman undrain` and `conman rebalance`.

use std::time::Duration;

use comfy_table::Cell;
use conman_proto::{
    DrainPlan, DrainReport, DrainRequest, DrainState, RebalanceReport, RebalanceRequest,
};
use http::Method;

use super::{Context, nodes};
use crate::args::{DrainArgs, NodeArgs, RebalanceArgs};
use crate::client::{Answer, PROMPT};
use crate::failure::{Exit, Failure};
use crate::human::{count, milliseconds, printable};
use crate::progress::Progress;

/// The columns of a plan.
const HEADER: [&str; 6] = ["AT", "NAME", "GEN", "CONNS", "FIRST SIGNAL", "GRACE"];

/// Interval between checks of a drain.
const INTERVAL: Duration = Duration::from_millis(200);

pub(super) async fn drain(context: &Context, args: DrainArgs) -> Result<Exit, Failure> {
    let request = DrainRequest {
        dry_run: args.dry_run,
        parallel: args.parallel,
        signal: args.signal,
        grace_ms: args.grace,
        reason: args.reason,
    };
    let path = nodes::path(&args.node, "drain");
    if args.dry_run {
        return plan(context, &path, &request).await;
    }
    let begun = context
        .client
        .answer::<DrainReport>(Method::POST, &path, Some(&request), PROMPT)
        .await?;
    let mut answer = begun;
    if !args.no_wait {
        let progress = Progress::start(&context.output, "moving sessions away".to_owned());
        while answer.value.state == DrainState::Draining {
            tokio::time::sleep(INTERVAL).await;
            answer = context
                .client
                .answer::<DrainReport>(Method::GET, &path, None::<&()>, PROMPT)
                .await?;
        }
        drop(progress);
    }
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
    } else {
        output.line(&summary(&answer.value, &args.node))?;
    }
    let unreleased = &answer.value.unreleased;
    if unreleased.is_empty() {
        return Ok(Exit::Done);
    }
    let listed: Vec<_> = unreleased
        .iter()
        .map(|one| format!("{}: {}", one.id, one.reason))
        .collect();
    Err(Failure::new(
        Exit::Stuck,
        "unreleased",
        "Some sessions could not be released",
        listed.join("; "),
    )
    .next("no other node may start them until this machine is certainly gone"))
}

async fn plan(context: &Context, path: &str, request: &DrainRequest) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<DrainPlan>(Method::POST, path, Some(request), PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let plan = answer.value;
    let rows = rows(&plan);
    if rows.is_empty() {
        output.line("There is nothing to move. Nothing was done.")?;
    } else {
        output.table(&HEADER, rows)?;
        output.line(&format!(
            "A drain now would stop {}, {} at a time, and take about {}, longer if a container cannot \
             be proven dead. Sessions with on_node_loss = \"restart\" start on other nodes at once, the \
             others when a client connects. Nothing was done.",
            count(plan.sessions.len() as u64, "session"),
            plan.parallel,
            ms(plan.predicted_ms),
        ))?;
    }
    Ok(Exit::Done)
}

fn rows(plan: &DrainPlan) -> Vec<Vec<Cell>> {
    plan.sessions
        .iter()
        .map(|session| {
            let signal = session.signal.as_deref().unwrap_or("SIGKILL");
            vec![
                Cell::new(ms(session.at_ms)),
                Cell::new(&session.id),
                Cell::new(session.generation),
                Cell::new(session.connections),
                Cell::new(printable(signal)),
                Cell::new(ms(session.grace_ms)),
            ]
        })
        .collect()
}

pub(super) async fn rebalance(context: &Context, args: &RebalanceArgs) -> Result<Exit, Failure> {
    let dry_run = args.dry_run;
    let path = nodes::path(&args.node, "rebalance");
    let request = RebalanceRequest { dry_run };
    let answer = context
        .client
        .answer::<DrainPlan>(Method::POST, &path, Some(&request), PROMPT)
        .await?;
    let output = &context.output;
    let waits = !dry_run && !args.no_wait && !answer.value.sessions.is_empty();
    if output.json {
        match waits {
            true => output.value(&rebalanced(context, &path).await?.raw)?,
            false => output.value(&answer.raw)?,
        }
        return Ok(Exit::Done);
    }
    let plan = answer.value;
    if plan.sessions.is_empty() {
        let subject = nodes::subject(&args.node);
        output.line(&format!(
            "{subject} does not have more sessions than its share. Nothing was done."
        ))?;
        return Ok(Exit::Done);
    }
    output.table(&HEADER, rows(&plan))?;
    let moved = count(plan.sessions.len() as u64, "session");
    let time = ms(plan.predicted_ms);
    output.line(&if dry_run {
        format!("A rebalance now would move {moved} in about {time}. Nothing was done.")
    } else {
        format!("Moving {moved} in about {time}. At the end there is an event, rebalance_finished.")
    })?;
    if waits {
        let report = rebalanced(context, &path).await?.value;
        output.line(&format!(
            "Moved {} of {} to other nodes; {} start again when a client connects; {} could not be moved.",
            report.moved,
            count(report.planned, "session"),
            report.waiting,
            report.not_moved
        ))?;
    }
    Ok(Exit::Done)
}

/// Waits for the end of a rebalance.
async fn rebalanced(context: &Context, path: &str) -> Result<Answer<RebalanceReport>, Failure> {
    let progress = Progress::start(&context.output, "moving sessions to other nodes".to_owned());
    loop {
        let answer = context
            .client
            .answer::<RebalanceReport>(Method::GET, path, None::<&()>, PROMPT)
            .await?;
        if answer.value.finished_at.is_some() {
            drop(progress);
            return Ok(answer);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

fn summary(report: &DrainReport, node: &NodeArgs) -> String {
    let reason = printable(&report.reason);
    let (subject, undrain) = (nodes::subject(node), nodes::command("undrain", node));
    match (report.state, report.finished_at) {
        (DrainState::Drained, Some(finished_at)) => {
            let took = finished_at.duration_since(report.started_at).as_secs_f64();
            format!(
                "Drained ({reason}) in {}: {}. {} {subject} admits none until {undrain}.",
                milliseconds(took * 1_000.0),
                sessions_now(report),
                nodes::passing(report.through),
            )
        }
        _ => format!(
            "Draining ({reason}): {}, {} to go. {undrain} cancels it.",
            sessions_now(report),
            report.remaining,
        ),
    }
}

/// Where the sessions are that had their turn: none of them is lost.
fn sessions_now(report: &DrainReport) -> String {
    let moved = report.moved_count;
    match (moved, report.released.saturating_sub(moved)) {
        (0, 0) => "no session moved".to_owned(),
        (0, rest) => format!(
            "{} stopped; each starts again when a client connects",
            count(rest, "session")
        ),
        (moved, 0) => format!("{} moved to other nodes", count(moved, "session")),
        (moved, rest) => format!(
            "{} moved to other nodes; {rest} more will start again when a client connects",
            count(moved, "session")
        ),
    }
}

pub(super) async fn undrain(context: &Context, args: &NodeArgs) -> Result<Exit, Failure> {
    nodes::change(context, args, "undrain").await
}

fn ms(ms: u64) -> String {
    u32::try_from(ms).map_or_else(|_| "?".to_owned(), |ms| milliseconds(ms.into()))
}
