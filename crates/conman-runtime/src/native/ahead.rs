//! Containers made ahead for templates with `pool`, from which `create` takes.
//!
//! One is of a *kind*: what all starts of a template have in common, as resolved, with the image's layers. A start of
//! another kind, because the template or its image has changed, ends those of the former kind and is the first of the
//! next. The shim holds their processes; here are their names, and a directory of each, which becomes that of the
//! container. They end with the connection to the shim, so none outlives this process, and are no containers to
//! anything else.
//!
//! One task makes and ends them, while no start is under way. Nothing waits for it: a start that finds none, or whose
//! has ended, makes its container from the beginning.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::fs::DirBuilder;
use std::hash::BuildHasher;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use conman_image::{ImageGuard, ImageId, ImageName};
use conman_linux::{DiskUsage, Meminfo, read_proc, spread_directories};
use conman_proto::ResolvedSpec;
use conman_shim_protocol::{LaunchSpec, Request, RootKind};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::failure::{call_failed, milliseconds, refused};
use super::{Inner, away};
use crate::RuntimeError;
use crate::shared::container_files::host_error;

/// No start for so long: then one is made.
const QUIET: Duration = Duration::from_millis(10);

/// Pause between two checks whether memory is short, an image is gone, or a template is no longer used; and after a
/// failure.
const INTERVAL: Duration = Duration::from_secs(5);

/// A template without a start for so long has none.
const UNUSED: Duration = Duration::from_mins(10);

/// Memory is short if less than this part of it is available.
const SHORT_PART: u64 = 10;

/// Bound on waiting for the ends of several.
const END_PATIENCE: Duration = Duration::from_secs(2);
const END_INTERVAL: Duration = Duration::from_millis(2);

/// For root only, like the containers' directories.
const MODE: u32 = 0o700;

const ACTION: &str = "make ahead";

/// Containers made ahead.
#[derive(Debug)]
pub(super) struct Pool {
    directory: PathBuf,
    /// Differs for each process, so that names are unique.
    prefix: u64,
    state: Mutex<PoolState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct PoolState {
    by_template: HashMap<String, Kind>,
    /// The names of those that containers have taken which were not started.
    taken: HashSet<String>,
    /// The names of those that are of no use.
    dropped: Vec<String>,
    made: u64,
    /// Starts under way, and when there was one last.
    starting: usize,
    last_start: Option<Instant>,
    has_task: bool,
    closed: bool,
}

/// What the starts of one template have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StartKind {
    /// Its [`LaunchSpec::kind`].
    pub(super) spec: LaunchSpec,
    /// Of its directory; it must be set while that is empty.
    pub(super) quota: Option<DiskUsage>,
    pub(super) image: ImageId,
}

/// A template in use.
#[derive(Debug)]
struct Kind {
    kind: StartKind,
    /// The cgroup above theirs.
    above: String,
    image: ImageName,
    size: usize,
    used: Instant,
    waiting: Vec<MadeAhead>,
}

/// One that waits for a start.
#[derive(Debug)]
struct MadeAhead {
    name: String,
    /// Keeps its layers.
    _image: ImageGuard,
}

fn names(ended: impl IntoIterator<Item = MadeAhead>) -> impl Iterator<Item = String> {
    ended.into_iter().map(|one| one.name)
}

/// A start under way.
#[derive(Debug)]
pub(super) struct Starting<'a>(&'a Pool);

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.starting -= 1;
        state.last_start = Some(Instant::now());
        drop(state);
        self.0.changed.notify_one();
    }
}

