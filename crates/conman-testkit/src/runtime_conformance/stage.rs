//! One check's runtime and directory.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use conman_linux::{Cgroups, PidFd};
use conman_proto::{Generation, ResolvedSpec};
use futures_util::StreamExt as _;

use super::Harness;
use crate::specs::resolved_spec;
use conman_core::naming::{self, CgroupDriver, Instance};
use conman_runtime::{ContainerKey, ContainerPlan, ExecPlan, LogOptions, OutputStream, Runtime};

/// Longest duration of any step on a busy host before a check fails.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Poll interval for conditions without a notification.
const INTERVAL: Duration = Duration::from_millis(10);

/// One check's own instance and directory.
#[expect(
    missing_debug_implementations,
    reason = "the harness need not have one"
)]
pub struct Stage {
    harness: Box<dyn Harness>,
    instance: Instance,
    runtime: Arc<dyn Runtime>,
    dir: PathBuf,
}

/// A started container.
#[derive(Debug)]
pub struct Running {
    pub key: ContainerKey,
    pub container_id: String,
    pub pidfd: Arc<PidFd>,
    pub pid: i32,
}

/// All output of a command, and its end.
pub(super) struct Outcome {
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) exit_code: Option<i32>,
    pub(super) error: Option<String>,
}

impl Stage {
    #[must_use]
    pub fn new(harness: impl Harness) -> Self {
        let instance = random_instance();
        let dir = std::env::temp_dir().join(format!("conman-conformance-{instance}"));
        std::fs::create_dir(&dir).expect("the directory is new");
        let runtime = harness.runtime(&instance);
        Self {
            harness: Box::new(harness),
            instance,
            runtime,
            dir,
        }
    }

    #[must_use]
    pub fn runtime(&self) -> &dyn Runtime {
        &*self.runtime
    }

    /// Every process of a container.
    #[must_use]
    pub fn pids(&self, key: &ContainerKey) -> Vec<i32> {
        self.runtime.pids(key).expect("the host shows its cgroups")
    }

