//! A runtime of processes whose sessions may ask for a terminal. They get none; whoever attaches
//! sees nothing, as on a terminal that nothing is written to. An order about files is never done. Memory has run
//! out in sessions called `hungry`, which the kernel shows until the runtime has noticed their end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use conman_proto::{ExecId, KeptExec, RuntimeKind};
use conman_runtime::{
    AttachOptions, AttachedIo, ContainerKey, ContainerPlan, Exec, ExecIo, ExecPlan, FilesOrder,
    FoundContainer, KeptStreams, Lifecycle, LogChunk, LogOptions, RuntimeError, RuntimeInfo,
    Started,
};
use conman_testkit::ProcessRuntime;
use futures_util::stream::BoxStream;
use tokio::sync::{mpsc, oneshot};

/// With whether an end was noticed.
#[derive(Debug)]
pub(crate) struct WithTerminals(Arc<ProcessRuntime>, AtomicBool);

impl WithTerminals {
    pub(crate) fn new(runtime: Arc<ProcessRuntime>) -> Self {
        Self(runtime, AtomicBool::new(false))
    }
}

#[async_trait]
impl Lifecycle for WithTerminals {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Native
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        self.0.info().await
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let mut plan = plan.clone();
        plan.spec.tty = false;
        self.0.create(&plan).await
    }

    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        self.0.start(key).await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        self.0.find(key).await
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        self.0.list().await
    }

    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.0.owns_pid(key, pid)
    }

    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>> {
        self.0.pids(key)
    }

    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32> {
        self.1.store(true, Ordering::Relaxed);
        self.0.exit_code(key, patience).await
    }

    fn oom_kills(&self, key: &ContainerKey) -> Option<u64> {
        let is_shown = key.session.as_str() == "hungry" && !self.1.load(Ordering::Relaxed);
        is_shown.then_some(1)
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        self.0.remove(keys).await
    }
}

#[async_trait]
impl Exec for WithTerminals {
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        self.0.exec(key, plan).await
    }

    async fn files(
        &self,
        key: &ContainerKey,
        _order: FilesOrder,
        _user: Option<String>,
    ) -> Result<ExecIo, RuntimeError> {
        let plan = ExecPlan {
            command: ["sleep", "1000"].map(str::to_owned).to_vec(),
            ..ExecPlan::default()
        };
        self.0.exec(key, plan).await
    }

    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        self.0.logs(key, options).await
    }
}

#[async_trait]
impl KeptStreams for WithTerminals {
    async fn attach(
        &self,
        _key: &ContainerKey,
        _exec: Option<ExecId>,
        _options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        Ok(AttachedIo {
            input: mpsc::channel(1).0,
            output: mpsc::channel(1).1,
            resize: mpsc::channel(1).0,
            status: oneshot::channel().1,
        })
    }

    async fn keep_exec(
        &self,
        key: &ContainerKey,
        plan: ExecPlan,
    ) -> Result<KeptExec, RuntimeError> {
        self.0.keep_exec(key, plan).await
    }
}
