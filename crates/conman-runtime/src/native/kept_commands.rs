//! Kept commands: any later client can list, attach to and end them, whichever daemon started them. The shim
//! knows all of them, with a description that is made here.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_linux::{PidFd, SignalNumber};
use conman_proto::{ExecId, KeptExec};
use conman_shim_protocol::{
    CallError, CommandView, ExecSpec, KeptCommandSpec, KeptStreamsSpec, MAX_LABEL_BYTES, Reply,
    Request,
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::attach::shim_size;
use super::ends::{ProcessEnd, end};
use super::exec::ContainerCommand;
use super::failure::{call_failed, milliseconds, start_failed};
use super::{NativeRuntime, away, store};
use crate::kept_streams::no_such_exec;
use crate::lifecycle::Lifecycle as _;
use crate::shared::exec_kill::kill_command;
use crate::shim_link::LinkError;
use crate::{AttachOptions, AttachedIo, ContainerKey, ExecPlan, KeptStreams, RuntimeError};

const KEEP: &str = "keep a command in";
const LIST: &str = "list the kept commands of";
const SIGNAL: &str = "signal a kept command of";
const END: &str = "end a kept command of";

/// How long the shim may take to report the end of a dead command.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Replaces what a description has no room for.
const CUT: &str = "…";

/// Between a container's name and a command's; no container's name has it.
const SEPARATOR: char = '_';

/// The shim's name of a command.
pub(super) fn name(key: &ContainerKey, id: ExecId) -> String {
    format!("{}{SEPARATOR}{id}", store::name(key))
}

/// Whether the shim's `name` is a kept command's.
pub(super) fn is_kept(name: &str) -> bool {
    name.contains(SEPARATOR)
}

/// What the shim stores of a command for its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Description {
    command: Vec<String>,
    user: Option<String>,
    tty: bool,
    started_at: Timestamp,
}

impl Description {
    /// The description as JSON that the shim takes. Long commands are cut, and a user is left out that would not
    /// fit with any.
    fn label(mut self) -> String {
        let json = |one: &Self| serde_json::to_string(one).unwrap_or_default();
        let mut label = json(&self);
        // Halves the longest part each time, so that this ends soon.
        while label.len() > MAX_LABEL_BYTES {
            let few = 8;
            if self.command.len() > few {
                self.command.truncate(self.command.len() / 2);
                self.command.push(CUT.to_owned());
            } else if let Some(longest) = self.command.iter_mut().max_by_key(|part| part.len())
                && longest.len() > 2 * CUT.len()
            {
                let half = longest.floor_char_boundary(longest.len() / 2);
                longest.truncate(half);
                longest.push_str(CUT);
            } else {
                self.user = None;
            }
            label = json(&self);
        }
        label
    }
}

fn view(command: &CommandView) -> Option<KeptExec> {
    let (_, id) = command.name.rsplit_once(SEPARATOR)?;
    let description: Description = serde_json::from_str(&command.label).ok()?;
    let ended = end(command.state);
    Some(KeptExec {
        id: id.parse().ok()?,
        command: description.command,
        user: description.user,
        tty: description.tty,
        started_at: description.started_at,
        pid: command.inner_pid,
        running: ended.is_none(),
        exit_code: ended.and_then(|ProcessEnd(code)| code),
        timed_out: command.timed_out,
        output_bytes: command.output_bytes,
    })
}

#[async_trait]
impl KeptStreams for NativeRuntime {
    async fn attach(
        &self,
        key: &ContainerKey,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        self.inner.attach(key, exec, options).await
    }

