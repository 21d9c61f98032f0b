//! Commands inside a running container: the shim runs them on streams that are made here.
//!
//! One task for each command. It carries bytes both ways and reports the end, which comes from
//! the shim: that of the command's first process, whatever it has left behind. The command outlives the task and
//! the daemon; only its streams do not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_linux::PidFd;
use conman_proto::{ExecStatus, NotRun};
use conman_shim_protocol::{
    ExecSpec, FilesOrder, Hardening, ProgramSpec, Reply, Request, TerminalSize,
};
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::attach::shim_size;
use super::ends::ProcessEnd;
use super::failure::{call_failed, milliseconds, start_failed};
use super::{Inner, NativeRuntime};
use super::{oci, program};
use crate::shared::container_files::host_error;
use crate::shared::exec_channels::{ExecEnds, exec_channels, exited};
use crate::shared::exec_kill::kill_command;
use crate::shared::exec_run::{self, WithoutReader};
use crate::shared::exec_streams::Streams;
use crate::shim_link::LinkError;
use crate::{ContainerKey, Exec, ExecIo, ExecPlan, LogChunk, LogOptions, RuntimeError};

const ACTION: &str = "run a command in";

/// Most bytes in one piece of a file's content.
const BULK_CHUNK_BYTES: usize = 64 * 1024;

/// Bound on an answer of a sandbox, which the session may have brought to a halt. A kill must not wait for it.
const HELP_PATIENCE: Duration = Duration::from_secs(5);

/// Most bytes of what a helper prints that are kept.
const MAX_HELP_BYTES: usize = 4 * 1024;

/// Poll interval for the end of a command. A shim that was replaced reports no end.
const END_INTERVAL: Duration = Duration::from_secs(2);

#[async_trait]
impl Exec for NativeRuntime {
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        exec(Arc::clone(&self.inner), key.clone(), plan, None).await
    }

    async fn files(
        &self,
        key: &ContainerKey,
        order: FilesOrder,
        user: Option<String>,
    ) -> Result<ExecIo, RuntimeError> {
        let plan = ExecPlan {
            // Shown where the shim lists it.
            command: vec!["conman-files".to_owned()],
            workdir: Some("/".to_owned()),
            user,
            stdin: order.has_input(),
            ..ExecPlan::default()
        };
        exec(Arc::clone(&self.inner), key.clone(), plan, Some(order)).await
    }

    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        self.inner.logs(key, options).await
    }
}

async fn exec(
    inner: Arc<Inner>,
    key: ContainerKey,
    plan: ExecPlan,
    files: Option<FilesOrder>,
) -> Result<ExecIo, RuntimeError> {
    let (same, owned, asked) = (Arc::clone(&inner), key.clone(), plan.clone());
    let prepare = move || same.command(&owned, &asked);
    let mut command = super::away(ACTION, prepare).await?;
    let name = inner.next_command();
    if command.hardening.has_runtime() && files.is_none() {
        command
            .wrap(&inner, &key, (&name, plan.tty.map(shim_size)))
            .await?;
    }
    let by_runtime = command.hardening.has_runtime() && files.is_none();
    let begun = begin(
        Arc::clone(&inner),
        key.clone(),
        plan,
        files,
        name.clone(),
        command,
    )
    .await;
    if begun.is_err() && by_runtime {
        inner.forget_inside(&key, &name).await;
    }
    begun
}

/// Runs a command of the OCI runtime about its container, and returns its exit code and what it prints. A boxed future:
/// a command is killed with such a command.
pub(super) fn help(
    inner: Arc<Inner>,
    key: ContainerKey,
    program: ProgramSpec,
    hardening: Hardening,
) -> BoxFuture<'static, Result<(Option<i32>, String), RuntimeError>> {
    let (runtime, subject) = (inner.kind_of(&key), key.to_string());
    let helping = async move {
        let name = inner.next_command();
        let command = ContainerCommand {
            program,
            ptys: 0,
            hardening,
        };
        let mut io = begin(inner, key, ExecPlan::default(), None, name, command).await?;
        let mut printed = Vec::new();
        while let Some((_, bytes)) = io.output.recv().await {
            let room = MAX_HELP_BYTES.saturating_sub(printed.len());
            printed.extend_from_slice(&bytes[..bytes.len().min(room)]);
        }
        let code = io.status.await.ok().and_then(|status| status.exit_code);
        Ok((code, String::from_utf8_lossy(&printed).trim().to_owned()))
    };
    Box::pin(async move {
        // Its end kills a command that has begun.
        let helped = timeout(HELP_PATIENCE, helping).await;
        helped.unwrap_or_else(|_| {
            Err(RuntimeError::TimedOut {
                runtime,
                action: "get an answer of the sandbox of",
                subject,
                after_ms: milliseconds(HELP_PATIENCE),
            })
        })
    })
}

