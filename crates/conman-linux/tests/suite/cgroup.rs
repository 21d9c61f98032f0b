//! Finding and removing cgroups, on whatever hierarchies the host has.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use conman_linux::{CgroupError, CgroupLayout, CgroupWeight, Cgroups, ExitScan, Freezer};

use crate::support::{Process, SOON};

/// A cgroup tree of its own in every hierarchy, removed at the end.
struct TestCgroup {
    path: String,
    mounts: Vec<PathBuf>,
}

/// A path that no other test, in this run or beside it, uses.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("/conman-test-{}-{number}", std::process::id())
}

impl TestCgroup {
    fn new() -> Self {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
        let mounts: Vec<PathBuf> = mounts
            .lines()
            .filter(|line| line.contains(" - cgroup ") || line.contains(" - cgroup2 "))
            .filter_map(|line| line.split(' ').nth(4).map(PathBuf::from))
            .collect();
        assert!(!mounts.is_empty(), "no cgroup hierarchy is mounted");
        let group = Self {
            path: unique(),
            mounts,
        };
        for mount in &group.mounts {
            for below in ["a", "b/c"] {
                std::fs::create_dir_all(group.directory(mount).join(below))
                    .expect("this test makes cgroups, as root");
            }
        }
        group
    }

    fn directory(&self, mount: &Path) -> PathBuf {
        mount.join(self.path.trim_start_matches('/'))
    }

    /// A hierarchy that takes processes without any set-up (the cpuset controller does not).
    fn simple_mount(&self) -> &Path {
        let simple = ["pids", "unified", "freezer", "cgroup"];
        let found = simple
            .iter()
            .find_map(|name| self.mounts.iter().find(|m| m.ends_with(name)));
        found.unwrap_or(&self.mounts[0])
    }

    fn put(&self, below: &str, process: &Process) {
        let procs = self
            .directory(self.simple_mount())
            .join(below)
            .join("cgroup.procs");
        std::fs::write(procs, process.pid().to_string()).expect("a process joins");
    }

    /// What it weighs, wherever the kernel gives out processors by weight.
    fn weights(&self) -> Vec<PathBuf> {
        let names = ["cpu.weight", "cpu.shares"];
        let files = self.mounts.iter().flat_map(|mount| {
            let directory = self.directory(mount);
            names.map(|name| directory.join(name))
        });
        files.filter(|file| file.exists()).collect()
    }

    fn exists(&self) -> bool {
        self.mounts
            .iter()
            .any(|mount| self.directory(mount).exists())
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        for mount in &self.mounts {
            for below in ["a", "b/c", "b", ""] {
                // Gone already is as good.
                let _ = std::fs::remove_dir(self.directory(mount).join(below));
            }
        }
    }
}

#[test]
fn processes_are_found_at_and_below_a_path_and_nowhere_else() {
    let cgroups = Cgroups::detect().expect("mounted");
    let group = TestCgroup::new();
    let (above, below, other) = (Process::idle(), Process::idle(), Process::idle());
    group.put("a", &above);
    group.put("b/c", &below);
    let path = &group.path;

    let mut expected = vec![above.pid(), below.pid()];
    expected.sort_unstable();
    assert_eq!(cgroups.pids_below(path), expected);
    assert_eq!(cgroups.pids_below(&format!("{path}/b")), [below.pid()]);
    for strange in [
        "",
        "/",
        "a",
        &path[1..],
        &format!("{path}/../.."),
        &format!("{path}/"),
        "/\0",
    ] {
        assert_eq!(
            cgroups.pids_below(strange),
            Vec::<i32>::new(),
            "{strange:?}"
        );
        assert!(!cgroups.contains(strange, above.pid()), "{strange:?}");
    }

    assert!(cgroups.contains(path, above.pid()));
    assert!(cgroups.contains(&format!("{path}/b"), below.pid()));
    assert!(!cgroups.contains(&format!("{path}/b"), above.pid()));
    assert!(!cgroups.contains(path, other.pid()));
    assert!(
        !cgroups.contains(&path[..path.len() - 1], above.pid()),
        "a prefix is no parent"
    );
    assert!(!cgroups.contains(path, i32::MAX));

    let own = Cgroups::of_pid(below.pid()).expect("it lives");
    assert!(own.contains(&format!("{path}/b/c")), "{own:?}");
}

#[test]
fn a_name_that_is_no_text_saves_nobody_from_being_killed_one_by_one() {
    let freezer = Freezer::detect().expect("mounted").killing_one_by_one();
    let group = TestCgroup::new();
    // In octal: no byte of any text.
    let script = r"printf '\377' > /proc/$$/comm; echo ready; read line; read line";
    let mut process = Process::until_ready(Command::new("sh").args(["-c", script]));
    group.put("a", &process);
    let name = std::fs::read(format!("/proc/{}/comm", process.pid())).expect("it lives");
    assert_eq!(name, b"\xff\n");
    freezer.kill(&group.path).expect("killed");
    assert!(process.pidfd().wait_dead(SOON).expect("waited"));
    process.reap();
}

#[test]
fn a_tree_is_removed_once_its_processes_are_gone_and_then_again() {
    let cgroups = Cgroups::detect().expect("mounted");
    let group = TestCgroup::new();
    let mut process = Process::idle();
    group.put("b/c", &process);

    let errors = cgroups.remove_tree(&group.path);
    assert!(!errors.is_empty() && group.exists());
    assert!(
        errors
            .iter()
            .all(|error| matches!(error, CgroupError::Remove { .. })),
        "{errors:?}"
    );
    assert_eq!(cgroups.pids_below(&group.path), [process.pid()]);

    let pidfd = process.pidfd();
    pidfd.kill().expect("signal");
    assert!(pidfd.wait_dead(SOON).expect("poll"));
    process.reap();
    for _ in 0..2 {
        let errors = cgroups.remove_tree(&group.path);
        assert!(errors.is_empty(), "{errors:?}");
        assert!(!group.exists());
    }
}

