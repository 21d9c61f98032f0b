//! The thread that writes the registry file.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use conman_core::EndCause;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;
use redb::Database;
use tokio::sync::oneshot;

use super::commit::{self, Write, Writes, unreadable};
use super::generations::Generations;
use super::mirror::Mirror;
use super::opening::{self, DatabaseFailure};
use super::queue::{Abandoned, Batch, Queue, Queued, Request};
use super::room::Room;
use super::schema;
use super::store_error;
use crate::rules::{self, Change, Effect};
use crate::state_lock::StateLock;
use crate::{Ending, RecordState, RegistryError, Release, SessionRecord};

/// Serves the queue: all waiting requests become one transaction, and every answer is sent after
/// its durable commit.
///
/// After a failed commit redb refuses further ones, and the transaction may or may not be durable.
/// The writer then closes the file, answers the whole batch with the error, and before the next
/// batch reopens the file and makes it equal to the mirror, which holds what was acknowledged. So a
/// full disk causes errors only while it is full. After any other disk error the file is rewritten
/// from the mirror: the kernel drops pages that it failed to write, so reading the file back proves
/// nothing.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) path: PathBuf,
    pub(super) queue: Arc<Queue>,
    pub(super) mirror: Arc<Mirror>,
    pub(super) generations: Generations,
    /// `None` after a failure.
    pub(super) database: Option<Database>,
    /// Claims to release with the next transaction.
    pub(super) abandoned: Vec<Abandoned>,
    /// Whether the file must be rewritten instead of reopened.
    pub(super) distrusted: bool,
    /// What the registry file holds.
    pub(super) reserved_through: u64,
    pub(super) room: Room,
    /// Released last, after the files are closed.
    pub(super) lock: StateLock,
}

/// The changes of one transaction.
#[derive(Debug, Default)]
struct StagedChanges {
    records: BTreeMap<SessionId, Option<Arc<SessionRecord>>>,
    writes: Writes,
    answers: Vec<Answer>,
    /// Why claims are refused, if they are.
    no_room: Option<RegistryError>,
}

/// A result that waits for the commit.
#[derive(Debug)]
enum Answer {
    Claim(
        oneshot::Sender<Result<Arc<SessionRecord>, RegistryError>>,
        Result<Arc<SessionRecord>, RegistryError>,
    ),
    Change(
        oneshot::Sender<Result<(), RegistryError>>,
        Result<(), RegistryError>,
    ),
    Release(
        oneshot::Sender<Vec<Result<(), RegistryError>>>,
        Vec<Result<(), RegistryError>>,
    ),
}

