//! Keeps a state file equal to the latest requested content, on a disk that may be full or hang.
//!
//! A request never waits for the disk. A newer one replaces one that is not written yet, and a failed write
//! is retried until it succeeds.
//!
//! [`StateWriter`] ──the latest request──> a thread, which ends with the last [`StateWriter`] ──its last
//! result──> [`StateWriter::set_and_wait`].

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use conman_linux::StateFile;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Pause before a failed write is retried.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// How long [`StateWriter::set_and_wait`] waits for the disk.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

/// A content, or none for no file, with the number of its request.
pub(crate) type Wanted<T> = (u64, Option<T>);

/// The result of the last write, with the number of its request.
type Tried = (u64, Result<(), Arc<io::Error>>);

#[derive(Debug, Clone)]
pub(crate) struct StateWriter<T> {
    file: StateFile,
    wanted: watch::Sender<Wanted<T>>,
    tried: watch::Receiver<Tried>,
}

impl<T: Clone + Send + Sync + 'static> StateWriter<T> {
    /// Starts the thread. It does not change the file before the first request.
    pub(crate) fn start(path: PathBuf) -> io::Result<Self>
    where
        T: Serialize,
    {
        Self::written_by(path, RETRY_PAUSE, |file, content| match content {
            Some(content) => file.write(content),
            None => file.remove(),
        })
    }

    /// Likewise, with a function that changes the file.
    pub(crate) fn written_by(
        path: PathBuf,
        retry_pause: Duration,
        write: impl FnMut(&StateFile, Option<&T>) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let file = StateFile::new(path);
        let (wanted, requests) = watch::channel((0, None));
        let (results, tried) = watch::channel((0, Ok(())));
        let runtime = runtime::Builder::new_current_thread()
            .enable_time()
            .build()?;
        let work = write_requests(file.clone(), requests, results, retry_pause, write);
        thread::Builder::new()
            .name("conman-state-file".to_owned())
            .spawn(move || runtime.block_on(work))?;
        Ok(Self {
            file,
            wanted,
            tried,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns what an earlier daemon left.
    pub(crate) async fn read(&self) -> io::Result<Option<T>>
    where
        T: DeserializeOwned,
    {
        let file = self.file.clone();
        let read = spawn_blocking(move || file.read()).await;
        read.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Requests a content, or none for no file. Returns the number of the request.
    pub(crate) fn set(&self, content: Option<T>) -> u64 {
        let mut number = 0;
        self.wanted.send_modify(|wanted| {
            number = wanted.0 + 1;
            *wanted = (number, content);
        });
        number
    }

    /// Likewise, and waits for the first try. After an error the request still stands.
    pub(crate) async fn set_and_wait(&self, content: Option<T>) -> io::Result<()> {
        let number = self.set(content);
        let mut tried = self.tried.clone();
        let is_tried = tried.wait_for(|(latest, _)| *latest >= number);
        let Ok(tried) = timeout(DISK_PATIENCE, is_tried).await else {
            let (why, path) = ("the disk does not answer in time", self.path().display());
            tracing::warn!(%path, "{why}; the state file is changed when it does");
            return Err(io::Error::new(ErrorKind::TimedOut, why));
        };
        match &*tried.map_err(io::Error::other)? {
            (_, Ok(())) => Ok(()),
            (_, Err(error)) => Err(io::Error::new(error.kind(), Arc::clone(error))),
        }
    }
}

async fn write_requests<T: Clone>(
    file: StateFile,
    mut requests: watch::Receiver<Wanted<T>>,
    results: watch::Sender<Tried>,
    retry_pause: Duration,
    mut write: impl FnMut(&StateFile, Option<&T>) -> io::Result<()>,
) {
    let path = file.path().display();
    let (mut is_written, mut reported) = (true, 0);
    loop {
        let changed = requests.changed();
        let changed = match is_written {
            true => changed.await,
            // Cancel safe: a request that is not seen stays one.
            false => timeout(retry_pause, changed).await.unwrap_or(Ok(())),
        };
        if changed.is_err() {
            return;
        }
        // A copy: a writing thread must not hold up the next request.
        let (number, content) = requests.borrow_and_update().clone();
        let result = write(&file, content.as_ref());
        match &result {
            Ok(()) if is_written => {}
            Ok(()) => tracing::info!(%path, "changed the state file"),
            Err(error) if reported == number => {
                tracing::debug!(%path, %error, "cannot change the state file yet");
            }
            Err(error) => {
                reported = number;
                let consequence = match content {
                    Some(_) => "a restarted daemon would not know of the change",
                    None => "a restarted daemon would act on it; remove it before a restart",
                };
                tracing::warn!(%path, %error, "cannot change the state file; retrying: {consequence}");
            }
        }
        is_written = result.is_ok();
        let _ = results.send_replace((number, result.map_err(Arc::new)));
    }
}

#[cfg(test)]
impl<T> StateWriter<T> {
    /// A writer whose requests are not carried out, and the requests.
    pub(crate) fn unwritten() -> (Self, watch::Receiver<Wanted<T>>) {
        let (wanted, requests) = watch::channel((0, None));
        let writer = Self {
            file: StateFile::new(PathBuf::new()),
            wanted,
            tried: watch::channel((0, Ok(()))).1,
        };
        (writer, requests)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use super::*;

    /// Long enough on any machine.
    const PATIENCE: Duration = Duration::from_secs(60);
    /// Changes that a test has not looked at: more than the writer tries during any test.
    const UNREAD: usize = 4_096;

    /// A writer whose disk refuses `count` removals, and the changes that the disk gets.
    fn refusing(mut count: usize) -> (StateWriter<String>, Receiver<Option<String>>) {
        let (given, changes) = sync_channel(UNREAD);
        let write = move |_: &StateFile, content: Option<&String>| -> io::Result<()> {
            let is_refused = content.is_none() && count > 0;
            // At the end of the test there is no receiver.
            let _ = given.send(content.cloned());
            if is_refused {
                count -= 1;
                return Err(ErrorKind::ReadOnlyFilesystem.into());
            }
            Ok(())
        };
        let writer = StateWriter::written_by(PathBuf::new(), Duration::from_millis(1), write);
        (writer.expect("a thread"), changes)
    }

    #[test]
    fn a_change_that_the_disk_refuses_is_written_later() {
        let (writer, changes) = refusing(3);
        writer.set(None);
        for _ in 0..4 {
            assert_eq!(changes.recv_timeout(PATIENCE), Ok(None));
        }
        // That was the last failure: the next change is another one.
        writer.set(Some("a test".to_owned()));
        let kept = changes.recv_timeout(PATIENCE);
        assert_eq!(kept, Ok(Some("a test".to_owned())));
    }

    #[test]
    fn a_newer_change_replaces_one_that_is_not_written() {
        let (writer, changes) = refusing(usize::MAX);
        writer.set(None);
        assert_eq!(changes.recv_timeout(PATIENCE), Ok(None));
        writer.set(Some("a test".to_owned()));
        while changes
            .recv_timeout(PATIENCE)
            .expect("it continues")
            .is_none()
        {}
        drop(writer);
        changes
            .recv()
            .expect_err("nothing else, and the thread ends");
    }

    #[tokio::test]
    async fn a_caller_learns_what_the_disk_answers() {
        let (writer, _changes) = refusing(usize::MAX);
        let refused = writer.set_and_wait(None).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
        let made = writer.set_and_wait(Some("a test".to_owned())).await;
        made.expect("it is written");
    }
}
