//! `conman logs`: a session's output, its two streams separate.

use conman_proto::{LOG_FRAMES, LogLine, LogStream};

use super::Context;
use super::followed::{Fate, Followed};
use crate::args::LogsArgs;
use crate::client::{ClientError, Lines, LogFrame, LogFrames};
use crate::failure::{Exit, Failure, WithSources};
use crate::output::ProgramOutput;

/// What a log had.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// Whether there was any output.
    pub(super) any: bool,
    /// What of it is lost, in words.
    pub(super) lost: Option<String>,
}

pub(super) async fn run(context: &Context, args: &LogsArgs) -> Result<Exit, Failure> {
    show(context, args).await.map(|_| Exit::Done)
}

pub(super) async fn show(context: &Context, args: &LogsArgs) -> Result<Shown, Failure> {
    let client = &context.client;
    let followed = match args.follow {
        true => Some(Followed::now(client, &args.id).await?),
        false => None,
    };
    let mut shown = Shown::default();
    let printed = match context.output.json {
        true => print_lines(context, args, &mut shown).await?,
        false => print_bytes(context, args, &mut shown).await?,
    };
    let cut = printed.err();
    match (followed, cut) {
        (Some(followed), cut) => require_end(context, args, &followed, cut).await?,
        (None, Some(cut)) => return Err(cut.into()),
        (None, None) => {}
    }
    Ok(shown)
}

fn path(args: &LogsArgs, format: &str) -> String {
    let mut path = format!("/v1/sessions/{}/logs?format={format}", args.id);
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
    path
}

/// Prints the daemon's lines of JSON, which may have unknown fields. The inner error cut the log.
async fn print_lines(
    context: &Context,
    args: &LogsArgs,
    shown: &mut Shown,
) -> Result<Result<(), ClientError>, Failure> {
    const KIND: &str = "application/x-ndjson";
    let client = &context.client;
    let response = client.stream(&path(args, "json"), KIND).await?;
    let mut lines = Lines::new(response.into_body());
    loop {
        let line = match lines.next().await {
            Ok(Some(line)) => line,
            Ok(None) => return Ok(Ok(())),
            Err(error) => return Ok(Err(client.stream_error(error))),
        };
        serde_json::from_slice::<LogLine>(&line)
            .map_err(|error| client.not_understood(error.to_string()))?;
        shown.any = true;
        let text = String::from_utf8_lossy(&line);
        context
            .output
            .program_line(LogStream::Stdout, &text, args.raw)?;
    }
}

/// Prints the bytes of both outputs as the program wrote them.
async fn print_bytes(
    context: &Context,
    args: &LogsArgs,
    shown: &mut Shown,
) -> Result<Result<(), ClientError>, Failure> {
    let client = &context.client;
    let response = client.stream(&path(args, "frames"), LOG_FRAMES).await?;
    let mut frames = LogFrames::new(response.into_body());
    let mut stdout = ProgramOutput::new(context.output, LogStream::Stdout, args.raw);
    let mut stderr = ProgramOutput::new(context.output, LogStream::Stderr, args.raw);
    let ended = loop {
        match frames.next().await {
            Ok(Some(LogFrame::Output(LogStream::Stdout, bytes))) => stdout.write(&bytes)?,
            Ok(Some(LogFrame::Output(LogStream::Stderr, bytes))) => stderr.write(&bytes)?,
            Ok(Some(LogFrame::Note(note))) => {
                context.output.warning(&note);
                shown.lost = Some(note);
                continue;
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(client.stream_error(error)),
        }
        shown.any = true;
    };
    stdout.finish()?;
    stderr.finish()?;
    Ok(ended)
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