impl Writer {
    /// Runs until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let served = catch_unwind(AssertUnwindSafe(|| {
            while let Some(Batch { queued, abandoned }) = self.queue.take() {
                self.abandoned.extend(abandoned);
                let committed = self.serve(queued);
                // The callers of some claims were gone when the answer was to be sent.
                if committed && !self.abandoned.is_empty() {
                    self.serve(Vec::new());
                }
            }
            // A failed commit that is durable must not reappear at the next start.
            if let Err(error) = self.ensure_open() {
                tracing::warn!(
                    path = %self.path.display(),
                    error = &error as &dyn std::error::Error,
                    "cannot undo a failed registry commit before closing; the next start may find \
                     changes that were refused"
                );
            }
        }));
        if served.is_err() {
            tracing::error!(path = %self.path.display(), "the registry's writer panicked");
            queue.abandon("it panicked");
        }
        // Closing the file writes to it, so the directory is released afterwards.
        let Self { database, lock, .. } = self;
        drop(database);
        drop(lock);
    }

    /// Runs one transaction. Returns whether it was committed.
    fn serve(&mut self, queued: Vec<Queued>) -> bool {
        if !self.room.has_file() {
            self.database = None;
        }
        if let Err(error) = self.ensure_open() {
            refuse(queued, &error);
            return false;
        }
        // Before every batch, not only before claims: a commit may shrink the file and free the
        // blocks beyond its end.
        let mut stage = StagedChanges {
            no_room: self.room.ensure().err(),
            ..StagedChanges::default()
        };
        self.stage_abandoned(&mut stage);
        // The places in the queue become free with the commit, which bounds memory.
        let mut places = Vec::with_capacity(queued.len());
        for Queued { request, place } in queued {
            self.stage(&mut stage, request);
            places.push(place);
        }
        let StagedChanges {
            records,
            writes,
            answers,
            ..
        } = stage;
        if let Err(error) = self.commit(&writes) {
            self.close(&error);
            tracing::warn!(
                path = %self.path.display(),
                requests = answers.len(),
                error = &error as &dyn std::error::Error,
                "a registry commit failed; the file is reopened with the next request"
            );
            answers.into_iter().for_each(|answer| answer.fail(&error));
            return false;
        }
        self.mirror.apply(records);
        self.abandoned = answers.into_iter().filter_map(Answer::deliver).collect();
        true
    }

    /// Releases claims whose callers were gone before the answer: no container can exist for them,
    /// and nothing else would release them.
    fn stage_abandoned(&mut self, stage: &mut StagedChanges) {
        for (id, generation) in self.abandoned.clone() {
            let why = "the start was given up before it was recorded";
            let ending = Ending::now(true, EndCause::StartFailed, why);
            if let Err(error) = self.change(stage, &id, generation, &Change::Release(ending)) {
                tracing::warn!(session = %id, %error, "cannot release an abandoned claim");
            }
        }
    }

    fn stage(&mut self, stage: &mut StagedChanges, request: Request) {
        match request {
            Request::Claim {
                id,
                spec,
                read,
                reply,
            } => {
                // A caller that is gone would never learn that it owns the session.
                if !reply.is_closed() {
                    let result = self.claim(stage, &id, *spec, read.as_deref());
                    stage.answers.push(Answer::Claim(reply, result));
                }
            }
            Request::Change {
                id,
                generation,
                change,
                reply,
            } => {
                let result = self.change(stage, &id, generation, &change);
                stage.answers.push(Answer::Change(reply, result));
            }
            Request::Release { batch, reply } => {
                let results = batch
                    .into_iter()
                    .map(
                        |Release {
                             id,
                             generation,
                             ending,
                         }| {
                            self.change(stage, &id, generation, &Change::Release(ending))
                        },
                    )
                    .collect();
                stage.answers.push(Answer::Release(reply, results));
            }
        }
    }

    fn claim(
        &mut self,
        stage: &mut StagedChanges,
        id: &SessionId,
        spec: ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<Arc<SessionRecord>, RegistryError> {
        rules::may_claim(id, self.current(stage, id).as_deref(), read)?;
        if let Some(error) = &stage.no_room {
            return Err(error.clone());
        }
        let unreadable = |source| unreadable(id, source);
        let encoded_spec = schema::encode_spec(&spec).map_err(unreadable)?;
        let record = SessionRecord {
            id: id.clone(),
            generation: self.generations.take()?,
            state: RecordState::Starting,
            spec,
            container: None,
            created_at: Timestamp::now(),
        };
        let session = schema::encode_session(&record).map_err(unreadable)?;
        let record = Arc::new(record);
        stage.records.insert(id.clone(), Some(Arc::clone(&record)));
        stage.writes.insert(
            id.clone(),
            Write::Put {
                session,
                spec: Some(encoded_spec),
            },
        );
        Ok(record)
    }

    fn change(
        &mut self,
        stage: &mut StagedChanges,
        id: &SessionId,
        generation: Generation,
        change: &Change,
    ) -> Result<(), RegistryError> {
        match rules::apply(id, generation, self.current(stage, id).as_deref(), change)? {
            Effect::Keep => {}
            Effect::Put(record) => {
                let session =
                    schema::encode_session(&record).map_err(|source| unreadable(id, source))?;
                let changed = matches!(change, Change::SetSpec(_));
                let spec = changed.then(|| schema::encode_spec(&record.spec));
                let spec = spec.transpose().map_err(|source| unreadable(id, source))?;
                let spec = match stage.writes.remove(id) {
                    Some(Write::Put { spec: staged, .. }) => spec.or(staged),
                    Some(Write::Remove) | None => spec,
                };
                stage.records.insert(id.clone(), Some(Arc::from(record)));
                stage
                    .writes
                    .insert(id.clone(), Write::Put { session, spec });
            }
            Effect::Remove => {
                stage.records.insert(id.clone(), None);
                stage.writes.insert(id.clone(), Write::Remove);
            }
        }
        Ok(())
    }

    /// The record as changed by this transaction so far.
    fn current(&self, stage: &StagedChanges, id: &SessionId) -> Option<Arc<SessionRecord>> {
        match stage.records.get(id) {
            Some(staged) => staged.clone(),
            None => self.mirror.get(id),
        }
    }

    fn commit(&mut self, writes: &Writes) -> Result<(), RegistryError> {
        let reserved_through = self.generations.reserved_through();
        if writes.is_empty() && reserved_through == self.reserved_through {
            return Ok(());
        }
        let Some(database) = &self.database else {
            return Err(RegistryError::Closed {
                reason: "its file is not open".to_owned(),
            });
        };
        commit::commit(database, writes, reserved_through)
            .map_err(|error| store_error("commit", &self.path, error))?;
        self.reserved_through = reserved_through;
        Ok(())
    }

    /// Closes the file after a failed commit.
    fn close(&mut self, error: &RegistryError) {
        self.database = None;
        self.distrusted |= !error.is_disk_full();
    }

    /// Reopens the file after a failure and undoes the parts of the failed commit that became
    /// durable, because its callers received an error. A file that is lost or damaged is rewritten
    /// from the mirror, which holds everything that was acknowledged.
    fn ensure_open(&mut self) -> Result<(), RegistryError> {
        if self.database.is_some() {
            return Ok(());
        }
        let records = self.mirror.snapshot();
        let found = if self.distrusted {
            Err(DatabaseFailure::Damaged("a write to it failed".to_owned()))
        } else {
            opening::open_database(&self.path)
        };
        match found {
            Ok((database, content)) => {
                let undo = commit::difference(&content.records, &records)?;
                self.reserved_through = content.reserved_through;
                self.database = Some(database);
                if let Err(error) = self.commit(&undo) {
                    self.close(&error);
                    return Err(error);
                }
            }
            Err(DatabaseFailure::Missing | DatabaseFailure::Damaged(_)) => {
                let reserved_through = self.generations.reserved_through();
                let rebuilt = opening::rebuild(&self.path, &records, reserved_through)?;
                self.database = Some(rebuilt);
                self.reserved_through = reserved_through;
                self.distrusted = false;
            }
            Err(DatabaseFailure::Refused(error)) => return Err(error),
        }
        tracing::info!(path = %self.path.display(), "reopened the registry file");
        Ok(())
    }
}

