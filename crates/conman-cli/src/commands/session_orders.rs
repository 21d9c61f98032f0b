//! `conman pause`, `resume`, `restart`, `update` and `kill`.

use conman_proto::{EnsureResponse, Session};
use http::Method;
use jiff::Timestamp;
use serde::de::DeserializeOwned;

use super::Context;
use crate::args::{KillArgs, SessionArgs, UpdateArgs};
use crate::client::{Answer, PROMPT, START, encode};
use crate::failure::{Exit, Failure};

pub(super) async fn pause(context: &Context, args: &SessionArgs) -> Result<Exit, Failure> {
    let answer = order::<Session>(context, args, "pause", PROMPT).await?;
    report(context, &answer, &answer.value)
}

pub(super) async fn resume(context: &Context, args: &SessionArgs) -> Result<Exit, Failure> {
    let answer = order::<Session>(context, args, "resume", PROMPT).await?;
    report(context, &answer, &answer.value)
}

pub(super) async fn restart(context: &Context, args: &SessionArgs) -> Result<Exit, Failure> {
    let answer = order::<EnsureResponse>(context, args, "restart", START).await?;
    report(context, &answer, &answer.value.session)
}

pub(super) async fn update(context: &Context, args: &UpdateArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}", args.id);
    let patch = args.request(Timestamp::now());
    let client = &context.client;
    let answer = client.answer::<Session>(Method::PATCH, &path, Some(&patch), PROMPT);
    let answer = answer
        .await
        .map_err(|error| Failure::from(error).about(args.id.as_str()))?;
    match context.output.json {
        true => context.output.value(&answer.raw)?,
        false => context.output.line(args.id.as_str())?,
    }
    Ok(Exit::Done)
}

async fn order<T: DeserializeOwned>(
    context: &Context,
    args: &SessionArgs,
    what: &str,
    patience: std::time::Duration,
) -> Result<Answer<T>, Failure> {
    let path = format!("/v1/sessions/{}/{what}", args.id);
    let answer = context
        .client
        .answer(Method::POST, &path, None::<&()>, patience)
        .await;
    answer.map_err(|error| Failure::from(error).about(args.id.as_str()))
}

fn report<T>(context: &Context, answer: &Answer<T>, session: &Session) -> Result<Exit, Failure> {
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
    } else {
        output.line(&format!("{} is {}", session.id, session.state))?;
    }
    Ok(Exit::Done)
}

pub(super) async fn kill(context: &Context, args: &KillArgs) -> Result<Exit, Failure> {
    let signal = encode(&args.signal);
    let path = match args.exec {
        Some(exec) => format!(
            "/v1/sessions/{}/execs/{exec}/signal?signal={signal}",
            args.id
        ),
        None => format!("/v1/sessions/{}/kill?signal={signal}", args.id),
    };
    let sent = context.client.order(Method::POST, &path).await;
    sent.map_err(|error| Failure::from(error).about(args.id.as_str()))?;
    Ok(Exit::Done)
}