/// Begins a command of which everything is known.
async fn begin(
    inner: Arc<Inner>,
    key: ContainerKey,
    plan: ExecPlan,
    files: Option<FilesOrder>,
    name: String,
    command: ContainerCommand,
) -> Result<ExecIo, RuntimeError> {
    let is_bulk = files.is_some();
    let by_runtime = command.hardening.has_runtime() && !is_bulk;
    let without_reader = match is_bulk || plan.tty.is_some() {
        true => WithoutReader::Continues,
        false => WithoutReader::Killed,
    };
    let spec = ExecSpec {
        files,
        kept: None,
        // A terminal hangs up; orders about files end by themselves.
        with_client: without_reader == WithoutReader::Killed,
        name: name.clone(),
        container: super::store::name(&key),
        terminal: plan.tty.is_some(),
        ptys: command.ptys,
        program: command.program,
        hardening: command.hardening,
    };
    let (near, far) = streams(&plan, is_bulk).map_err(|source| {
        host_error(
            "make streams for a command in",
            inner.store.container(&key).path(),
            source,
        )
    })?;
    // Before the command can end.
    let end = inner.ends.wait(&name);
    let fds = far.each_ref().map(AsFd::as_fd);
    let request = Request::Exec(Box::new(spec));
    let patience = inner.timeouts.start;
    inner.standing.ended(&key, patience).await;
    let answer = inner.link.call(&request, &fds, patience).await;
    // While a copy is open here, the near ends do not see the command close its own.
    drop(far);
    let (io, ends) = exec_channels();
    let process = match answer {
        Ok((Reply::Launched { pid, .. }, fds)) => fds
            .into_iter()
            .next()
            .map(|fd| Arc::new(PidFd::received(fd, pid))),
        Ok(_) => return Err(call_failed(ACTION, &key, LinkError::Unexpected)),
        Err(error) => {
            inner.ends.forget(&name);
            let status = not_run(&key, error)?;
            // The caller may have gone.
            let _ = ends.status.send(status);
            return Ok(io);
        }
    };
    let running = Running {
        inner,
        key,
        name,
        process,
        end,
        by_runtime,
    };
    tokio::spawn(run(running, near, ends, without_reader));
    Ok(io)
}

impl Inner {
    /// Returns what to run. Blocks.
    pub(super) fn command(
        &self,
        key: &ContainerKey,
        plan: &ExecPlan,
    ) -> Result<ContainerCommand, RuntimeError> {
        let dir = self.store.container(key);
        let stored = dir.plan()?.ok_or_else(|| RuntimeError::NoSuchContainer {
            subject: key.to_string(),
        })?;
        let root = &stored.launch.root;
        let upper = dir.root().join("upper");
        let layers: Vec<_> = root.layers.iter().map(|one| root.store.join(one)).collect();
        let directories: Vec<_> = [&upper]
            .into_iter()
            .filter(|upper| upper.exists())
            .chain(&layers)
            .map(std::path::PathBuf::as_path)
            .collect();
        let first = stored.session_program.as_ref();
        let first = first.map_or(&stored.launch.program, |(_, program)| program);
        let program = program::command(key, first, plan, &directories)?;
        let asks = plan.tty.is_some() && stored.launch.ptys_when_asked;
        Ok(ContainerCommand {
            program,
            ptys: if asks { stored.launch.ptys } else { 0 },
            hardening: stored.launch.hardening,
        })
    }
}

/// What to run in a container.
#[derive(Debug)]
pub(super) struct ContainerCommand {
    pub(super) program: ProgramSpec,
    /// As [`ExecSpec::ptys`].
    pub(super) ptys: u32,
    /// The container's layers of protection.
    pub(super) hardening: Hardening,
}

impl ContainerCommand {
    /// Makes it a command of the container's OCI runtime, which runs what it was.
    pub(super) async fn wrap(
        &mut self,
        inner: &Inner,
        key: &ContainerKey,
        (name, terminal): (&str, Option<TerminalSize>),
    ) -> Result<(), RuntimeError> {
        self.program = inner
            .wrap_command(key, &self.program, (name, terminal))
            .await?;
        self.ptys = 0;
        Ok(())
    }
}

fn streams(plan: &ExecPlan, is_bulk: bool) -> io::Result<(Streams, [OwnedFd; 3])> {
    match plan.tty {
        Some(size) => Streams::terminal(size),
        // For conman's own program for files, which no program of the session can trace. The launcher
        // changes the owner of the pipes to the command's user.
        None if is_bulk => Streams::pipes(plan.stdin, BULK_CHUNK_BYTES),
        None => Streams::sockets(plan.stdin),
    }
}