impl Answer {
    /// Sends the answer; returns a claim whose caller is gone.
    fn deliver(self) -> Option<(SessionId, Generation)> {
        match self {
            Self::Claim(reply, result) => match reply.send(result) {
                Err(Ok(record)) => Some((record.id.clone(), record.generation)),
                Ok(()) | Err(Err(_)) => None,
            },
            // A caller that is gone needs no answer, and the change stays.
            Self::Change(reply, result) => {
                let _ = reply.send(result);
                None
            }
            Self::Release(reply, results) => {
                let _ = reply.send(results);
                None
            }
        }
    }

    fn fail(self, error: &RegistryError) {
        match self {
            Self::Claim(reply, _) => drop(reply.send(Err(error.clone()))),
            Self::Change(reply, _) => drop(reply.send(Err(error.clone()))),
            Self::Release(reply, results) => {
                drop(reply.send(results.iter().map(|_| Err(error.clone())).collect()));
            }
        }
    }
}

fn refuse(batch: Vec<Queued>, error: &RegistryError) {
    for Queued { request, .. } in batch {
        match request {
            Request::Claim { reply, .. } => Answer::Claim(reply, Err(error.clone())),
            Request::Change { reply, .. } => Answer::Change(reply, Err(error.clone())),
            Request::Release { batch, reply } => {
                Answer::Release(reply, batch.iter().map(|_| Err(error.clone())).collect())
            }
        }
        .deliver();
    }
}
