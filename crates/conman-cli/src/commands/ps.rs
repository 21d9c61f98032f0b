//! `conman ps`: lists sessions.

use comfy_table::Cell;
use conman_proto::Session;
use jiff::Timestamp;
use serde_json::json;

use super::Context;
use super::session_pages::{self, Filter};
use crate::args::PsArgs;
use crate::failure::{Exit, Failure};
use crate::human::{ago, printable};
use crate::output::{Output, PROSE};

pub(super) async fn run(context: &Context, args: &PsArgs) -> Result<Exit, Failure> {
    let mut filter = if args.all || !args.state.is_empty() {
        Filter::default()
    } else {
        Filter::not_ended()
    };
    filter.labels.clone_from(&args.label);
    filter.node.clone_from(&args.node);
    if !args.state.is_empty() {
        filter.states.clone_from(&args.state);
    }
    let (sessions, raw) = session_pages::all(context, &filter).await?;
    let output = &context.output;
    if output.json {
        output.value(&json!({ "sessions": raw, "next": null }))?;
    } else if args.quiet {
        for session in &sessions {
            output.line(session.id.as_str())?;
        }
    } else {
        table(output, &sessions, Timestamp::now())?;
        let is_narrow = !filter.states.is_empty() || !filter.labels.is_empty();
        match (sessions.is_empty(), is_narrow || filter.node.is_some()) {
            (true, false) => output.note("no sessions; `conman run ID --image IMAGE` starts one"),
            (true, true) => {
                output.note("no such sessions; `conman ps --all` shows ended ones too");
            }
            (false, _) => {}
        }
    }
    Ok(Exit::Done)
}

fn table(output: &Output, sessions: &[Session], now: Timestamp) -> Result<(), Failure> {
    let reasons = sessions.iter().any(|session| session.reason.is_some());
    let mut header = vec![
        "NAME", "STATE", "NODE", "SINCE", "FROM", "CONNS", "GEN", "PID", "URL",
    ];
    if reasons {
        header.push(PROSE);
    }
    let rows = sessions
        .iter()
        .map(|session| {
            let mut row = row(session, now);
            if reasons {
                row.push(Cell::new(printable(
                    session.reason.as_deref().unwrap_or("-"),
                )));
            }
            row
        })
        .collect();
    output.table(&header, rows)
}

/// Where it is reached: the address that works in a browser, if there is one.
fn address(session: &Session) -> Option<&str> {
    session.browser_url.as_deref().or(session.url.as_deref())
}

fn row(session: &Session, now: Timestamp) -> Vec<Cell> {
    let since = session
        .ended_at
        .or(session.started_at)
        .unwrap_or(session.created_at);
    let from = session.template.as_deref().unwrap_or(&session.spec.image);
    vec![
        Cell::new(&session.id),
        Output::state_cell(session.state),
        Cell::new(printable(&session.node)),
        Cell::new(ago(now, since)),
        Cell::new(printable(from)),
        Cell::new(session.connections),
        Cell::new(session.generation),
        Cell::new(
            session
                .pid
                .map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
        ),
        Cell::new(printable(address(session).unwrap_or("-"))),
    ]
}