/// A program that does not exist is an end like any other; everything else is an error.
fn not_run(key: &ContainerKey, error: LinkError) -> Result<ExecStatus, RuntimeError> {
    match start_failed(ACTION, key, error) {
        RuntimeError::NoSuchCommand {
            command,
            reason,
            exit_code,
            ..
        } => Ok(ExecStatus {
            exit_code: Some(exit_code),
            error: Some(format!("cannot run `{command}`: {reason}")),
            not_run: Some(NotRun::NoSuchCommand),
            ..ExecStatus::default()
        }),
        other => Err(other),
    }
}

/// A command that has started.
struct Running {
    inner: Arc<Inner>,
    key: ContainerKey,
    name: String,
    /// `None` when it had ended before a pidfd was opened.
    process: Option<Arc<PidFd>>,
    /// It is a command of the OCI runtime, which runs the session's.
    by_runtime: bool,
    end: oneshot::Receiver<ProcessEnd>,
}

impl Running {
    async fn ended(&mut self) -> ExecStatus {
        let status = self.first_ended().await;
        let is_unknown = self.by_runtime
            && self
                .inner
                .oci_of(&self.key)
                .is_ok_and(|oci| oci.may_have_failed(status.exit_code));
        if is_unknown && !self.inner.has_begun_inside(&self.key, &self.name).await {
            return ExecStatus {
                exit_code: Some(oci::NOT_FOUND),
                error: Some("the OCI runtime cannot run it; its output has the reason".to_owned()),
                not_run: Some(NotRun::NoSuchCommand),
                ..status
            };
        }
        status
    }

    async fn first_ended(&mut self) -> ExecStatus {
        let process = self.process.as_deref();
        match reported_end(process, &mut self.end).await {
            Some(end) => status(end),
            None => {
                self.inner.ends.forget(&self.name);
                let ended = process.and_then(|process| process.ended().ok().flatten());
                status(ProcessEnd(ended.map(|ended| ended.code())))
            }
        }
    }
}

/// Waits for the shim's report of a command's end; `None` if the command is dead and the report does not come, because
/// that shim was replaced. No `process`: the command was dead before a pidfd was opened.
async fn reported_end(
    process: Option<&PidFd>,
    end: &mut oneshot::Receiver<ProcessEnd>,
) -> Option<ProcessEnd> {
    loop {
        let is_dead = process.is_none_or(|process| process.is_dead().unwrap_or(false));
        // Cancel safe: an end that is not received stays in the channel.
        if let Ok(reported) = timeout(END_INTERVAL, &mut *end).await {
            return Some(reported.unwrap_or(ProcessEnd(None)));
        }
        if is_dead {
            return None;
        }
    }
}

fn status(ProcessEnd(code): ProcessEnd) -> ExecStatus {
    match code {
        Some(code) => exited(code),
        None => ExecStatus {
            exit_code: None,
            error: Some("the command's end is unknown: the shim that ran it has gone".to_owned()),
            ..ExecStatus::default()
        },
    }
}

async fn run(mut running: Running, near: Streams, ends: ExecEnds, without_reader: WithoutReader) {
    let (inner, key, process) = (
        Arc::clone(&running.inner),
        running.key.clone(),
        running.process.clone(),
    );
    let (name, by_runtime) = (running.name.clone(), running.by_runtime);
    let find = || {
        let (inner, key, process) = (Arc::clone(&inner), key.clone(), process.clone());
        let name = name.clone();
        async move {
            if by_runtime && let Err(error) = inner.kill_inside(&key, &name).await {
                tracing::warn!(container = %key, %error, "what a killed command has started may go on");
            }
            let kill = process.map(|process| -> Box<dyn FnOnce() -> _ + Send> {
                Box::new(move || kill_command(&inner.kernel, &key, &process))
            });
            Ok(kill)
        }
    };
    exec_run::run(near, ends, running.ended(), find, without_reader).await;
    if by_runtime {
        running
            .inner
            .forget_inside(&running.key, &running.name)
            .await;
    }
    // Only here, after its start was answered as well.
    let names = vec![running.name];
    if let Err(error) = running.inner.ask(&Request::Acknowledge { names }).await {
        tracing::debug!(%error, "the next connection reports the command's end again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_command_that_was_dead_at_once_has_an_end_without_a_report() {
        let (_unused, mut end) = oneshot::channel();
        assert!(reported_end(None, &mut end).await.is_none());

        let (report, mut end) = oneshot::channel();
        report.send(ProcessEnd(Some(3))).expect("it is received");
        let reported = reported_end(None, &mut end).await.expect("reported");
        assert_eq!(reported.0, Some(3));
    }
}
