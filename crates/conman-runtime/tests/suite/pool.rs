//! Starts that take containers made ahead, and all that may happen to these.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use conman_core::Instance;
use conman_core::naming::{CgroupDriver, instance_cgroup};
use conman_linux::{Cgroups, PidFd, ProjectQuotas};
use conman_proto::{Generation, ResolvedSpec, RuntimeKind};
use conman_runtime::{
    ContainerKey, ContainerPlan, Lifecycle, MADE_AHEAD, NativeRuntime, NativeTimeouts, Started,
};
use conman_testkit::resolved_spec;
use conman_testkit::runtime_conformance::say_skipped;

use crate::native_host::{Host, IMAGE};

const PATIENCE: Duration = Duration::from_secs(60);

struct Scene {
    host: Host,
    instance: Instance,
    runtime: Arc<NativeRuntime>,
    next: u64,
}

impl Scene {
    fn new() -> Option<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(0);
        let host = Host::new().map_err(|why| say_skipped(&why)).ok()?;
        let [.., a, b] = std::process::id().to_be_bytes();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let instance = Instance::new([0xa4, number, a, b]);
        let runtime = Arc::new(host.open(&instance, NativeTimeouts::default()));
        Some(Self {
            host,
            instance,
            runtime,
            next: 0,
        })
    }

    fn plan(&mut self, pool: u32) -> ContainerPlan {
        self.next += 1;
        let generation = Generation::new(self.next).expect("not zero");
        let key = ContainerKey::new("alice".parse().expect("an id"), generation);
        let spec = ResolvedSpec {
            template: Some("python".to_owned()),
            command: ["sleep", "1000"].map(str::to_owned).to_vec(),
            memory_bytes: Some(64 << 20),
            disk_bytes: Some(64 << 20),
            pool,
            ..resolved_spec(RuntimeKind::Native, IMAGE)
        };
        ContainerPlan {
            files_dir: self.host.path(&format!("files-{}", self.next)),
            spec,
            binds: Vec::new(),
            key,
        }
    }

    async fn start(&self, plan: &ContainerPlan) -> (Started, PidFd) {
        self.runtime.create(plan).await.expect("created");
        let started = self.runtime.start(&plan.key).await;
        let started = started.unwrap_or_else(|error| panic!("{error}: {error:?}"));
        let process = PidFd::open(started.pid).expect("it lives");
        assert!(self.runtime.owns_pid(&plan.key, started.pid));
        (started, process)
    }

    async fn remove(&self, plan: &ContainerPlan, process: &PidFd) {
        process.kill().expect("killed");
        assert!(process.wait_dead(PATIENCE).expect("waited"));
        self.removed(plan).await;
    }

    async fn removed(&self, plan: &ContainerPlan) {
        let keys = [plan.key.clone()];
        until(async || self.runtime.remove(&keys).await[0].is_ok()).await;
    }

    /// The names of cgroups of containers made ahead, taken or not.
    fn ahead(&self) -> Vec<String> {
        let above = instance_cgroup(&self.instance, CgroupDriver::Cgroupfs);
        let mut names = Cgroups::detect().expect("cgroups").children(&above);
        names.retain(|name| name.starts_with("ahead_"));
        names
    }

    /// Waits until so many wait.
    async fn full(&self, count: usize) {
        until(async || self.runtime.made_ahead() == count).await;
    }
}

async fn until(mut done: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    waited.expect("it comes true in time");
}

fn took_one(started: &Started) -> bool {
    started.steps.iter().any(|(name, _)| *name == MADE_AHEAD)
}

#[tokio::test]
async fn starts_take_what_was_made_ahead_and_leave_nothing() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(2);
    let (started, process) = scene.start(&first).await;
    assert!(!took_one(&started), "the first one of its template");
    scene.full(2).await;
    let second = scene.plan(2);
    let (started, taken) = scene.start(&second).await;
    assert!(took_one(&started));
    let pids = scene.runtime.pids(&second.key).expect("read");
    assert!(pids.contains(&started.pid), "{pids:?}");
    assert_eq!(scene.runtime.list().await.expect("listed").len(), 2);
    let own = scene.host.path(scene.instance.as_str());
    for plan in [&first, &second] {
        let directory = own.join(format!("containers/alice.{}", plan.key.generation));
        let is_limited = ProjectQuotas::is_limited(&directory).expect("readable");
        assert_eq!(is_limited, ProjectQuotas::of(&own).is_some());
    }
    // The next daemon finds it by its record and its cgroup's label.
    let next = scene.host.open(&scene.instance, NativeTimeouts::default());
    assert!(next.owns_pid(&second.key, started.pid));
    let found = next.find(&second.key).await.expect("found").expect("there");
    assert_eq!(found.pid, Some(started.pid));
    drop(next);
    scene.remove(&second, &taken).await;
    scene.remove(&first, &process).await;
    scene.runtime.end_idle_shim().await;
    until(async || scene.ahead().is_empty()).await;
    let left = std::fs::read_dir(own.join("ahead"));
    assert_eq!(left.expect("readable").count(), 0);
}