    async fn keep_exec(
        &self,
        key: &ContainerKey,
        plan: ExecPlan,
    ) -> Result<KeptExec, RuntimeError> {
        let (inner, owned, asked) = (Arc::clone(&self.inner), key.clone(), plan.clone());
        let mut command = away(KEEP, move || inner.command(&owned, &asked)).await?;
        let id = ExecId::new(RandomState::new().hash_one(Timestamp::now().as_nanosecond()));
        if command.hardening.has_runtime() {
            if plan.timeout.is_some() {
                return Err(RuntimeError::Unsupported {
                    runtime: self.kind,
                    action: "bound the time of a kept command of",
                    subject: key.to_string(),
                    reason: "its OCI runtime runs the command, and conman ends no part of it; use `timeout` inside"
                        .to_owned(),
                });
            }
            // The files of a command that has ended have no use, and the shim may forget that command for this one.
            let kept = self.kept_execs(key).await?;
            for ended in kept.iter().filter(|one| !one.running) {
                self.inner.forget_inside(key, &name(key, ended.id)).await;
            }
            let described = (&*name(key, id), plan.tty.map(shim_size));
            command.wrap(&self.inner, key, described).await?;
        }
        let request = Request::Exec(Box::new(spec(key, id, command, plan)));
        let patience = self.inner.timeouts.start;
        self.inner.standing.ended(key, patience).await;
        let answer = self.inner.link.call(&request, &[], patience).await;
        if answer.is_err() && !self.runs_programs_itself() {
            self.inner.forget_inside(key, &name(key, id)).await;
        }
        match answer {
            Ok((Reply::Launched { .. }, _)) => self.kept_exec(key, id).await,
            Ok(_) => Err(call_failed(KEEP, key, LinkError::Unexpected)),
            Err(LinkError::Refused(CallError::Full { what })) => Err(RuntimeError::TooMany {
                subject: key.to_string(),
                what,
                remedy: "end some",
            }),
            Err(error) => Err(start_failed(KEEP, key, error)),
        }
    }

    async fn kept_execs(&self, key: &ContainerKey) -> Result<Vec<KeptExec>, RuntimeError> {
        let mut all: Vec<CommandView> = Vec::new();
        loop {
            let request = Request::Commands {
                container: store::name(key),
                after: all.last().map(|one| one.name.clone()),
            };
            match self.inner.ask(&request).await {
                Ok(Reply::Commands { commands, more }) => {
                    all.extend(commands);
                    if !more {
                        break;
                    }
                }
                Ok(_) => return Err(call_failed(LIST, key, LinkError::Unexpected)),
                Err(error) => return Err(call_failed(LIST, key, error)),
            }
        }
        let mut views: Vec<_> = all.iter().filter_map(view).collect();
        views.sort_by_key(|one| (one.started_at, one.id));
        Ok(views)
    }

    async fn kept_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<KeptExec, RuntimeError> {
        let found = self.inner.look_up(key, name(key, exec), LIST).await?;
        let command = found.command.as_ref().and_then(view);
        command.ok_or_else(|| no_such_exec(key, exec))
    }

    async fn signal_exec(
        &self,
        key: &ContainerKey,
        exec: ExecId,
        signal: SignalNumber,
    ) -> Result<bool, RuntimeError> {
        if !self.runs_programs_itself() {
            // Another process may have the pid of one that has ended.
            if !self.kept_exec(key, exec).await?.running {
                return Ok(false);
            }
            let name = name(key, exec);
            return self.inner.signal_inside(key, Some(&name), signal).await;
        }
        let request = Request::Signal {
            name: name(key, exec),
            signal: signal.get(),
        };
        match self.inner.ask(&request).await {
            Ok(_) => Ok(true),
            Err(LinkError::Refused(CallError::Ended { .. })) => Ok(false),
            Err(LinkError::Refused(CallError::NoSuchContainer { .. })) => {
                Err(no_such_exec(key, exec))
            }
            Err(error) => Err(call_failed(SIGNAL, key, error)),
        }
    }

