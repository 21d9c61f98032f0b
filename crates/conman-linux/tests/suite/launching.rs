//! What launching and freezing containers stands on, on the real kernel.

#![expect(clippy::print_stderr, reason = "a skipped test says so there")]

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use conman_linux::{
    CgroupLayout, CgroupLimits, CgroupMaker, CgroupPart, Cgroups, Disk, Ended, Features, Freezer,
    Interface, IoLimits, MakeCgroupError, SessionCgroup, SoleThread,
};

use crate::support::{Process, SOON};

/// A cgroup that is gone, with its processes, when the test is over.
struct Scratch {
    path: String,
    cgroups: Cgroups,
}

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self {
            path: format!("/conman-launch-{}-{number}", std::process::id()),
            cgroups: Cgroups::detect().expect("this host has cgroups"),
        }
    }

    fn inner(&self) -> String {
        format!("{}/one.1", self.path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let left = self.cgroups.remove_tree(&self.path);
        if !std::thread::panicking() {
            assert!(left.is_empty(), "{left:?}");
        }
    }
}

/// Puts a process into a cgroup of whatever hierarchy freezes.
fn put(cgroup: &str, process: &Process) {
    let name = cgroup.trim_start_matches('/');
    let unified = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
    let found = unified
        .iter()
        .map(|mount| std::path::Path::new(mount).join(name).join("cgroup.procs"))
        .find(|file| file.exists())
        .expect("the cgroup is in the unified hierarchy");
    std::fs::write(found, process.pid().to_string()).expect("a process joins");
}

/// Every limit there is.
const ALL_LIMITS: CgroupLimits = CgroupLimits {
    memory_bytes: Some(64 << 20),
    pids: Some(17),
    cpu_millis: Some(250),
    cpu_weighted: false,
    io: None,
};

/// What a cgroup's files of this name hold, in whatever hierarchies have it.
fn values(cgroup: &str, file: &str) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let mounts = mounts.lines().filter(|line| line.contains(" - cgroup"));
    let points = mounts.filter_map(|line| line.split(' ').nth(4));
    let below = cgroup.trim_start_matches('/');
    let files = points.map(|point| std::path::Path::new(point).join(below).join(file));
    let texts = files.filter_map(|file| std::fs::read_to_string(file).ok());
    texts.map(|text| text.trim().to_owned()).collect()
}

/// Makes a cgroup with its limits. After an error it is removed again.
fn make(
    maker: &CgroupMaker,
    path: &str,
    limits: &CgroupLimits,
) -> Result<SessionCgroup, MakeCgroupError> {
    let mut cgroup = maker.begin(path)?;
    if let Err(error) = maker.limit(&mut cgroup, limits) {
        cgroup.take_back();
        return Err(error);
    }
    if let Some((file, text)) = cgroup.cpu_quota() {
        rustix::io::write(file, text.as_bytes()).expect("the quota is accepted");
    }
    Ok(cgroup)
}

fn part(part: CgroupPart) -> CgroupLayout {
    CgroupLayout::detect().expect("readable").part(part)
}

#[test]
fn v1_hierarchies_alone_take_every_limit_and_freeze_and_kill() {
    let scratch = Scratch::new();
    let layout = part(CgroupPart::V1);
    let Ok(freezer) = Freezer::of(&layout) else {
        eprintln!("skipped: this host has no v1 freezer");
        return;
    };
    let maker = CgroupMaker::of(&layout);
    let cgroup = make(&maker, &scratch.inner(), &ALL_LIMITS).expect("made");
    assert!(cgroup.unified().is_none());
    assert_eq!(cgroup.entrances().count(), 4, "memory, pids, cpu, freezer");
    let expected = [
        ("memory.limit_in_bytes", "67108864"),
        ("pids.max", "17"),
        ("cpu.cfs_quota_us", "25000"),
        ("freezer.state", "THAWED"),
    ];
    for (file, value) in expected {
        assert_eq!(values(&scratch.inner(), file), [value], "{file}");
    }
    let process = Process::idle();
    let pids = freezer_tasks(&scratch.inner());
    std::fs::write(pids, process.pid().to_string()).expect("a process joins");
    freezer.freeze(&scratch.path).expect("ordered");
    assert!(becomes_frozen(&freezer, &scratch.inner()));
    assert!(!freezer.dies_frozen());
    freezer.kill(&scratch.inner()).expect("killed");
    // The parent holds it still.
    freezer.thaw(&scratch.path).expect("thawed");
    assert!(process.pidfd().wait_dead(SOON).expect("waited"));
}

fn freezer_tasks(cgroup: &str) -> std::path::PathBuf {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let line = mounts.lines().find(|line| {
        let options = line.rsplit(' ').next().unwrap_or_default();
        line.contains(" - cgroup ") && options.split(',').any(|option| option == "freezer")
    });
    let point = line.and_then(|line| line.split(' ').nth(4));
    std::path::Path::new(point.expect("a v1 freezer"))
        .join(cgroup.trim_start_matches('/'))
        .join("cgroup.procs")
}

