//! Commands inside a running container.
//!
//! One task for each command. It carries bytes both ways over the connection that dockerd handed
//! over, resizes the terminal, and requests the exit code once the outputs have ended, which dockerd ends some two
//! seconds after the command if processes that it has left behind have them open. It ends the command as soon as
//! the output has no reader.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bollard::exec::ResizeExecOptions;
use bollard::models::{ExecConfig, ExecInspectResponse};
use bytes::{Bytes, BytesMut};
use conman_linux::{PidFd, Signal};
use conman_proto::{ExecStatus, NotRun, TerminalSize};
use futures_util::stream::BoxStream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::daemon::Lane;
use super::failure::{Failure, names_no_user, unrunnable_exit_code};
use super::frames::Frames;
use super::hijack::{self, Hijacked};
use super::{DockerRuntime, Shared};
use crate::shared::exec_channels::{
    ExecEnds, OUTPUT_CHUNK_BYTES, exec_channels, exited, latest_size,
};
use crate::shared::exec_kill::{Killing, kill_command, on_order};
use crate::shared::exec_streams::carry_input;
use crate::{
    ContainerKey, Exec, ExecIo, ExecPlan, LogChunk, LogOptions, OutputStream, RuntimeError,
};

const ACTION: &str = "run a command in";
const KILL: &str = "kill a command in";

/// How long dockerd may take to notice a command's end after its outputs have ended.
const EXIT_PATIENCE: Duration = Duration::from_secs(15);
const EXIT_INTERVAL: Duration = Duration::from_millis(20);

/// A terminal can be resized only once the command runs, and there is no notification for that.
const RESIZE_ATTEMPTS: u32 = 20;
const RESIZE_INTERVAL: Duration = Duration::from_millis(25);

/// How dockerd's messages begin that take the place of output when a command cannot run.
const EXPLANATIONS: [&[u8]; 3] = [
    b"OCI runtime exec failed",
    b"unable to find user",
    b"unable to find group",
];

/// dockerd's exit code of a command that it could not start.
const NOT_STARTED: i64 = 126;

/// A command that dockerd created.
struct Command {
    shared: Arc<Shared>,
    key: ContainerKey,
    exec_id: String,
    /// For error messages.
    program: String,
    /// Holds a place among the streams.
    _place: OwnedSemaphorePermit,
}

#[async_trait]
impl Exec for DockerRuntime {
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        exec(&self.shared, key, plan).await
    }

    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        super::logs::logs(&self.shared, key, options).await
    }
}

async fn exec(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    plan: ExecPlan,
) -> Result<ExecIo, RuntimeError> {
    let subject = key.to_string();
    let place = shared.stream_place(key, ACTION)?;
    let program = plan.command.first().cloned().unwrap_or_default();
    let (tty, with_stdin) = (plan.tty, plan.stdin);
    let name = shared.container_name(key);
    let started = shared
        .daemon
        .call(Lane::Calls, shared.timeouts.exec, |facts| async move {
            let created = facts.client.create_exec(&name, exec_config(plan)).await?;
            let version = facts.client.client_version();
            let path = format!("/v{version}/exec/{}/start", created.id);
            Ok((
                created.id,
                hijack::start_exec(shared.daemon.socket(), &path, tty).await,
            ))
        });
    let (exec_id, connection) = started
        .await
        .map_err(|failure| failure.about(ACTION, &subject))?;
    let connection = connection.map_err(|failure| failure.about(ACTION, &subject))?;

    let (io, mut ends) = exec_channels();
    if !with_stdin {
        ends.stdin.close();
    }
    let command = Command {
        shared: Arc::clone(shared),
        key: key.clone(),
        exec_id,
        program,
        _place: place,
    };
    tokio::spawn(command.run(connection, tty, ends));
    Ok(io)
}

