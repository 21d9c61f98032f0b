//! Orders about files in sessions. Each is carried out by a process in its session.

use std::sync::Arc;
use std::time::Duration;

use conman_core::{ActivityGuard, ActivityKind};
use conman_proto::SessionId;
use conman_runtime::{ExecIo, FilesOrder};
use tokio::time::timeout;

use crate::access::{
    AccessHandle, Running, answering, is_ending_or_dead, running, unless_ending, why_killed,
};
use crate::error::AccessError;
use crate::session::SessionHandle;

/// Bound on the wait for the end of a session in which a process was killed: when the first process ends, the kernel
/// kills the others before that shows.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// An order about a session's files that is being carried out. The session counts as in use until this is dropped.
#[derive(Debug)]
pub struct FilesGuard {
    handle: Arc<SessionHandle>,
    _activity: ActivityGuard,
}

impl FilesGuard {
    /// Returns why the order has no result, after its process has ended without one.
    pub async fn no_result(&self) -> AccessError {
        no_result(&self.handle).await
    }
}

impl AccessHandle {
    /// Carries out an order about a running session's files, as `user` or its program's user.
    pub async fn files(
        &self,
        id: &SessionId,
        order: FilesOrder,
        user: Option<String>,
    ) -> Result<(ExecIo, FilesGuard), AccessError> {
        self.awake(id).await?;
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        let guard = FilesGuard {
            _activity: handle.activity.begin_as(ActivityKind::Files),
            handle,
        };
        let began = runtime.files(&key, order, user);
        let began = answering(&self.context, runtime, "reach the files of", began).await;
        Ok((unless_ending(&guard.handle, began)?, guard))
    }
}

/// Returns why an order has no result, after its process has ended without one.
pub(crate) async fn no_result(handle: &SessionHandle) -> AccessError {
    let id = handle.id.clone();
    let mut closing = handle.closing.subscribe();
    let ends = is_ending_or_dead(handle)
        || timeout(END_PATIENCE, closing.wait_for(Option::is_some))
            .await
            .is_ok();
    match ends {
        true => AccessError::KilledWithSession {
            id,
            why: why_killed(handle),
        },
        false => AccessError::NoResult { id },
    }
}

#[cfg(test)]
mod tests {
    use conman_core::Closing;
    use conman_linux::PidFd;
    use conman_proto::SessionState;

    use super::*;
    use crate::session::View;
    use crate::session_table::tests::spec;

    /// A session that runs.
    fn session() -> Arc<SessionHandle> {
        let own = i32::try_from(std::process::id()).expect("a process id");
        let process = PidFd::open(own).expect("this process");
        let view = View {
            state: SessionState::Running,
            process: Some(Arc::new(process)),
            ..View::starting()
        };
        SessionHandle::new("alice".parse().expect("an id"), spec(), view)
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_whose_process_is_killed_just_before_its_session_ends_has_that_reason() {
        let handle = session();
        let closing = Closing::service_restart("session is moving");
        let (error, _) = tokio::join!(no_result(&handle), async {
            handle.closing.send_replace(Some(closing))
        });
        let AccessError::KilledWithSession { why, .. } = &error else {
            panic!("{error:?}");
        };
        assert_eq!(why, "the session is moving");
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_whose_process_is_killed_in_a_session_that_runs_on_has_another_reason() {
        let error = no_result(&session()).await;
        assert!(matches!(error, AccessError::NoResult { .. }), "{error:?}");
    }
}
