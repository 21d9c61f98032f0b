//! `conman net`: links that connect running sessions to interfaces of their nodes.

use comfy_table::Cell;
use conman_proto::{LinkRequest, SessionId, SessionLink, SessionLinkList, SessionState};
use http::Method;
use serde_json::{Value, json};

use super::Context;
use super::session_pages::{self, Filter};
use crate::args::{NetArgs, NetAttachArgs, NetCommand};
use crate::client::{ClientError, PROMPT, encode};
use crate::failure::{Exit, Failure};
use crate::human::printable;

pub(super) async fn run(context: &Context, args: &NetArgs) -> Result<Exit, Failure> {
    match &args.command {
        NetCommand::Attach(args) => attach(context, args).await,
        NetCommand::Detach { id, name } => {
            let path = format!("{}/{}", links_of(id), encode(name.as_str()));
            let detached = context.client.order(Method::DELETE, &path).await;
            detached.map_err(|error| Failure::from(error).about(id.as_str()))?;
            Ok(Exit::Done)
        }
        NetCommand::Ls { id } => list(context, id.as_ref()).await,
    }
}

fn links_of(id: &SessionId) -> String {
    format!("/v1/sessions/{id}/links")
}

async fn attach(context: &Context, args: &NetAttachArgs) -> Result<Exit, Failure> {
    let request = LinkRequest {
        to: args.to.clone(),
        name: args.name.clone(),
        addresses: args.address.clone(),
        routes: args.route.clone(),
    };
    let answer = context
        .client
        .answer::<SessionLink>(Method::POST, &links_of(&args.id), Some(&request), PROMPT)
        .await
        .map_err(|error| Failure::from(error).about(args.id.as_str()))?;
    let output = &context.output;
    match output.json {
        true => output.value(&answer.raw)?,
        false => output.line(&printable(&answer.value.name))?,
    }
    Ok(Exit::Done)
}

async fn list(context: &Context, id: Option<&SessionId>) -> Result<Exit, Failure> {
    let ids = match id {
        Some(id) => vec![id.clone()],
        None => {
            let running = Filter {
                states: vec![SessionState::Running],
                ..Filter::default()
            };
            let (sessions, _) = session_pages::all(context, &running).await?;
            sessions.into_iter().map(|session| session.id).collect()
        }
    };
    let (mut rows, mut values) = (Vec::new(), Vec::new());
    for session in ids {
        let path = links_of(&session);
        let links = match context.client.get::<SessionLinkList>(&path).await {
            Ok(listed) => listed.links,
            // One of many that has ended meanwhile.
            Err(ClientError::Refused(_)) if id.is_none() => continue,
            Err(error) => return Err(Failure::from(error).about(session.as_str())),
        };
        for link in links {
            values.push(json!({"session": session, "link": link}));
            let cells = [
                session.to_string(),
                printable(&link.name).into_owned(),
                link.to.to_string(),
                printable(&link.addresses.join(" ")).into_owned(),
            ];
            rows.push(cells.map(Cell::new).into());
        }
    }
    let output = &context.output;
    match output.json {
        true => output.value(&Value::from(values))?,
        false => output.table(&["SESSION", "NAME", "TO", "ADDRESSES"], rows)?,
    }
    Ok(Exit::Done)
}
