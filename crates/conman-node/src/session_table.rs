//! Admission: the lives of this node, and the decision of each ensure. Synchronous.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_proto::{Generation, ResolvedSpec, SessionId, SessionState};
use jiff::Timestamp;

use crate::error::EnsureError;
use crate::host_limits::HostLimit;
use crate::session::{SessionHandle, View};

/// All sessions of the node, the ended ones that are still shown included.
#[derive(Debug, Default)]
pub(crate) struct SessionTable {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    slots: BTreeMap<SessionId, Slot>,
    /// Lives that have not ended.
    live: usize,
    /// Ended generations, oldest first; some may have been followed by newer ones.
    ended: VecDeque<(SessionId, Generation)>,
    shutting_down: bool,
}

#[derive(Debug)]
struct Slot {
    current: Arc<SessionHandle>,
    /// What is shown while the current life has no generation yet.
    former: Option<Arc<SessionHandle>>,
}

impl Slot {
    fn shown(&self) -> Option<&Arc<SessionHandle>> {
        if self.current.generation().is_some() {
            Some(&self.current)
        } else {
            self.former.as_ref()
        }
    }
}

/// How many sessions the node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupancy {
    /// Sessions that have not ended.
    pub live: usize,
    /// Sessions that have a container, which therefore count in the host's usage. Sessions that are still
    /// starting do not count: they may have no container yet.
    pub settled: usize,
}

/// The decision of an ensure.
#[derive(Debug)]
pub(crate) enum Admission {
    /// A new life, which the caller must start.
    Start(Arc<SessionHandle>),
    /// There is one already.
    Join(Arc<SessionHandle>),
    /// There is one that is about to end.
    WaitForEnd(Arc<SessionHandle>),
    Refuse(EnsureError),
}

impl SessionTable {
    /// A panic while the lock is held leaves at worst a counter too high.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides, and adds the new life that results. `host` is the host's limit; `enter` enters a new life in
    /// the kill table, which may refuse it.
    pub(crate) fn admit(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        max_sessions: usize,
        host: Option<HostLimit>,
        enter: impl FnOnce(&SessionHandle) -> Result<(), EnsureError>,
    ) -> Admission {
        let mut inner = self.lock();
        let former = match inner.slots.get(id) {
            None => None,
            Some(slot) => match slot.current.state() {
                SessionState::Running if slot.current.is_ending() => {
                    return Admission::WaitForEnd(Arc::clone(&slot.current));
                }
                SessionState::Starting
                | SessionState::Running
                | SessionState::Frozen
                | SessionState::Paused => {
                    return Admission::Join(Arc::clone(&slot.current));
                }
                SessionState::Stopping | SessionState::Stuck => {
                    return Admission::WaitForEnd(Arc::clone(&slot.current));
                }
                SessionState::Stopped | SessionState::Failed => slot.shown().cloned(),
            },
        };
        if inner.shutting_down {
            return Admission::Refuse(EnsureError::ShuttingDown);
        }
        if inner.live >= max_sessions {
            return Admission::Refuse(EnsureError::Full { max_sessions });
        }
        if let Some(limit) = host.filter(|limit| inner.live >= limit.max_sessions) {
            let limit = Box::new(limit.met);
            return Admission::Refuse(EnsureError::NoRoom { limit });
        }
        let spec = ResolvedSpec {
            // Of an earlier life.
            expires_at: spec.expires_at.filter(|at| *at > Timestamp::now()),
            ..spec.clone()
        };
        let handle = SessionHandle::new(id.clone(), spec, View::starting());
        if let Err(refusal) = enter(&handle) {
            return Admission::Refuse(refusal);
        }
        inner.live += 1;
        inner.slots.insert(
            id.clone(),
            Slot {
                current: Arc::clone(&handle),
                former,
            },
        );
        Admission::Start(handle)
    }

    /// Adds a life that is in the registry from before and still runs; `enter` enters it in the kill table.
    /// Refused, without any effect, where there is a life already.
    pub(crate) fn take_on(&self, handle: &Arc<SessionHandle>, enter: impl FnOnce()) -> bool {
        let mut inner = self.lock();
        if inner.has_life(&handle.id) {
            return false;
        }
        enter();
        inner.live += 1;
        inner.show(handle);
        true
    }

    /// Adds an ended life that is in the registry from before, where there is no other.
    pub(crate) fn adopt_ended(&self, handle: &Arc<SessionHandle>) {
        let mut inner = self.lock();
        if let Some(generation) = handle.generation()
            && !inner.has_life(&handle.id)
        {
            inner.ended.push_back((handle.id.clone(), generation));
            inner.show(handle);
        }
    }

    /// Ends a life: `publish` shows it as ended. Atomic with the count, so that a caller that sees the end
    /// finds room for the next life.
    ///
    /// Returns what is no longer shown, which the caller must make the registry forget.
    pub(crate) fn finish(
        &self,
        handle: &Arc<SessionHandle>,
        max_ended: usize,
        publish: impl FnOnce(),
    ) -> Vec<Arc<SessionHandle>> {
        let mut inner = self.lock();
        publish();
        inner.live = inner.live.saturating_sub(1);
        match handle.generation() {
            Some(generation) => inner.ended.push_back((handle.id.clone(), generation)),
            None => inner.drop_unclaimed(handle),
        }
        inner.trim(max_ended)
    }

