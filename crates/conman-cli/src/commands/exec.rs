//! `conman exec`: a command in a session, its input, output and exit code passed through.
//!
//! Two loops run within one task: one carries input and the terminal's size to the command, one
//! its output to the standard streams, which threads read and write (see [`crate::stdio`]).

use std::io::Read as _;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use conman_proto::{ExecRequest, ExecResult, ExecStatus};
use http::Method;
use tokio::sync::mpsc;

use super::followed::{Fate, Followed};
use super::{Context, attach};
use crate::args::ExecArgs;
use crate::client::{
    ClientError, ExecSocket, ExecSocketError, FromCommand, FromExec, ToCommand, encode,
};
use crate::failure::{Exit, Failure, WithSources};
use crate::stdio::{StdWriter, Stream, read_stdin};
use crate::terminal::{self, Interrupt, Interrupts, RawTerminal, Resizes};

/// Longest time that the API allows for a command without a live connection.
const LONGEST: Duration = Duration::from_secs(3_600);

/// Time for the daemon to answer after that.
const MARGIN: Duration = Duration::from_secs(30);

/// Bound on standard input with `--json`: the API's limit.
const MAX_STDIN_BYTES: usize = 1024 * 1024;

/// Bound on a command and its environment in the address of a request: less than the API's limit of a head.
const MAX_REQUEST_BYTES: usize = 60 * 1024;

/// A shell's exit code for a program that wrote to a pipe without a reader: 128 + SIGPIPE.
const NO_READER: Exit = Exit::Command(141);

/// A command that was killed, as all are with their container: 128 + SIGKILL.
const KILLED: i32 = 137;

/// Title of the problem when the command may have run or may still run.
const LOST: &str = "The command did not run to its end";

pub(super) async fn run(context: &Context, args: ExecArgs) -> Result<Exit, Failure> {
    let result = if args.keep || args.detach {
        attach::keep(context, args).await
    } else if context.output.json {
        collect(context, args).await
    } else {
        live(context, args).await
    };
    result.map_err(of_conman)
}

/// A failure of conman: every code below 125 could be the command's.
pub(super) fn of_conman(failure: Failure) -> Failure {
    match (&failure, failure.exit()) {
        (Failure::OutputClosed, _) => Failure::Quiet(NO_READER),
        (_, Exit::Command(_)) => failure,
        _ => failure.with_exit(Exit::NOT_RUN),
    }
}

pub(super) fn request(args: &ExecArgs) -> ExecRequest {
    ExecRequest {
        command: args.command.clone(),
        env: args.env.iter().cloned().collect(),
        workdir: args.workdir.clone(),
        user: args.user.clone(),
        tty: args.tty,
        terminal_size: args.tty.then(terminal::size).flatten(),
        timeout_ms: args.timeout,
        ..ExecRequest::default()
    }
}

/// One JSON value with everything that the command printed.
async fn collect(context: &Context, args: ExecArgs) -> Result<Exit, Failure> {
    if args.tty {
        return Err(Failure::usage(
            "a terminal's output is not JSON: use --tty or --json",
        ));
    }
    let mut request = request(&args);
    request.timeout_ms = args
        .timeout
        .or_else(|| u32::try_from(LONGEST.as_millis()).ok());
    if args.interactive {
        match String::from_utf8(whole_stdin()?) {
            Ok(text) => request.stdin = Some(text),
            Err(error) => request.stdin_base64 = Some(BASE64.encode(error.as_bytes())),
        }
    }
    let path = format!("/v1/sessions/{}/exec", args.id);
    let answer = context
        .client
        .answer::<ExecResult>(Method::POST, &path, Some(&request), LONGEST + MARGIN)
        .await?;
    context.output.value(&answer.raw)?;
    Ok(Exit::of_command(answer.value.exit_code))
}

fn whole_stdin() -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_STDIN_BYTES as u64 + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() > MAX_STDIN_BYTES {
        return Err(Failure::usage(
            "standard input is larger than 1 MiB: leave out --json",
        ));
    }
    Ok(bytes)
}

