//! `conman token`: a connect token for one session.

use conman_proto::{ConnectToken, ConnectTokenRequest, Session};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::args::TokenArgs;
use crate::client::PROMPT;
use crate::failure::{Exit, Failure};
use crate::human::{duration, since};

pub(super) async fn run(context: &Context, args: &TokenArgs) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{}/token", args.id);
    let request = ConnectTokenRequest { ttl_s: args.ttl };
    let answer = context
        .client
        .answer::<ConnectToken>(Method::POST, &path, Some(&request), PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
    } else {
        let ConnectToken {
            token,
            expires_at,
            url,
        } = &answer.value;
        output.line(token)?;
        let valid = duration(since(*expires_at, Timestamp::now()));
        output.note(&format!("opens connections to {} for {valid}", args.id));
        if let Some(url) = url {
            output.note(&format!("in a browser: {url}"));
        }
        let path = format!("/v1/sessions/{}", args.id);
        let session = context.client.get::<Session>(&path).await;
        if session.is_err_and(|error| Failure::from(error).exit() == Exit::NotFound) {
            output.warning(&format!(
                "no session has the name {} yet; a connection starts it only where its template allows that",
                args.id
            ));
        }
    }
    Ok(Exit::Done)
}