fn exec_config(plan: ExecPlan) -> ExecConfig {
    let environment = plan
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"));
    ExecConfig {
        attach_stdin: Some(plan.stdin),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        tty: Some(plan.tty.is_some()),
        env: Some(environment.collect()),
        cmd: Some(plan.command),
        user: plan.user,
        working_dir: plan.workdir,
        privileged: Some(false),
        ..ExecConfig::default()
    }
}

impl Command {
    async fn run(self, connection: Hijacked, tty: Option<TerminalSize>, ends: ExecEnds) {
        let ExecEnds {
            mut stdin,
            output: to,
            mut resize,
            mut status,
            kill,
        } = ends;
        let mut killing = pin!(on_order(kill, || self.kill()));
        let (reader, writer) = tokio::io::split(connection);
        let output = carry_output(reader, tty.is_some(), &to);
        let input = async {
            let mut writer = writer;
            carry_input(&mut stdin, &mut writer).await;
            // Fails when the command has ended already.
            let _ = writer.shutdown().await;
            std::future::pending().await
        };
        let resizes = async {
            if let Some(size) = tty {
                // For a daemon that ignored the size at the start.
                self.resize(size).await;
                while let Some(size) = latest_size(&mut resize).await {
                    self.resize(size).await;
                }
            }
            std::future::pending().await
        };
        let explanation = tokio::select! {
            // The outputs ended. Input and sizes have no reader any more.
            explanation = output => explanation,
            // These never end; cancelled when the outputs end.
            () = input => None,
            () = resizes => None,
            // Polled again below.
            never = &mut killing => match never {},
            // There is no reader any more.
            () = to.closed() => return self.leave(tty).await,
        };
        drop(to);
        drop(stdin);
        let ended = tokio::select! {
            ended = self.status(explanation) => ended,
            // Never ends; cancelled when the command has ended.
            never = &mut killing => match never {},
            // There is no waiter any more.
            () = status.closed() => return self.leave(tty).await,
        };
        // The caller may have stopped waiting.
        let _ = status.send(ended);
    }

    /// Ends the command, which has no reader any more: a terminal's as a hangup does, since dockerd keeps the
    /// terminal open.
    async fn leave(&self, tty: Option<TerminalSize>) {
        let left = match tty {
            Some(_) => self.hang_up().await,
            None => match self.kill().await {
                Ok(Some(kill)) => self.shared.on_blocking_thread(KILL, kill).await,
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            },
        };
        if let Err(error) = left {
            tracing::warn!(%error, "cannot end a command whose client has left");
        }
    }

    async fn hang_up(&self) -> Result<(), RuntimeError> {
        let subject = self.key.to_string();
        let process = self.first_process().await;
        let process = process.map_err(|failure| failure.about(KILL, &subject))?;
        if let Some(process) = process {
            // Fails once it has ended.
            let _ = process.signal(Signal::SIGHUP);
        }
        Ok(())
    }

    async fn kill(&self) -> Result<Killing, RuntimeError> {
        let subject = self.key.to_string();
        let process = self.first_process().await;
        let process = process.map_err(|failure| failure.about(KILL, &subject))?;
        let Some(process) = process else {
            return Ok(None);
        };
        let (shared, key) = (Arc::clone(&self.shared), self.key.clone());
        let work = move || kill_command(&shared.kernel, &key, &process);
        Ok(Some(Box::new(work)))
    }

    /// The command's first process, once it exists; `None` when it has ended.
    async fn first_process(&self) -> Result<Option<PidFd>, Failure> {
        loop {
            let seen = self.inspect().await?;
            if has_ended(&seen) {
                return Ok(None);
            }
            // The PID is unchanged after the pidfd was opened, so both are the same process.
            if let Some(pid) = pid_of(&seen)
                && let Ok(process) = PidFd::open(pid)
                && pid_of(&self.inspect().await?) == Some(pid)
            {
                return Ok(Some(process));
            }
            tokio::time::sleep(EXIT_INTERVAL).await;
        }
    }

