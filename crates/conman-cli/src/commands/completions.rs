//! `conman completions SHELL`.

use clap::CommandFactory as _;
use serde_json::json;

use crate::args::{Cli, CompletionsArgs};
use crate::failure::{Exit, Failure};
use crate::output::Output;

pub(super) fn run(output: &Output, args: &CompletionsArgs) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "conman", &mut script);
    if output.json {
        let script = String::from_utf8_lossy(&script);
        output.value(&json!({ "shell": args.shell.to_string(), "script": script }))?;
    } else {
        Output::raw_stdout(&script)?;
    }
    Ok(Exit::Done)
}