/// Refuses what does not fit into the address of a request, without repeating it.
fn check_length(request: &ExecRequest) -> Result<(), Failure> {
    let json = serde_json::to_string(request).map_err(std::io::Error::from)?;
    let bytes = encode(&json).map(str::len).sum::<usize>();
    match bytes > MAX_REQUEST_BYTES {
        true => Err(Failure::usage(format!(
            "the command line and its environment are too long ({bytes} bytes as sent, {MAX_REQUEST_BYTES} are \
             allowed): copy a file into the session with `conman cp`, or use standard input with -i"
        ))),
        false => Ok(()),
    }
}

/// Output as it comes, input as it is typed.
async fn live(context: &Context, args: ExecArgs) -> Result<Exit, Failure> {
    if args.tty && args.interactive && !terminal::stdin_is_terminal() {
        return Err(Failure::usage(
            "standard input is not a terminal: leave out -t",
        ));
    }
    let request = request(&args);
    check_length(&request)?;
    let path = format!("/v1/sessions/{}/exec", args.id);
    // An error here need not affect the next steps.
    let followed = Followed::now(&context.client, &args.id).await;
    // Installed before the size is read, so that no later change is missed.
    let resizes = args.tty.then(Resizes::listen).transpose()?;
    let mut socket = context.client.exec(&path, &request).await?;
    if !args.interactive {
        // The other direction reports a broken connection.
        let _ = socket.to_command.stdin(&[]).await;
    }
    let interactive_terminal = args.tty && args.interactive;
    // Installed before the terminal is raw, so that no signal leaves it raw. In a cooked terminal
    // every signal has its usual effect, and there is nothing to restore.
    let mut interrupts = interactive_terminal.then(Interrupts::listen).transpose()?;
    let raw = interactive_terminal.then(RawTerminal::enter).transpose()?;
    let input = args.interactive.then(read_stdin).transpose()?;
    let ended = tokio::select! {
        // The command ended.
        ended = converse(socket, input, resizes) => ended?,
        // Cancelling the conversation disconnects from the command, as the signal intends.
        signal = ending_signal(interrupts.as_mut(), raw.as_ref()) => {
            return Ok(Exit::Command(128 + signal));
        }
    };
    drop(raw);
    let again = format!("conman exec {} …", args.id);
    tokio::select! {
        told = with_container(context, followed, &ended, &again) => drop(told?),
        // It calls the daemon once more; a signal skips that.
        signal = ending_signal(interrupts.as_mut(), None) => {
            return Ok(Exit::Command(128 + signal));
        }
    }
    exit_of(ended)
}

/// Reports if a command ended with its container because of the node: otherwise it looks like any
/// killed command.
pub(super) async fn with_container(
    context: &Context,
    followed: Result<Followed, ClientError>,
    ended: &Result<ExecStatus, ExecSocketError>,
    again: &str,
) -> Result<Fate, Failure> {
    let exit = match ended {
        Ok(status) if status.exit_code == Some(KILLED) => Exit::of_command(KILLED),
        Ok(status) if status.exit_code.is_some() => return Ok(Fate::Ended),
        Ok(_) | Err(_) => Exit::NOT_RUN,
    };
    let followed = match followed {
        Ok(followed) => followed,
        Err(error) => return Ok(Fate::Unknown(error.into())),
    };
    match followed.fate(&context.client, again).await {
        Fate::Gone(failure) => Err(failure.with_exit(exit)),
        fate @ (Fate::Ended | Fate::Runs | Fate::Unknown(_)) => Ok(fate),
    }
}

/// The signal that ends this process. Meanwhile, stops and continues it on signals.
pub(super) async fn ending_signal(
    interrupts: Option<&mut Interrupts>,
    raw: Option<&RawTerminal>,
) -> u8 {
    let Some(interrupts) = interrupts else {
        return std::future::pending().await;
    };
    loop {
        match (interrupts.next().await, raw) {
            (Interrupt::End(signal), _) => return signal,
            (Interrupt::Suspend, Some(raw)) => {
                // A terminal that hung up meanwhile shows as the end of the input.
                let _ = raw.suspend();
            }
            (Interrupt::Suspend, None) => {}
        }
    }
}