#[test]
fn what_is_not_conmans_is_never_removed() {
    let cgroups = Cgroups::detect().expect("mounted");
    for path in [
        "",
        "/",
        "/docker",
        "/system.slice",
        "/a/conman-1",
        "conman-1",
        "/conman-1/../docker",
        "/conman-1/..",
        "/./conman-1",
        "//conman-1",
        "/conman-1/",
    ] {
        let errors = cgroups.remove_tree(path);
        assert!(
            matches!(errors.as_slice(), [CgroupError::Refused { .. }]),
            "{path}: {errors:?}"
        );
    }
}

#[test]
fn an_observer_sees_the_living_of_a_cgroup_and_no_zombie() {
    let group = TestCgroup::new();
    let (mut first, second) = (Process::idle(), Process::idle());
    group.put("a", &first);
    group.put("b", &second);
    let alive = || {
        let mut pids: Vec<i32> = conman_observer::alive_below(&group.path)
            .iter()
            .map(|entry| entry.pid)
            .collect();
        pids.sort_unstable();
        pids
    };
    let mut both = vec![first.pid(), second.pid()];
    both.sort_unstable();
    assert_eq!(alive(), both);

    let identity = first.identity();
    let pidfd = first.pidfd();
    pidfd.kill().expect("signal");
    assert!(pidfd.wait_dead(SOON).expect("poll"));
    assert_eq!(alive(), [second.pid()]);
    let zombies = conman_observer::scan(|entry| entry.pid == first.pid());
    assert!(zombies[0].is_zombie(), "{zombies:?}");
    assert_eq!(zombies[0].start_time_ticks, identity.start_time_ticks);
    first.reap();
}

fn read(files: &[PathBuf]) -> Vec<String> {
    let text = files.iter().map(std::fs::read_to_string);
    text.map(|text| text.expect("readable").trim().to_owned())
        .collect()
}

#[test]
#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
fn a_cgroup_goes_before_others_until_what_was_before_is_put_back() {
    let group = TestCgroup::new();
    let files = group.weights();
    if files.is_empty() {
        return println!("skipped: no cgroup of this host has a weight");
    }
    let layout = CgroupLayout::detect().expect("mounted");
    let weight = || CgroupWeight::of(&layout, &["/conman-none".to_owned(), group.path.clone()]);
    let usual = read(&files);
    for file in &files {
        std::fs::write(file, "333").expect("an operator sets it");
    }
    let mut mine = weight();
    assert!(mine.raise());
    let raised = read(&files);
    let number = |text: &String| text.parse::<u32>().expect("a number");
    assert!(raised.iter().all(|text| number(text) > 1_000), "{raised:?}");
    // Raised twice is raised once.
    assert!(mine.raise());
    mine.restore();
    assert!(read(&files).iter().all(|text| text == "333"));

    // Whoever has raised nothing changes nothing.
    mine.restore();
    weight().restore();
    assert!(read(&files).iter().all(|text| text == "333"));

    // What was before is lost with whoever raised it.
    assert!(weight().raise());
    weight().restore();
    assert_eq!(read(&files), usual);
    assert!(!CgroupWeight::of(&layout, &[format!("{}/..", group.path)]).raise());
}

#[test]
fn everything_in_an_ended_cgroup_exits_and_so_does_what_joins_it_later() {
    let group = TestCgroup::new();
    let unified = |mount: &&PathBuf| mount.join("cgroup.controllers").exists();
    let mount = group.mounts.iter().find(unified);
    let directory = group
        .directory(mount.expect("the unified hierarchy"))
        .join("a");
    let scan = ExitScan::of(&format!("{}/a", group.path)).expect("its cgroup");
    for _ in 0..2 {
        let processes = [Process::idle(), Process::idle()];
        for process in &processes {
            let procs = directory.join("cgroup.procs");
            std::fs::write(procs, process.pid().to_string()).expect("a process joins");
        }
        let begun = Instant::now();
        while !scan
            .end_and_list()
            .expect("its threads")
            .iter()
            .all(|thread| thread.exiting)
        {
            assert!(begun.elapsed() < SOON, "something does not exit");
        }
        for process in &processes {
            while !process.pidfd().is_dead().expect("its state") {
                assert!(begun.elapsed() < SOON, "a process lives on");
            }
        }
    }
}

#[test]
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn the_limit_of_cpu_time_of_a_cgroup_that_exists_is_set_and_lifted() {
    let cgroups = Cgroups::detect().expect("mounted");
    let group = TestCgroup::new();
    let path = format!("{}/a", group.path);
    match cgroups.limit_cpu(&path, 250) {
        Ok(()) => {}
        // The controller is in the unified hierarchy, and its root does not hand it on.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return eprintln!("skipped: test cgroups have no cpu controller here");
        }
        Err(error) => panic!("{error}"),
    }
    let limit = cgroups.cpu_limit(&path).expect("it has one");
    limit.lift().expect("lifted");
    assert!(cgroups.cpu_limit(&path).is_none());
    let absent = cgroups.limit_cpu(&format!("{path}/absent"), 250);
    let absent = absent.expect_err("there is no such cgroup");
    assert_eq!(absent.kind(), std::io::ErrorKind::NotFound);
}
