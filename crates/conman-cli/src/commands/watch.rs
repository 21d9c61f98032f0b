//! `conman watch`: changes of files in a directory of a session.

use conman_proto::{FileChange, FileChangeKind};

use super::Context;
use crate::args::WatchArgs;
use crate::client::{SseEvents, StreamError, encode};
use crate::failure::{Exit, Failure};
use crate::human::printable;

pub(super) async fn run(context: &Context, args: &WatchArgs) -> Result<Exit, Failure> {
    let target = &args.path;
    let mut path = format!(
        "/v1/sessions/{}/files/watch?path={}",
        target.id,
        encode(&target.path)
    );
    if let Some(user) = &args.user {
        path.push_str(&format!("&user={}", encode(user)));
    }
    let client = &context.client;
    let response = client.stream(&path, "text/event-stream").await?;
    let mut messages = SseEvents::new(response.into_body());
    loop {
        let message = match messages.next().await {
            Ok(Some(message)) => message,
            Ok(None) | Err(StreamError::Broken(_)) => break,
            Err(error) => return Err(client.stream_error(error).into()),
        };
        let change: FileChange = serde_json::from_str(&message.data)
            .map_err(|error| client.not_understood(error.to_string()))?;
        let is_last = change.kind == FileChangeKind::Gone;
        if context.output.json {
            context.output.item(&change)?;
        } else {
            context.output.line(&line(&change))?;
        }
        if is_last {
            return Ok(Exit::Done);
        }
    }
    let note = format!("the watch has ended: conman why {} says why", target.id);
    context.output.note(&note);
    Ok(Exit::Done)
}

fn line(change: &FileChange) -> String {
    let slash = if change.directory { "/" } else { "" };
    match &change.name {
        Some(name) => format!("{} {}{slash}", change.kind.as_str(), printable(name)),
        None => change.kind.as_str().to_owned(),
    }
}
