//! `conman logs`: what a session printed, its two outputs kept apart.

use std::time::Duration;

use conman_proto::{LogLine, LogStream, Session, SessionState};

use super::Context;
use crate::args::LogsArgs;
use crate::client::Lines;
use crate::failure::{Exit, Failure};
use crate::output::Output;

/// How long the daemon may take to notice that a session ended after its log has.
const END_LOOKS: u32 = 8;
const END_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn run(context: &Context, args: &LogsArgs) -> Result<Exit, Failure> {
    let mut path = format!("/v1/sessions/{}/logs?format=json", args.id);
    if args.follow {
        path.push_str("&follow=true");
    }
    if args.timestamps {
        path.push_str("&timestamps=true");
    }
    if let Some(lines) = args.tail {
        path.push_str(&format!("&tail={lines}"));
    }
    let client = &context.client;
    let response = client.stream(&path, "application/x-ndjson").await?;
    let mut lines = Lines::new(response.into_body());
    while let Some(line) = lines
        .next()
        .await
        .map_err(|error| client.stream_error(error))?
    {
        let parsed: LogLine = serde_json::from_slice(&line)
            .map_err(|error| client.not_understood(error.to_string()))?;
        if context.output.json {
            // As the daemon wrote it: it may have fields that this version does not know.
            Output::raw_stdout(&[&line[..], b"\n"].concat())?;
        } else {
            print(&parsed)?;
        }
    }
    if args.follow {
        require_end(context, args).await
    } else {
        Ok(Exit::Done)
    }
}

fn print(line: &LogLine) -> std::io::Result<()> {
    let mut text = line.at.map_or_else(String::new, |at| format!("{at} "));
    text.push_str(&line.text);
    text.push('\n');
    match line.stream {
        LogStream::Stdout => Output::raw_stdout(text.as_bytes()),
        LogStream::Stderr => Output::raw_stderr(text.as_bytes()),
    }
}

/// A followed log ends with its session, or with a daemon that stops; a script must be able to
/// tell the two apart.
async fn require_end(context: &Context, args: &LogsArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}", args.id);
    for _ in 0..END_LOOKS {
        match context.client.get::<Session>(&path).await {
            Ok(Session {
                state: SessionState::Running | SessionState::Frozen,
                ..
            }) => {
                tokio::time::sleep(END_INTERVAL).await;
            }
            Ok(_) => return Ok(Exit::Done),
            Err(error) => {
                let failure = Failure::from(error);
                let forgotten = failure.exit() == Exit::NotFound;
                return if forgotten {
                    Ok(Exit::Done)
                } else {
                    Err(failure)
                };
            }
        }
    }
    Err(Failure::new(
        Exit::Unreachable,
        "log-cut",
        "The log ended before the session",
        format!("{} still runs; the daemon was probably restarted", args.id),
    )
    .next(format!("`conman logs -f --tail 0 {}` goes on", args.id)))
}
