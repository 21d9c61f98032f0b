//! What is made, taken and dropped, without a shim.

use std::process::Command;

use conman_image::{ImageLimits, ImageStore};
use conman_proto::RuntimeKind;
use conman_testkit::resolved_spec;
use serde_json::json;

use super::*;

const IMAGE: &str = "empty:test";

struct Scene {
    directory: tempfile::TempDir,
    store: ImageStore,
    pool: Pool,
}

impl Scene {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir_all(at("root/etc")).expect("made");
        let mut tar = Command::new("tar");
        let tar = tar.arg("-cf").arg(at("root.tar")).arg("-C").arg(at("root"));
        assert!(tar.arg(".").status().expect("tar runs").success());
        let store = ImageStore::open(&at("images"), ImageLimits::default()).expect("a store");
        let name = IMAGE.parse().expect("a name");
        store.import(&at("root.tar"), &name).expect("imported");
        let pool = Pool::open(at("ahead"), |_| Ok(())).expect("opened");
        Self {
            directory,
            store,
            pool,
        }
    }

    fn guard(&self) -> ImageGuard {
        let name = IMAGE.parse().expect("a name");
        self.store.pin(&name).expect("it is there")
    }

    /// Takes one for a start of the template with this limit of memory.
    fn take(&self, template: &str, memory_bytes: u64) -> Option<String> {
        let spec = ResolvedSpec {
            template: Some(template.to_owned()),
            pool: 2,
            ..resolved_spec(RuntimeKind::Native, IMAGE)
        };
        let to = self.directory.path().join("taken");
        let launch = launch(memory_bytes);
        let kind = StartKind {
            spec: launch.kind(),
            quota: None,
            image: self.guard().image().id,
        };
        let taken = self.pool.take(&spec, kind, &launch.cgroup, &to);
        if taken.is_some() {
            std::fs::remove_dir(to).expect("it was moved");
        }
        taken
    }

    /// Makes what is missing.
    fn fill(&self) -> usize {
        let mut count = 0;
        while let Some((template, kind, order)) = self.pool.lacking() {
            assert_eq!(kind.image, self.guard().image().id);
            assert_eq!(kind.spec, order.kind());
            std::fs::create_dir(self.pool.directory_of(&order.name)).expect("made");
            let one = MadeAhead {
                name: order.name.clone(),
                _image: self.guard(),
            };
            self.pool.add(&template, &kind, one);
            count += 1;
        }
        count
    }

    fn dropped(&self, is_short: bool) -> usize {
        let is_named = |name: &ImageName, _: &ImageId| self.store.get(name).is_some();
        self.pool.take_dropped(is_short, is_named).len()
    }
}

fn launch(memory_bytes: u64) -> LaunchSpec {
    let spec = json!({
        "name": "alice.1", "cgroup": "/conman-x/alice.1", "hostname": "alice",
        "limits": { "memory_bytes": memory_bytes },
        "root": {
            "store": "/store", "layers": ["a"], "scratch": "/s", "read_only": false, "shared_ids": false,
        },
        "program": {
            "argv": ["sh"], "env": [["A", "secret"]], "workdir": "/srv", "uid": 0, "gid": 0,
            "groups": [], "nofile": null,
        },
        "log": "/log", "log_bytes": null, "ptys": 0, "files": [["/etc/hosts", "alice"]], "binds": [],
        "terminal": null,
        "hardening": {
            "seccomp": true, "no_new_privileges": true, "masked_proc": true, "capabilities": null,
        },
    });
    serde_json::from_value(spec).expect("a spec")
}

#[test]
fn what_is_made_knows_nothing_of_the_start_that_it_was_made_after() {
    let scene = Scene::new();
    assert_eq!(scene.take("python", 1), None);
    let (_, _, order) = scene.pool.lacking().expect("one is missing");
    order.check().expect("the shim takes it");
    let text = serde_json::to_string(&order).expect("JSON");
    assert!(
        !text.contains("alice") && !text.contains("secret"),
        "{text}"
    );
}

#[test]
fn a_start_takes_one_of_its_kind_and_ends_those_of_a_former_kind() {
    let scene = Scene::new();
    assert_eq!(
        (scene.fill(), scene.take("python", 1), scene.fill()),
        (0, None, 2)
    );
    let (one, other) = (scene.take("python", 1), scene.take("python", 1));
    assert!(one.is_some() && other.is_some() && one != other);
    assert_eq!((scene.take("python", 1), scene.fill()), (None, 2));
    assert_eq!(
        (scene.take("other", 1), scene.fill(), scene.dropped(false)),
        (None, 2, 0)
    );
    assert_eq!((scene.take("python", 2), scene.dropped(false)), (None, 2));
    scene.pool.drop_all();
    assert_eq!((scene.dropped(false), scene.fill()), (2, 0));
}

#[test]
fn none_is_kept_while_memory_is_short_or_without_its_image_or_after_the_end() {
    let scene = Scene::new();
    assert_eq!((scene.take("python", 1), scene.fill()), (None, 2));
    assert_eq!((scene.dropped(false), scene.dropped(true)), (0, 2));
    assert_eq!(
        (scene.fill(), scene.dropped(false)),
        (2, 0),
        "its starts go on"
    );
    let name = IMAGE.parse().expect("a name");
    scene.store.remove(&name).expect("removed");
    let is_named = |name: &ImageName, _: &ImageId| scene.store.get(name).is_some();
    assert_eq!(scene.pool.take_dropped(false, is_named).len(), 2);
    assert!(scene.pool.lacking().is_none());
    scene.pool.lock().closed = true;
    scene
        .store
        .import(&scene.directory.path().join("root.tar"), &name)
        .expect("imported");
    assert_eq!((scene.take("python", 1), scene.fill()), (None, 0));
}

#[test]
fn a_directory_that_is_there_is_not_replaced() {
    let scene = Scene::new();
    assert_eq!((scene.take("python", 1), scene.fill()), (None, 2));
    std::fs::create_dir(scene.directory.path().join("taken")).expect("made");
    assert_eq!(scene.take("python", 1), None);
}

#[test]
fn only_the_first_start_of_a_container_takes_one_and_only_in_the_process_that_created_it() {
    let scene = Scene::new();
    assert_eq!((scene.take("python", 1), scene.fill()), (None, 2));
    let name = scene.take("python", 1).expect("one waits");
    assert!(scene.pool.is_first_start(&name) && !scene.pool.is_first_start(&name));
    assert!(!scene.pool.is_first_start("ahead_of_an_earlier_process"));
    let never_started = scene.take("python", 1).expect("one waits");
    scene.pool.drop_one(never_started.clone());
    assert!(!scene.pool.is_first_start(&never_started));
    assert_eq!(scene.dropped(false), 1);
}

#[test]
fn nothing_is_made_while_a_start_is_under_way_or_was_a_moment_ago() {
    let scene = Scene::new();
    assert_eq!(scene.pool.quiet_in(), Some(Duration::ZERO));
    let (one, other) = (scene.pool.start(), scene.pool.start());
    drop(one);
    assert_eq!(scene.pool.quiet_in(), None);
    drop(other);
    assert!(scene.pool.quiet_in().is_some_and(|left| left <= QUIET));
}
