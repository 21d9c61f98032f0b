//! Kept commands: any later client can list and end them, whichever daemon started them.
//! [`super::kept_files`] stores them.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use conman_linux::PidFd;
use conman_proto::{ExecId, KeptExec};
use conman_shim::{CallError, ExecSpec, Hardening, Reply, Request};
use jiff::Timestamp;

use super::ends::{End, end};
use super::failure::{call_failed, refused, unrunnable};
use super::kept_files::{self, MAX_KEPT, StoredExec};
use super::terminals::shim_size;
use super::{Inner, away, no_such_container, store};
use crate::shared::exec_kill::kill_command;
use crate::shim_link::LinkError;
use crate::{ContainerKey, ExecPlan, RuntimeError};

const KEEP: &str = "keep a command in";
const LIST: &str = "list the kept commands of";
const END: &str = "end a kept command of";

/// How long the shim may take to report the end of a dead command.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// What the shim knows of a kept command.
enum Known {
    Runs,
    Ended(End),
}

pub(super) async fn keep(
    inner: Arc<Inner>,
    key: ContainerKey,
    plan: ExecPlan,
) -> Result<KeptExec, RuntimeError> {
    let Some(size) = plan.tty else {
        let reason = "only a terminal can be kept, and it is to have none".to_owned();
        return Err(refused(KEEP, &key, reason));
    };
    let (same, owned, asked) = (Arc::clone(&inner), key.clone(), plan.clone());
    let program = away(KEEP, move || same.command(&owned, &asked)).await?;
    let stored = StoredExec {
        id: ExecId::new(RandomState::new().hash_one(Timestamp::now().as_nanosecond())),
        command: plan.command,
        user: plan.user,
        started_at: Timestamp::now(),
    };
    // Until the shim has received and answered the start.
    let _beginning = inner.reserve(&key, &stored).await?;
    let spec = ExecSpec {
        files: None,
        name: kept_files::name(stored.id),
        container: store::name(&key),
        program,
        terminal: false,
        kept_terminal: Some(shim_size(size)),
        hardening: Hardening::default(),
    };
    let request = Request::Exec(Box::new(spec));
    match inner.link.call(&request, &[], inner.timeouts.start).await {
        Ok((Reply::Launched { .. }, _)) => Ok(stored.into_view(true, None)),
        answer => {
            let error = not_kept(
                &key,
                answer.map_or_else(|error| error, |_| LinkError::Unexpected),
            );
            // A command that may still start is listed and can be ended.
            if !error.is_ambiguous() {
                if let Err(error) = inner.unlist(&key, stored.id).await {
                    tracing::warn!(container = %key, %error, "cannot unlist a failed command");
                }
                inner.ends.forget(&kept_files::name(stored.id));
            }
            Err(error)
        }
    }
}

fn not_kept(key: &ContainerKey, error: LinkError) -> RuntimeError {
    match error {
        LinkError::Refused(CallError::Launch { error }) => match unrunnable(&error) {
            Some(unrunnable) => RuntimeError::NoSuchCommand {
                command: unrunnable.command,
                subject: key.to_string(),
                reason: unrunnable.reason,
                exit_code: unrunnable.exit_code,
            },
            None => refused(KEEP, key, error.to_string()),
        },
        LinkError::Refused(CallError::NoSuchContainer { .. } | CallError::Ended { .. }) => {
            refused(KEEP, key, "it is not running".to_owned())
        }
        LinkError::Refused(CallError::Full { what }) => RuntimeError::TooMany {
            subject: key.to_string(),
            what,
            remedy: "end some",
        },
        other => call_failed(KEEP, key, other),
    }
}

/// The kept commands of a container, the oldest first.
pub(super) async fn list(
    inner: &Arc<Inner>,
    key: &ContainerKey,
) -> Result<Vec<KeptExec>, RuntimeError> {
    let mut views = Vec::new();
    for stored in inner.stored(key).await? {
        let (running, exit_code) = match inner.known(stored.id, key, LIST).await? {
            Known::Runs => (true, None),
            Known::Ended(End(code)) => (false, code),
        };
        views.push(stored.into_view(running, exit_code));
    }
    Ok(views)
}