/// Copies both ways until the command ends and its last output is written.
pub(super) async fn converse(
    socket: ExecSocket,
    input: Option<mpsc::Receiver<Bytes>>,
    resizes: Option<Resizes>,
) -> Result<Result<ExecStatus, ExecSocketError>, Failure> {
    let ExecSocket {
        mut to_command,
        mut from_command,
    } = socket;
    let writer = StdWriter::start()?;
    let ended = tokio::select! {
        // The end of the output is the command's.
        ended = pass_out(&mut from_command, &writer) => ended,
        // Cancel safe: unsent input has no reader once the command has ended.
        never = pass_in(&mut to_command, input, resizes) => match never {},
    };
    to_command.close().await;
    // Output before a broken connection is written before the error is reported.
    writer.finish().await?;
    Ok(ended)
}

/// Sends input and sizes; never ends, since the command may end later.
async fn pass_in(
    to_command: &mut ToCommand,
    input: Option<mpsc::Receiver<Bytes>>,
    resizes: Option<Resizes>,
) -> std::convert::Infallible {
    // The other direction fails as well, with the reason.
    let _ = try_pass_in(to_command, input, resizes).await;
    std::future::pending().await
}

async fn try_pass_in(
    to_command: &mut ToCommand,
    mut input: Option<mpsc::Receiver<Bytes>>,
    mut resizes: Option<Resizes>,
) -> Result<(), ExecSocketError> {
    loop {
        tokio::select! {
            // Cancel safe: `recv` loses nothing.
            piece = next_piece(&mut input) => match piece {
                Some(piece) => to_command.stdin(&piece).await?,
                None => {
                    input = None;
                    to_command.stdin(&[]).await?;
                }
            },
            // Cancel safe: a signal is kept until it is received.
            () = next_resize(&mut resizes) => {
                if let Some(size) = terminal::size() {
                    to_command.resize(size).await?;
                }
            }
        }
    }
}

pub(super) async fn next_piece(input: &mut Option<mpsc::Receiver<Bytes>>) -> Option<Bytes> {
    match input {
        Some(input) => input.recv().await,
        None => std::future::pending().await,
    }
}

pub(super) async fn next_resize(resizes: &mut Option<Resizes>) {
    match resizes {
        Some(resizes) => resizes.next().await,
        None => std::future::pending().await,
    }
}

/// Output, until the command's status.
async fn pass_out(
    from_command: &mut FromCommand,
    writer: &StdWriter,
) -> Result<ExecStatus, ExecSocketError> {
    loop {
        let written = match from_command.next().await? {
            FromExec::Stdout(bytes) => writer.write(Stream::Stdout, bytes).await,
            FromExec::Stderr(bytes) => writer.write(Stream::Stderr, bytes).await,
            FromExec::Replay(_) => {
                return Err(ExecSocketError::Protocol("a replay".to_owned()));
            }
            FromExec::Position(position) if position.dropped == 0 => continue,
            FromExec::Position(position) => {
                let note = format!(
                    "conman: {} bytes of output were dropped\n",
                    position.dropped
                );
                writer.write(Stream::Stderr, note.into()).await
            }
            FromExec::Ended(status) => return Ok(status),
        };
        if !written {
            // The writer reports the reason when it is finished, before this is used.
            return Ok(ExecStatus {
                exit_code: None,
                error: None,
                ..ExecStatus::default()
            });
        }
    }
}

pub(super) fn exit_of(ended: Result<ExecStatus, ExecSocketError>) -> Result<Exit, Failure> {
    let not_run =
        |exit, title, detail: String| Err(Failure::new(exit, "exec-failed", title, detail));
    match ended {
        Ok(ExecStatus {
            exit_code: Some(code),
            error: None,
            out_of_memory: true,
            ..
        }) => Err(Failure::new(
            Exit::of_command(code),
            "out-of-memory",
            "The command was killed",
            "the session's memory ran out".to_owned(),
        )),
        Ok(ExecStatus {
            exit_code: Some(code),
            error: None,
            ..
        }) => Ok(Exit::of_command(code)),
        Ok(ExecStatus {
            exit_code: Some(code),
            error: Some(error),
            ..
        }) => not_run(Exit::of_command(code), "The command cannot be run", error),
        Ok(ExecStatus {
            exit_code: None,
            error,
            ..
        }) => {
            let error = error.unwrap_or_else(|| "how it ended is unknown".to_owned());
            not_run(Exit::NOT_RUN, LOST, error)
        }
        Err(error) => not_run(Exit::NOT_RUN, LOST, WithSources(&error).to_string()),
    }
}
