//! A Docker whose daemon hangs: what it is asked is not answered before it goes on. It has nothing.

use std::time::Duration;

use async_trait::async_trait;
use conman_proto::{ExecId, KeptExec, RuntimeKind};
use conman_runtime::{
    AttachOptions, AttachedIo, ContainerKey, ContainerPlan, Exec, ExecIo, ExecPlan, FoundContainer,
    KeptStreams, Lifecycle, LogChunk, LogOptions, RuntimeError, RuntimeInfo, Started,
};
use futures_util::stream::BoxStream;
use tokio::sync::watch;

#[derive(Debug, Default)]
pub(crate) struct Silent {
    answers: watch::Sender<bool>,
    /// The containers that it was asked for.
    asked: watch::Sender<Vec<ContainerKey>>,
}

impl Silent {
    pub(crate) fn answer(&self) {
        self.answers.send_replace(true);
    }

    pub(crate) fn was_asked_for(&self, key: &ContainerKey) -> bool {
        self.asked.borrow().contains(key)
    }

    async fn answering(&self) {
        // The sender lives in `self`.
        let _ = self.answers.subscribe().wait_for(|answers| *answers).await;
    }

    async fn refuse<T>(&self, action: &'static str) -> Result<T, RuntimeError> {
        self.answering().await;
        Err(RuntimeError::Unavailable {
            runtime: RuntimeKind::Docker,
            action,
            reason: "made to have nothing".to_owned(),
        })
    }
}

#[async_trait]
impl Lifecycle for Silent {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Docker
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        self.refuse("describe itself").await
    }

    async fn create(&self, _plan: &ContainerPlan) -> Result<String, RuntimeError> {
        self.refuse("create").await
    }

    async fn start(&self, _key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.refuse("start").await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        self.asked.send_modify(|asked| asked.push(key.clone()));
        self.answering().await;
        Ok(None)
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        self.answering().await;
        Ok(Vec::new())
    }

    fn owns_pid(&self, _key: &ContainerKey, _pid: i32) -> bool {
        false
    }

    fn pids(&self, _key: &ContainerKey) -> std::io::Result<Vec<i32>> {
        Ok(Vec::new())
    }

    async fn exit_code(&self, _key: &ContainerKey, _patience: Duration) -> Option<i32> {
        self.answering().await;
        None
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        self.answering().await;
        keys.iter().map(|_| Ok(())).collect()
    }
}

#[async_trait]
impl Exec for Silent {
    async fn exec(&self, _key: &ContainerKey, _plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        self.refuse("run a command").await
    }

    async fn logs(
        &self,
        _key: &ContainerKey,
        _options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        self.refuse("read the log").await
    }
}

#[async_trait]
impl KeptStreams for Silent {
    async fn attach(
        &self,
        _key: &ContainerKey,
        _exec: Option<ExecId>,
        _options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        self.refuse("attach").await
    }

    async fn keep_exec(
        &self,
        _key: &ContainerKey,
        _plan: ExecPlan,
    ) -> Result<KeptExec, RuntimeError> {
        self.refuse("keep a command").await
    }
}