    async fn resize(&self, size: TerminalSize) {
        for _ in 0..RESIZE_ATTEMPTS {
            let options = ResizeExecOptions {
                width: size.columns,
                height: size.rows,
            };
            let resized = self.shared.daemon.call(
                Lane::Calls,
                self.shared.timeouts.exec,
                |facts| async move { facts.client.resize_exec(&self.exec_id, options).await },
            );
            if resized.await.is_ok() {
                return;
            }
            tokio::time::sleep(RESIZE_INTERVAL).await;
        }
        tracing::debug!(exec = %self.exec_id, "cannot resize the terminal");
    }

    /// How the command ended. `explanation`: what dockerd may have sent instead of output.
    async fn status(&self, explanation: Option<Bytes>) -> ExecStatus {
        let unknown = |error: String| ExecStatus {
            exit_code: None,
            error: Some(error),
            ..ExecStatus::default()
        };
        let ended = match tokio::time::timeout(EXIT_PATIENCE, self.ended()).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(failure)) if failure.is_not_found() => {
                return unknown("the container is gone".to_owned());
            }
            Ok(Err(failure)) => {
                let error = failure.about("report the end of a command in", &self.program);
                return unknown(error.to_string());
            }
            Err(_) => return unknown("Docker does not report how the command ended".to_owned()),
        };
        let Some(exit_code) = ended.exit_code else {
            return unknown("Docker does not report how the command ended".to_owned());
        };
        if exit_code == NOT_STARTED && ended.pid.unwrap_or(0) == 0 {
            let reason = explanation.map(|words| String::from_utf8_lossy(&words).trim().to_owned());
            let reason = reason.unwrap_or_else(|| "Docker could not start it".to_owned());
            return ExecStatus {
                exit_code: Some(unrunnable_exit_code(&reason).unwrap_or(126)),
                error: Some(format!("cannot run `{}`: {reason}", self.program)),
                not_run: Some(lack(&reason)),
                ..ExecStatus::default()
            };
        }
        exited(i32::try_from(exit_code).unwrap_or(i32::MAX))
    }

    async fn ended(&self) -> Result<ExecInspectResponse, Failure> {
        loop {
            let seen = self.inspect().await?;
            if seen.running != Some(true) {
                return Ok(seen);
            }
            tokio::time::sleep(EXIT_INTERVAL).await;
        }
    }

    async fn inspect(&self) -> Result<ExecInspectResponse, Failure> {
        let seen = self.shared.daemon.call(
            Lane::Calls,
            self.shared.timeouts.inspect,
            |facts| async move { facts.client.inspect_exec(&self.exec_id).await },
        );
        seen.await
    }
}

/// Neither running nor still to be started.
fn has_ended(seen: &ExecInspectResponse) -> bool {
    seen.running != Some(true) && seen.exit_code.is_some()
}

/// PID of the first process of a running command.
fn pid_of(seen: &ExecInspectResponse) -> Option<i32> {
    let pid = seen.pid.filter(|_| seen.running == Some(true))?;
    i32::try_from(pid).ok().filter(|pid| *pid > 0)
}

/// What dockerd's explanation says that a command lacked.
fn lack(explanation: &str) -> NotRun {
    let of_workdir = |explanation: &str| {
        // The words of runc and of crun; runc's for a relative path.
        ["chdir", "Cwd must be"]
            .iter()
            .any(|words| explanation.contains(words))
    };
    match explanation {
        words if names_no_user(words) => NotRun::NoSuchUser,
        words if unrunnable_exit_code(words).is_none() && of_workdir(words) => {
            NotRun::NoSuchWorkdir
        }
        _ => NotRun::NoSuchCommand,
    }
}

