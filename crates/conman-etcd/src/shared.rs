//! State shared by the driver, the other tasks and the registry's callers.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_core::ownership::{
    BootTime, Key, NodeName, OwnedState, Ownership, SessionName, Timing, Value,
};
use conman_proto::{Generation, SessionId};
use tokio::sync::{Notify, watch};

use super::codec::SessionDetails;
use super::events::Events;
use super::figures;
use super::orders::Orders;
use super::records::{OwnRecord, Records, Since};
use super::store::Store;
use super::wire::{self, Compare};
use conman_registry::{Located, RegistryError, SessionRecord, Standing};

/// Number of other nodes' sessions whose location is cached. When it is reached, all are dropped
/// and looked up again, one round trip each.
const MAX_LOCATIONS: usize = 100_000;

/// Number of remembered revisions. When it is reached, all are dropped and read again.
const MAX_REVISIONS: usize = 10_000;

/// Maximum number of unreadable records that are logged.
const MAX_UNREADABLE: usize = 100;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) me: NodeName,
    pub(super) timing: Timing,
    pub(super) store: Store,
    pub(super) standing: watch::Sender<Standing>,
    /// Incarnation of the latest rejoin; 0 while this node is not live.
    pub(super) incarnation: watch::Sender<u64>,
    pub(super) orders: Arc<Orders>,
    pub(super) events: Events,
    /// Notified when this node should publish or read announcements early.
    pub(super) hurry: Notify,
    records: Mutex<Records>,
    locations: Mutex<HashMap<SessionId, Located>>,
    /// Revisions that wrote the records read last, by session, with hashes of these records.
    revisions: Mutex<HashMap<SessionId, (u64, i64)>>,
    hasher: RandomState,
    /// Keys of unreadable records that have been logged.
    unreadable: Mutex<HashSet<String>>,
    /// Why the latest renewal failed; `None` after a success.
    trouble: Mutex<Option<String>>,
}

impl Shared {
    pub(super) fn new(me: NodeName, timing: Timing, store: Store) -> Self {
        Self {
            me,
            timing,
            store,
            standing: watch::Sender::new(Standing::Joining {
                reason: "it has just begun".to_owned(),
            }),
            incarnation: watch::Sender::new(0),
            orders: Arc::default(),
            events: Events::default(),
            hurry: Notify::new(),
            records: Mutex::default(),
            locations: Mutex::default(),
            revisions: Mutex::default(),
            hasher: RandomState::new(),
            unreadable: Mutex::default(),
            trouble: Mutex::default(),
        }
    }

    pub(super) fn stands(&self, standing: Standing) {
        let trouble = self.trouble();
        self.standing.send_if_modified(|now| {
            let changed = *now != standing;
            self.events.stands(now, &standing, trouble.as_deref());
            if changed {
                figures::stands(&standing);
                match &standing {
                    Standing::Fenced => {
                        let reason = self.why_late();
                        tracing::error!(
                            reason,
                            "ownership has lapsed; all sessions are frozen until it is renewed"
                        );
                    }
                    Standing::Late => {
                        let reason = self.why_late();
                        tracing::warn!(reason, "renewal of ownership is late");
                    }
                    Standing::Alone | Standing::Live => tracing::info!("renewed ownership"),
                    Standing::Joining { reason } => tracing::info!(reason, "joining the fleet"),
                }
            }
            *now = standing;
            changed
        });
    }

