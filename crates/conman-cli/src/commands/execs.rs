//! `conman execs`: the kept commands of a session.

use comfy_table::Cell;
use conman_proto::{KeptExec, KeptExecList};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::args::SessionArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{ago, printable};

pub(super) async fn run(context: &Context, args: &SessionArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}/execs", args.id);
    let answer = context
        .client
        .answer::<KeptExecList>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    if answer.value.execs.is_empty() {
        output.note("no kept commands");
    }
    let now = Timestamp::now();
    let row = |one: &KeptExec| {
        let state = match (one.running, one.exit_code) {
            (true, _) => "running".to_owned(),
            (false, _) if one.timed_out => "timed out".to_owned(),
            (false, Some(code)) => format!("exited {code}"),
            (false, None) => "ended".to_owned(),
        };
        let pid = one.pid.map(|pid| pid.to_string()).unwrap_or_default();
        let command = one.command.join(" ");
        let command = printable(&command).into_owned();
        let id = one.id.to_string();
        [id, state, pid, ago(now, one.started_at), command]
            .map(Cell::new)
            .to_vec()
    };
    let rows = answer.value.execs.iter().map(row).collect();
    output.table(&["EXEC", "STATE", "PID", "STARTED", "COMMAND"], rows)?;
    Ok(Exit::Done)
}
