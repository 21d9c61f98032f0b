//! `conman processes`: the processes of a session.

use comfy_table::Cell;
use conman_proto::ProcessList;
use http::Method;

use super::Context;
use crate::args::SessionArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{bytes, printable};

pub(super) async fn run(context: &Context, args: &SessionArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}/processes", args.id);
    let answer = context
        .client
        .answer::<ProcessList>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let rows = answer.value.processes.iter().map(|process| {
        let uid = process
            .uid
            .map_or_else(|| "?".to_owned(), |uid| uid.to_string());
        let command = process.command.join(" ");
        vec![
            Cell::new(process.pid),
            Cell::new(uid),
            Cell::new(&process.state),
            Cell::new(format!("{:.1}", process.cpu_s)),
            Cell::new(bytes(process.memory_bytes)),
            Cell::new(printable(&command)),
        ]
    });
    let header = ["PID", "UID", "STATE", "CPU S", "MEMORY", "COMMAND"];
    output.table(&header, rows.collect())?;
    if answer.value.truncated {
        output.warning("the session has more processes than are listed");
    }
    Ok(Exit::Done)
}
