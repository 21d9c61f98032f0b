//! Downloads blobs into files; an interrupted download is resumed.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use conman_linux::remove_if_present;
use futures_util::StreamExt as _;
use oci_client::client::SizedStream;
use tokio::io::AsyncWriteExt as _;

use crate::blobs::Blobs;
use crate::digest::{Digest, Hasher};
use crate::pull::error::{PullError, is_passing};
use crate::pull::remote::{Remote, STALL_TIMEOUT};
use crate::store::failed;

/// Attempts for one blob. Each resumes where the last one broke.
const ATTEMPTS: u32 = 6;

/// Pause before the second attempt; doubled for each later one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Files of blobs, whole (`HEX`) and in part (`HEX.partial`).
#[derive(Debug)]
pub(super) struct Downloads {
    directory: PathBuf,
    /// One download at a time of each blob, for all images.
    turns: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
}

/// How an attempt ended that did not complete the blob.
enum Broken {
    Fatal(PullError),
    Passing(io::Error),
}

impl Downloads {
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            turns: Mutex::default(),
        }
    }

    /// Downloads the blob, and reports to `progress` how many bytes have arrived. Dropping the future
    /// leaves a partial file that the next call resumes.
    pub(super) async fn fetch(
        &self,
        remote: &Remote,
        what: &str,
        digest: Digest,
        size: u64,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), PullError> {
        let turn = self.turn(digest);
        let _turn = turn.lock().await;
        let whole = self.directory.join(digest.hex());
        if tokio::fs::metadata(&whole)
            .await
            .is_ok_and(|file| file.len() == size)
        {
            touch(&whole).await;
            progress(size);
            return Ok(());
        }
        let partial = self.directory.join(format!("{}.partial", digest.hex()));
        let mut pause = FIRST_PAUSE;
        let mut attempt = 1;
        // Bytes of an earlier run get only one attempt: they may be damaged.
        let mut inherited = tokio::fs::try_exists(&partial).await.unwrap_or(true);
        loop {
            match self
                .attempt(remote, what, digest, size, &partial, progress)
                .await
            {
                Ok(()) => {}
                Err(Broken::Fatal(error)) => return Err(error),
                Err(Broken::Passing(source)) if attempt >= ATTEMPTS => {
                    return Err(PullError::Interrupted {
                        what: what.to_owned(),
                        reference: remote.reference().to_string(),
                        attempts: attempt,
                        source,
                    });
                }
                Err(Broken::Passing(error)) => {
                    tracing::debug!(%digest, attempt, %error, "a download broke");
                    attempt += 1;
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                    continue;
                }
            }
            let actual = hash(&partial).await.map_err(failed("read", &partial))?;
            if actual == digest {
                break;
            }
            tokio::fs::remove_file(&partial)
                .await
                .map_err(failed("remove", &partial))?;
            if !inherited {
                return Err(PullError::DigestMismatch {
                    what: what.to_owned(),
                    reference: remote.reference().to_string(),
                    expected: digest,
                    actual,
                });
            }
            inherited = false;
        }
        tokio::fs::rename(&partial, &whole)
            .await
            .map_err(failed("put in place", &whole))?;
        Ok(())
    }

    /// Removes a blob that has been unpacked.
    pub(super) fn remove(&self, digest: &Digest) {
        let path = self.directory.join(digest.hex());
        if let Err(error) = remove_if_present(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove a download");
        }
    }

    async fn attempt(
        &self,
        remote: &Remote,
        what: &str,
        digest: Digest,
        size: u64,
        partial: &Path,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Broken> {
        let fatal = |error: io::Error| Broken::Fatal(failed("write", partial)(error).into());
        let mut file = tokio::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(partial)
            .await
            .map_err(fatal)?;
        let mut have = file.metadata().await.map_err(fatal)?.len();
        if have > size {
            file.set_len(0).await.map_err(fatal)?;
            have = 0;
        }
        if have < size {
            let asked = tokio::time::timeout(STALL_TIMEOUT, remote.blob(&digest, have)).await;
            let (continues, stream) = match asked {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) if is_passing(&error) => {
                    return Err(Broken::Passing(io::Error::other(error)));
                }
                Ok(Err(error)) => return Err(Broken::Fatal(remote.failed(what, error))),
                Err(_) => return Err(Broken::Passing(io::ErrorKind::TimedOut.into())),
            };
            if !continues {
                file.set_len(0).await.map_err(fatal)?;
                have = 0;
            }
            have = copy(stream, &mut file, have, size, progress, fatal).await?;
        }
        if have > size {
            return Err(Broken::Fatal(remote.too_long(what, size)));
        }
        file.sync_all().await.map_err(fatal)?;
        if have < size {
            return Err(Broken::Passing(io::ErrorKind::UnexpectedEof.into()));
        }
        progress(size);
        Ok(())
    }

    fn turn(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(&digest).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.insert(digest, Arc::downgrade(&turn));
        turn
    }
}

/// Appends a stream to the file until more than `size` bytes are there. Returns their number.
async fn copy(
    mut stream: SizedStream,
    file: &mut tokio::fs::File,
    mut have: u64,
    size: u64,
    progress: &(dyn Fn(u64) + Sync),
    fatal: impl Fn(io::Error) -> Broken,
) -> Result<u64, Broken> {
    let outcome = loop {
        let chunk = match tokio::time::timeout(STALL_TIMEOUT, stream.next()).await {
            Ok(Some(Ok(chunk))) => chunk,
            // The stream's check of a digest; ours follows, on the file's content.
            Ok(Some(Err(_))) if have == size => break Ok(have),
            Ok(Some(Err(error))) => break Err(Broken::Passing(error)),
            Ok(None) => break Ok(have),
            Err(_) => break Err(Broken::Passing(io::ErrorKind::TimedOut.into())),
        };
        have += chunk.len() as u64;
        if have > size {
            break Ok(have);
        }
        if let Err(error) = file.write_all(&chunk).await {
            break Err(fatal(error));
        }
        progress(have);
    };
    // Tokio's file writes in the background; the next attempt reads its length.
    file.flush().await.map_err(fatal)?;
    outcome
}

/// Marks the file as in use; otherwise a collection could take it for abandoned.
async fn touch(path: &Path) {
    if let Ok(file) = tokio::fs::OpenOptions::new().append(true).open(path).await {
        let file = file.into_std().await;
        // One system call on a local file.
        let _ = file.set_modified(std::time::SystemTime::now());
    }
}

async fn hash(path: &Path) -> io::Result<Digest> {
    let path = path.to_owned();
    tokio::task::spawn_blocking(move || {
        let mut file = File::open(path)?;
        let mut hasher = Hasher::default();
        let mut buffer = vec![0; 128 << 10];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hasher.finish()),
                count => hasher.update(&buffer[..count]),
            }
        }
    })
    .await
    .map_err(io::Error::other)?
}

impl Blobs for Downloads {
    fn open(&self, digest: &Digest) -> io::Result<Option<Box<dyn Read + '_>>> {
        match File::open(self.directory.join(digest.hex())) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
