//! The registry in a file on this node.
//!
//! One OS thread writes ([`writer`]). Requests reach it through a bounded queue that any tokio
//! runtime may push into ([`queue`]); answers come back through one-shot channels. Reads are served
//! from memory ([`mirror`]). The state directory holds `registry.redb` ([`schema`]), `generations`
//! ([`generations`]) and `lock`.

mod commit;
mod generations;
mod mirror;
mod opening;
mod queue;
mod room;
mod schema;
#[cfg(test)]
mod tests;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use async_trait::async_trait;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use tokio::sync::oneshot;

use self::generations::Generations;
use self::mirror::Mirror;
pub use self::opening::{LeftAlone, left_alone, used_through};
use self::queue::{Queue, Request};
use self::room::Room;
use self::writer::Writer;
use crate::rules::Change;
use crate::{ContainerIdentity, RecordState, Registry, RegistryError, Release, SessionRecord};

/// How to open an [`EmbeddedRegistry`].
#[derive(Debug, Clone, Copy, Default)]
pub struct EmbeddedOptions {
    /// Every generation assigned is greater than this one. Needed once when the state directory
    /// does not say which generations were used, or to remove a node from its fleet; otherwise it
    /// has no effect.
    pub generation_floor: Option<Generation>,
}

/// Ownership records in a state directory that only this process uses.
///
/// A queued request is executed even when its future is dropped, with one exception: a claim whose
/// caller is gone is undone.
#[derive(Debug)]
pub struct EmbeddedRegistry {
    queue: Arc<Queue>,
    mirror: Arc<Mirror>,
    writer: Option<JoinHandle<()>>,
}

impl EmbeddedRegistry {
    /// Opens the registry in `dir`, which is created if missing, and starts its writer. Blocks on
    /// the disk.
    ///
    /// # Errors
    /// [`RegistryError::InUse`] at once when another process (or another registry in this one)
    /// holds the directory; [`RegistryError::Damaged`], [`RegistryError::OtherFormat`] and
    /// [`RegistryError::FloorUnknown`] when continuing might use a generation twice or misread
    /// records; [`RegistryError::OfFleet`] in the directory of a fleet's node.
    pub fn open(dir: &Path, options: EmbeddedOptions) -> Result<Self, RegistryError> {
        let opened = opening::open(dir, &options)?;
        let queue = Arc::new(Queue::new());
        let mirror = Arc::new(Mirror::new(opened.content.records));
        let writer = Writer {
            queue: Arc::clone(&queue),
            mirror: Arc::clone(&mirror),
            generations: Generations::new(opened.high_water, opened.generations_path),
            room: Room::new(&opened.registry_path),
            database: Some(opened.database),
            abandoned: Vec::new(),
            distrusted: false,
            reserved_through: opened.content.reserved_through,
            lock: opened.lock,
            path: opened.registry_path,
        };
        let thread = std::thread::Builder::new()
            .name("registry".to_owned())
            .spawn(move || writer.run())
            .map_err(|source| RegistryError::Io {
                action: "start the writer of",
                path: dir.to_owned(),
                source: Arc::new(source),
            })?;
        Ok(Self {
            queue,
            mirror,
            writer: Some(thread),
        })
    }

    async fn change(
        &self,
        id: &SessionId,
        generation: Generation,
        change: Change,
    ) -> Result<(), RegistryError> {
        let (reply, answer) = oneshot::channel();
        let (id, change) = (id.clone(), Box::new(change));
        self.queue
            .push(Request::Change {
                id,
                generation,
                change,
                reply,
            })
            .await?;
        answer.await.unwrap_or_else(|_| Err(self.queue.closed()))
    }
}

/// Serves the queued requests, closes the files and releases the directory. Blocks for as long as a
/// commit takes.
impl Drop for EmbeddedRegistry {
    fn drop(&mut self) {
        self.queue.close("the registry was closed");
        if let Some(writer) = self.writer.take() {
            // The writer has caught and reported its panics.
            let _ = writer.join();
        }
    }
}

/// Waits for the answer to a claim, and gives the claim up when it is dropped first.
struct ClaimAnswer<'a> {
    answer: oneshot::Receiver<Result<Arc<SessionRecord>, RegistryError>>,
    queue: &'a Queue,
}

impl ClaimAnswer<'_> {
    async fn receive(mut self) -> Result<Arc<SessionRecord>, RegistryError> {
        (&mut self.answer)
            .await
            .unwrap_or_else(|_| Err(self.queue.closed()))
    }
}

impl Drop for ClaimAnswer<'_> {
    fn drop(&mut self) {
        // After this the writer notices the dropped claim; an answer sent before it is received
        // here.
        self.answer.close();
        if let Ok(Ok(record)) = self.answer.try_recv() {
            self.queue.give_up((record.id.clone(), record.generation));
        }
    }
}

#[async_trait]
impl Registry for EmbeddedRegistry {
    async fn claim_by(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
        read: Option<&SessionRecord>,
    ) -> Result<SessionRecord, RegistryError> {
        let (reply, answer) = oneshot::channel();
        let request = Request::Claim {
            id: id.clone(),
            spec: Box::new(spec.clone()),
            read: read.cloned().map(Box::new),
            reply,
        };
        self.queue.push(request).await?;
        let record = ClaimAnswer {
            answer,
            queue: &self.queue,
        }
        .receive()
        .await?;
        Ok(Arc::unwrap_or_clone(record))
    }

    async fn set_container(
        &self,
        id: &SessionId,
        generation: Generation,
        container: &ContainerIdentity,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, Change::SetContainer(container.clone()))
            .await
    }

    async fn set_state(
        &self,
        id: &SessionId,
        generation: Generation,
        state: RecordState,
    ) -> Result<(), RegistryError> {
        self.change(id, generation, Change::SetState(state)).await
    }

    async fn set_spec(
        &self,
        id: &SessionId,
        generation: Generation,
        spec: &ResolvedSpec,
    ) -> Result<(), RegistryError> {
        let change = Change::SetSpec(Box::new(spec.clone()));
        self.change(id, generation, change).await
    }

    async fn release(&self, batch: Vec<Release>) -> Vec<Result<(), RegistryError>> {
        if batch.is_empty() {
            return Vec::new();
        }
        let asked = batch.len();
        let (reply, answer) = oneshot::channel();
        let answered = match self.queue.push(Request::Release { batch, reply }).await {
            Ok(()) => answer.await.map_err(|_| self.queue.closed()),
            Err(error) => Err(error),
        };
        answered.unwrap_or_else(|error| vec![Err(error); asked])
    }

    async fn forget(&self, id: &SessionId, generation: Generation) -> Result<(), RegistryError> {
        self.change(id, generation, Change::Forget).await
    }

    async fn get(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        Ok(self.mirror.get(id).map(Arc::unwrap_or_clone))
    }

    async fn list(&self) -> Result<Vec<SessionRecord>, RegistryError> {
        Ok(self
            .mirror
            .snapshot()
            .into_values()
            .map(Arc::unwrap_or_clone)
            .collect())
    }
}

fn store_error(action: &'static str, path: &Path, error: redb::Error) -> RegistryError {
    RegistryError::Store {
        action,
        path: path.to_owned(),
        source: Arc::new(error),
    }
}