    /// The processes of a container that are in a PID namespace: all but the relays of its commands'
    /// streams, which end a moment after what they serve.
    pub(super) fn pids_in(&self, namespace: &Path, key: &ContainerKey) -> Vec<i32> {
        let mut pids = self.pids(key);
        pids.retain(|pid| pid_namespace(*pid).is_some_and(|of| of == namespace));
        pids
    }

    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }

    /// The runtime as a restarted daemon would create it.
    #[must_use]
    pub fn another_runtime(&self) -> Arc<dyn Runtime> {
        self.harness.runtime(&self.instance)
    }

    pub(super) fn forgetful_runtime(&self) -> Arc<dyn Runtime> {
        self.harness
            .runtime_that_loses_answers_of_start(&self.instance)
    }

    pub(super) fn runtime_of(&self, instance: &Instance) -> Arc<dyn Runtime> {
        self.harness.runtime(instance)
    }

    pub(super) fn keeps_outputs_apart(&self) -> bool {
        self.harness.keeps_outputs_apart()
    }

    pub(super) fn has_terminals(&self) -> bool {
        self.harness.has_terminals()
    }

    pub(super) fn resizes_terminals(&self) -> bool {
        self.harness.resizes_terminals()
    }

    pub(super) fn keeps_commands(&self) -> bool {
        self.harness.keeps_commands()
    }

    /// A container's log as text.
    pub(super) async fn whole_log(&self, key: &ContainerKey) -> String {
        let log = self.runtime.logs(key, LogOptions::default()).await;
        let mut log = log.expect("there is a log");
        let reading = async {
            let mut text = String::new();
            while let Some(chunk) = log.next().await {
                let chunk = chunk.expect("it is read");
                text.push_str(&String::from_utf8_lossy(&chunk.bytes));
            }
            text
        };
        within(PATIENCE, "the log", reading).await
    }

    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A plan for a container that runs `command`.
    #[must_use]
    pub fn plan(&self, session: &str, command: &[&str]) -> ContainerPlan {
        let key = ContainerKey::new(
            session.parse().expect("a valid session id"),
            Generation::new(7).expect("not zero"),
        );
        let spec = ResolvedSpec {
            command: command.iter().copied().map(str::to_owned).collect(),
            pids: 64,
            ..resolved_spec(self.runtime.kind(), &self.harness.image())
        };
        let files_dir = self.dir.join(session);
        ContainerPlan {
            key,
            spec,
            files_dir,
            binds: Vec::new(),
        }
    }

    /// Creates and starts a container.
    pub async fn run(&self, plan: &ContainerPlan) -> Running {
        self.runtime
            .create(plan)
            .await
            .expect("the container is created");
        let started = self
            .runtime
            .start(&plan.key)
            .await
            .expect("the container starts");
        let pidfd = Arc::new(PidFd::open(started.pid).expect("its init lives"));
        assert!(
            self.runtime.owns_pid(&plan.key, started.pid),
            "the init belongs to the container"
        );
        Running {
            key: plan.key.clone(),
            container_id: started.container_id,
            pidfd,
            pid: started.pid,
        }
    }

    /// Runs a container that does nothing until it is killed.
    pub async fn run_idle(&self, session: &str) -> Running {
        self.run(&self.plan(session, &["sleep", "1000"])).await
    }

    /// Runs a command and collects its outputs until its end.
    pub(super) async fn exec(&self, key: &ContainerKey, plan: ExecPlan) -> Outcome {
        self.exec_with_input(key, plan, &[]).await
    }

    pub(super) async fn sh(&self, key: &ContainerKey, script: &str) -> Outcome {
        self.exec(key, command(&["sh", "-c", script])).await
    }

    pub(super) async fn exec_with_input(
        &self,
        key: &ContainerKey,
        plan: ExecPlan,
        input: &[&str],
    ) -> Outcome {
        let io = self
            .runtime
            .exec(key, plan)
            .await
            .expect("the command is run");
        let conman_runtime::ExecIo {
            stdin,
            mut output,
            resize,
            status,
            kill: _,
        } = io;
        for piece in input {
            let piece = Bytes::copy_from_slice(piece.as_bytes());
            stdin.send(piece).await.expect("the command reads");
        }
        drop(stdin);
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let reading = async {
            while let Some((stream, bytes)) = output.recv().await {
                match stream {
                    OutputStream::Stdout => stdout.extend_from_slice(&bytes),
                    OutputStream::Stderr => stderr.extend_from_slice(&bytes),
                }
            }
            status.await.expect("the end is reported")
        };
        let status = within(PATIENCE, "the command's end", reading).await;
        drop(resize);
        Outcome {
            stdout: String::from_utf8(stdout).expect("text"),
            stderr: String::from_utf8(stderr).expect("text"),
            exit_code: status.exit_code,
            error: status.error,
        }
    }

    /// The cgroups of the container that still exist.
    pub(super) fn cgroups_left(&self, key: &ContainerKey) -> Vec<PathBuf> {
        let bases = std::fs::read_dir("/sys/fs/cgroup").expect("cgroups are mounted");
        let bases = bases.flatten().map(|entry| entry.path());
        let bases: Vec<_> = bases.chain([PathBuf::from("/sys/fs/cgroup")]).collect();
        [CgroupDriver::Cgroupfs, CgroupDriver::Systemd]
            .map(|driver| {
                naming::cgroup_parent(&self.instance, &key.session, key.generation, driver).path
            })
            .iter()
            .flat_map(|path| {
                bases
                    .iter()
                    .map(|base| base.join(path.trim_start_matches('/')))
            })
            .filter(|path| path.exists())
            .collect()
    }

    /// Kills and removes everything that the instance still has.
    async fn clear(&self) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        // A fresh runtime: the check may have injected faults into its own.
        let runtime = self.harness.runtime(&self.instance);
        while tokio::time::Instant::now() < deadline {
            let Ok(found) = runtime.list().await else {
                break;
            };
            if found.is_empty() {
                break;
            }
            let keys: Vec<_> = found.into_iter().map(|container| container.key).collect();
            for key in &keys {
                for pid in runtime.pids(key).expect("seen") {
                    if let Ok(pidfd) = PidFd::open(pid)
                        && runtime.owns_pid(key, pid)
                    {
                        let _ = pidfd.kill();
                    }
                }
            }
            runtime.remove(&keys).await;
            tokio::time::sleep(INTERVAL).await;
        }
        if let Ok(cgroups) = Cgroups::detect() {
            for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
                let _ = cgroups.remove_tree(&naming::instance_cgroup(&self.instance, driver));
            }
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime
                    .expect("a runtime to clean up with")
                    .block_on(self.clear());
            });
        });
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Running {
    /// Kills the init and waits until no process of its PID namespace is left.
    pub fn kill(&self) {
        self.pidfd.kill().expect("the signal is sent");
        assert!(
            self.pidfd.wait_dead(PATIENCE).expect("poll works"),
            "it dies of SIGKILL"
        );
    }
}

/// The name of a process's PID namespace; `None` if there is no such process.
pub(super) fn pid_namespace(pid: i32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// An instance that no other check uses.
#[must_use]
pub(super) fn random_instance() -> Instance {
    let [a, b, c, d, ..] = RandomState::new().hash_one(()).to_ne_bytes();
    Instance::new([a, b, c, d])
}

pub(super) fn command(command: &[&str]) -> ExecPlan {
    let command = command.iter().copied().map(str::to_owned).collect();
    ExecPlan {
        command,
        ..ExecPlan::default()
    }
}

/// Fails the check when `what` does not happen in time.
pub(super) async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not come within {limit:?}"),
    }
}

/// Polls for a condition that has no notification.
pub(super) async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, async {
        loop {
            if let Some(value) = look() {
                return value;
            }
            tokio::time::sleep(INTERVAL).await;
        }
    })
    .await
}
