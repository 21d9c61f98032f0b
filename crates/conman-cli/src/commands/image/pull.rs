//! `conman image pull`: an image from a registry, by the node.

use conman_proto::{Image, Problem, PullPhase, PullProgress, PullRequest};
use serde::de::DeserializeOwned;

use super::super::Context;
use crate::args::ImagePullArgs;
use crate::client::{Answer, ClientError, SseEvents, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, printable};
use crate::progress::Progress;

pub(super) async fn run(context: &Context, args: &ImagePullArgs) -> Result<Exit, Failure> {
    let mut path = "/v1/images".to_owned();
    if let Some(name) = &args.name {
        path.push_str(&format!("?name={}", encode(name)));
    }
    let body = PullRequest {
        pull: args.reference.clone(),
    };
    let progress = Progress::start(&context.output, format!("pulling {}", shown(args)));
    let response = context
        .client
        .post_for_stream(&path, &body, "text/event-stream")
        .await?;
    let mut events = SseEvents::new(response.into_body());
    let image = loop {
        let event = events
            .next()
            .await
            .map_err(|error| context.client.stream_error(error))?;
        let Some(event) = event else {
            let reason = "the pull's progress ended without its outcome";
            return Err(Failure::from(context.client.not_understood(reason))
                .next("the pull may continue; repeat the command to follow it"));
        };
        match event.name.as_str() {
            "progress" => {
                let now: Answer<PullProgress> = read(context, &event.data)?;
                progress.set(format!("pulling {}: {}", shown(args), in_words(&now.value)));
            }
            "image" => break read::<Image>(context, &event.data)?,
            "problem" => {
                let problem: Answer<Problem> = read(context, &event.data)?;
                return Err(ClientError::Refused(Box::new(problem.value)).into());
            }
            // A newer daemon may send other events.
            _ => {}
        }
    };
    drop(progress);
    super::arrived(
        context,
        args.name.as_deref().unwrap_or(&args.reference),
        &image,
    )
}

fn shown(args: &ImagePullArgs) -> String {
    printable(&args.reference).into_owned()
}

fn read<T: DeserializeOwned>(context: &Context, data: &str) -> Result<Answer<T>, Failure> {
    let raw: serde_json::Value = serde_json::from_str(data)
        .map_err(|error| context.client.not_understood(error.to_string()))?;
    let value =
        T::deserialize(&raw).map_err(|error| context.client.not_understood(error.to_string()))?;
    Ok(Answer { value, raw })
}

fn in_words(progress: &PullProgress) -> String {
    match progress.phase {
        PullPhase::Waiting => "waiting for other pulls".to_owned(),
        PullPhase::Resolving => "resolving the reference".to_owned(),
        PullPhase::Downloading => {
            let done = progress.layers.iter().map(|layer| layer.done_bytes).sum();
            let total = progress.layers.iter().map(|layer| layer.total_bytes).sum();
            format!("{} of {}", bytes(done), bytes(total))
        }
        PullPhase::Unpacking => "unpacking".to_owned(),
    }
}
