//! A node on real processes: namespaces and cgroups of the kernel's, a runtime that makes trouble
//! on demand, and a registry that outlives the node. Every stage has an instance of its own, and
//! leaves nothing behind.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod flaky_registry;
pub(crate) mod frozen;
pub(crate) mod silent;
pub(crate) mod weights;
pub(crate) mod with_terminals;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use conman_core::naming::{CgroupDriver, cgroup_parent, instance_cgroup};
use conman_core::{Instance, SpecPolicy, Template};
use conman_linux::{Cgroups, PidFd};
use conman_node::{EmergencyThread, Node, NodeOptions};
use conman_proto::{
    EventKind, Generation, RuntimeKind, Session, SessionId, SessionRequest, SessionState,
};
use conman_registry::{Journal, Registry, SessionRecord};
use conman_runtime::Runtime;
use conman_testkit::{Faults, ModelRegistry, ProcessOptions, ProcessRuntime};
use tempfile::TempDir;
use with_terminals::WithTerminals;

/// Longer than anything here takes on a busy machine, and short enough not to hang a build.
const PATIENCE: Duration = Duration::from_secs(60);

/// What outlives a daemon: its directories, its records, its containers.
pub(crate) struct Stage {
    pub(crate) state: TempDir,
    pub(crate) instance: Instance,
    pub(crate) registry: Arc<ModelRegistry>,
}

/// A daemon, on a tokio runtime of its own so that it can be made to vanish.
pub(crate) struct Daemon {
    tokio: Option<tokio::runtime::Runtime>,
    pub(crate) node: Arc<Node>,
    pub(crate) runtime: Arc<ProcessRuntime>,
    pub(crate) registry: Arc<dyn Registry>,
}

impl Stage {
    pub(crate) fn new() -> Self {
        assert!(
            nix::unistd::geteuid().is_root(),
            "making namespaces and cgroups takes root"
        );
        let mut random = [0; 4];
        getrandom::fill(&mut random).expect("random bytes");
        Self {
            state: tempfile::tempdir().expect("a directory"),
            instance: Instance::new(random),
            registry: Arc::new(ModelRegistry::new()),
        }
    }

    pub(crate) fn options(&self) -> NodeOptions {
        let template = |start_on_connect| Template {
            request: web(),
            start_on_connect,
            ..Template::default()
        };
        let policy = SpecPolicy {
            default_runtime: RuntimeKind::Process,
            templates: BTreeMap::from([
                ("web".to_owned(), template(true)),
                ("manual".to_owned(), template(false)),
            ]),
            ..SpecPolicy::default()
        };
        let mut options = NodeOptions::new(
            "test-node".to_owned(),
            self.instance.clone(),
            self.state.path().to_owned(),
            policy,
        );
        options.bounds.create = Duration::from_secs(20);
        options.bounds.start = Duration::from_secs(20);
        options
    }

    pub(crate) fn boot(&self) -> Daemon {
        self.boot_with(self.options())
    }

    pub(crate) fn boot_with(&self, options: NodeOptions) -> Daemon {
        self.boot_on(options, self.registry.clone(), Duration::from_secs(30))
    }

    /// `call_timeout` is the runtime's own bound on its calls.
    pub(crate) fn boot_on(
        &self,
        options: NodeOptions,
        registry: Arc<dyn Registry>,
        call_timeout: Duration,
    ) -> Daemon {
        self.boot_as(options, registry, call_timeout, |runtime| vec![runtime])
    }

    /// A daemon whose emergency thread is running already.
    pub(crate) fn boot_after(&self, emergency: EmergencyThread) -> Daemon {
        let bound = Duration::from_secs(30);
        let as_given = |runtime| vec![runtime as Arc<dyn Runtime>];
        self.boot_attached(
            self.options(),
            emergency,
            self.registry.clone(),
            bound,
            as_given,
        )
    }

    /// A daemon that has another runtime beside its own.
    pub(crate) fn boot_beside(
        &self,
        other: Arc<dyn Runtime>,
        registry: Arc<dyn Registry>,
    ) -> Daemon {
        let patience = Duration::from_secs(30);
        self.boot_as(self.options(), registry, patience, |own| vec![other, own])
    }

    /// A daemon whose sessions of these names are told as killed by a fence, once they are dead.
    pub(crate) fn boot_fenced(&self, ids: &[&str]) -> Daemon {
        self.boot_with_faults(|faults| ids.iter().for_each(|id| faults.fence(session(id))))
    }

    /// A daemon that has this trouble from its first moment.
    pub(crate) fn boot_with_faults(&self, make: impl FnOnce(&Faults)) -> Daemon {
        let patience = Duration::from_secs(30);
        self.boot_as(self.options(), self.registry.clone(), patience, |runtime| {
            make(runtime.faults());
            vec![runtime]
        })
    }

    /// A daemon that takes its runtime for conman's own, whose sessions may ask for terminals.
    pub(crate) fn boot_with_terminals(&self) -> Daemon {
        let mut options = self.options();
        options.policy.default_runtime = RuntimeKind::Native;
        let patience = Duration::from_secs(30);
        self.boot_as(options, self.registry.clone(), patience, |runtime| {
            vec![Arc::new(WithTerminals::new(runtime))]
        })
    }

    fn boot_as(
        &self,
        options: NodeOptions,
        registry: Arc<dyn Registry>,
        call_timeout: Duration,
        as_given: impl FnOnce(Arc<ProcessRuntime>) -> Vec<Arc<dyn Runtime>>,
    ) -> Daemon {
        let emergency = EmergencyThread::start(&[]).expect("a thread");
        self.boot_attached(options, emergency, registry, call_timeout, as_given)
    }

