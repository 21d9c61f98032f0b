//! `conman attach`: connects the user's terminal with a kept one, or follows a kept command; and
//! `conman exec --keep` and `--detach`, which start one first.
//!
//! Detaching leaves the program running; so does the death of this process, of the connection and
//! of the daemon. The user's terminal gets its settings back and leaves the modes that a
//! full-screen program had set.

use bytes::Bytes;
use conman_proto::{ExecId, ExecRequest, ExecStatus, KeptExec, SessionId};
use http::Method;
use tokio::sync::mpsc;

use super::Context;
use super::exec::{
    self, ending_signal, exit_of, next_piece, next_resize, of_conman, request, with_container,
};
use super::followed::{Fate, Followed};
use crate::args::detach_keys::DetachWatch;
use crate::args::{AttachArgs, DetachKeys, ExecArgs};
use crate::client::{ExecSocket, ExecSocketError, FromCommand, FromExec, PROMPT, ToCommand};
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::stdio::{StdWriter, Stream, read_stdin};
use crate::terminal::{self, Interrupts, RawTerminal, Resizes};

/// Clears the screen, before a replay.
const CLEAR: &[u8] = b"\x1b[m\x1b[H\x1b[2J";

/// Leaves the modes that a full-screen program may have set: the alternate screen, a scrolling
/// region, mouse reports, bracketed paste, application keys, a hidden cursor, attributes. Leaving
/// the alternate screen moves the cursor to its saved position even if it was not active, so the
/// position is saved first.
const LEAVE: &[u8] =
    b"\x1b7\x1b[?1049l\x1b7\x1b[r\x1b8\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\
    \x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[m\r\n";

/// The terminal to attach to.
struct Target {
    id: SessionId,
    exec: Option<ExecId>,
    keys: DetachKeys,
    scrollback: bool,
}

impl Target {
    fn path(&self) -> String {
        let of_exec = |exec| format!("/execs/{exec}");
        let mut path = format!(
            "/v1/sessions/{}{}/attach?scrollback={}",
            self.id,
            self.exec.map(of_exec).unwrap_or_default(),
            self.scrollback
        );
        if let Some(size) = terminal::size() {
            path.push_str(&format!("&columns={}&rows={}", size.columns, size.rows));
        }
        path
    }

    /// The command that attaches again.
    fn command(&self) -> String {
        match self.exec {
            Some(exec) => format!("conman attach --exec {exec} {}", self.id),
            None => format!("conman attach {}", self.id),
        }
    }
}

/// How an attachment ended.
enum Ended {
    Detached,
    Program(Result<ExecStatus, ExecSocketError>),
}

pub(super) async fn run(context: &Context, args: AttachArgs) -> Result<Exit, Failure> {
    let target = Target {
        id: args.id,
        exec: args.exec,
        keys: args.detach_keys,
        scrollback: !args.no_scrollback,
    };
    let attached = async {
        match has_terminal(context, &target).await? {
            true => attach(context, target).await,
            false => follow(context, target, args.interactive).await,
        }
    };
    attached.await.map_err(of_conman)
}

async fn has_terminal(context: &Context, target: &Target) -> Result<bool, Failure> {
    let Some(exec) = target.exec else {
        return Ok(true);
    };
    let path = format!("/v1/sessions/{}/execs/{exec}", target.id);
    let answer = context
        .client
        .answer::<KeptExec>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    Ok(answer.value.tty)
}

/// Follows a command without a terminal, to its end.
async fn follow(context: &Context, target: Target, interactive: bool) -> Result<Exit, Failure> {
    if context.output.json {
        return Err(Failure::usage("a command's output is not JSON"));
    }
    // An error here need not affect the next steps.
    let followed = Followed::now(&context.client, &target.id).await;
    let socket = context.client.attach(&target.path()).await?;
    let input = interactive.then(read_stdin).transpose()?;
    let ended = exec::converse(socket, input, None).await?;
    with_container(context, followed, &ended, &target.command()).await?;
    exit_of(ended)
}

/// Starts a command that is kept, and attaches to it unless it is detached.
pub(super) async fn keep(context: &Context, args: ExecArgs) -> Result<Exit, Failure> {
    let output = &context.output;
    if args.keep && !output.json && !terminal::stdin_is_terminal() {
        return Err(Failure::usage(
            "standard input is not a terminal: leave out -i",
        ));
    }
    let path = format!("/v1/sessions/{}/execs", args.id);
    let request = ExecRequest {
        open_stdin: args.detach && args.interactive,
        ..request(&args)
    };
    let answer = context
        .client
        .answer::<KeptExec>(Method::POST, &path, Some(&request), PROMPT)
        .await?;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    if args.detach {
        output.line(&answer.value.id.to_string())?;
        return Ok(Exit::Done);
    }
    let target = Target {
        id: args.id,
        exec: Some(answer.value.id),
        keys: args.detach_keys,
        scrollback: true,
    };
    attach(context, target).await
}

