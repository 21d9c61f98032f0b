//! The store for a daemon: nothing here blocks the caller's thread.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::{Stream, StreamExt as _};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::image::{Image, ImageSummary};
use crate::import::ImportError;
use crate::name::ImageName;
use crate::pull::{PullConfig, PullError, PullProgress, Puller};
use crate::store::{GcReport, ImageStore, StoreError};

/// Most concurrent uploads and imports. Each holds a thread, and room for its archive and its
/// unpacked form; the disk is busy with fewer.
const MAX_IMPORTS: usize = 4;

/// Most pieces of an upload between its connection and its thread: those in flight while one is
/// written. A piece has at most some 100 KiB, the size of a connection's buffer.
const PIECES_AHEAD: usize = 4;

/// Why an operation on the store did not start or complete.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("{limit} imports are under way: try again later")]
    Busy { limit: usize },
    #[error("conman failed while it {doing}")]
    Panicked { doing: &'static str },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Import(#[from] ImportError),
}

/// The store with its puller and its collector, for tasks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ImageKeeper {
    store: ImageStore,
    puller: Puller,
    imports: Arc<Semaphore>,
    /// Notified when there may be something to collect.
    garbage: Arc<Notify>,
}

impl ImageKeeper {
    pub fn new(store: ImageStore, pulls: PullConfig) -> Self {
        Self {
            puller: Puller::new(store.clone(), pulls),
            store,
            imports: Arc::new(Semaphore::new(MAX_IMPORTS)),
            garbage: Arc::default(),
        }
    }

    pub fn store(&self) -> &ImageStore {
        &self.store
    }

    pub async fn list(&self) -> Result<Vec<ImageSummary>, KeeperError> {
        self.blocking("listed images", ImageStore::list).await
    }

    pub async fn get(&self, name: &ImageName) -> Result<ImageSummary, KeeperError> {
        let name = name.clone();
        let found = self.blocking("looked an image up", move |store| {
            store.summary(&name).ok_or_else(|| StoreError::NoSuchImage {
                name: name.to_string(),
            })
        });
        Ok(found.await??)
    }

    /// Removes a name; an image without names is collected soon.
    pub async fn remove(&self, name: &ImageName) -> Result<ImageSummary, KeeperError> {
        let name = name.clone();
        let removed = self
            .blocking("removed a name", move |store| store.remove(&name))
            .await??;
        self.garbage.notify_one();
        Ok(removed)
    }

    /// Collects at once. Every user of an image holds an [`crate::ImageGuard`], so there is nothing
    /// else to check.
    pub async fn collect(&self) -> Result<GcReport, KeeperError> {
        let collected = self.blocking("collected images", |store| store.collect(&BTreeSet::new()));
        Ok(collected.await??)
    }

    /// Collects periodically, and soon after a name was removed or replaced; never ends.
    ///
    /// Cancel safe: a collection that has begun ends on its thread.
    pub async fn collect_from_time_to_time(&self, every: Option<Duration>) {
        loop {
            let pause = async {
                match every {
                    Some(every) => tokio::time::sleep(every).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Cancel safe: a dropped sleep is started again.
                () = pause => {}
                // Cancel safe: the permit is taken only when this arm is.
                () = self.garbage.notified() => {}
            }
            match self.collect().await {
                Ok(report) if report == GcReport::default() => {}
                Ok(report) => tracing::info!(
                    images = report.images.len(),
                    layers = report.layers.len(),
                    freed_bytes = report.freed_bytes,
                    "collected images"
                ),
                Err(error) => tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot collect images"
                ),
            }
        }
    }

    /// Imports an archive that arrives in pieces. It is complete only if the stream ends without an
    /// error: an upload that breaks, or whose caller goes away, leaves nothing. Once all of it has
    /// arrived, the import continues without the caller.
    pub async fn import(
        &self,
        name: &ImageName,
        mut pieces: impl Stream<Item = io::Result<Bytes>> + Unpin,
    ) -> Result<Image, KeeperError> {
        let permit = Arc::clone(&self.imports).try_acquire_owned();
        let permit = permit.map_err(|_| KeeperError::Busy { limit: MAX_IMPORTS })?;
        let (sender, receiver) = mpsc::channel(PIECES_AHEAD);
        let (store, name) = (self.store.clone(), name.clone());
        let import = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            store.import_stream(Pieces::new(receiver), &name)
        });
        loop {
            let piece = pieces.next().await;
            let last = !matches!(piece, Some(Ok(_)));
            // The receiver is dropped once the import has failed; its result has the reason.
            if sender.send(piece).await.is_err() || last {
                break;
            }
        }
        drop(sender);
        let image = joined("imported an image", import.await)??;
        // Another image may have had the name.
        self.garbage.notify_one();
        Ok(image)
    }

    /// [`Puller::pull`].
    pub async fn pull(
        &self,
        reference: &str,
        name: &ImageName,
        on_progress: impl FnMut(&PullProgress),
    ) -> Result<Image, Arc<PullError>> {
        let image = self.puller.pull(reference, name, on_progress).await?;
        self.garbage.notify_one();
        Ok(image)
    }

    async fn blocking<T: Send + 'static>(
        &self,
        doing: &'static str,
        work: impl FnOnce(&ImageStore) -> T + Send + 'static,
    ) -> Result<T, KeeperError> {
        let store = self.store.clone();
        joined(
            doing,
            tokio::task::spawn_blocking(move || work(&store)).await,
        )
    }
}

fn joined<T>(
    doing: &'static str,
    outcome: Result<T, tokio::task::JoinError>,
) -> Result<T, KeeperError> {
    outcome.map_err(|_| KeeperError::Panicked { doing })
}

/// `None` is the end. Without it, the upload is incomplete.
type Piece = Option<io::Result<Bytes>>;

/// The receiving thread's end of an upload.
struct Pieces {
    receiver: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Pieces {
    fn new(receiver: mpsc::Receiver<Piece>) -> Self {
        Self {
            receiver,
            current: Bytes::new(),
            ended: false,
        }
    }
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Some(piece)) => self.current = piece?,
                Some(None) => self.ended = true,
                None => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the upload was cancelled before its end",
                    ));
                }
            }
        }
        let count = self.current.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.current[..count]);
        self.current.advance(count);
        Ok(count)
    }
}
