//! `conman events`: the nodes' journals, past and as they grow.

use std::collections::BTreeSet;
use std::time::Duration;

use conman_proto::{Event, EventKind, EventPage};
use http::Method;
use serde::Serialize;
use tokio::time::Instant;

use super::Context;
use crate::args::EventsArgs;
use crate::client::{ClientError, PROMPT, SseEvents, encode};
use crate::failure::{Exit, Failure};
use crate::human::{clock, milliseconds, printable};
use crate::output::Output;

/// Events per request: the most that the API returns.
const PAGE: usize = 1_000;

/// A daemon that restarts is back within seconds; later it counts as stopped.
const GIVE_UP: Duration = Duration::from_secs(60);

/// Pauses between attempts to reach a restarting daemon, the last one repeated.
const PAUSES_MS: [u64; 4] = [100, 300, 1_000, 2_000];

pub(super) async fn run(context: &Context, args: &EventsArgs) -> Result<Exit, Failure> {
    if args.no_follow {
        past(context, args).await
    } else {
        follow(context, args).await
    }
}

/// All past events, page by page.
async fn past(context: &Context, args: &EventsArgs) -> Result<Exit, Failure> {
    let mut after = args.after.clone().unwrap_or_else(|| "0".to_owned());
    // Unreachable nodes, which every page reports.
    let mut missing = BTreeSet::new();
    loop {
        let path = path(args, Some(&after));
        let path = format!("{path}&follow=false&limit={PAGE}");
        let answer = context
            .client
            .answer::<EventPage>(Method::GET, &path, None::<&()>, PROMPT)
            .await?;
        let page = answer.value;
        if page.truncated && args.after.is_some() {
            warn_of_gap(&context.output);
        }
        for event in &page.events {
            if event.kind != EventKind::NodeUnreachable || missing.insert(event.node.clone()) {
                print(&context.output, event, None)?;
            }
        }
        if page.complete || page.cursor == after {
            return Ok(Exit::Done);
        }
        after = page.cursor;
    }
}

/// Continues from its position when the daemon restarts.
async fn follow(context: &Context, args: &EventsArgs) -> Result<Exit, Failure> {
    let mut position = args.after.clone();
    // When the last connection ended; `None` before the first.
    let mut lost: Option<Instant> = None;
    let mut attempt = 0;
    loop {
        let before = position.clone();
        match stream(context, args, &mut position).await {
            Ok(()) => {
                lost = Some(Instant::now());
                if position != before {
                    attempt = 0;
                }
                context.output.note("the stream ended; connecting again");
            }
            Err(StreamEnd::Connect(error)) => {
                let waiting = lost.is_some_and(|lost| lost.elapsed() < GIVE_UP);
                let failure = Failure::from(error);
                if !waiting || failure.exit() != Exit::Unreachable {
                    return Err(failure);
                }
            }
            Err(StreamEnd::Failure(failure)) => return Err(failure),
        }
        pause(&mut attempt).await;
    }
}

async fn pause(attempt: &mut usize) {
    let pause = PAUSES_MS[(*attempt).min(PAUSES_MS.len() - 1)];
    *attempt += 1;
    tokio::time::sleep(Duration::from_millis(pause)).await;
}

/// Why following stopped.
enum StreamEnd {
    /// No stream was opened.
    Connect(ClientError),
    /// Trying again would not help.
    Failure(Failure),
}

/// The events of one connection, until the daemon ends it or it breaks.
async fn stream(
    context: &Context,
    args: &EventsArgs,
    position: &mut Option<String>,
) -> Result<(), StreamEnd> {
    let path = path(args, position.as_deref());
    let response = context
        .client
        .stream(&path, "text/event-stream")
        .await
        .map_err(StreamEnd::Connect)?;
    let mut messages = SseEvents::new(response.into_body());
    loop {
        let message = match messages.next().await {
            Ok(Some(message)) => message,
            Ok(None) | Err(crate::client::StreamError::Broken(_)) => return Ok(()),
            Err(error) => {
                let error = context.client.stream_error(error);
                return Err(StreamEnd::Failure(error.into()));
            }
        };
        if message.id.is_some() {
            position.clone_from(&message.id);
        }
        if message.data.is_empty() {
            continue;
        }
        let event: Event = serde_json::from_str(&message.data)
            .map_err(|error| context.client.not_understood(error.to_string()))
            .map_err(|error| StreamEnd::Failure(error.into()))?;
        print(&context.output, &event, position.as_deref()).map_err(StreamEnd::Failure)?;
    }
}

fn path(args: &EventsArgs, after: Option<&str>) -> String {
    let mut parameters = Vec::new();
    let mut add = |name: &str, value: &str| parameters.push(format!("{name}={}", encode(value)));
    if let Some(after) = after {
        add("after", after);
    }
    if let Some(session) = &args.session {
        add("session", session.as_str());
    }
    if let Some(node) = &args.node {
        add("node", node);
    }
    for kind in &args.kind {
        add("kind", kind.as_str());
    }
    if args.local {
        add("local", "true");
    }
    format!("/v1/events?{}", parameters.join("&"))
}

fn warn_of_gap(output: &Output) {
    output.warning("some events after that position are no longer in their journal");
}

/// An event, with the position to resume from.
#[derive(Serialize)]
struct Item<'a> {
    #[serde(flatten)]
    event: &'a Event,
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<&'a str>,
}

fn print(output: &Output, event: &Event, cursor: Option<&str>) -> Result<(), Failure> {
    if output.json {
        return output.item(&Item { event, cursor });
    }
    let session = event
        .session
        .as_ref()
        .map_or_else(|| "-".to_owned(), ToString::to_string);
    let phase = match (&event.phase, event.duration_ms) {
        (Some(phase), Some(ms)) => format!(" [{}: {}]", printable(phase), milliseconds(ms)),
        (None, Some(ms)) => format!(" [{}]", milliseconds(ms)),
        _ => String::new(),
    };
    output.line(&format!(
        "{}  {:<10} {:<18} {session}  {}{phase}",
        clock(event.at),
        printable(&event.node),
        event.kind.as_str(),
        printable(&event.message),
    ))
}