    /// Records how the latest renewal ended.
    pub(super) fn note_trouble(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.lock();
        trouble.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn why_late(&self) -> String {
        self.trouble().unwrap_or_else(|| {
            "no renewal has failed; this machine was too slow or was suspended".to_owned()
        })
    }

    /// The error while nothing can be recorded.
    pub(super) fn unavailable(&self) -> RegistryError {
        let reason = match &*self.standing.borrow() {
            Standing::Joining { reason } => {
                format!("this node has not joined its fleet yet: {reason}")
            }
            Standing::Fenced => format!(
                "this node's ownership has lapsed, and everything on it is frozen until it is \
                 renewed: {}",
                self.why_late()
            ),
            Standing::Alone | Standing::Live | Standing::Late => {
                self.trouble().unwrap_or_else(|| {
                    "etcd has not confirmed it yet; try again in a moment".to_owned()
                })
            }
        };
        RegistryError::Unavailable { reason }
    }

    pub(super) fn mine(&self, id: &SessionId) -> Option<OwnRecord> {
        self.records().of(id).cloned()
    }

    pub(super) fn since(&self) -> Since {
        self.records().since()
    }

    pub(super) fn note_mine(&self, mine: OwnRecord) {
        self.records().note(mine);
    }

    pub(super) fn note_changed(&self, mine: OwnRecord) {
        self.records().note_changed(mine);
    }

    /// Returns the newest known record; `None` where the record that was read is out of date.
    pub(super) fn note_read(&self, mine: OwnRecord, since: Since) -> Option<OwnRecord> {
        let mut records = self.records();
        let id = mine.details.record.id.clone();
        let is_present = records.note_read(mine, since);
        is_present.then(|| records.of(&id).cloned()).flatten()
    }

    /// Evicts the record unless it has another generation.
    pub(super) fn not_mine(&self, id: &SessionId, generation: Generation) {
        self.records().take_out(id, generation);
    }

    /// Evicts all records after ownership may have been lost.
    pub(super) fn nothing_mine(&self) {
        self.records().clear();
    }

    pub(super) fn location(&self, id: &SessionId) -> Option<Located> {
        self.locations().get(id).cloned()
    }

    pub(super) fn note_location(&self, id: &SessionId, located: Option<Located>) {
        let mut locations = self.locations();
        match located {
            Some(located) => {
                if locations.len() >= MAX_LOCATIONS {
                    locations.clear();
                }
                locations.insert(id.clone(), located);
            }
            None => {
                locations.remove(id);
            }
        }
    }

    pub(super) fn forget_location(&self, id: &SessionId, generation: Generation) {
        let mut locations = self.locations();
        if locations
            .get(id)
            .is_some_and(|known| known.generation <= generation)
        {
            locations.remove(id);
        }
    }

    /// Remembers the revision that wrote a record.
    pub(super) fn note_revision(&self, read: &OwnRecord) {
        let Some(revision) = read.mod_revision else {
            return;
        };
        let record = &read.details.record;
        let Some(hash) = self.hash(record) else {
            return;
        };
        let mut revisions = self.revisions();
        if revisions.len() >= MAX_REVISIONS {
            revisions.clear();
        }
        revisions.insert(record.id.clone(), (hash, revision));
    }

    /// Forgets and returns the revision that wrote this record, if it is remembered.
    pub(super) fn take_revision(&self, record: &SessionRecord) -> Option<i64> {
        let (noted, revision) = self.revisions().remove(&record.id)?;
        (Some(noted) == self.hash(record)).then_some(revision)
    }

    fn hash(&self, record: &SessionRecord) -> Option<u64> {
        let text = serde_json::to_vec(record).ok()?;
        Some(self.hasher.hash_one(text))
    }

    /// Whether this unreadable record has not been logged and should be.
    pub(super) fn is_news(&self, key: &str) -> bool {
        let logged = self.unreadable.lock();
        let mut logged = logged.unwrap_or_else(PoisonError::into_inner);
        logged.len() < MAX_UNREADABLE && logged.insert(key.to_owned())
    }

    /// Compares that this node owns the session by exactly this claim.
    pub(super) fn is_mine(&self, details: &SessionDetails) -> Compare {
        let ownership = Ownership {
            owner: self.me.clone(),
            incarnation: details.incarnation,
            generation: details.record.generation.get(),
            state: OwnedState::Owned,
        };
        let key = self.store.keys.of(&Key::Session(name(&details.record.id)));
        let stored = self.store.stored(&key, &Value::Session(ownership));
        wire::is(key, Some(stored))
    }

    pub(super) fn details(&self, incarnation: u64, record: SessionRecord) -> SessionDetails {
        SessionDetails {
            node: self.me.to_string(),
            incarnation,
            record,
        }
    }

    /// A panic while the lock is held cannot leave a partial change: each is one map operation.
    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn revisions(&self) -> MutexGuard<'_, HashMap<SessionId, (u64, i64)>> {
        self.revisions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn locations(&self) -> MutexGuard<'_, HashMap<SessionId, Located>> {
        self.locations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn name(id: &SessionId) -> SessionName {
    id.as_str().into()
}

/// CLOCK_BOOTTIME, which includes time in suspend.
pub(super) fn boot_time() -> BootTime {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let millis = u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000_000;
    BootTime(seconds.saturating_mul(1_000).saturating_add(millis))
}
