//! Ways to what outlives its clients: the terminal of a session's program, and kept commands.

use std::sync::atomic::Ordering;

use conman_core::ActivityKind;
use conman_linux::SignalNumber;
use conman_proto::{ExecId, KeptExec, SessionId};
use conman_runtime::{AttachOptions, ExecPlan, RuntimeError};

use crate::access::{
    AccessHandle, Running, answering, container_of, failed, is_ending_or_dead, not_running, place,
    running, unless_ending, with_session_end,
};
use crate::attached::{Attached, Presence};
use crate::context::Context;
use crate::error::AccessError;
use crate::session::SessionHandle;

impl AccessHandle {
    /// Attaches to the terminal of a running session's program, or to a kept command in it.
    pub async fn attach(
        &self,
        id: &SessionId,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<Attached, AccessError> {
        self.awake(id).await?;
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        if exec.is_none() && !handle.spec().tty {
            return Err(AccessError::NoTerminal { id: id.clone() });
        }
        let presence = Presence {
            _place: place(&handle)?,
            _activity: handle.activity.begin_as(ActivityKind::Attachment),
        };
        let attached = runtime.attach(&key, exec, options);
        let attached = answering(&self.context, runtime, "attach to", attached).await;
        let mut io = unless_ending(&handle, attached)?;
        io.status = with_session_end(handle, io.status, None);
        Ok(Attached { io, presence })
    }

    /// Runs a command in a running session whose streams are kept.
    pub async fn keep_exec(&self, id: &SessionId, plan: ExecPlan) -> Result<KeptExec, AccessError> {
        self.awake(id).await?;
        let kept = running(&self.context, id)?;
        let begins = kept.handle.activity.begin_as(ActivityKind::Command);
        let begun = kept.runtime.keep_exec(&kept.key, plan);
        let begun = self.kept_answer(&kept, "run a command in", begun).await;
        kept.handle.kept_commands.store(true, Ordering::Relaxed);
        drop(begins);
        begun
    }

    /// Returns the kept commands of a running session, the oldest first.
    pub async fn kept_execs(&self, id: &SessionId) -> Result<Vec<KeptExec>, AccessError> {
        let kept = running(&self.context, id)?;
        let listed = kept.runtime.kept_execs(&kept.key);
        self.kept_answer(&kept, "list the commands of", listed)
            .await
    }

    /// Returns one of them.
    pub async fn kept_exec(&self, id: &SessionId, exec: ExecId) -> Result<KeptExec, AccessError> {
        let kept = running(&self.context, id)?;
        let found = kept.runtime.kept_exec(&kept.key, exec);
        self.kept_answer(&kept, "look up a command of", found).await
    }

    /// Sends a signal to the first process of a kept command.
    pub async fn signal_exec(
        &self,
        id: &SessionId,
        exec: ExecId,
        signal: SignalNumber,
    ) -> Result<(), AccessError> {
        let kept = running(&self.context, id)?;
        let sent = kept.runtime.signal_exec(&kept.key, exec, signal);
        match self.kept_answer(&kept, "signal a command of", sent).await? {
            true => Ok(()),
            false => Err(AccessError::ExecEnded {
                id: id.clone(),
                exec,
            }),
        }
    }

    /// Kills a kept command, if it has not ended, and forgets it.
    pub async fn end_exec(&self, id: &SessionId, exec: ExecId) -> Result<(), AccessError> {
        let kept = running(&self.context, id)?;
        let ended = kept.runtime.end_exec(&kept.key, exec);
        self.kept_answer(&kept, "end a command of", ended).await
    }

    /// Waits for what the runtime of a running session answers about kept commands.
    async fn kept_answer<T>(
        &self,
        of: &Running<'_>,
        action: &'static str,
        answer: impl Future<Output = Result<T, RuntimeError>>,
    ) -> Result<T, AccessError> {
        let answer = answering(&self.context, of.runtime, action, answer).await;
        // Also a success: its commands may already have the exit codes of their kill.
        match is_ending_or_dead(&of.handle) {
            true => Err(not_running(&of.handle)),
            false => answer.map_err(failed(&of.handle.id)),
        }
    }
}

/// Finds out whether kept commands run in a session, for its idle clock. They may as long as the runtime does not
/// answer.
pub(crate) async fn find_running(context: &Context, handle: &SessionHandle) {
    let Ok((runtime, key)) = container_of(context, handle) else {
        return;
    };
    // First: a command that begins meanwhile sets it again.
    handle.kept_commands.store(false, Ordering::Relaxed);
    let listed = runtime.kept_execs(&key);
    let listed = answering(context, runtime, "list the commands of", listed).await;
    let may_run = match listed {
        Ok(commands) => commands.iter().any(|command| command.running),
        Err(RuntimeError::Unsupported { .. }) => false,
        Err(_) => true,
    };
    if may_run {
        handle.kept_commands.store(true, Ordering::Relaxed);
        handle.activity.note(ActivityKind::Command);
    }
}
