//! A container's log, and how long it is followed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{BoxStream, StreamExt as _};

use super::Inner;
use super::store;
use crate::shared::kept_logs::OutputEnd;
use crate::shared::log_files::{self, LogFile};
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

/// Interval at which the kernel is asked whether a followed log's container lives, independent of
/// the shim.
const LIFE_INTERVAL: Duration = Duration::from_secs(1);

impl Inner {
    /// One file holds both outputs, in the order in which they were written, unless they are told apart.
    pub(super) async fn logs(
        self: &Arc<Self>,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let dir = self.store.container(key);
        let log: PathBuf = dir.log();
        let plan = match options.previous {
            true => None,
            false => super::away(ACTION, move || dir.plan()).await?,
        };
        let Some(plan) = plan else {
            return self.kept_log(key, options).await;
        };
        if plan.launch.terminal.is_some() {
            return self.terminal_log(key, options).await;
        }
        let mut life = Life {
            inner: Arc::clone(self),
            key: key.clone(),
            name: store::name(key),
            looked: Instant::now(),
            empty_before: false,
        };
        let mut files = vec![LogFile::new(OutputStream::Stdout, log)];
        let errors = plan.launch.log_stderr;
        files.extend(errors.map(|log| LogFile::new(OutputStream::Stderr, log)));
        let read = log_files::read(files, options, move || life.has_ended()).await?;
        // Its files may have been moved away before they were opened.
        if !self.store.container(key).exists() {
            return self.kept_log(key, options).await.or(Ok(read));
        }
        Ok(read)
    }
}

impl Inner {
    /// What the terminal of a dead container showed last, to be kept; `None` if it had no terminal.
    pub(super) async fn last_screen(self: &Arc<Self>, key: &ContainerKey) -> Option<OutputEnd> {
        let dir = self.store.container(key);
        let plan = super::away(ACTION, move || dir.plan()).await.ok()??;
        plan.launch.terminal.as_ref()?;
        let mut screen = OutputEnd::default();
        match self.terminal_log(key, LogOptions::default()).await {
            Ok(mut shown) => {
                while let Some(Ok(chunk)) = shown.next().await {
                    screen.push(&chunk.bytes, self.kept_logs.most_bytes());
                }
            }
            Err(error) => tracing::warn!(container = %key, %error, "cannot keep the log"),
        }
        Some(screen)
    }

    /// The log of a container that is removed.
    async fn kept_log(
        self: &Arc<Self>,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let (inner, owned) = (Arc::clone(self), key.clone());
        let find = move || inner.kept_logs.find_for(&owned, options);
        let Some(files) = super::away(ACTION, find).await? else {
            return Err(super::no_such_container(key));
        };
        let options = LogOptions {
            follow: false,
            ..options
        };
        log_files::read(files, options, || true).await
    }
}

/// Whether a followed container may still write.
struct Life {
    inner: Arc<Inner>,
    key: ContainerKey,
    name: String,
    looked: Instant,
    /// The last check found no process of it, though it had started.
    empty_before: bool,
}

impl Life {
    fn has_ended(&mut self) -> bool {
        if self.inner.ends.of(&self.name).is_some() {
            return true;
        }
        if self.looked.elapsed() < LIFE_INTERVAL {
            return false;
        }
        self.looked = Instant::now();
        let dir = self.inner.store.container(&self.key);
        if !dir.exists() {
            return true;
        }
        // Twice, because a start has its log before its first process.
        let pids = self.inner.kernel.pids(&self.key);
        let empty = dir.log().exists() && pids.is_ok_and(|pids| pids.is_empty());
        std::mem::replace(&mut self.empty_before, empty) && empty
    }
}
