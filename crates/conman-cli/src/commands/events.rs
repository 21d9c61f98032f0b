//! `conman events`: the node's journal, past and as it grows.

use std::time::Duration;

use conman_proto::{Event, EventPage};
use http::Method;
use tokio::time::Instant;

use super::Context;
use crate::args::EventsArgs;
use crate::client::{ClientError, PROMPT, SseEvents};
use crate::failure::{Exit, Failure};
use crate::human::{clock, milliseconds, printable};
use crate::output::Output;

/// Events asked for at a time: the most that the API gives.
const PAGE: usize = 1_000;

/// A daemon that restarts is back within seconds; one that is not back by then was stopped.
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

/// Everything that has happened, page by page.
async fn past(context: &Context, args: &EventsArgs) -> Result<Exit, Failure> {
    let mut after = args.after.unwrap_or(0);
    loop {
        let path = format!("{}&follow=false&limit={PAGE}", path(args, after));
        let answer = context
            .client
            .answer::<EventPage>(Method::GET, &path, None::<&()>, PROMPT)
            .await?;
        let page = answer.value;
        if page.truncated && args.after.is_some() {
            warn_of_gap(&context.output, after);
        }
        for event in &page.events {
            print(&context.output, event)?;
        }
        match page.events.last() {
            Some(last) if page.events.len() >= PAGE && last.seq > after => after = last.seq,
            _ => return Ok(Exit::Done),
        }
    }
}

/// Goes on where it was when the daemon restarts.
async fn follow(context: &Context, args: &EventsArgs) -> Result<Exit, Failure> {
    let mut position = match args.after {
        Some(after) => after,
        // Asked for explicitly: without a position nothing could be resumed before the first
        // event has come.
        None => {
            context
                .client
                .get::<EventPage>("/v1/events?follow=false&limit=1")
                .await?
                .last_seq
        }
    };
    // When the last connection ended; none before the first.
    let mut lost: Option<Instant> = None;
    let mut attempt = 0;
    loop {
        let before = position;
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

/// One connection's worth of events, until the daemon ends it or it breaks off.
async fn stream(context: &Context, args: &EventsArgs, position: &mut u64) -> Result<(), StreamEnd> {
    let path = path(args, *position);
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
        if message.name == "truncated" {
            warn_of_gap(&context.output, *position);
            continue;
        }
        let event: Event = serde_json::from_str(&message.data)
            .map_err(|error| context.client.not_understood(error.to_string()))
            .map_err(|error| StreamEnd::Failure(error.into()))?;
        *position = event.seq;
        print(&context.output, &event).map_err(StreamEnd::Failure)?;
    }
}

fn path(args: &EventsArgs, after: u64) -> String {
    let mut path = format!("/v1/events?after={after}");
    if let Some(session) = &args.session {
        path.push_str(&format!("&session={session}"));
    }
    path
}

fn warn_of_gap(output: &Output, after: u64) {
    output.warning(&format!(
        "some events after number {after} are no longer in the journal"
    ));
}

fn print(output: &Output, event: &Event) -> Result<(), Failure> {
    if output.json {
        return output.item(event);
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
        "{}  {:<7} {:<17} {session}  {}{phase}",
        clock(event.at),
        event.seq,
        event.kind.as_str(),
        printable(&event.message),
    ))
}
