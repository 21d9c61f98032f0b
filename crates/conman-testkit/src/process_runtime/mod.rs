//! [`ProcessRuntime`]: containers without images and without a daemon, for tests.
//!
//! For the kernel, these are real containers: PID, network, IPC, UTS and mount namespaces with a
//! process 1, cgroups with limits. But they see the host's files, so they are not
//! for untrusted code. Images and CPU limits are ignored, [`Network::Bridge`] has no egress, and
//! binds need paths that exist or lie below `/run`.
//!
//! A container's data is in its directory ([`store`]) and in the kernel, so a new
//! [`ProcessRuntime`] over the same directory knows what the previous one did. A shell script
//! outside the container waits for its end and stores the exit code.
//!
//! Tasks: one for each running command ([`exec`]), and one for each call whose answer [`Faults`]
//! lost.
//!
//! [`Network::Bridge`]: conman_proto::Network::Bridge

mod command_line;
mod containers;
mod exec;
mod faults;
mod launch;
mod placement;
mod store;

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::naming::{CgroupDriver, Instance};
use conman_proto::{ExecId, KeptExec, RuntimeKind, SessionId};
use futures_util::stream::BoxStream;

pub use faults::{Fault, Faults, Operation};

use conman_runtime::shared::blocking::on_blocking_thread;
use conman_runtime::shared::kernel_view::KernelView;
use conman_runtime::shared::removals::some_at_a_time;
use conman_runtime::{
    AttachOptions, AttachedIo, ContainerKey, ContainerPlan, Exec, ExecIo, ExecPlan, FoundContainer,
    KeptStreams, Lifecycle, LogChunk, LogOptions, RuntimeError, RuntimeInfo, Started,
};
use containers::Inner;
use placement::Placement;
use store::Store;

/// Configuration of a [`ProcessRuntime`].
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    pub instance: Instance,
    /// Where the containers' directories are; instances may share it.
    pub state_dir: PathBuf,
    /// Bound on each call.
    pub call_timeout: Duration,
}

/// Containers made of plain namespaced processes.
#[derive(Debug)]
pub struct ProcessRuntime {
    inner: Arc<Inner>,
    faults: Faults,
    call_timeout: Duration,
}

fn no_such_image(image: String) -> RuntimeError {
    let remedy = "end the fault in the test".to_owned();
    RuntimeError::NoSuchImage { image, remedy }
}

impl ProcessRuntime {
    /// Takes over what an earlier runtime left in the same directory.
    pub fn open(options: ProcessOptions) -> Result<Self, RuntimeError> {
        let inner = Inner {
            store: Store::open(&options.state_dir, options.instance.clone())?,
            placement: Placement::detect()?,
            kernel: KernelView::new(options.instance, &[CgroupDriver::Cgroupfs])?,
        };
        Ok(Self {
            inner: Arc::new(inner),
            faults: Faults::default(),
            call_timeout: options.call_timeout,
        })
    }

    /// Injects faults.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Does `work` within the bound on a call, unless a fault affects it.
    async fn call<T, F>(
        &self,
        operation: Operation,
        action: &'static str,
        session: Option<&SessionId>,
        work: F,
    ) -> Result<T, RuntimeError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, RuntimeError>> + Send + 'static,
    {
        let fault = self.faults.strike(operation, session);
        let subject = session.map_or_else(|| "the host".to_owned(), SessionId::to_string);
        let timed_out = |after: Duration| RuntimeError::TimedOut {
            runtime: RuntimeKind::Process,
            action,
            subject: subject.clone(),
            after_ms: after.as_millis().try_into().unwrap_or(u64::MAX),
        };
        let befallen = async {
            self.faults.answering().await;
            match fault {
                None => {}
                Some(Fault::Delay(delay)) => tokio::time::sleep(delay).await,
                Some(Fault::Hang) => std::future::pending().await,
                Some(Fault::Refuse(reason)) => {
                    let runtime = RuntimeKind::Process;
                    let subject = subject.clone();
                    return Err(RuntimeError::Refused {
                        runtime,
                        action,
                        subject,
                        reason,
                    });
                }
                Some(Fault::LackImageAfter(after, image)) => {
                    tokio::time::sleep(after).await;
                    return Err(no_such_image(image));
                }
                Some(Fault::LackImage(image)) => {
                    return Err(no_such_image(image));
                }
                Some(Fault::Unavailable) => {
                    let runtime = RuntimeKind::Process;
                    let reason = "made unavailable by a test".to_owned();
                    return Err(RuntimeError::Unavailable {
                        runtime,
                        action,
                        reason,
                    });
                }
                Some(Fault::LoseAnswer { happens_after }) => {
                    tokio::spawn(async move {
                        tokio::time::sleep(happens_after).await;
                        if let Err(error) = work.await {
                            tracing::debug!(%error, action, "a call with a lost answer failed");
                        }
                    });
                    return Err(timed_out(Duration::ZERO));
                }
            }
            let result = work.await;
            self.faults.answering().await;
            result
        };
        tokio::time::timeout(self.call_timeout, befallen)
            .await
            .unwrap_or_else(|_| Err(timed_out(self.call_timeout)))
    }
}