#[test]
fn a_unified_hierarchy_alone_takes_every_limit_or_refuses_the_first_that_it_cannot() {
    let scratch = Scratch::new();
    let layout = part(CgroupPart::Unified);
    if Freezer::of(&layout).is_err() {
        eprintln!("skipped: this host has no unified cgroup hierarchy");
        return;
    }
    let maker = CgroupMaker::of(&layout);
    match make(&maker, &scratch.inner(), &ALL_LIMITS) {
        Ok(cgroup) => {
            assert!(cgroup.unified().is_some() && cgroup.entrances().next().is_none());
            let expected = [
                ("memory.max", "67108864"),
                ("memory.oom.group", "1"),
                ("pids.max", "17"),
                ("cpu.max", "25000 100000"),
            ];
            for (file, value) in expected {
                assert_eq!(values(&scratch.inner(), file), [value], "{file}");
            }
        }
        Err(MakeCgroupError::NoController { controller }) => {
            eprintln!("skipped in part: the {controller} controller belongs to v1 on this host");
            assert_eq!(
                values(&scratch.inner(), "cgroup.procs"),
                [""; 0],
                "it was taken back"
            );
        }
        Err(error) => panic!("{error}"),
    }
    let plain = format!("{}/plain.1", scratch.path);
    let cgroup = make(&maker, &plain, &CgroupLimits::default()).expect("made");
    assert!(cgroup.unified().is_some());
}

#[test]
fn limits_that_no_hierarchy_can_enforce_are_refused_by_name() {
    let scratch = Scratch::new();
    let maker = CgroupMaker::of(&CgroupLayout::parse(b""));
    let cases = [
        ("memory", ALL_LIMITS),
        (
            "cpu",
            CgroupLimits {
                cpu_millis: Some(1_000),
                ..CgroupLimits::default()
            },
        ),
    ];
    for (name, limits) in cases {
        let error = make(&maker, &scratch.inner(), &limits).expect_err("refused");
        assert!(
            matches!(error, MakeCgroupError::NoController { controller } if controller == name),
            "{error}"
        );
    }
}

#[test]
fn a_disk_gives_a_cgroup_no_more_than_its_rate() {
    let scratch = Scratch::new();
    let layout = part(CgroupPart::All);
    let files = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let disk = Disk::of(files.path()).expect("readable");
    let Some(disk) = disk.filter(|_| layout.limits_io()) else {
        eprintln!("skipped: no io controller, or a file system that is not on one disk");
        return;
    };
    assert!(disk.node.exists(), "{}", disk.node.display());
    let limits = CgroupLimits {
        io: Some(IoLimits {
            device: disk.device,
            read_bytes_per_s: Some(5 << 20),
            write_bytes_per_s: Some(1 << 20),
            total_weight: None,
        }),
        ..CgroupLimits::default()
    };
    let _cgroup = make(&CgroupMaker::of(&layout), &scratch.inner(), &limits).expect("made");
    let (major, minor) = disk.device;
    let v1 = values(&scratch.inner(), "blkio.throttle.read_bps_device");
    let v2 = values(&scratch.inner(), "io.max");
    let expected = format!("{major}:{minor} ");
    assert!(v1.iter().chain(&v2).any(|text| text.starts_with(&expected)));
    let script = format!(
        "for file in /sys/fs/cgroup/blkio{0}/tasks /sys/fs/cgroup{0}/cgroup.procs; do \
         echo 0 > $file && break; done 2> /dev/null
         exec dd if=/dev/zero of={1}/file bs=1M count=3 oflag=direct status=none",
        scratch.inner(),
        files.path().display()
    );
    let begun = Instant::now();
    let written = Command::new("sh").args(["-c", &script]).status();
    assert!(written.expect("a shell").success());
    // The third mebibyte is written after two seconds.
    assert!(begun.elapsed() > Duration::from_millis(1_500));
}

#[test]
fn an_older_kernel_kills_one_by_one() {
    let scratch = Scratch::new();
    let layout = part(CgroupPart::Unified);
    let Ok(freezer) = Freezer::of(&layout) else {
        eprintln!("skipped: this host has no unified cgroup hierarchy");
        return;
    };
    let maker = CgroupMaker::of(&layout);
    make(&maker, &scratch.inner(), &CgroupLimits::default()).expect("made");
    let processes: Vec<Process> = (0..3).map(|_| Process::idle()).collect();
    for process in &processes {
        put(&scratch.inner(), process);
    }
    freezer
        .killing_one_by_one()
        .kill(&scratch.path)
        .expect("killed");
    for process in &processes {
        assert!(process.pidfd().wait_dead(SOON).expect("waited"));
    }
}