    /// Drops ended lives beyond `max_ended`, oldest first.
    pub(crate) fn trim(&self, max_ended: usize) -> Vec<Arc<SessionHandle>> {
        self.lock().trim(max_ended)
    }

    /// Drops the life of a session that has ended.
    pub(crate) fn remove_ended(&self, id: &SessionId) -> Option<Arc<SessionHandle>> {
        let mut inner = self.lock();
        if inner.has_life(id) {
            return None;
        }
        inner.ended.retain(|(ended, _)| ended != id);
        inner.slots.remove(id).map(|slot| slot.current)
    }

    /// The life that is shown for an id.
    pub(crate) fn shown(&self, id: &SessionId) -> Option<Arc<SessionHandle>> {
        self.lock().slots.get(id)?.shown().cloned()
    }

    /// The latest life of an id, whether it is shown yet or not.
    pub(crate) fn current(&self, id: &SessionId) -> Option<Arc<SessionHandle>> {
        Some(Arc::clone(&self.lock().slots.get(id)?.current))
    }

    /// The lives that are shown, ordered by id: all, or those after one.
    pub(crate) fn shown_after(&self, after: Option<&SessionId>) -> Vec<Arc<SessionHandle>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.lock()
            .slots
            .range::<SessionId, _>((from, Bound::Unbounded))
            .filter_map(|(_, slot)| slot.shown())
            .cloned()
            .collect()
    }

    /// All lives that have not ended.
    pub(crate) fn live(&self) -> Vec<Arc<SessionHandle>> {
        let inner = self.lock();
        inner
            .slots
            .values()
            .map(|slot| &slot.current)
            .filter(|life| !life.is_ended())
            .cloned()
            .collect()
    }

    /// Lives that have not ended, and those of them that have a container.
    pub(crate) fn occupancy(&self) -> Occupancy {
        let has_container = |state: SessionState| match state {
            SessionState::Running
            | SessionState::Frozen
            | SessionState::Paused
            | SessionState::Stopping
            | SessionState::Stuck => true,
            SessionState::Starting | SessionState::Stopped | SessionState::Failed => false,
        };
        let inner = self.lock();
        let lives = inner.slots.values();
        let settled = lives.filter(|slot| has_container(slot.current.state()));
        Occupancy {
            live: inner.live,
            settled: settled.count(),
        }
    }

    /// Whether this generation is of a life that has not ended. A life without a generation has no container
    /// yet, so it does not count.
    pub(crate) fn is_live(&self, id: &SessionId, generation: Generation) -> bool {
        self.current(id)
            .is_some_and(|life| !life.is_ended() && life.generation() == Some(generation))
    }

    /// Admits nothing from now on.
    pub(crate) fn shut_down(&self) {
        self.lock().shutting_down = true;
    }
}

impl Inner {
    fn has_life(&self, id: &SessionId) -> bool {
        let slot = self.slots.get(id);
        slot.is_some_and(|slot| !slot.current.is_ended())
    }

    fn show(&mut self, handle: &Arc<SessionHandle>) {
        let slot = Slot {
            current: Arc::clone(handle),
            former: None,
        };
        self.slots.insert(handle.id.clone(), slot);
    }

    /// Removes a start that was never recorded.
    fn drop_unclaimed(&mut self, handle: &Arc<SessionHandle>) {
        let Some(slot) = self.slots.get_mut(&handle.id) else {
            return;
        };
        if !Arc::ptr_eq(&slot.current, handle) {
            return;
        }
        match slot.former.take() {
            Some(former) => slot.current = former,
            None => {
                self.slots.remove(&handle.id);
            }
        }
    }

    fn trim(&mut self, max_ended: usize) -> Vec<Arc<SessionHandle>> {
        let mut forgotten = Vec::new();
        while self.ended.len() > max_ended {
            let Some((id, generation)) = self.ended.pop_front() else {
                break;
            };
            let shown = self.slots.get(&id).is_some_and(|slot| {
                slot.current.is_ended() && slot.current.generation() == Some(generation)
            });
            if shown {
                forgotten.extend(self.slots.remove(&id).map(|slot| slot.current));
            }
        }
        forgotten
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn spec() -> ResolvedSpec {
        let spec = serde_json::json!({
            "runtime": "process", "image": "none", "command": [], "args": [], "env": {},
            "ready_timeout_s": 60, "network": "loopback", "pids": 128, "labels": {}, "binds": [],
            "idle_timeout_s": 0, "max_lifetime_s": 0, "preempt_grace_ms": 0
        });
        serde_json::from_value(spec).expect("a spec")
    }

    #[test]
    fn a_life_from_before_is_not_taken_on_where_there_is_one_by_now() {
        let sessions = SessionTable::default();
        let id: SessionId = "alice".parse().expect("an id");
        let admitted = sessions.admit(&id, &spec(), 1, None, |_| Ok(()));
        let Admission::Start(present) = admitted else {
            panic!("{admitted:?}");
        };
        let from_before = || SessionHandle::new(id.clone(), spec(), View::starting());
        assert!(!sessions.take_on(&from_before(), || panic!("it was entered to be killed")));
        let current = sessions.current(&id).expect("there is one");
        assert!(Arc::ptr_eq(&current, &present));

        assert!(sessions.finish(&present, 1, || ()).is_empty());
        let mut entered = false;
        assert!(sessions.take_on(&from_before(), || entered = true));
        assert!(entered);
    }
}