async fn attach(context: &Context, target: Target) -> Result<Exit, Failure> {
    if context.output.json {
        return Err(Failure::usage("a terminal's output is not JSON"));
    }
    if !terminal::stdin_is_terminal() {
        return Err(Failure::usage(format!(
            "standard input is not a terminal; `conman logs {}` reads what the \
             session's terminal showed",
            target.id
        )));
    }
    // An error here need not affect the next steps.
    let followed = Followed::now(&context.client, &target.id).await;
    // Installed before the size is read, so that no later change is missed.
    let resizes = Resizes::listen()?;
    let socket = context.client.attach(&target.path()).await?;
    if !target.keys.is_empty() {
        context.output.note(&format!("{} detaches", target.keys));
    }
    // Installed before the terminal is raw, so that no signal leaves it raw.
    let mut interrupts = Interrupts::listen()?;
    let raw = RawTerminal::enter()?;
    let input = read_stdin()?;
    let writer = StdWriter::start()?;
    let watch = DetachWatch::new(target.keys.clone());
    let ended = tokio::select! {
        // The program ended, or the user detached.
        ended = converse(socket, &writer, (input, watch), resizes) => ended,
        // Detaching is what the signal means.
        signal = ending_signal(Some(&mut interrupts), Some(&raw)) => {
            drop(writer);
            leave();
            return Ok(Exit::Command(128 + signal));
        }
    };
    let written = writer.finish().await;
    leave();
    drop(raw);
    written?;
    let back = target.command();
    let ended = match ended {
        Ended::Program(ended) => ended,
        Ended::Detached => {
            context
                .output
                .note(&format!("detached; `{back}` comes back"));
            return Ok(Exit::Done);
        }
    };
    let fate = tokio::select! {
        fate = with_container(context, followed, &ended, &back) => fate?,
        // It calls the daemon once more; a signal skips that.
        signal = ending_signal(Some(&mut interrupts), None) => {
            return Ok(Exit::Command(128 + signal));
        }
    };
    exit_after(ended, fate, &back)
}

/// The exit once the program or its connection has ended; `back` is the command that attaches again.
fn exit_after(
    ended: Result<ExecStatus, ExecSocketError>,
    fate: Fate,
    back: &str,
) -> Result<Exit, Failure> {
    if ended.is_ok() {
        return exit_of(ended);
    }
    let next = match fate {
        Fate::Runs => format!("the program still runs; `{back}` comes back to it"),
        Fate::Unknown(why) => {
            let why = why.detail();
            format!(
                "it is unknown whether the program still runs ({why}); `{back}` comes back to it \
                 if so"
            )
        }
        Fate::Ended | Fate::Gone(_) => return exit_of(ended),
    };
    exit_of(ended).map_err(|failure| failure.next(next))
}

/// Leaves the program's modes. The writer must have finished.
fn leave() {
    // A terminal that hung up has no modes.
    let _ = Output::raw_stdout(LEAVE);
}

/// Copies both ways until the program ends or the keys are typed.
async fn converse(
    socket: ExecSocket,
    writer: &StdWriter,
    typed: (mpsc::Receiver<Bytes>, DetachWatch),
    resizes: Resizes,
) -> Ended {
    let ExecSocket {
        mut to_command,
        mut from_command,
    } = socket;
    let ended = tokio::select! {
        // The end of the output is the program's, or the connection's.
        ended = pass_out(&mut from_command, writer) => Ended::Program(ended),
        // Cancel safe: unsent output is dropped.
        () = pass_in(&mut to_command, typed, resizes) => Ended::Detached,
    };
    to_command.close().await;
    ended
}

/// Returns when the keys are typed, or the input ends.
async fn pass_in(
    to_command: &mut ToCommand,
    (input, mut watch): (mpsc::Receiver<Bytes>, DetachWatch),
    resizes: Resizes,
) {
    let (mut input, mut resizes) = (Some(input), Some(resizes));
    loop {
        let sent = tokio::select! {
            // Cancel safe: `recv` loses nothing.
            piece = next_piece(&mut input) => {
                let Some(piece) = piece else { return };
                let (passed, detach) = watch.pass(&piece);
                let sent = if passed.is_empty() {
                    Ok(())
                } else {
                    to_command.stdin(&passed).await
                };
                if detach {
                    return;
                }
                sent
            }
            // Cancel safe: a signal is kept until it is received.
            () = next_resize(&mut resizes) => match terminal::size() {
                Some(size) => to_command.resize(size).await,
                None => Ok(()),
            },
        };
        if sent.is_err() {
            // The other direction fails as well, with the reason.
            std::future::pending::<()>().await;
        }
    }
}

/// Copies the terminal's output, until the program's status.
async fn pass_out(
    from_command: &mut FromCommand,
    writer: &StdWriter,
) -> Result<ExecStatus, ExecSocketError> {
    loop {
        let bytes = match from_command.next().await? {
            FromExec::Position(_) => continue,
            FromExec::Stdout(bytes) | FromExec::Stderr(bytes) => bytes,
            FromExec::Replay(bytes) => [CLEAR, &bytes].concat().into(),
            FromExec::Ended(status) => return Ok(status),
        };
        if !writer.write(Stream::Stdout, bytes).await {
            // The writer reports the reason when it is finished, before this is used.
            return Ok(ExecStatus {
                exit_code: None,
                error: None,
                ..ExecStatus::default()
            });
        }
    }
}
