//! `conman preempt` and `conman readmit`.

use std::time::Duration;

use comfy_table::Cell;
use conman_proto::{PreemptPlan, PreemptReport, PreemptRequest};
use http::Method;

use super::{Context, nodes};
use crate::args::{NodeArgs, PreemptArgs};
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{count, milliseconds, printable};
use crate::progress::Progress;

/// Bounds the wait if the node's budget applies: the longest that the API allows.
const LONGEST_BUDGET: Duration = Duration::from_secs(3_600);

pub(super) async fn preempt(context: &Context, args: PreemptArgs) -> Result<Exit, Failure> {
    let request = PreemptRequest {
        dry_run: args.dry_run,
        budget_ms: args
            .budget
            .and_then(|budget| u32::try_from(budget.as_millis()).ok()),
        reason: args.reason,
    };
    if args.dry_run {
        return plan(context, &args.node, &request).await;
    }
    let output = &context.output;
    let question = "Kill and release every session of the node, and admit no more?";
    if !args.yes && !output.confirm(question)? {
        output.note("nothing was done");
        Ok(Exit::Failed)
    } else {
        act(context, &args.node, &request, args.budget).await
    }
}

async fn plan(
    context: &Context,
    node: &NodeArgs,
    request: &PreemptRequest,
) -> Result<Exit, Failure> {
    let path = nodes::path(node, "preempt");
    let answer = context
        .client
        .answer::<PreemptPlan>(Method::POST, &path, Some(request), PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let plan = answer.value;
    let rows: Vec<_> = plan
        .sessions
        .iter()
        .map(|session| {
            vec![
                Cell::new(&session.id),
                Cell::new(session.generation),
                Cell::new(
                    session
                        .pid
                        .map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
                ),
                Cell::new(printable(session.signal.as_deref().unwrap_or("SIGKILL"))),
                Cell::new(ms(session.grace_ms)),
            ]
        })
        .collect();
    if !rows.is_empty() {
        output.table(&["NAME", "GEN", "PID", "FIRST SIGNAL", "GRACE"], rows)?;
    }
    let killed = count(plan.sessions.len() as u64, "session");
    let (last, budget) = (ms(plan.last_kill_ms), ms(plan.budget_ms));
    output.line(&format!(
        "A preemption now would kill {killed}, the last after {last}, of a budget of {budget}. \
         Nothing was done."
    ))?;
    Ok(Exit::Done)
}

async fn act(
    context: &Context,
    node: &NodeArgs,
    request: &PreemptRequest,
    budget: Option<Duration>,
) -> Result<Exit, Failure> {
    let path = nodes::path(node, "preempt");
    let patience = budget.unwrap_or(LONGEST_BUDGET) + PROMPT;
    let progress = Progress::start(
        &context.output,
        "killing and releasing every session".to_owned(),
    );
    let answer = context
        .client
        .answer::<PreemptReport>(Method::POST, &path, Some(request), patience)
        .await;
    drop(progress);
    let answer = answer?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
    } else {
        output.line(&summary(&answer.value, node))?;
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

fn summary(report: &PreemptReport, node: &NodeArgs) -> String {
    let (subject, readmit) = (nodes::subject(node), nodes::command("readmit", node));
    if report.sessions == 0 {
        return format!(
            "There was no session to kill. {} {subject} admits none until {readmit}.",
            nodes::passing(report.through)
        );
    }
    let after = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), milliseconds);
    format!(
        "{} of {} killed, {} certified dead, {} released.\n\
         After the notice: last kill {}, last death certificate {}, last release {}.\n\
         {} {subject} admits none until {readmit}.",
        report.killed,
        count(report.sessions, "session"),
        report.certified,
        report.released,
        after(report.last_kill_ms),
        after(report.last_certificate_ms),
        after(report.last_release_ms),
        nodes::passing(report.through),
    )
}

pub(super) async fn readmit(context: &Context, args: &NodeArgs) -> Result<Exit, Failure> {
    nodes::change(context, args, "readmit").await
}

fn ms(ms: u64) -> String {
    u32::try_from(ms).map_or_else(|_| "?".to_owned(), |ms| milliseconds(ms.into()))
}
