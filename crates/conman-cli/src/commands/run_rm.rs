//! `conman run --rm`: stays with a session until its program ends, then removes it.

use std::time::Duration;

use conman_proto::{EndCause, EnsureResponse, Session, SessionId, SessionState, StopReport};
use http::Method;

use super::exec::ending_signal;
use super::{Context, attach, logs, run};
use crate::args::{AttachArgs, LogsArgs, RunArgs};
use crate::client::START;
use crate::failure::{Exit, Failure};
use crate::terminal::Interrupts;

/// Interval between polls for the log of a session that is starting.
const LOG_INTERVAL: Duration = Duration::from_millis(50);

pub(super) async fn run(
    context: &Context,
    args: &RunArgs,
    answer: &EnsureResponse,
) -> Result<Exit, Failure> {
    let session = &answer.session;
    let id = &session.id;
    if !answer.created {
        let title = "The session runs already";
        let detail =
            format!("{id} was started by another command; it was neither attached to nor removed");
        let failure = Failure::new(Exit::Refused, "session-exists", title, detail);
        return Err(failure.next(format!("use another name, or `conman rm {id}` first")));
    }
    if let Some(url) = session.browser_url.as_deref().or(session.url.as_deref()) {
        context.output.note(url);
    }
    let mut interrupts = Interrupts::listen()?;
    let ended = tokio::select! {
        // The program ended.
        ended = program(context, args, id) => ended,
        signal = ending_signal(Some(&mut interrupts), None) => Ok(Exit::Command(128 + signal)),
    };
    let path = format!("/v1/sessions/{id}?forget=true");
    let client = &context.client;
    let removed = client.answer::<StopReport>(Method::DELETE, &path, None::<&()>, START);
    match (ended, removed.await) {
        (Ok(exit), Ok(_)) => Ok(exit),
        (Err(failure), Ok(_)) => Err(failure),
        (_, Err(error)) => Err(Failure::from(error)
            .about(id.as_str())
            .next(format!("`conman rm --forget {id}` removes it"))),
    }
}

/// Waits for the start; whether the program has not ended since.
async fn is_up(context: &Context, path: &str) -> Result<bool, Failure> {
    loop {
        let session: Session = context.client.get(path).await?;
        match session.state {
            SessionState::Starting => tokio::time::sleep(LOG_INTERVAL).await,
            // Its program has ended; the rest of it is still being removed.
            SessionState::Stopping => return Ok(false),
            state => return Ok(!state.is_ended()),
        }
    }
}

/// The program wrote more than its log keeps, faster than it was read.
fn output_lost(id: &SessionId, lost: &str) -> Failure {
    let title = "Output of the program was lost";
    let failure = Failure::new(Exit::NOT_RUN, "output-lost", title, format!("{id}: {lost}"));
    failure.next(
        "start the session, and run the command with `conman exec`, which waits for its reader",
    )
}

/// Shows the program's output until it ends; returns its exit code.
async fn program(context: &Context, args: &RunArgs, id: &SessionId) -> Result<Exit, Failure> {
    let path = format!("/v1/sessions/{id}");
    if args.tty && is_up(context, &path).await? {
        let attach = AttachArgs {
            exec: None,
            // Detaching would end it.
            detach_keys: String::new().parse().map_err(Failure::usage)?,
            no_scrollback: false,
            interactive: false,
            id: id.clone(),
        };
        let attached = attach::run(context, attach).await;
        // It may have ended before its terminal could be attached to.
        if attached.is_ok() || is_up(context, &path).await? {
            return attached;
        }
    }
    let log = LogsArgs {
        follow: true,
        tail: None,
        since: None,
        timestamps: false,
        previous: false,
        // As of every program that a user starts at a terminal.
        raw: true,
        id: id.clone(),
    };
    loop {
        let followed = logs::show(context, &log).await;
        let mut session: Session = context.client.get(&path).await?;
        // Its exit code is known a moment after its log has ended.
        while followed.is_ok() && !session.state.is_ended() && session.state != SessionState::Stuck
        {
            tokio::time::sleep(LOG_INTERVAL).await;
            session = context.client.get(&path).await?;
        }
        let is_over = session.state.is_ended();
        let cause = session.end.as_ref().map(|end| end.cause);
        let has_exited = cause == Some(EndCause::Exited);
        match (followed, session.exit_code) {
            (Ok(mut shown), code) => {
                if !shown.any {
                    // It may have ended before its log could be opened; then the kept log has the end of it.
                    let kept = LogsArgs {
                        follow: false,
                        ..log
                    };
                    shown = logs::show(context, &kept).await.unwrap_or(shown);
                }
                if let Some(lost) = shown.lost {
                    return Err(output_lost(id, &lost));
                }
                return match code.map(Exit::of_command) {
                    // Whether it was ready before is of no interest.
                    Some(exit) if has_exited => Ok(exit),
                    Some(exit) => Err(run::ended(&session).with_exit(exit)),
                    None => Err(run::ended(&session)),
                };
            }
            // There is no container yet.
            (Err(failure), _) if failure.slug() == Some("log-not-kept") && !is_over => {
                tokio::time::sleep(LOG_INTERVAL).await;
            }
            // What a terminal showed is not kept.
            (Err(_), Some(code)) if args.tty && has_exited => {
                context
                    .output
                    .warning("the program ended before its terminal could be attached to");
                return Ok(Exit::of_command(code));
            }
            (Err(_), _) if is_over => return Err(run::ended(&session)),
            (Err(failure), _) => return Err(failure),
        }
    }
}