#[async_trait]
impl Lifecycle for ProcessRuntime {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Process
    }

    async fn lacks_image(&self, _image: &str) -> Option<RuntimeError> {
        match self.faults.strike(Operation::LookForImage, None)? {
            Fault::LackImage(image) => Some(no_such_image(image)),
            Fault::LackImageAfter(after, image) => {
                tokio::time::sleep(after).await;
                Some(no_such_image(image))
            }
            _ => None,
        }
    }

    async fn info(&self) -> Result<RuntimeInfo, RuntimeError> {
        let warnings = vec![
            "sessions see the host's files; use the docker runtime outside of tests".to_owned(),
        ];
        let info = RuntimeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            warnings,
        };
        self.call(Operation::Info, "describe itself", None, async { Ok(info) })
            .await
    }

    async fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        if plan.spec.tty {
            return Err(unsupported("give a terminal to", &plan.key));
        }
        let inner = Arc::clone(&self.inner);
        let session = plan.key.session.clone();
        let plan = plan.clone();
        self.call(Operation::Create, "create", Some(&session), async move {
            away("create", move || inner.create(&plan)).await
        })
        .await
    }

    async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        let inner = Arc::clone(&self.inner);
        let owned = key.clone();
        self.call(Operation::Start, "start", Some(&key.session), async move {
            inner.start(&owned).await
        })
        .await
    }

    async fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        let inner = Arc::clone(&self.inner);
        let owned = key.clone();
        self.call(Operation::Find, "find", Some(&key.session), async move {
            away("find", move || inner.find(&owned)).await
        })
        .await
    }

    async fn list(&self) -> Result<Vec<FoundContainer>, RuntimeError> {
        let inner = Arc::clone(&self.inner);
        self.call(Operation::List, "list", None, async move {
            away("list", move || {
                let keys = inner.store.keys()?;
                let inits = inner.kernel.init_pids(&keys)?;
                let found = keys
                    .iter()
                    .map(|key| inner.found(key, inits.get(key).copied()));
                found.filter_map(Result::transpose).collect()
            })
            .await
        })
        .await
    }

    fn owns_pid(&self, key: &ContainerKey, pid: i32) -> bool {
        self.inner.kernel.owns_pid(key, pid)
    }

    fn pids(&self, key: &ContainerKey) -> std::io::Result<Vec<i32>> {
        self.inner.kernel.pids(key)
    }

    async fn exit_code(&self, key: &ContainerKey, patience: Duration) -> Option<i32> {
        let dir = self.inner.store.container(key);
        let wait = self.call(
            Operation::ExitCode,
            "wait for",
            Some(&key.session),
            async move { Ok(dir.wait_exit_code(patience).await) },
        );
        tokio::time::timeout(patience, wait).await.ok()?.ok()?
    }

    async fn was_fenced(&self, key: &ContainerKey) -> bool {
        self.faults.was_fenced(&key.session).await
    }

    async fn remove(&self, keys: &[ContainerKey]) -> Vec<Result<(), RuntimeError>> {
        let mut removals = Vec::with_capacity(keys.len());
        for key in keys {
            let inner = Arc::clone(&self.inner);
            let owned = key.clone();
            let removal = async move { away("remove", move || inner.remove(&owned)).await };
            removals.push(self.call(Operation::Remove, "remove", Some(&key.session), removal));
        }
        some_at_a_time(removals).await
    }
}

#[async_trait]
impl Exec for ProcessRuntime {
    async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Result<ExecIo, RuntimeError> {
        let inner = Arc::clone(&self.inner);
        let owned = key.clone();
        self.call(
            Operation::Exec,
            "run a command in",
            Some(&key.session),
            async move { inner.exec(&owned, &plan) },
        )
        .await
    }

    async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let (inner, owned) = (Arc::clone(&self.inner), key.clone());
        let logs = async move { inner.logs(&owned, options).await };
        self.call(Operation::Logs, "read the log of", Some(&key.session), logs)
            .await
    }
}

#[async_trait]
impl KeptStreams for ProcessRuntime {
    async fn attach(
        &self,
        key: &ContainerKey,
        _exec: Option<ExecId>,
        _options: AttachOptions,
    ) -> Result<AttachedIo, RuntimeError> {
        Err(unsupported("attach to", key))
    }

    async fn keep_exec(
        &self,
        key: &ContainerKey,
        _plan: ExecPlan,
    ) -> Result<KeptExec, RuntimeError> {
        Err(unsupported("keep a command in", key))
    }
}

fn unsupported(action: &'static str, key: &ContainerKey) -> RuntimeError {
    RuntimeError::Unsupported {
        runtime: RuntimeKind::Process,
        action,
        subject: key.to_string(),
        reason: "it has no streams that outlive the daemon: use the runtime `native`".to_owned(),
    }
}

async fn away<T: Send + 'static>(
    action: &'static str,
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    on_blocking_thread(RuntimeKind::Process, action, work).await
}