/// Ends with the outputs, or when there is no reader any more. Returns dockerd's explanation if
/// that is all that was received.
async fn carry_output<R: AsyncRead + Unpin>(
    mut from: R,
    tty: bool,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
) -> Option<Bytes> {
    let mut frames = Frames::new();
    let mut received = BytesMut::new();
    // The command's output may begin like an explanation; it is held until more output follows.
    let mut held: Option<(OutputStream, Bytes)> = None;
    let mut first = true;
    loop {
        received.reserve(OUTPUT_CHUNK_BYTES);
        let room = OUTPUT_CHUNK_BYTES as u64;
        match (&mut from).take(room).read_buf(&mut received).await {
            Ok(0) | Err(_) => return held.map(|(_, words)| words),
            Ok(_) => {}
        }
        loop {
            let piece = if tty {
                let bytes = received.split().freeze();
                (!bytes.is_empty()).then_some((OutputStream::Stdout, bytes))
            } else {
                frames.next(&mut received)
            };
            let Some(piece) = piece else { break };
            if std::mem::take(&mut first) && is_explanation(&piece.1) {
                held = Some(piece);
                continue;
            }
            for piece in held.take().into_iter().chain([piece]) {
                if to.send(piece).await.is_err() {
                    return None;
                }
            }
        }
    }
}

fn is_explanation(bytes: &[u8]) -> bool {
    EXPLANATIONS
        .iter()
        .any(|beginning| bytes.starts_with(beginning))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_command_lacked_follows_from_the_explanation() {
        let chdir = "OCI runtime exec failed: exec failed: unable to start container process: chdir to cwd \
                     (\"/nosuch\") set in config.json failed: no such file or directory: unknown";
        let relative =
            "OCI runtime exec failed: exec failed: Cwd must be an absolute path: unknown";
        let program = "OCI runtime exec failed: exec failed: unable to start container process: exec: \
                       \"chdir\": executable file not found in $PATH: unknown";
        let user = "unable to find user nosuch: no matching entries in passwd file";
        for (explanation, expected) in [
            (chdir, NotRun::NoSuchWorkdir),
            (relative, NotRun::NoSuchWorkdir),
            (program, NotRun::NoSuchCommand),
            (user, NotRun::NoSuchUser),
            ("Docker could not start it", NotRun::NoSuchCommand),
        ] {
            assert_eq!(lack(explanation), expected, "{explanation}");
        }
    }

    async fn carried(pieces: &'static [&'static [u8]]) -> (Vec<u8>, Option<Bytes>) {
        let (mut near, far) = tokio::io::duplex(64);
        let (sender, mut receiver) = mpsc::channel::<(OutputStream, Bytes)>(1);
        let writing = async {
            for piece in pieces {
                near.write_all(piece).await.expect("read on the other side");
                tokio::task::yield_now().await;
            }
            drop(near);
        };
        let reading = async {
            let mut output = Vec::new();
            while let Some((_, bytes)) = receiver.recv().await {
                output.extend_from_slice(&bytes);
            }
            output
        };
        let carrying = async {
            let explanation = carry_output(far, true, &sender).await;
            drop(sender);
            explanation
        };
        let ((), output, explanation) = tokio::join!(writing, reading, carrying);
        (output, explanation)
    }

    #[tokio::test]
    async fn an_explanation_is_kept_from_the_output_and_its_imitation_is_not_lost() {
        let (output, explanation) = carried(&[b"OCI runtime exec failed: nosuch"]).await;
        assert_eq!((&output[..], explanation.is_some()), (&b""[..], true));
        let (output, explanation) = carried(&[b"OCI runtime exec failed", b", they say"]).await;
        let all = &b"OCI runtime exec failed, they say"[..];
        // Both pieces may come as one.
        assert_eq!(explanation.as_deref().unwrap_or(&output), all);
        let (output, explanation) = carried(&[b"\x01\xff\xff\xff\xff\xff\xff\xff", b"raw"]).await;
        assert_eq!(
            (&output[..], explanation),
            (&b"\x01\xff\xff\xff\xff\xff\xff\xffraw"[..], None)
        );
    }
}
