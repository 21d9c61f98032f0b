//! `conman inspect`: everything about a session, as JSON.

use conman_proto::Session;
use http::Method;

use super::Context;
use crate::args::InspectArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};

pub(super) async fn run(context: &Context, args: &InspectArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}", args.id);
    let answer = context
        .client
        .answer::<Session>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    context.output.value(&answer.raw)?;
    Ok(Exit::Done)
}
