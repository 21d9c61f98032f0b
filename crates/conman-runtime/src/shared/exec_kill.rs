//! Kills a command before it ends.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use conman_linux::{Lineage, PidFd, ProcessError};
use tokio::sync::oneshot;

use crate::shared::container_files::host_error;
use crate::shared::kernel_view::KernelView;
use crate::{ContainerKey, RuntimeError};

/// How long a command that creates processes faster than they are killed is fought.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two rounds of kills, since a death takes the kernel a moment.
const ROUND: Duration = Duration::from_millis(20);

/// Where the result of a kill goes.
pub type KillReply = oneshot::Sender<Result<(), RuntimeError>>;

/// Kills a running command; dropping it does nothing.
#[derive(Debug)]
pub struct ExecKill(oneshot::Sender<KillReply>);

impl ExecKill {
    /// The second value receives the order, for the task that runs the command.
    #[must_use]
    pub fn new() -> (Self, oneshot::Receiver<KillReply>) {
        let (sender, order) = oneshot::channel();
        (Self(sender), order)
    }

    /// Sends SIGKILL to the command's first process and all that are in its session (setsid(2)),
    /// and returns when they are dead. Killing one that has ended succeeds.
    pub async fn kill(self) -> Result<(), RuntimeError> {
        let (reply, result) = oneshot::channel();
        // If the order is not received or answered, the command has ended.
        if self.0.send(reply).is_err() {
            return Ok(());
        }
        result.await.unwrap_or(Ok(()))
    }
}

/// The blocking part of a kill; `None` when the command has ended.
pub type Killing = Option<Box<dyn FnOnce() -> Result<(), RuntimeError> + Send>>;

/// Carries out the order when it comes; never ends.
///
/// Cancelling `find` is safe, since the command has then ended. The killing that it returned is
/// not cancelled: the first process may be dead, and the command's end reported, while others
/// still die.
pub async fn on_order<F>(
    order: oneshot::Receiver<KillReply>,
    find: impl FnOnce() -> F,
) -> Infallible
where
    F: Future<Output = Result<Killing, RuntimeError>>,
{
    if let Ok(reply) = order.await {
        // The caller may have stopped waiting.
        match find().await {
            Ok(Some(kill)) => drop(tokio::task::spawn_blocking(move || reply.send(kill()))),
            Ok(None) => drop(reply.send(Ok(()))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }
    std::future::pending().await
}

/// Kills the command whose first process is `first`, which must be one of the container's. Blocks,
/// at most for about `PATIENCE`.
pub fn kill_command(
    kernel: &KernelView,
    key: &ContainerKey,
    first: &PidFd,
) -> Result<(), RuntimeError> {
    let pid = first.pid();
    if !kernel.owns_pid(key, pid) {
        return match first.is_dead() {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(pid, "it is in no cgroup of the session")),
            Err(error) => Err(failed(pid, error)),
        };
    }
    let leads_session = Lineage::of(pid).is_ok_and(|lineage| lineage.session == pid);
    signal(first)?;
    let deadline = Instant::now() + PATIENCE;
    let mut killed = Vec::new();
    loop {
        let all = kernel.pids(key).map_err(|error| failed(pid, error))?;
        let others = all.into_iter().filter(|other| {
            let in_session = || Lineage::of(*other).is_ok_and(|lineage| lineage.session == pid);
            leads_session && *other != pid && in_session()
        });
        killed.clear();
        for other in others {
            match PidFd::open(other) {
                // Checked again, since the pidfd keeps the PID from being reused.
                Ok(process) if kernel.owns_pid(key, other) => {
                    let same = Lineage::of(other).is_ok_and(|lineage| lineage.session == pid);
                    if same && signal(&process)? {
                        killed.push(process);
                    }
                }
                Ok(_) | Err(ProcessError::Gone { .. }) => {}
                Err(error) => return Err(failed(other, error)),
            }
        }
        let mut alive = false;
        for process in killed.iter().chain([first]) {
            alive |= !process
                .wait_dead(ROUND)
                .map_err(|error| failed(pid, error))?;
        }
        if killed.is_empty() && !alive {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(failed(pid, "some of its processes do not die"));
        }
    }
}

/// Returns whether the process was alive.
fn signal(process: &PidFd) -> Result<bool, RuntimeError> {
    process.kill().map_err(|error| failed(process.pid(), error))
}

fn failed(pid: i32, reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> RuntimeError {
    let path = format!("/proc/{pid}");
    host_error(
        "kill the command of",
        path.as_ref(),
        std::io::Error::other(reason),
    )
}