#[tokio::test]
async fn a_changed_template_is_not_served_by_what_was_made_for_the_former_one() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(1);
    let (_, process) = scene.start(&first).await;
    scene.full(1).await;
    let former = scene.ahead();
    let mut changed = scene.plan(1);
    changed.spec.memory_bytes = Some(65 << 20);
    let (started, other) = scene.start(&changed).await;
    assert!(!took_one(&started));
    until(async || scene.ahead().iter().all(|name| !former.contains(name))).await;
    scene.full(1).await;
    // As SIGHUP does.
    scene.runtime.drop_pool();
    until(async || scene.ahead().is_empty()).await;
    scene.remove(&first, &process).await;
    scene.remove(&changed, &other).await;
}

#[tokio::test]
async fn one_that_has_died_and_an_image_that_is_removed_fail_no_start() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(1);
    let (_, process) = scene.start(&first).await;
    scene.full(1).await;
    let above = instance_cgroup(&scene.instance, CgroupDriver::Cgroupfs);
    let cgroups = Cgroups::detect().expect("cgroups");
    for pid in cgroups.pids_below(&format!("{above}/{}", scene.ahead()[0])) {
        let waiting = PidFd::open(pid).expect("it lives");
        waiting.kill().expect("killed");
        assert!(waiting.wait_dead(PATIENCE).expect("waited"));
    }
    let second = scene.plan(1);
    let (started, usual) = scene.start(&second).await;
    assert!(!took_one(&started));
    scene.full(1).await;
    // What waits keeps its layers, but no start that names the image takes it.
    let name = IMAGE.parse().expect("a name");
    let image = scene.host.store().remove(&name).expect("removed");
    scene
        .host
        .store()
        .collect(&std::collections::BTreeSet::new())
        .expect("collected");
    let third = scene.plan(1);
    scene
        .runtime
        .create(&third)
        .await
        .expect_err("there is no image");
    until(async || scene.ahead().is_empty()).await;
    drop(image);
    scene.remove(&first, &process).await;
    scene.remove(&second, &usual).await;
}

#[tokio::test]
async fn a_container_that_is_never_started_ends_what_it_has_taken() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(1);
    let (_, process) = scene.start(&first).await;
    scene.full(1).await;
    let taken = scene.ahead();
    let second = scene.plan(1);
    scene.runtime.create(&second).await.expect("created");
    let found = scene.runtime.find(&second.key).await.expect("found");
    assert_eq!(found.expect("there").pid, None, "it has not started");
    scene.removed(&second).await;
    until(async || scene.ahead().iter().all(|name| !taken.contains(name))).await;
    scene.remove(&first, &process).await;
}

/// Removes the one of a cgroup's directories that has its label.
fn remove_labelled(cgroup: &str) -> bool {
    let mounts = std::fs::read_dir("/sys/fs/cgroup").expect("there are cgroups");
    let mounts = mounts.map(|entry| entry.expect("listed").path());
    let mut directories = std::iter::once(PathBuf::from("/sys/fs/cgroup"))
        .chain(mounts)
        .map(|mount| mount.join(cgroup.trim_start_matches('/')));
    let is_labelled =
        |path: &PathBuf| rustix::fs::getxattr(path, "trusted.conman", &mut [0_u8; 256]).is_ok();
    let found = directories.find(is_labelled);
    found.is_some_and(|path| std::fs::remove_dir(path).is_ok())
}

#[tokio::test]
async fn a_removal_that_ended_halfway_through_a_cgroup_that_was_taken_is_completed() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(1);
    let (_, process) = scene.start(&first).await;
    scene.full(1).await;
    let taken = scene.ahead();
    let second = scene.plan(1);
    let (started, other) = scene.start(&second).await;
    assert!(took_one(&started));
    other.kill().expect("killed");
    assert!(other.wait_dead(PATIENCE).expect("waited"));
    let above = instance_cgroup(&scene.instance, CgroupDriver::Cgroupfs);
    until(async || remove_labelled(&format!("{above}/{}", taken[0]))).await;
    scene.removed(&second).await;
    assert!(scene.ahead().iter().all(|name| !taken.contains(name)));
    scene.remove(&first, &process).await;
}

#[tokio::test]
async fn they_end_with_the_runtime_that_made_them() {
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let first = scene.plan(2);
    let (_, process) = scene.start(&first).await;
    scene.full(2).await;
    let former = scene.ahead();
    scene.runtime = Arc::new(scene.host.open(&scene.instance, NativeTimeouts::default()));
    until(async || scene.ahead().iter().all(|name| !former.contains(name))).await;
    scene.remove(&first, &process).await;
}
