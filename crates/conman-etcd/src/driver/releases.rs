//! Releases under way: their records and the waiting callers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use conman_core::EndCause;
use conman_core::ownership::{BootTime, Event, NodeProtocol, Slot, Stake};
use conman_proto::Generation;
use futures_util::future::BoxFuture;

use super::super::codec::SessionDetails;
use super::super::notes;
use super::super::records::{OwnRecord, Since};
use super::super::shared::{Shared, boot_time, name};
use super::super::store::ReadError;
use super::Reply;
use super::claims::Claims;
use conman_registry::rules::{self, Change, Effect};
use conman_registry::{Ending, RecordState, RegistryError, Release, SessionRecord};

/// How long a caller waits for a release; the release continues without it, and may be requested
/// again.
const PATIENCE_MS: u64 = 5_000;

#[derive(Debug)]
struct Pending {
    release: Release,
    details: SessionDetails,
    waiting: Vec<Reply<()>>,
    since: BootTime,
    /// Why etcd refuses it.
    refused: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Releases {
    pending: HashMap<Slot, Pending>,
    /// Those that etcd has recorded.
    recorded: HashSet<Slot>,
}

/// What etcd has about a session that is to be released.
pub(super) struct Looked {
    release: Release,
    reply: Reply<()>,
    /// Nothing has been tried yet.
    first: bool,
    since: Since,
    found: Result<Option<OwnRecord>, ReadError>,
}

/// Reads the record of a release that is not cached.
pub(super) fn look(
    shared: Arc<Shared>,
    release: Release,
    reply: Reply<()>,
    first: bool,
) -> BoxFuture<'static, Looked> {
    Box::pin(async move {
        let since = shared.since();
        let found = notes::read(&shared, &release.id).await;
        Looked {
            release,
            reply,
            first,
            since,
            found,
        }
    })
}

impl Releases {
    /// Registers a release. Returns the slot to certify, unless that is under way.
    pub(super) fn begin(
        &mut self,
        details: SessionDetails,
        release: Release,
        reply: Reply<()>,
    ) -> Option<Slot> {
        let slot = slot(&release);
        if let Some(pending) = self.pending.get_mut(&slot) {
            pending.waiting.push(reply);
            return None;
        }
        let pending = Pending {
            details: ended(details, release.ending.clone()),
            release,
            waiting: vec![reply],
            since: boot_time(),
            refused: None,
        };
        self.pending.insert(slot.clone(), pending);
        Some(slot)
    }

    /// Releases a start whose caller is gone.
    pub(super) fn give_back(&mut self, details: SessionDetails) {
        let release = Release {
            id: details.record.id.clone(),
            generation: details.record.generation,
            ending: abandoned(),
        };
        self.keep(details, release);
    }

    /// Registers a release without a waiting caller, unless there is one.
    fn keep(&mut self, details: SessionDetails, release: Release) {
        self.pending
            .entry(slot(&release))
            .or_insert_with(|| Pending {
                details: ended(details, release.ending.clone()),
                release,
                waiting: Vec::new(),
                since: boot_time(),
                refused: None,
            });
    }

    /// Handles a record that was read: answers the caller, or returns its certificate for the
    /// protocol.
    pub(super) fn looked(
        &mut self,
        looked: Looked,
        protocol: &NodeProtocol,
        shared: &Shared,
    ) -> Vec<Event> {
        let Looked {
            release,
            reply,
            first,
            since,
            found,
        } = looked;
        let mine = match found {
            Ok(mine) => mine,
            // The record stays as it is; the release is stored under another key.
            Err(ReadError::Value(error)) => {
                tracing::warn!(%error, "cannot record how a session ended");
                None
            }
            Err(error) => {
                let _ = reply.send(Err(notes::unavailable(&error.to_string())));
                return Vec::new();
            }
        };
        let slot = slot(&release);
        match (judge(&release, mine.as_ref(), shared), mine) {
            (Ok(Effect::Put(_)), Some(mine)) if first && protocol.is_live() => {
                // A newer record must not be overwritten: the caller tries again.
                let present = shared.note_read(mine, since);
                let generation = release.generation;
                let Some(mine) = present.filter(|now| now.details.record.generation == generation)
                else {
                    let _ = reply.send(Err(shared.unavailable()));
                    return Vec::new();
                };
                let Some(slot) = self.begin(mine.details, release, reply) else {
                    return Vec::new();
                };
                // Owned by the registry; a protocol that does not know it has to read first.
                vec![match protocol.stake(&slot.session) {
                    None => Event::StopAsked(slot.session),
                    Some(_) => Event::DeathCertificate(slot),
                }]
            }
            (Ok(Effect::Put(_)), mine) => {
                let _ = reply.send(Err(shared.unavailable()));
                // Whenever the protocol gives it up, this is how it ended.
                if let Some(mine) = mine {
                    self.keep(mine.details, release);
                }
                vec![Event::DeathCertificate(slot)]
            }
            // Nothing to record, but the protocol may still hold the slot.
            (judged, _) => {
                let _ = reply.send(judged.map(|_| ()));
                vec![Event::DeathCertificate(slot)]
            }
        }
    }

