//! `conman run`: ensures a session.

use std::time::Duration;

use conman_proto::{EnsureResponse, Session, SessionId, SessionState};
use http::Method;

use super::{Context, attach, run_rm};
use crate::args::detach_keys::DETACH_KEYS;
use crate::args::{AttachArgs, RunArgs};
use crate::client::{Answer, ClientError, PROMPT, START};
use crate::failure::{Exit, Failure};
use crate::human::milliseconds;
use crate::phases;
use crate::progress::Progress;

/// Interval of progress updates for a user at a terminal.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);

pub(super) async fn run(context: &Context, args: &RunArgs) -> Result<Exit, Failure> {
    // The log of a session that starts can be followed.
    let waits = !args.no_wait && !args.rm;
    let answer = ensure(context, args, waits).await?;
    if args.rm {
        return run_rm::run(context, args, &answer.value).await;
    }
    let exit = report(context, args, &answer)?;
    if args.interactive {
        let args = AttachArgs {
            exec: None,
            detach_keys: DETACH_KEYS.parse().map_err(Failure::usage)?,
            no_scrollback: false,
            interactive: false,
            id: answer.value.session.id,
        };
        return attach::run(context, args).await;
    }
    Ok(exit)
}

async fn ensure(
    context: &Context,
    args: &RunArgs,
    waits: bool,
) -> Result<Answer<EnsureResponse>, Failure> {
    let (query, patience) = match waits {
        true => ("", START),
        false => ("?wait=false", PROMPT),
    };
    let (method, path) = match args.id() {
        Some(id) => (Method::PUT, format!("/v1/sessions/{id}")),
        None => (Method::POST, "/v1/sessions".to_owned()),
    };
    let target = format!("{path}{query}");
    let request = args.request();
    let client = &context.client;
    let ensure = client.answer::<EnsureResponse>(method, &target, Some(&request), patience);
    let name = args.id().map_or("a session", SessionId::as_str);
    let progress = Progress::start(&context.output, format!("{name}: requesting it"));
    let answer = if progress.is_shown() && args.id().is_some() {
        tokio::select! {
            answer = ensure => answer,
            // Cancel safe: reading the session changes nothing.
            never = watch(context, &path, &progress) => match never {},
        }
    } else {
        ensure.await
    };
    drop(progress);
    answer.map_err(|error| explain(error, args))
}

/// Shows the phase of the start; never ends.
async fn watch(context: &Context, path: &str, progress: &Progress) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(WATCH_INTERVAL).await;
        // An error here also affects the request that is waited for, which reports it.
        if let Ok(session) = context.client.get::<Session>(path).await {
            let ended = session.phases_ms.keys().map(String::as_str);
            let what = match session.state {
                SessionState::Starting if !session.phases_ms.is_empty() => {
                    phases::in_words(phases::present(ended))
                }
                // A session with a known process has been started and verified.
                SessionState::Starting if session.pid.is_some() => phases::in_words(phases::READY),
                state => state.as_str(),
            };
            progress.set(format!("{}: {what}", session.id));
        }
    }
}

fn report(
    context: &Context,
    args: &RunArgs,
    answer: &Answer<EnsureResponse>,
) -> Result<Exit, Failure> {
    let output = &context.output;
    let EnsureResponse {
        session,
        created,
        spec_matches,
    } = &answer.value;
    if output.json {
        output.value(&answer.raw)?;
    } else {
        // A session without a port has no URL; the other commands take its name.
        let url = session.browser_url.as_deref().or(session.url.as_deref());
        output.line(url.unwrap_or(session.id.as_str()))?;
    }
    if !spec_matches {
        output.warning(&format!(
            "{} runs already, with another spec than this one, which was not applied; \
             `conman rm {0}` first to change it",
            session.id
        ));
    }
    let total = phases::total_ms(&session.phases_ms);
    match session.state {
        SessionState::Failed | SessionState::Stopped => return Err(ended(session)),
        SessionState::Stuck => return Err(ended(session).with_exit(Exit::Stuck)),
        SessionState::Paused => output.note("it is paused; the next connection resumes it"),
        SessionState::Running if *created => {
            output.note(&format!("started in {}", milliseconds(total)));
        }
        SessionState::Running => output.note("it was running already"),
        SessionState::Starting if args.no_wait => output.note("it is starting"),
        SessionState::Starting | SessionState::Frozen | SessionState::Stopping => {
            output.warning(&format!("it is {} and does not serve yet", session.state));
        }
    }
    Ok(Exit::Done)
}

/// The session ended before it could be used.
pub(super) fn ended(session: &Session) -> Failure {
    let id = &session.id;
    let reason = session.reason.as_deref().unwrap_or("no reason is known");
    Failure::new(
        Exit::Failed,
        "session-ended",
        "The session does not run",
        format!("{id} is {}: {reason}", session.state),
    )
    .next(format!(
        "`conman why {id}` shows what happened, `conman logs {id}` shows its output"
    ))
}

/// Puts the session's name into the advice.
fn explain(error: ClientError, args: &RunArgs) -> Failure {
    let Some(id) = args.id() else {
        // The detail has its name if it was started.
        return error.into();
    };
    let advice = match &error {
        ClientError::Refused(problem) => match (problem.slug(), problem.status) {
            ("session-stuck", _) => Some(format!("`conman why {id}` shows what blocks it")),
            // 503 is about the node; every other 5xx about this start.
            (_, 500 | 502 | 504) => Some(format!(
                "`conman why {id}` shows what happened and what to look at"
            )),
            _ => None,
        },
        // The daemon continues to start it, with or without a client.
        ClientError::TimedOut { .. } | ClientError::Broken { .. } => {
            Some(format!("`conman inspect {id}` shows whether it started"))
        }
        _ => None,
    };
    let failure = Failure::from(error);
    match advice {
        Some(advice) => failure.next(advice),
        None => failure,
    }
}
