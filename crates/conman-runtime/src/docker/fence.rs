//! The shim's dead-man fence over Docker's containers.
//!
//! ```text
//! guard: the shim makes the cgroup above all of it, which it can freeze and kill
//!   └▶ Docker starts ─▶ appeared, with a pidfd │ not started ─▶ dead, removed: forgotten
//! ```
//! So whatever dockerd does with a start, late or never answered, happens in a cgroup that the
//! fence holds. Containers that already run when a shim is met for the first time are added then.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use conman_core::{error_chain, naming};
use conman_linux::{PidFd, ProcessError};
use conman_proto::RuntimeKind;
use conman_shim_protocol::{CallError, Request};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Shared;
use super::daemon::Lane;
use super::failure::Failure;
use crate::fence_opening::FenceOpener;
use crate::shared::kernel_view::KernelView;
use crate::shim_link::{Connection, Link, LinkError, REMEDY_FOR_FULL, ShimCommand, name};
use crate::{ContainerKey, RuntimeError};

/// Bound on the shim's answers, which it gives at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bound on adding running containers to the fence: two calls for each container.
const GUARDING_PATIENCE: Duration = Duration::from_secs(2);

/// How long the shim may take to notice a death, and how often it is polled.
const DEATH_PATIENCE: Duration = Duration::from_secs(2);
const DEATH_INTERVAL: Duration = Duration::from_millis(5);

/// Where the shim is.
#[derive(Debug, Clone)]
pub struct DockerFence {
    pub socket: PathBuf,
    /// Starts a shim where none answers. Without it, another program must start one.
    pub shim: Option<ShimCommand>,
    pub opener: FenceOpener,
}

#[derive(Debug)]
pub(super) struct Fence {
    link: Link,
    /// The connection over which all running containers were reported to the shim.
    told: Mutex<Option<Arc<Connection>>>,
}

impl Fence {
    pub(super) fn new(options: DockerFence) -> Self {
        Self {
            link: Link::new(options.socket, options.shim, None, options.opener),
            told: Mutex::default(),
        }
    }

    /// Call it before ordering a start.
    async fn guard(&self, key: &ContainerKey, cgroup: String) -> Result<(), LinkError> {
        let name = name(key);
        let guard = Request::Guard {
            name: name.clone(),
            cgroup,
        };
        let exists = match self.link.ask(&guard, PATIENCE).await {
            Ok(_) => return Ok(()),
            Err(LinkError::Refused(exists @ CallError::Exists { .. })) => exists,
            Err(error) => return Err(error),
        };
        // An earlier start is under the fence already; one that has ended needs no guard.
        match self.link.find(name, PATIENCE).await?.container {
            Some(view) if view.foreign && view.state.is_alive() => Ok(()),
            _ => Err(LinkError::Refused(exists)),
        }
    }

