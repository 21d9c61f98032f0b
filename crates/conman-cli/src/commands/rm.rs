//! `conman rm`: stops sessions.

use std::collections::BTreeSet;

use conman_proto::{SessionId, SessionState, StopReport};
use futures_util::{StreamExt as _, stream};
use http::Method;
use serde_json::json;

use super::Context;
use super::session_pages::{self, Filter};
use crate::args::RmArgs;
use crate::client::{Answer, ClientError, START};
use crate::failure::{Exit, Failure};
use crate::human::{count, milliseconds, printable};
use crate::progress::Progress;

/// Concurrent stops: each holds a connection, and the daemon serves a bounded number.
const PARALLEL: usize = 16;

type Outcome = (SessionId, Result<Answer<StopReport>, ClientError>);

pub(super) async fn run(context: &Context, args: RmArgs) -> Result<Exit, Failure> {
    if let Some(exec) = args.exec {
        let [id] = &args.id[..] else {
            return Err(Failure::usage("--exec needs one session"));
        };
        let path = format!("/v1/sessions/{id}/execs/{exec}");
        context.client.order(Method::DELETE, &path).await?;
        return Ok(Exit::Done);
    }
    let query = query(&args);
    let ids = if args.all {
        // `--all` does not affect sessions of other nodes.
        let filter = Filter {
            node: Some("self".to_owned()),
            ..Filter::not_ended()
        };
        let (sessions, _) = session_pages::all(context, &filter).await?;
        let ids: Vec<_> = sessions.into_iter().map(|session| session.id).collect();
        let question = format!("Stop {}?", count(ids.len() as u64, "session"));
        if !ids.is_empty() && !args.yes && !context.output.confirm(&question)? {
            context.output.note("nothing was stopped");
            return Ok(Exit::Failed);
        }
        ids
    } else {
        distinct(args.id)
    };
    if ids.is_empty() && !context.output.json {
        context.output.note("this node has no sessions to stop");
    }
    let outcomes = stop_all(context, ids, query).await;
    let stopped = outcomes.iter().any(|(_, outcome)| outcome.is_ok());
    let exit = report(context, outcomes, args.forget)?;
    if stopped && !args.forget {
        context.output.note(
            "`conman ps --all` still lists what has ended; `conman rm --forget ID` removes it there",
        );
    }
    Ok(exit)
}

/// Each name once, in the order given.
fn distinct(ids: Vec<SessionId>) -> Vec<SessionId> {
    let mut seen = BTreeSet::new();
    ids.into_iter()
        .filter(|id| seen.insert(id.clone()))
        .collect()
}

fn query(args: &RmArgs) -> &'static str {
    match (args.forget, args.force) {
        (false, false) => "",
        (true, false) => "?forget=true",
        (false, true) => "?force=true",
        (true, true) => "?forget=true&force=true",
    }
}

async fn stop_all(context: &Context, ids: Vec<SessionId>, query: &str) -> Vec<Outcome> {
    let total = ids.len();
    let progress = Progress::start(&context.output, format!("stopping {total}"));
    stream::iter(ids)
        .map(|id| async move {
            let path = format!("/v1/sessions/{id}{query}");
            let answer = context
                .client
                .answer(Method::DELETE, &path, None::<&()>, START)
                .await;
            (id, answer)
        })
        .buffered(PARALLEL)
        .enumerate()
        .map(|(done, outcome)| {
            progress.set(format!("stopped {} of {total}", done + 1));
            outcome
        })
        .collect()
        .await
}

/// Reports every outcome; the exit code is the greatest of all.
fn report(context: &Context, outcomes: Vec<Outcome>, forget: bool) -> Result<Exit, Failure> {
    let output = &context.output;
    let (mut reports, mut failures) = (Vec::new(), Vec::new());
    for (id, outcome) in outcomes {
        match outcome {
            Ok(answer) => {
                if answer.value.state == SessionState::Stuck {
                    failures.push(stuck(&answer.value));
                } else if !output.json {
                    output.line(&done(&answer.value, forget))?;
                }
                reports.push(answer.raw);
            }
            Err(error) => failures.push(Failure::from(error).about(id.as_str())),
        }
    }
    if output.json {
        output.value(&json!({ "reports": reports }))?;
    }
    for failure in &failures {
        output.failure(failure);
    }
    let worst = failures
        .iter()
        .map(Failure::exit)
        .max_by_key(|exit| exit.code());
    Ok(worst.unwrap_or(Exit::Done))
}

/// What the order did. A session that had ended before has no time between the order and its end.
fn done(report: &StopReport, forget: bool) -> String {
    let id = &report.id;
    let forgotten = if forget { "; it is forgotten" } else { "" };
    match report.released_ms {
        Some(ms) if ms > 0.0 => {
            let state = report.state;
            format!("{id} is {state}, after {}{forgotten}", milliseconds(ms))
        }
        _ => {
            let how = match report.state {
                SessionState::Failed => "had failed before",
                _ => "had ended before",
            };
            let why = report.reason.as_deref();
            let why = why.map_or_else(String::new, |why| format!(" ({})", printable(why)));
            let rest = match forget {
                true => "; it is forgotten".to_owned(),
                false => format!("; `conman rm --forget {id}` takes it off the lists"),
            };
            format!("{id} {how}{why}{rest}")
        }
    }
}

fn stuck(report: &StopReport) -> Failure {
    let id = &report.id;
    let reason = report.reason.as_deref().unwrap_or("no reason is known");
    Failure::new(
        Exit::Stuck,
        "session-stuck",
        "The session could not be killed yet",
        format!("{id}: {reason}"),
    )
    .next(format!("conman keeps trying; `conman why {id}` shows more"))
}
