//! One command: carries its streams, kills it on order and once it has no reader, and reports its end.

use std::pin::pin;

use conman_proto::ExecStatus;
use tokio::sync::oneshot;

use crate::RuntimeError;
use crate::shared::exec_channels::ExecEnds;
use crate::shared::exec_kill::{Killing, on_order};
use crate::shared::exec_streams::Streams;

/// Whether a command is killed when it has no reader any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutReader {
    Killed,
    /// Its terminal hangs up on it, or the end of its input ends it.
    Continues,
}

/// Returns once the end is reported. `ended` completes when the command's first process has ended; `find` returns
/// how to kill it.
pub async fn run<F>(
    near: Streams,
    mut ends: ExecEnds,
    ended: impl Future<Output = ExecStatus>,
    find: impl Fn() -> F,
    without_reader: WithoutReader,
) where
    F: Future<Output = Result<Killing, RuntimeError>>,
{
    let mut killing = pin!(on_order(ends.kill, &find));
    let mut ended = pin!(ended);
    let carry = near.carry(
        &mut ends.stdin,
        &mut ends.resize,
        &ends.output,
        ended.as_mut(),
    );
    let (early, terminal) = tokio::select! {
        // The outputs ended, or have no reader any more.
        carried = carry => carried,
        // Polled again below.
        never = &mut killing => match never {},
    };
    let has_left = ends.output.is_closed();
    drop(ends.output);
    drop(ends.stdin);
    // A command that has closed its terminal goes on, and would be hung up without it.
    let terminal = terminal.filter(|_| !has_left);
    let status = match early {
        Some(status) => status,
        None => tokio::select! {
            status = &mut ended => status,
            // Cancel safe: it only waits.
            () = waiter_left(has_left, &mut ends.status) => {
                drop(terminal);
                if without_reader == WithoutReader::Killed {
                    kill_left(find().await).await;
                }
                ended.await
            }
            // Never ends; cancelled when the command has ended.
            never = &mut killing => match never {},
        },
    };
    // The caller may have stopped waiting.
    let _ = ends.status.send(status);
}

async fn waiter_left(has_left: bool, status: &mut oneshot::Sender<ExecStatus>) {
    if !has_left {
        status.closed().await;
    }
}

async fn kill_left(found: Result<Killing, RuntimeError>) {
    let killed = match found {
        // A panic was reported where it happened.
        Ok(Some(kill)) => tokio::task::spawn_blocking(kill).await.unwrap_or(Ok(())),
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = killed {
        tracing::warn!(%error, "cannot kill a command whose client has left");
    }
}
