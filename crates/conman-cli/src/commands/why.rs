//! `conman why`: a session's timeline as text.

use conman_proto::{Node, Session, Timeline};
use http::Method;
use jiff::Timestamp;
use serde_json::json;

use super::Context;
use crate::args::WhyArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::story::Story;

pub(super) async fn run(context: &Context, args: &WhyArgs) -> Result<Exit, Failure> {
    let id = &args.id;
    let client = &context.client;
    // The session first: then the timeline includes what it shows.
    let session = match client.get::<Session>(&format!("/v1/sessions/{id}")).await {
        Ok(session) => Some(session),
        Err(error) => {
            let failure = Failure::from(error);
            // A session that was forgotten keeps its timeline for a while. If its node does not
            // answer, the others know why.
            if failure.exit() != Exit::NotFound && !is_other_nodes(&failure) {
                return Err(failure);
            }
            None
        }
    };
    let path = format!("/v1/sessions/{id}/timeline");
    let timeline = client
        .answer::<Timeline>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    let node = match timeline.value.fleet {
        // Its registry knows which nodes would start the session.
        Some(_) => None,
        None => client.get::<Node>("/v1/nodes/self").await.ok(),
    };
    let node = node.map(|node| node.state);
    let story = Story::new(session.as_ref(), &timeline.value, node, Timestamp::now());
    let output = &context.output;
    if output.json {
        output.value(&json!({ "id": id, "story": story, "timeline": timeline.raw }))?;
    } else {
        output.line(&story.to_string())?;
    }
    Ok(Exit::Done)
}

/// Whether the session's node does not answer, and not the one that received the request.
fn is_other_nodes(failure: &Failure) -> bool {
    let Failure::Reported { problem, .. } = failure else {
        return false;
    };
    [
        "node-unreachable",
        "node-silent",
        "node-lost",
        "session-moves",
        "registry-failed",
    ]
    .contains(&problem.slug())
}