    /// Whether there is a certificate for it.
    pub(super) fn is_certified(&self, slot: &Slot) -> bool {
        self.pending.contains_key(slot)
    }

    /// The record that is written with a release's transaction.
    pub(super) fn details(
        &self,
        slot: &Slot,
        claims: &Claims,
        shared: &Shared,
    ) -> Option<SessionDetails> {
        if let Some(pending) = self.pending.get(slot) {
            return Some(pending.details.clone());
        }
        // A claim that was found to be ours too late to be used.
        let known = claims.of(slot).or_else(|| {
            let id = slot.session.parse().ok()?;
            let details = shared.mine(&id)?.details;
            (details.record.generation.get() == slot.generation).then_some(details)
        })?;
        let ending = unheard(&known.record);
        Some(ended(known, ending))
    }

    /// etcd refuses the release; the waiting callers get the reason.
    pub(super) fn refused(&mut self, slot: &Slot, reason: String) {
        tracing::error!(
            session = %slot.session, generation = slot.generation, reason,
            "etcd refuses a release"
        );
        if let Some(pending) = self.pending.get_mut(slot) {
            for reply in pending.waiting.drain(..) {
                let _ = reply.send(Err(notes::unavailable(&reason)));
            }
            pending.refused = Some(reason);
        }
    }

    /// etcd has recorded the release.
    pub(super) fn recorded(&mut self, slot: Slot) {
        self.recorded.insert(slot);
    }

    /// Answers the releases that the protocol has finished. One that it gave up without a recorded
    /// release is read from etcd.
    pub(super) fn settle(
        &mut self,
        protocol: &NodeProtocol,
        shared: &Arc<Shared>,
    ) -> Vec<BoxFuture<'static, Looked>> {
        let now = boot_time();
        let done = |slot: &Slot| match protocol.stake(&slot.session) {
            Some(Stake::Held { generation } | Stake::Ending { generation, .. }) => {
                generation != slot.generation
            }
            Some(Stake::Claiming) | None => true,
            Some(Stake::Checking) => false,
        };
        let over: Vec<Slot> = self
            .pending
            .keys()
            .filter(|slot| done(slot))
            .cloned()
            .collect();
        let mut looking = Vec::new();
        for slot in over {
            let Some(pending) = self.pending.remove(&slot) else {
                continue;
            };
            shared.not_mine(&pending.release.id, pending.release.generation);
            if self.recorded.remove(&slot) {
                for reply in pending.waiting {
                    let _ = reply.send(Ok(()));
                }
                continue;
            }
            for reply in pending.waiting {
                let release = pending.release.clone();
                looking.push(look(Arc::clone(shared), release, reply, false));
            }
        }
        if self.pending.is_empty() {
            self.recorded.clear();
        }
        for pending in self.pending.values_mut() {
            if now.since(pending.since) >= PATIENCE_MS {
                for reply in pending.waiting.drain(..) {
                    let _ = reply.send(Err(match &pending.refused {
                        Some(reason) => notes::unavailable(reason),
                        None => shared.unavailable(),
                    }));
                }
            }
        }
        looking
    }

    pub(super) fn give_up(&mut self, shared: &Shared) {
        for (_, pending) in self.pending.drain() {
            for reply in pending.waiting {
                let _ = reply.send(Err(shared.unavailable()));
            }
        }
    }
}

fn slot(release: &Release) -> Slot {
    Slot {
        session: name(&release.id),
        generation: release.generation.get(),
    }
}

/// The effect of a release on the record that was read.
fn judge(
    release: &Release,
    read: Option<&OwnRecord>,
    shared: &Shared,
) -> Result<Effect, RegistryError> {
    let record = read.map(|mine| &mine.details.record);
    match read {
        Some(mine)
            if mine.details.node != *shared.me
                && mine.details.record.generation == release.generation =>
        {
            Err(superseded(release, mine.details.record.generation))
        }
        _ => {
            let change = Change::Release(release.ending.clone());
            rules::apply(&release.id, release.generation, record, &change)
        }
    }
}

fn superseded(release: &Release, current: Generation) -> RegistryError {
    RegistryError::Superseded {
        id: release.id.clone(),
        generation: release.generation,
        current: Some(current),
    }
}

fn ended(details: SessionDetails, mut ending: Ending) -> SessionDetails {
    let mut details = details;
    rules::keep_deleted(&details.record, &mut ending.cause);
    details.record.state = RecordState::Ended(ending);
    details
}

/// The ending of a session whose end was not reported.
fn unheard(record: &SessionRecord) -> Ending {
    let started_at = match &record.state {
        RecordState::Running { started_at, .. } => Some(*started_at),
        _ => None,
    };
    if started_at.is_none() && record.container.is_none() {
        return abandoned();
    }
    // Without a start time, it counts as a failed start for the limit of restarts.
    let cause = started_at.map_or(EndCause::StartFailed, |_| EndCause::Unknown);
    Ending {
        started_at,
        ..Ending::now(true, cause, "it has ended for an unknown reason")
    }
}

fn abandoned() -> Ending {
    let why = "its start was given up before anything was created";
    Ending::now(true, EndCause::StartFailed, why)
}
