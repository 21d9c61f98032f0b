//! `conman logs`: a session's output, its two streams separate.

use conman_proto::{LogLine, LogStream};

use super::Context;
use super::followed::{Fate, Followed};
use crate::args::LogsArgs;
use crate::client::{ClientError, Lines};
use crate::failure::{Exit, Failure, WithSources};
use crate::output::Output;

pub(super) async fn run(context: &Context, args: &LogsArgs) -> Result<Exit, Failure> {
    show(context, args).await.map(|_| Exit::Done)
}

/// Returns whether there was any line.
pub(super) async fn show(context: &Context, args: &LogsArgs) -> Result<bool, Failure> {
    let mut path = format!("/v1/sessions/{}/logs?format=json", args.id);
    if args.follow {
        path.push_str("&follow=true");
    }
    if args.timestamps {
        path.push_str("&timestamps=true");
    }
    if let Some(since) = args.since {
        path.push_str(&format!("&since={since}"));
    }
    if args.previous {
        path.push_str("&previous=true");
    }
    if let Some(lines) = args.tail {
        path.push_str(&format!("&tail={lines}"));
    }
    let client = &context.client;
    let followed = match args.follow {
        true => Some(Followed::now(client, &args.id).await?),
        false => None,
    };
    let response = client.stream(&path, "application/x-ndjson").await?;
    let mut lines = Lines::new(response.into_body());
    let mut printed = false;
    let cut = loop {
        let line = match lines.next().await {
            Ok(Some(line)) => line,
            Ok(None) => break None,
            Err(error) => break Some(client.stream_error(error)),
        };
        let parsed: LogLine = serde_json::from_slice(&line)
            .map_err(|error| client.not_understood(error.to_string()))?;
        printed = true;
        if context.output.json {
            // As the daemon wrote it: it may have unknown fields.
            let text = String::from_utf8_lossy(&line);
            context
                .output
                .program_line(LogStream::Stdout, &text, args.raw)?;
        } else {
            print(context.output, &parsed, args.raw)?;
        }
    };
    match (followed, cut) {
        (Some(followed), cut) => require_end(context, args, &followed, cut).await?,
        (None, Some(cut)) => return Err(cut.into()),
        (None, None) => {}
    }
    Ok(printed)
}

fn print(output: Output, line: &LogLine, raw: bool) -> std::io::Result<()> {
    let at = line.at.map_or_else(String::new, |at| format!("{at} "));
    output.program_line(line.stream, &format!("{at}{}", line.text), raw)
}

/// A followed log ends with its container, or with a daemon that stops or fails. A script must be
/// able to distinguish these, and know whether the container ended as it should.
async fn require_end(
    context: &Context,
    args: &LogsArgs,
    followed: &Followed,
    cut: Option<ClientError>,
) -> Result<(), Failure> {
    let again = format!("conman logs -f {}", args.id);
    match (followed.fate(&context.client, &again).await, cut) {
        (Fate::Gone(failure) | Fate::Unknown(failure), _) => Err(failure),
        (Fate::Ended, None) => Ok(()),
        (Fate::Ended, Some(cut)) => Err(cut.into()),
        (Fate::Runs, cut) => {
            let why = cut.map_or_else(
                || "the daemon was probably restarted".to_owned(),
                |cut| WithSources(&cut).to_string(),
            );
            let detail = format!("{} still runs; {why}", args.id);
            let title = "The log ended before the session";
            let failure = Failure::new(Exit::Unreachable, "log-cut", title, detail);
            let next = format!("`conman logs -f --tail 0 {}` continues", args.id);
            Err(failure.next(next))
        }
    }
}