impl Pool {
    /// Removes what an earlier process has left. `discard` moves a directory away.
    pub(super) fn open(
        directory: PathBuf,
        discard: impl Fn(&Path) -> io::Result<()>,
    ) -> Result<Self, RuntimeError> {
        let failed = |source| host_error("make", &directory, source);
        discard(&directory).map_err(failed)?;
        let made = DirBuilder::new().mode(MODE).create(&directory);
        made.map_err(failed)?;
        spread_directories(&directory);
        Ok(Self {
            directory,
            prefix: RandomState::new().hash_one(()),
            state: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// A panic while the lock is held cannot leave half a change that matters: what is lost ends with this process.
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn directory_of(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(super) fn start(&self) -> Starting<'_> {
        self.lock().starting += 1;
        Starting(self)
    }

    /// Takes one for a start of this kind, if its template has a pool and one waits: it moves the directory to `to` and
    /// returns the name. `cgroup` is the start's.
    pub(super) fn take(
        &self,
        spec: &ResolvedSpec,
        kind: StartKind,
        cgroup: &str,
        to: &Path,
    ) -> Option<String> {
        let name = self.pop(spec, kind, cgroup)?;
        let moved = rustix::fs::renameat_with(
            rustix::fs::CWD,
            self.directory_of(&name),
            rustix::fs::CWD,
            to,
            rustix::fs::RenameFlags::NOREPLACE,
        );
        match moved {
            Ok(()) => {
                self.lock().taken.insert(name.clone());
                Some(name)
            }
            Err(error) => {
                tracing::warn!(name, %error, "cannot take a container made ahead");
                self.drop_one(name);
                None
            }
        }
    }

    /// Whether a container that has taken this one is started for the first time, by the process that created it: what
    /// is in the container's directory is of the one that was taken. Later it may be of the container.
    pub(super) fn is_first_start(&self, name: &str) -> bool {
        self.lock().taken.remove(name)
    }

    /// It is of no use, unless a start has taken it.
    pub(super) fn drop_one(&self, name: String) {
        let mut state = self.lock();
        state.taken.remove(&name);
        state.dropped.push(name);
        drop(state);
        self.changed.notify_one();
    }

    /// The templates may have changed, or be gone.
    pub(super) fn drop_all(&self) {
        let mut state = self.lock();
        let former = std::mem::take(&mut state.by_template);
        let waiting = former.into_values().flat_map(|kind| kind.waiting);
        state.dropped.extend(names(waiting));
        drop(state);
        self.changed.notify_one();
    }

    fn pop(&self, spec: &ResolvedSpec, kind: StartKind, cgroup: &str) -> Option<String> {
        let size = usize::try_from(spec.pool).unwrap_or(0);
        let template = spec.template.as_ref()?;
        if size == 0 {
            return None;
        }
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        if let Some(known) = state.by_template.get_mut(template)
            && known.kind == kind
        {
            (known.used, known.size) = (Instant::now(), size);
            return known.waiting.pop().map(|one| one.name);
        }
        let (above, _) = cgroup.rsplit_once('/')?;
        let fresh = Kind {
            kind,
            above: above.to_owned(),
            image: spec.image.parse().ok()?,
            size,
            used: Instant::now(),
            waiting: Vec::new(),
        };
        if let Some(former) = state.by_template.insert(template.clone(), fresh) {
            state.dropped.extend(names(former.waiting));
        }
        None
    }

    /// Drops what is no longer of use, and takes all that was dropped. `is_named`: whether the name still leads to the
    /// image.
    fn take_dropped(
        &self,
        is_short: bool,
        is_named: impl Fn(&ImageName, &ImageId) -> bool,
    ) -> Vec<String> {
        let mut state = self.lock();
        let PoolState {
            by_template,
            dropped,
            closed,
            ..
        } = &mut *state;
        for kind in by_template.values_mut() {
            let excess = match is_short {
                true => 0,
                false => kind.size.min(kind.waiting.len()),
            };
            dropped.extend(names(kind.waiting.drain(excess..)));
        }
        by_template.retain(|_, kind| {
            let is_of_use = kind.used.elapsed() < UNUSED && is_named(&kind.image, &kind.kind.image);
            let kept = !*closed && is_of_use;
            if !kept {
                dropped.extend(names(kind.waiting.drain(..)));
            }
            kept
        });
        std::mem::take(dropped)
    }

    /// The order for the next one, if one is missing: its template and its kind come along.
    fn lacking(&self) -> Option<(String, StartKind, LaunchSpec)> {
        let mut state = self.lock();
        let lacking = |(_, kind): &(&String, &Kind)| kind.waiting.len() < kind.size;
        let (template, kind) = state.by_template.iter().find(lacking)?;
        let name = format!("ahead_{:016x}_{}", self.prefix, state.made);
        let directory = self.directory_of(&name);
        let mut order = kind.kind.spec.clone();
        order.cgroup = format!("{}/{name}", kind.above);
        order.root.scratch = directory.join("root");
        order.log = directory.join("log");
        order.name = name;
        let found = (template.clone(), kind.kind.clone(), order);
        state.made += 1;
        Some(found)
    }

    /// It waits, unless the template's starts are of another kind meanwhile.
    fn add(&self, template: &str, kind: &StartKind, one: MadeAhead) {
        let mut state = self.lock();
        match state.by_template.get_mut(template) {
            Some(known) if known.kind == *kind => known.waiting.push(one),
            _ => state.dropped.push(one.name),
        }
    }

    /// How long to wait until no start was under way for [`QUIET`]; `None` while one is.
    fn quiet_in(&self) -> Option<Duration> {
        let state = self.lock();
        let since = state.last_start.map_or(QUIET, |at| at.elapsed());
        (state.starting == 0).then(|| QUIET.saturating_sub(since))
    }

    /// How many wait for a start.
    pub(super) fn waiting(&self) -> usize {
        let state = self.lock();
        let waiting = state.by_template.values().map(|kind| kind.waiting.len());
        waiting.sum()
    }

    fn is_in_use(&self) -> bool {
        let state = self.lock();
        !state.by_template.is_empty() || !state.dropped.is_empty()
    }
}

impl Inner {
    /// Whether containers of it are made before their sessions are known.
    pub(super) fn can_be_made_ahead(&self, spec: &ResolvedSpec) -> bool {
        spec.pool > 0 && self.root_kind(spec) == RootKind::Overlay
    }

    /// Starts the task that makes them, once there is something to make.
    pub(super) fn keep_pool(self: &Arc<Self>) {
        let mut state = self.pool.lock();
        if !state.has_task && !state.by_template.is_empty() {
            state.has_task = true;
            tokio::spawn(keep(Arc::downgrade(self)));
        }
    }

    /// Ends all, for the daemon's end.
    pub(super) async fn close_pool(self: &Arc<Self>) {
        self.pool.lock().closed = true;
        self.drop_unused().await;
    }

    /// Ends those that are of no use.
    async fn drop_unused(self: &Arc<Self>) -> bool {
        let is_short = tokio::task::spawn_blocking(memory_is_short).await;
        let is_short = is_short.unwrap_or(true);
        let store = self.images.store();
        let is_named = |name: &ImageName, id: &ImageId| {
            let found = store.get(name);
            found.is_some_and(|image| image.id == *id)
        };
        let dropped = self.pool.take_dropped(is_short, is_named);
        if !dropped.is_empty() {
            self.end_ahead(&dropped).await;
            tracing::debug!(
                count = dropped.len(),
                is_short,
                "ended containers made ahead"
            );
            let inner = Arc::clone(self);
            tokio::task::spawn_blocking(move || inner.store.trash.empty());
        }
        !is_short
    }

    /// Ends those that no start has taken, and waits a moment until nothing of them is left.
    async fn end_ahead(self: &Arc<Self>, names: &[String]) {
        let ended = async {
            for name in names {
                let kill = Request::Kill { name: name.clone() };
                // The shim keeps an unknown name from ever starting, and keeps a bounded number of them.
                if self.is_ahead(name).await
                    && let Err(error) = self.ask(&kill).await
                {
                    tracing::debug!(name, %error, "cannot end a container made ahead");
                }
            }
            for name in names {
                while self.is_ahead(name).await {
                    sleep(END_INTERVAL).await;
                }
            }
        };
        if timeout(END_PATIENCE, ended).await.is_err() {
            tracing::warn!(
                patience_ms = milliseconds(END_PATIENCE),
                "containers made ahead have not ended in time; the shim removes each as soon as it ends"
            );
        }
        let directories: Vec<_> = names
            .iter()
            .map(|name| self.pool.directory_of(name))
            .collect();
        let inner = Arc::clone(self);
        let discarded = away("end", move || {
            directories.iter().try_for_each(|directory| {
                let discarded = inner.store.trash.discard(directory);
                discarded.map_err(|source| host_error("throw away", directory, source))
            })
        });
        if let Err(error) = discarded.await {
            tracing::warn!(%error, "cannot remove the directory of a container made ahead");
        }
    }

    /// Whether the shim has it under that name: no start has taken it, and it has not ended.
    async fn is_ahead(&self, name: &str) -> bool {
        let found = self.link.find(name.to_owned(), self.timeouts.call).await;
        found.is_ok_and(|found| found.starting || found.container.is_some())
    }

    /// Makes one that is missing. `false` when none is.
    async fn make_ahead(self: &Arc<Self>) -> Result<bool, RuntimeError> {
        let Some((template, kind, order)) = self.pool.lacking() else {
            return Ok(false);
        };
        let (inner, name) = (Arc::clone(self), order.name.clone());
        let (image, quota) = (kind.image, kind.quota);
        let prepared = away(ACTION, move || {
            let guard = inner.images.store().pin_id(&image);
            let guard = guard.map_err(|error| refused(ACTION, &name, error.to_string()))?;
            let directory = inner.pool.directory_of(&name);
            let made = DirBuilder::new().mode(MODE).create(&directory);
            made.map_err(|source| host_error("make", &directory, source))?;
            inner.limit_disk(&directory, quota);
            Ok(guard)
        });
        let guard = prepared.await?;
        let name = order.name.clone();
        let request = Request::Launch(Box::new(order));
        match self.link.call(&request, &[], self.timeouts.start).await {
            Ok(_) => {
                let one = MadeAhead {
                    name,
                    _image: guard,
                };
                self.pool.add(&template, &kind, one);
                Ok(true)
            }
            Err(error) => {
                self.end_ahead(std::slice::from_ref(&name)).await;
                Err(call_failed(ACTION, &name, error))
            }
        }
    }
}

/// Makes what is missing and ends what is of no use, while there is a runtime.
async fn keep(runtime: Weak<Inner>) {
    loop {
        let Some(inner) = runtime.upgrade() else {
            return;
        };
        if inner.drop_unused().await {
            loop {
                match inner.pool.quiet_in() {
                    // It wakes this task when it ends.
                    None => break,
                    Some(Duration::ZERO) => match inner.make_ahead().await {
                        Ok(true) => {}
                        Ok(false) => break,
                        // None may start.
                        Err(RuntimeError::Fenced { .. }) => break,
                        Err(error) => {
                            tracing::warn!(%error, "cannot make a container ahead");
                            sleep(INTERVAL).await;
                            break;
                        }
                    },
                    Some(left) => sleep(left).await,
                }
            }
        }
        let pool = Arc::clone(&inner.pool);
        let is_in_use = pool.is_in_use();
        drop(inner);
        tokio::select! {
            // Cancel safe: a notification that is not received stays.
            () = pool.changed.notified() => {}
            () = sleep(INTERVAL), if is_in_use => {}
        }
    }
}

/// Whether containers that nothing needs yet should give their memory back.
fn memory_is_short() -> bool {
    let Ok(memory) = read_proc::<Meminfo>("/proc/meminfo") else {
        return false;
    };
    let available = memory.mem_available.unwrap_or(u64::MAX);
    available < memory.mem_total / SHORT_PART
}

#[cfg(test)]
mod tests;