#[test]
fn interfaces_are_left_out_by_their_names() {
    let features = Features::probe().expect("probed");
    for interface in Interface::ALL {
        assert_eq!(Interface::from_name(interface.name()), Some(interface));
        let less = features.clone().without(&[interface]);
        let json = serde_json::to_value(interface).expect("JSON");
        assert_eq!(json, interface.name());
        assert!(!less.has(interface));
    }
    assert_eq!(Interface::from_name("everything"), None);
    // Owners are mapped by the same call.
    let less = features.without(&[Interface::MountAttributes]);
    assert!(!less.has(Interface::MappedLayers));
}

#[test]
fn a_process_with_several_threads_may_not_clone() {
    let other = std::thread::spawn(|| SoleThread::prove().is_err());
    assert!(other.join().expect("no panic"));
}

#[test]
fn a_cgroup_is_made_once_with_its_limits_and_never_taken_over() {
    let scratch = Scratch::new();
    let maker = CgroupMaker::of(&part(CgroupPart::All));
    let cgroup = make(&maker, &scratch.inner(), &ALL_LIMITS).expect("made");
    let process = Process::idle();
    put(&scratch.inner(), &process);
    let again = make(&maker, &scratch.inner(), &ALL_LIMITS).expect_err("it exists");
    assert!(matches!(again, MakeCgroupError::Exists { .. }), "{again}");
    drop(process);
    cgroup.take_back();
    make(&maker, &scratch.inner(), &ALL_LIMITS)
        .expect("after it was taken back it can be made")
        .take_back();
}

#[test]
fn nothing_outside_of_conmans_own_is_made() {
    let maker = CgroupMaker::of(&part(CgroupPart::All));
    for path in [
        "/",
        "",
        "/docker/a",
        "/conman-x/../y",
        "conman-x",
        "/conman-x//y",
    ] {
        let error = make(&maker, path, &CgroupLimits::default()).expect_err("refused");
        assert!(
            matches!(error, MakeCgroupError::Refused { .. }),
            "{path}: {error}"
        );
    }
}

#[test]
fn a_frozen_cgroup_is_proven_frozen_and_dies_without_a_thaw() {
    let scratch = Scratch::new();
    let maker = CgroupMaker::of(&part(CgroupPart::All));
    let freezer = Freezer::detect().expect("this host can freeze");
    let _cgroup = make(&maker, &scratch.inner(), &CgroupLimits::default()).expect("made");
    if !freezer.dies_frozen() {
        eprintln!("skipped: this host has no unified cgroup hierarchy");
        return;
    }
    let process = Process::idle();
    put(&scratch.inner(), &process);
    let pidfd = process.pidfd();
    assert!(!freezer.is_frozen(&scratch.path).expect("readable"));
    freezer.freeze(&scratch.path).expect("frozen by its parent");
    assert!(becomes_frozen(&freezer, &scratch.inner()));
    freezer.thaw(&scratch.path).expect("thawed");
    assert!(!freezer.is_frozen(&scratch.inner()).expect("readable"));
    freezer.freeze(&scratch.path).expect("frozen again");
    assert!(becomes_frozen(&freezer, &scratch.path));
    freezer.kill(&scratch.path).expect("killed");
    assert!(pidfd.wait_dead(SOON).expect("waited"));
}

#[test]
fn freezing_what_does_not_exist_says_so() {
    let freezer = Freezer::detect().expect("this host can freeze");
    let error = freezer
        .freeze("/conman-nobody/x")
        .expect_err("no such cgroup");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    let error = freezer.freeze("/conman/../x").expect_err("not plain");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn the_exit_code_of_a_reaped_process_comes_through_its_pidfd() {
    let features = Features::probe().expect("probed");
    if !features.has(Interface::ExitStatusByPidfd) {
        eprintln!("skipped: this kernel does not tell exit codes through a pidfd");
        return;
    }
    let mut child = Command::new("sh")
        .args(["-c", "exit 7"])
        .spawn()
        .expect("sh runs");
    let pid = i32::try_from(child.id()).expect("a pid");
    // It cannot be reaped, nor its PID be another's, before `wait`.
    let pidfd = conman_linux::PidFd::open(pid).expect("it exists, if only as a zombie");
    assert!(pidfd.wait_dead(SOON).expect("waited"));
    child.wait().expect("reaped");
    assert_eq!(pidfd.ended().expect("asked"), Some(Ended::Exited(7)));
}

#[test]
fn the_features_of_this_kernel_are_told() {
    let features = Features::probe().expect("probed");
    assert!(!features.release.is_empty());
    assert_eq!(
        features.unified_cgroups,
        Cgroups::detect().expect("detected").has_unified()
    );
}

fn becomes_frozen(freezer: &Freezer, path: &str) -> bool {
    let end = std::time::Instant::now() + SOON;
    loop {
        let frozen = freezer.is_frozen(path).expect("readable");
        if frozen || std::time::Instant::now() > end {
            return frozen;
        }
        std::thread::yield_now();
    }
}