/// Kills a command, if it has not ended, and forgets it.
pub(super) async fn end_one(
    inner: &Arc<Inner>,
    key: &ContainerKey,
    exec: ExecId,
) -> Result<(), RuntimeError> {
    if !inner.stored(key).await?.iter().any(|one| one.id == exec) {
        return Err(RuntimeError::NoSuchExec {
            subject: key.to_string(),
            exec,
        });
    }
    inner.wait_begun(key, exec).await?;
    let name = kept_files::name(exec);
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
            away(END, move || kill_command(&same.kernel, &owned, &process)).await?;
            // If the end is not reported in time, forgetting is refused below.
            let _ = tokio::time::timeout(END_PATIENCE, ended).await;
        }
        Ok(_) => return Err(call_failed(END, key, LinkError::Unexpected)),
        Err(LinkError::Refused(CallError::Ended { .. } | CallError::NoSuchContainer { .. })) => {}
        Err(error) => return Err(call_failed(END, key, error)),
    }
    inner.forget_exec(key, exec).await
}

/// A kept command that is listed but that the shim may not know yet. The shim's answer about it
/// would look as if it had ended.
#[derive(Debug)]
struct Beginning {
    inner: Arc<Inner>,
    exec: ExecId,
}

impl Beginning {
    fn new(inner: &Arc<Inner>, exec: ExecId) -> Self {
        inner.beginning.send_modify(|all| {
            all.insert(exec);
        });
        Self {
            inner: Arc::clone(inner),
            exec,
        }
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        self.inner.beginning.send_modify(|all| {
            all.remove(&self.exec);
        });
    }
}

impl Inner {
    /// Stores a command that is about to start. Replaces one that has ended if there is no room.
    async fn reserve(
        self: &Arc<Self>,
        key: &ContainerKey,
        stored: &StoredExec,
    ) -> Result<Beginning, RuntimeError> {
        // Before it can be found in the list.
        let beginning = Beginning::new(self, stored.id);
        // Other callers may take the free places, so there are as many tries as places.
        for _ in 0..=MAX_KEPT {
            let (inner, owned, stored) = (Arc::clone(self), key.clone(), stored.clone());
            let added = away(KEEP, move || {
                let _turn = inner.keeping.lock().unwrap_or_else(PoisonError::into_inner);
                let dir = inner.store.container(&owned);
                if !dir.exists() {
                    return Err(no_such_container(&owned));
                }
                kept_files::add(dir.path(), &stored)
            });
            if added.await? {
                return Ok(beginning);
            }
            let Some(ended) = self.oldest_ended(key).await? else {
                break;
            };
            self.forget_exec(key, ended).await?;
        }
        Err(RuntimeError::TooMany {
            subject: key.to_string(),
            what: format!("kept commands than {MAX_KEPT}"),
            remedy: "end some",
        })
    }

    /// Waits while the command is about to start. The bound of a start bounds the wait.
    async fn wait_begun(&self, key: &ContainerKey, exec: ExecId) -> Result<(), RuntimeError> {
        let mut beginning = self.beginning.subscribe();
        let begun = beginning.wait_for(|all| !all.contains(&exec));
        let after = self.timeouts.start;
        match tokio::time::timeout(after, begun).await {
            // The sender lives in `self`, so it is not dropped.
            Ok(_) => Ok(()),
            Err(_) => Err(call_failed(END, key, LinkError::TimedOut { after })),
        }
    }

    async fn oldest_ended(
        self: &Arc<Self>,
        key: &ContainerKey,
    ) -> Result<Option<ExecId>, RuntimeError> {
        for stored in self.stored(key).await? {
            if let Known::Ended(_) = self.known(stored.id, key, KEEP).await? {
                return Ok(Some(stored.id));
            }
        }
        Ok(None)
    }

    async fn stored(self: &Arc<Self>, key: &ContainerKey) -> Result<Vec<StoredExec>, RuntimeError> {
        let (inner, key) = (Arc::clone(self), key.clone());
        away(KEEP, move || {
            let dir = inner.store.container(&key);
            if dir.exists() {
                kept_files::all(dir.path())
            } else {
                Err(no_such_container(&key))
            }
        })
        .await
    }

    async fn known(
        &self,
        exec: ExecId,
        key: &ContainerKey,
        action: &'static str,
    ) -> Result<Known, RuntimeError> {
        // Includes one whose end is known: the shim keeps it until it has answered its start.
        if self.beginning.borrow().contains(&exec) {
            return Ok(Known::Runs);
        }
        let name = kept_files::name(exec);
        if let Some(end) = self.ends.of(&name) {
            return Ok(Known::Ended(end));
        }
        match self.ask(&Request::Find { name }).await {
            Ok(Reply::Found {
                container,
                starting,
            }) => Ok(match container.map(|view| end(view.state)) {
                Some(None) => Known::Runs,
                Some(Some(end)) => Known::Ended(end),
                None if starting => Known::Runs,
                None => Known::Ended(End(None)),
            }),
            Ok(_) => Err(call_failed(action, key, LinkError::Unexpected)),
            Err(error) => Err(call_failed(action, key, error)),
        }
    }