    /// `process` is the container's first.
    async fn appeared(&self, key: &ContainerKey, process: &PidFd) -> Result<(), LinkError> {
        let appeared = Request::Appeared {
            name: name(key),
            pid: process.pid(),
        };
        match self
            .link
            .call(&appeared, &[process.as_fd()], PATIENCE)
            .await
        {
            // It was reported already, or has died since.
            Ok(_) | Err(LinkError::Refused(CallError::Exists { .. } | CallError::Ended { .. })) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// No process of the start will appear any more. The shim verifies that and refuses until the
    /// last process is gone.
    async fn not_started(&self, key: &ContainerKey) -> Result<(), LinkError> {
        let over = Request::NotStarted { name: name(key) };
        match self.ask_until_dead(&over).await {
            // It has appeared, is known to be over, or is unknown to the shim.
            Err(LinkError::Refused(
                CallError::Exists { .. }
                | CallError::Ended { .. }
                | CallError::NoSuchContainer { .. },
            )) => Ok(()),
            other => other,
        }
    }

    /// Docker has removed the container.
    async fn forget(&self, key: &ContainerKey) -> Result<(), LinkError> {
        self.not_started(key).await?;
        let names = vec![name(key)];
        self.ask_until_dead(&Request::Acknowledge { names }).await
    }

    /// Makes a request that the shim refuses while a process lives, until it has noticed the death.
    async fn ask_until_dead(&self, request: &Request) -> Result<(), LinkError> {
        let deadline = Instant::now() + DEATH_PATIENCE;
        loop {
            match self.link.ask(request, PATIENCE).await {
                Err(LinkError::Refused(CallError::StillAlive { .. }))
                    if Instant::now() < deadline =>
                {
                    tokio::time::sleep(DEATH_INTERVAL).await;
                }
                other => return other.map(drop),
            }
        }
    }

    /// Whether the fence killed the container without an order.
    pub(super) async fn was_fenced(&self, key: &ContainerKey) -> bool {
        self.link.was_fenced(key).await
    }

    /// See [`super::DockerRuntime::open_fence`].
    pub(super) async fn open(&self) -> Result<(), RuntimeError> {
        let opened = self.link.open_fence().await;
        opened.map_err(|error| fence_failed("open", "the fence", error))
    }
}

impl Shared {
    /// Puts the container, if there is a fence, under it before its start is ordered.
    pub(super) async fn guard(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let Some(fence) = &self.fence else {
            return Ok(());
        };
        let cgroup = self.cgroup(key).await;
        let cgroup = cgroup.map_err(|failure| failure.of_start(key))?;
        let guarded = fence.guard(key, cgroup).await;
        guarded.map_err(|error| fence_failed("start", key, error))
    }

    /// Reports the result of a start to the fence. An uncertain result is not reported: the guard
    /// then stays over whatever appears. After an error the container may run.
    pub(super) async fn tell_start<T>(
        self: &Arc<Self>,
        key: &ContainerKey,
        started: &Result<T, RuntimeError>,
        pid: impl FnOnce(&T) -> i32,
    ) -> Result<(), RuntimeError> {
        let Some(fence) = &self.fence else {
            return Ok(());
        };
        match started {
            Ok(started) => {
                let (shared, owned, pid) = (Arc::clone(self), key.clone(), pid(started));
                let hold = move || Ok(hold(&shared.kernel, &owned, pid));
                let told = match self.on_blocking_thread("start", hold).await? {
                    Ok(Some(process)) => fence.appeared(key, &process).await,
                    // It is dead.
                    Ok(None) => fence.not_started(key).await,
                    Err(error) => return Err(uncertain(key, &error)),
                };
                told.map_err(|error| uncertain(key, &error))
            }
            // It may still start.
            Err(error) if error.is_ambiguous() => Ok(()),
            // The caller of the start has the same doubt.
            Err(_) if !self.is_seen_empty(key).await => Ok(()),
            Err(_) => {
                let told = fence.not_started(key).await;
                told.map_err(|error| fence_failed("start", key, error))
            }
        }
    }

    /// Whether the kernel shows no process of the container, once dying ones have died. Docker
    /// may report a failure for a start that it lost track of.
    async fn is_seen_empty(self: &Arc<Self>, key: &ContainerKey) -> bool {
        let deadline = Instant::now() + DEATH_PATIENCE;
        loop {
            let (shared, owned) = (Arc::clone(self), key.clone());
            let check = move || shared.kernel.check_dead(&owned);
            match self.on_blocking_thread("start", check).await {
                Ok(()) => return true,
                Err(RuntimeError::StillAlive { .. }) if Instant::now() < deadline => {}
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::warn!(container = %key, %error, "a failed start may have left processes");
                    return false;
                }
            }
            tokio::time::sleep(DEATH_INTERVAL).await;
        }
    }

    /// Nothing of the container exists any more.
    pub(super) async fn unguard(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let Some(fence) = &self.fence else {
            return Ok(());
        };
        let forgotten = fence.forget(key).await;
        forgotten.map_err(|error| fence_failed("remove", key, error))
    }

    /// Like [`Self::guard_running`], but bounded, since health checks of Docker do not wait for
    /// the shim. The next call starts over.
    pub(super) async fn guard_running_soon(self: &Arc<Self>) -> Result<(), String> {
        match tokio::time::timeout(GUARDING_PATIENCE, self.guard_running()).await {
            Ok(guarded) => guarded.map_err(|error| error.to_string()),
            Err(_) => Err("the shim does not answer in time".to_owned()),
        }
    }

    /// Puts all running containers under the fence, once for each new connection to a shim.
    async fn guard_running(self: &Arc<Self>) -> Result<(), RuntimeError> {
        let Some(fence) = &self.fence else {
            return Ok(());
        };
        let failed = |error| fence_failed("guard", "its containers", error);
        let connection = fence.link.connection().await.map_err(failed)?;
        let mut told = fence.told.lock().await;
        if told
            .as_ref()
            .is_some_and(|told| Arc::ptr_eq(told, &connection))
        {
            return Ok(());
        }
        let listed = self.list().await;
        let listed = listed.map_err(|failure| failure.about("list", "the containers"))?;
        let known = fence.link.containers(PATIENCE).await.map_err(failed)?;
        let known: BTreeSet<_> = known.into_iter().map(|view| view.name).collect();
        let unknown = listed.into_iter().map(|each| each.key);
        let unknown: Vec<_> = unknown.filter(|key| !known.contains(&name(key))).collect();
        let (shared, keys) = (Arc::clone(self), unknown.clone());
        let inits = self
            .on_blocking_thread("list", move || shared.kernel.init_pids(&keys))
            .await?;
        for (key, pid) in &inits {
            self.guard(key).await?;
            self.tell_start(key, &Ok(*pid), |pid| *pid).await?;
            tracing::info!(container = %key, "container is under the fence");
        }
        *told = Some(connection);
        Ok(())
    }

    /// The cgroup above all of the container's.
    async fn cgroup(&self, key: &ContainerKey) -> Result<String, Failure> {
        let driver = self
            .daemon
            .call(Lane::Calls, self.timeouts.info, |facts| async move {
                Ok(facts.cgroup_driver)
            })
            .await?;
        let instance = self.kernel.instance();
        Ok(naming::cgroup_parent(instance, &key.session, key.generation, driver).path)
    }
}

/// Opens a pidfd of a process of the container; `None` when it is gone. Blocks.
fn hold(kernel: &KernelView, key: &ContainerKey, pid: i32) -> io::Result<Option<PidFd>> {
    held(PidFd::open(pid), |process| {
        if kernel.shows(key, pid)? {
            return Ok(true);
        }
        // A process that is ending is shown in no cgroup.
        if process.wait_dead(DEATH_PATIENCE)? {
            return Ok(false);
        }
        Err(io::Error::other(format!(
            "process {pid}, which Docker has started, is in no cgroup of the session"
        )))
    })
}

/// Returns `None` only on proof of a death.
fn held(
    opened: Result<PidFd, ProcessError>,
    lives_there: impl FnOnce(&PidFd) -> io::Result<bool>,
) -> io::Result<Option<PidFd>> {
    match opened {
        Ok(process) => Ok(lives_there(&process)?.then_some(process)),
        Err(error) if error.proves_death() => Ok(None),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Docker has started the container, but the fence does not know its first process.
fn uncertain(key: &ContainerKey, error: &(dyn std::error::Error + 'static)) -> RuntimeError {
    let error = error_chain(error);
    RuntimeError::Unavailable {
        runtime: RuntimeKind::Docker,
        action: "start",
        reason: format!("Docker has started {key}, and the fence has not taken it: {error}"),
    }
}

fn fence_failed(action: &'static str, subject: impl ToString, error: LinkError) -> RuntimeError {
    let runtime = RuntimeKind::Docker;
    match error {
        LinkError::Refused(CallError::Fenced) => RuntimeError::Fenced {
            runtime,
            action,
            subject: subject.to_string(),
        },
        LinkError::Refused(CallError::Full { what }) => RuntimeError::TooMany {
            subject: subject.to_string(),
            what,
            remedy: REMEDY_FOR_FULL,
        },
        LinkError::Refused(refusal) => RuntimeError::Refused {
            runtime,
            action,
            subject: subject.to_string(),
            reason: format!("the shim, whose fence it is to be under, refuses: {refusal}"),
        },
        error @ (LinkError::Unreachable { .. }
        | LinkError::Lost
        | LinkError::TimedOut { .. }
        | LinkError::Unexpected) => RuntimeError::Unavailable {
            runtime,
            action,
            reason: format!("its fence is missing: {error}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_proves_a_death_is_one() {
        let none_left = || ProcessError::Io {
            action: "open a pidfd of",
            pid: 7,
            source: io::Error::from_raw_os_error(24),
        };
        let own = || PidFd::open(std::process::id().cast_signed());
        assert!(held(Err(none_left()), |_| Ok(true)).is_err());
        let unread = held(own(), |_| Err(io::Error::from_raw_os_error(24)));
        assert!(unread.is_err());
        let gone = held(Err(ProcessError::Gone { pid: 7 }), |_| Ok(true));
        assert!(matches!(gone, Ok(None)));
        assert!(matches!(held(own(), |_| Ok(false)), Ok(None)));
        assert!(matches!(held(own(), |_| Ok(true)), Ok(Some(_))));
        let key = ContainerKey::new(
            "alice".parse().expect("an id"),
            conman_proto::Generation::new(7).expect("not zero"),
        );
        let error = uncertain(&key, &io::Error::other(none_left()));
        assert!(error.is_ambiguous(), "{error}");
        let refused = LinkError::Refused(CallError::StillAlive {
            name: "alice.7".to_owned(),
        });
        assert!(uncertain(&key, &refused).is_ambiguous());
    }

    #[test]
    fn a_shim_that_has_no_room_or_is_fenced_is_no_fault_of_the_spec() {
        let full = CallError::Full {
            what: "containers".to_owned(),
        };
        let error = fence_failed("start", "alice", LinkError::Refused(full));
        assert!(matches!(error, RuntimeError::TooMany { .. }), "{error}");
        assert!(error.to_string().contains("stop some"), "{error}");
        let error = fence_failed("start", "alice", LinkError::Refused(CallError::Fenced));
        assert!(matches!(error, RuntimeError::Fenced { .. }), "{error}");
    }
}
