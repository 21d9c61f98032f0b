//! Ways to what outlives its clients: the terminal of a session's program, and kept commands.

use conman_linux::Signal;
use conman_proto::{ExecId, KeptExec, SessionId};
use conman_runtime::{AttachOptions, ExecPlan};

use crate::access::{AccessHandle, Running, failed, place, running};
use crate::attached::{Attached, Presence};
use crate::error::AccessError;

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
            _activity: handle.activity.begin(),
        };
        let attached = runtime.attach(&key, exec, options).await;
        let io = attached.map_err(failed(id))?;
        Ok(Attached { io, presence })
    }

    /// Runs a command in a running session whose streams are kept.
    pub async fn keep_exec(&self, id: &SessionId, plan: ExecPlan) -> Result<KeptExec, AccessError> {
        self.awake(id).await?;
        let Running { runtime, key, .. } = running(&self.context, id)?;
        runtime.keep_exec(&key, plan).await.map_err(failed(id))
    }

    /// Returns the kept commands of a running session, the oldest first.
    pub async fn kept_execs(&self, id: &SessionId) -> Result<Vec<KeptExec>, AccessError> {
        let Running { runtime, key, .. } = running(&self.context, id)?;
        runtime.kept_execs(&key).await.map_err(failed(id))
    }

    /// Returns one of them.
    pub async fn kept_exec(&self, id: &SessionId, exec: ExecId) -> Result<KeptExec, AccessError> {
        let Running { runtime, key, .. } = running(&self.context, id)?;
        runtime.kept_exec(&key, exec).await.map_err(failed(id))
    }

    /// Sends a signal to the first process of a kept command.
    pub async fn signal_exec(
        &self,
        id: &SessionId,
        exec: ExecId,
        signal: Signal,
    ) -> Result<(), AccessError> {
        let Running { runtime, key, .. } = running(&self.context, id)?;
        let sent = runtime.signal_exec(&key, exec, signal).await;
        match sent.map_err(failed(id))? {
            true => Ok(()),
            false => Err(AccessError::ExecEnded {
                id: id.clone(),
                exec,
            }),
        }
    }

    /// Kills a kept command, if it has not ended, and forgets it.
    pub async fn end_exec(&self, id: &SessionId, exec: ExecId) -> Result<(), AccessError> {
        let Running { runtime, key, .. } = running(&self.context, id)?;
        runtime.end_exec(&key, exec).await.map_err(failed(id))
    }
}