    /// The shim closes the terminal and reports that to attached clients.
    async fn forget_exec(
        self: &Arc<Self>,
        key: &ContainerKey,
        exec: ExecId,
    ) -> Result<(), RuntimeError> {
        let name = kept_files::name(exec);
        let names = vec![name.clone()];
        self.ask(&Request::Acknowledge { names })
            .await
            .map_err(|error| call_failed(END, key, error))?;
        self.unlist(key, exec).await?;
        self.ends.forget(&name);
        Ok(())
    }

    async fn unlist(
        self: &Arc<Self>,
        key: &ContainerKey,
        exec: ExecId,
    ) -> Result<(), RuntimeError> {
        let (inner, key) = (Arc::clone(self), key.clone());
        away(KEEP, move || {
            let _turn = inner.keeping.lock().unwrap_or_else(PoisonError::into_inner);
            kept_files::remove(inner.store.container(&key).path(), exec)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use conman_core::Instance;
    use conman_image::{ImageLimits, ImageStore};
    use conman_proto::Generation;

    use super::*;
    use crate::{NativeNetwork, NativeOptions, NativeRuntime, NativeTimeouts};

    fn stored(number: u64) -> StoredExec {
        StoredExec {
            id: ExecId::new(number),
            command: vec!["sh".to_owned()],
            user: None,
            started_at: Timestamp::UNIX_EPOCH,
        }
    }

    /// A runtime with a container but without a shim.
    fn inner(directory: &Path) -> (Arc<Inner>, ContainerKey) {
        let images = directory.join("images");
        let runtime = NativeRuntime::open(NativeOptions {
            instance: Instance::new([9; 4]),
            directory: directory.join("containers"),
            images: ImageStore::open(&images, ImageLimits::default()).expect("a new store"),
            bind_first_id: conman_core::DEFAULT_BIND_FIRST_ID,
            socket: directory.join("absent.sock"),
            shim: None,
            kept_logs: super::super::KeptLogLimits::default(),
            fence: crate::FenceOpener::AnyConnection,
            network: NativeNetwork::default(),
            timeouts: NativeTimeouts {
                // Do not wait for a command that is about to start.
                start: Duration::ZERO,
                ..NativeTimeouts::default()
            },
        });
        let inner = runtime.expect("the host has cgroups").inner;
        let key = ContainerKey {
            session: "alice".parse().expect("an id"),
            generation: Generation::FIRST,
        };
        let dir = inner.store.container(&key);
        assert!(dir.make().expect("made"));
        // The content is not read.
        crate::shared::stored_plan::write(dir.path(), &()).expect("written");
        (inner, key)
    }

    #[tokio::test]
    async fn commands_that_begin_at_the_same_time_do_not_take_each_others_places() {
        let directory = tempfile::tempdir().expect("a directory");
        let (inner, key) = inner(directory.path());
        let mut beginning = Vec::new();
        for number in 0..MAX_KEPT as u64 {
            let place = inner.reserve(&key, &stored(number)).await;
            beginning.push(place.expect("there is room"));
        }
        let error = inner.reserve(&key, &stored(99)).await.expect_err("full");
        assert!(matches!(error, RuntimeError::TooMany { .. }), "{error}");
        let listed = list(&inner, &key).await.expect("listed");
        assert_eq!(listed.len(), MAX_KEPT);
        assert!(listed.iter().all(|one| one.running));
        // Only the shim knows about a command that is no longer about to start.
        beginning.pop();
        let error = inner.reserve(&key, &stored(99)).await;
        let error = error.expect_err("there is no shim");
        assert!(matches!(error, RuntimeError::Unavailable { .. }), "{error}");
    }

    #[tokio::test]
    async fn one_that_is_about_to_begin_is_not_ended_before_it_has_begun() {
        let directory = tempfile::tempdir().expect("a directory");
        let (inner, key) = inner(directory.path());
        let beginning = inner
            .reserve(&key, &stored(7))
            .await
            .expect("there is room");
        let id = ExecId::new(7);
        let error = end_one(&inner, &key, id).await.expect_err("not yet");
        assert!(matches!(error, RuntimeError::TimedOut { .. }), "{error}");
        drop(beginning);
        let error = end_one(&inner, &key, id).await.expect_err("no shim");
        assert!(matches!(error, RuntimeError::Unavailable { .. }), "{error}");
    }
}
