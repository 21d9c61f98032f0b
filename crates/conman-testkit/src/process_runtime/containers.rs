//! The containers themselves: what each call does, without faults and bounds.

use std::sync::Arc;
use std::time::Duration;

use conman_core::naming::{self, CgroupDriver};
use conman_proto::RuntimeKind;
use conman_runtime::shared::container_files::ContainerFiles;
use conman_runtime::shared::kernel_view::KernelView;
use conman_runtime::shared::log_files::{self, LogFile};
use conman_runtime::{
    ContainerKey, ContainerPlan, ExecIo, ExecPlan, FoundContainer, LogChunk, LogOptions,
    OutputStream, RuntimeError, Started,
};
use futures_util::stream::BoxStream;

use super::placement::Placement;
use super::store::{ContainerDir, Store};
use super::{command_line, exec, launch};

/// Poll interval for the exit code in the container's directory, once the kernel has reported an
/// end.
const EXIT_INTERVAL: Duration = Duration::from_millis(5);

/// How long the supervisor may take to store the end of a container that ended at once.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);

/// Most bytes of a failed container's output that an error quotes.
const QUOTED_BYTES: usize = 300;

/// The containers of one directory.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) store: Store,
    pub(super) placement: Placement,
    pub(super) kernel: KernelView,
}

impl Inner {
    pub(super) fn cgroup(&self, key: &ContainerKey) -> String {
        let instance = self.kernel.instance();
        naming::cgroup_parent(
            instance,
            &key.session,
            key.generation,
            CgroupDriver::Cgroupfs,
        )
        .path
    }

    pub(super) fn create(&self, plan: &ContainerPlan) -> Result<String, RuntimeError> {
        let dir = self.store.container(&plan.key);
        dir.create(plan)?;
        ContainerFiles::at(&plan.files_dir).write(&plan.key, &[])?;
        self.placement.make(&self.cgroup(&plan.key), &plan.spec)?;
        Ok(self.container_id(&plan.key))
    }

    pub(super) fn container_id(&self, key: &ContainerKey) -> String {
        naming::container_name(self.kernel.instance(), &key.session, key.generation)
    }

    pub(super) async fn start(&self, key: &ContainerKey) -> Result<Started, RuntimeError> {
        let dir = self.store.container(key);
        let Some(plan) = dir.plan()? else {
            return Err(RuntimeError::NoSuchContainer {
                subject: key.to_string(),
            });
        };
        let program = command_line::program(&plan.spec).swap_remove(0);
        if dir.begin()? {
            let environment = command_line::environment(key, &plan.spec);
            command_line::check_runnable(&program, &environment)
                .map_err(|unrunnable| no_such_command(key, &program, &unrunnable))?;
            let procs = self.placement.procs_files(&self.cgroup(key));
            launch::launch(key, &dir, &plan, &procs).await?;
        }
        match self.kernel.init_pid(key)? {
            Some(pid) => Ok(Started {
                container_id: self.container_id(key),
                pid,
                steps: Vec::new(),
                egress: None,
            }),
            None => Err(Self::ended_at_once(key, &dir).await),
        }
    }

    pub(super) async fn ended_at_once(key: &ContainerKey, dir: &ContainerDir) -> RuntimeError {
        let ending = match dir.wait_exit_code(EXIT_PATIENCE).await {
            Some(exit_code) => format!("ended at once with exit code {exit_code}"),
            None => "ended at once".to_owned(),
        };
        let mut output = std::fs::read(dir.trouble()).unwrap_or_default();
        output.extend(std::fs::read(dir.stderr()).unwrap_or_default());
        let quoted = String::from_utf8_lossy(&output[output.len().saturating_sub(QUOTED_BYTES)..]);
        RuntimeError::EndedAtOnce {
            subject: key.to_string(),
            reason: format!("{ending}: {}", quoted.trim()),
        }
    }

    pub(super) fn find(&self, key: &ContainerKey) -> Result<Option<FoundContainer>, RuntimeError> {
        self.found(key, self.kernel.init_pid(key)?)
    }

    pub(super) fn found(
        &self,
        key: &ContainerKey,
        pid: Option<i32>,
    ) -> Result<Option<FoundContainer>, RuntimeError> {
        let dir = self.store.container(key);
        if dir.plan()?.is_none() {
            return Ok(None);
        }
        Ok(Some(FoundContainer {
            key: key.clone(),
            container_id: self.container_id(key),
            pid,
            exit_code: dir.exit_code(),
        }))
    }

    pub(super) fn remove(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        self.kernel.check_dead(key)?;
        let dir = self.store.container(key);
        if let Some(plan) = dir.plan()? {
            ContainerFiles::at(&plan.files_dir).remove()?;
        }
        self.kernel.remove_cgroups(key)?;
        dir.remove()
    }

    pub(super) async fn logs(
        &self,
        key: &ContainerKey,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
        let dir = self.store.container(key);
        if dir.plan()?.is_none() {
            return Err(RuntimeError::NoSuchContainer {
                subject: key.to_string(),
            });
        }
        let files = vec![
            LogFile::new(OutputStream::Stdout, dir.stdout()),
            LogFile::new(OutputStream::Stderr, dir.stderr()),
        ];
        log_files::read(files, options, move || dir.has_ended()).await
    }

    pub(super) fn exec(
        self: &Arc<Self>,
        key: &ContainerKey,
        plan: &ExecPlan,
    ) -> Result<ExecIo, RuntimeError> {
        let Some(stored) = self.store.container(key).plan()? else {
            return Err(RuntimeError::NoSuchContainer {
                subject: key.to_string(),
            });
        };
        let Some(init_pid) = self.kernel.init_pid(key)? else {
            return Err(RuntimeError::Refused {
                runtime: RuntimeKind::Process,
                action: "run a command in",
                subject: key.to_string(),
                reason: "it is not running".to_owned(),
            });
        };
        let place = exec::Place {
            container: Arc::clone(self),
            key: key.clone(),
            init_pid,
            cgroup_procs: self.placement.procs_files(&self.cgroup(key)),
            environment: command_line::environment(key, &stored.spec),
        };
        exec::exec(place, plan)
    }
}

impl ContainerDir {
    pub(super) fn has_ended(&self) -> bool {
        !self.exists() || self.exit_code().is_some()
    }

    /// `None` if there is no such container, or its exit code is not stored in time.
    pub(super) async fn wait_exit_code(&self, patience: Duration) -> Option<i32> {
        let written = async {
            loop {
                let exit_code = self.exit_code();
                if exit_code.is_some() || !self.exists() {
                    return exit_code;
                }
                tokio::time::sleep(EXIT_INTERVAL).await;
            }
        };
        tokio::time::timeout(patience, written).await.ok()?
    }
}

fn no_such_command(
    key: &ContainerKey,
    program: &str,
    unrunnable: &command_line::Unrunnable,
) -> RuntimeError {
    RuntimeError::NoSuchCommand {
        command: program.to_owned(),
        subject: key.to_string(),
        reason: unrunnable.reason.to_owned(),
        exit_code: unrunnable.exit_code,
    }
}