    async fn end_exec(&self, key: &ContainerKey, exec: ExecId) -> Result<(), RuntimeError> {
        let inner = &self.inner;
        let name = name(key, exec);
        let ended = inner.ends.wait(&name);
        let hold = Request::Hold { name: name.clone() };
        let held = inner.link.call(&hold, &[], inner.timeouts.call).await;
        match held {
            Ok((Reply::Held { pid }, fds)) => {
                let Some(process) = fds.into_iter().next() else {
                    return Err(call_failed(END, key, LinkError::Unexpected));
                };
                let (same, owned) = (Arc::clone(inner), key.clone());
                let process = PidFd::received(process, pid);
                if !self.runs_programs_itself() {
                    let killed = inner.kill_inside(key, &name).await;
                    if let Err(error) = killed {
                        tracing::warn!(container = %key, %error, "what a killed command has started may go on");
                    }
                }
                away(END, move || kill_command(&same.kernel, &owned, &process)).await?;
                // If the end is not reported in time, forgetting is refused below.
                let _ = tokio::time::timeout(END_PATIENCE, ended).await;
            }
            Ok(_) => return Err(call_failed(END, key, LinkError::Unexpected)),
            Err(LinkError::Refused(CallError::NoSuchContainer { .. })) => {
                inner.ends.forget(&name);
                return Err(no_such_exec(key, exec));
            }
            Err(LinkError::Refused(CallError::Ended { .. })) => {}
            Err(error) => return Err(call_failed(END, key, error)),
        }
        inner.ends.forget(&name);
        if !self.runs_programs_itself() {
            inner.forget_inside(key, &name).await;
        }
        // The shim closes the streams and reports that to attached clients.
        let names = vec![name];
        let forgotten = inner.ask(&Request::Acknowledge { names }).await;
        forgotten.map_err(|error| call_failed(END, key, error))?;
        Ok(())
    }
}

/// The order for the shim.
fn spec(key: &ContainerKey, id: ExecId, command: ContainerCommand, plan: ExecPlan) -> ExecSpec {
    let description = Description {
        command: plan.command,
        user: plan.user,
        tty: plan.tty.is_some(),
        started_at: Timestamp::now(),
    };
    ExecSpec {
        with_client: false,
        files: None,
        name: name(key, id),
        container: store::name(key),
        program: command.program,
        terminal: false,
        ptys: command.ptys,
        kept: Some(KeptCommandSpec {
            streams: match plan.tty {
                Some(size) => KeptStreamsSpec::Terminal(shim_size(size)),
                None => KeptStreamsSpec::Pipes { stdin: plan.stdin },
            },
            timeout_ms: plan.timeout.map(milliseconds),
            label: description.label(),
        }),
        hardening: command.hardening,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_is_cut_to_what_the_shim_takes() {
        for command in [
            vec!["x\u{1}".repeat(40_000), "short".to_owned()],
            vec!["argument".to_owned(); 256],
            vec!["é".repeat(30_000); 2],
        ] {
            let description = Description {
                command: command.clone(),
                user: Some("\u{fc}".repeat(256)),
                tty: false,
                started_at: Timestamp::UNIX_EPOCH,
            };
            let label = description.clone().label();
            assert!(label.len() <= MAX_LABEL_BYTES, "{}", label.len());
            let read: Description = serde_json::from_str(&label).expect("a description");
            assert_eq!(read.user, description.user);
            let begin = read.command[0].trim_end_matches(CUT);
            assert!(command[0].starts_with(begin));
        }
    }

    #[test]
    fn a_user_that_leaves_no_room_is_left_out() {
        let description = Description {
            command: vec!["sh".to_owned(); 8],
            user: Some("\u{1}".repeat(256)),
            tty: false,
            started_at: Timestamp::UNIX_EPOCH,
        };
        let label = description.label();
        let read: Description = serde_json::from_str(&label).expect("a description");
        assert!(
            label.len() <= MAX_LABEL_BYTES && read.user.is_none(),
            "{label}"
        );
    }

    #[test]
    fn only_the_names_of_kept_commands_are_taken_for_theirs() {
        let key = ContainerKey::new(
            "alice".parse().expect("an id"),
            conman_proto::Generation::FIRST,
        );
        assert!(is_kept(&name(&key, ExecId::new(7))));
        assert!(!is_kept(&store::name(&key)) && !is_kept("exec.1.2"));
    }
}