    fn boot_attached(
        &self,
        options: NodeOptions,
        emergency: EmergencyThread,
        registry: Arc<dyn Registry>,
        call_timeout: Duration,
        as_given: impl FnOnce(Arc<ProcessRuntime>) -> Vec<Arc<dyn Runtime>>,
    ) -> Daemon {
        let tokio = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a tokio runtime");
        let runtime = ProcessRuntime::open(ProcessOptions {
            instance: self.instance.clone(),
            state_dir: self.state.path().join("containers"),
            call_timeout,
        });
        let runtime = Arc::new(runtime.expect("the host has cgroups"));
        let journal = self.journal(&options.name);
        let runtimes = as_given(runtime.clone());
        let started = Node::start(options, emergency, registry.clone(), journal, runtimes);
        let node = tokio.block_on(started).expect("the node starts");
        Daemon {
            tokio: Some(tokio),
            node,
            runtime,
            registry,
        }
    }

    /// The journal of a daemon that vanished is closed a moment after it.
    fn journal(&self, name: &str) -> Arc<Journal> {
        let dir = self.state.path().join("journal");
        let opened = eventually("the journal to be free", || {
            Journal::open(&dir, name, 10_000).ok()
        });
        Arc::new(opened)
    }

    pub(crate) fn cgroup(&self, id: &str, generation: Generation) -> String {
        let id = id.parse().expect("an id");
        cgroup_parent(&self.instance, &id, generation, CgroupDriver::Cgroupfs).path
    }

    /// Processes of this instance's containers that run, as an observer sees them.
    pub(crate) fn alive(&self) -> usize {
        let below = instance_cgroup(&self.instance, CgroupDriver::Cgroupfs);
        conman_observer::alive_below(&below).len()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let below = instance_cgroup(&self.instance, CgroupDriver::Cgroupfs);
        let cgroups = Cgroups::detect().expect("the host has cgroups");
        for _ in 0..200 {
            let pids = cgroups.pids_below(&below);
            if pids.is_empty() && cgroups.remove_tree(&below).is_empty() {
                return;
            }
            for process in pids.into_iter().filter_map(|pid| PidFd::open(pid).ok()) {
                // Gone is just as well.
                let _ = process.kill();
            }
            pause();
        }
    }
}

impl Daemon {
    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        let tokio = self.tokio.as_ref().expect("the daemon lives");
        tokio.block_on(async {
            tokio::time::timeout(PATIENCE, work)
                .await
                .expect("nothing takes that long")
        })
    }

    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.tokio.as_ref().expect("the daemon lives").spawn(work)
    }

    pub(crate) fn faults(&self) -> &Faults {
        self.runtime.faults()
    }

    pub(crate) fn start(&self, id: &str, request: &SessionRequest) -> Session {
        let started = self.run(self.node.sessions().ensure(&session(id), request, true));
        started.expect("it starts").session
    }

    pub(crate) fn show(&self, id: &str) -> Session {
        self.node.sessions().get(&session(id)).expect("it is shown")
    }

    pub(crate) fn record(&self, id: &str) -> SessionRecord {
        let record = self.run(self.registry.get(&session(id)));
        record.expect("readable").expect("recorded")
    }

    /// Waits until the session is in this state, and shows it.
    pub(crate) fn await_state(&self, id: &str, state: SessionState) -> Session {
        eventually(&format!("{id} to be {state}"), || {
            self.node
                .sessions()
                .get(&session(id))
                .filter(|session| session.state == state)
        })
    }

    /// The kinds of the session's events, phases left out.
    pub(crate) fn story(&self, id: &str) -> Vec<EventKind> {
        self.run(self.node.journal().flush());
        let timeline = self.run(self.node.journal().timeline(&session(id)));
        let events = timeline.expect("readable").events;
        let kinds = events.into_iter().map(|event| event.kind);
        kinds
            .filter(|kind| *kind != EventKind::SessionPhase)
            .collect()
    }

    /// Ends like a daemon that was sent SIGKILL: nothing is said to anybody.
    pub(crate) fn vanish(mut self) {
        if let Some(tokio) = self.tokio.take() {
            tokio.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(tokio) = self.tokio.take() {
            tokio.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

pub(crate) fn session(id: &str) -> SessionId {
    id.parse().expect("an id")
}

/// A program without a port that runs until it is killed.
pub(crate) fn idle() -> SessionRequest {
    program("exec sleep 1000")
}

/// A shell script without a port.
pub(crate) fn program(script: &str) -> SessionRequest {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    SessionRequest {
        image: Some("none".to_owned()),
        command: Some(command),
        ..SessionRequest::default()
    }
}

/// An HTTP server on port 8080.
pub(crate) fn web() -> SessionRequest {
    SessionRequest {
        port: Some(Some(8080)),
        ..program("exec busybox httpd -f -p 8080 -h /etc")
    }
}

pub(crate) fn web_from(template: &str) -> SessionRequest {
    SessionRequest {
        template: Some(template.to_owned()),
        ..SessionRequest::default()
    }
}

/// Looks again and again until there is something to see.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = std::time::Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(began.elapsed() < PATIENCE, "waited too long for {what}");
        pause();
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "called on a test's own thread, outside of tokio"
)]
fn pause() {
    std::thread::sleep(Duration::from_millis(5));
}

pub(crate) fn bind_root(stage: &Stage) -> PathBuf {
    let root = stage.state.path().join("binds");
    std::fs::create_dir_all(&root).expect("made");
    root
}
