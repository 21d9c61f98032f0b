//! Starts on bad ground: directories that are full or read-only, layers that are not what they
//! should be, programs that are none. Each ends with a reason and leaves nothing, and the next one
//! works.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use conman_linux::{CgroupLimits, Cgroups, Freezer};
use conman_shim::{CallError, ClientError, LaunchError, LaunchSpec, Reply, Request};

use crate::support::{Client, SOON, Shim, available, until, wait_dead, write_program};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};

const PROGRAM: &str = env!("CARGO_BIN_EXE_conman-shim");

/// Everything that a start could leave behind.
#[derive(Debug, PartialEq, Eq)]
struct Ground {
    cgroups: Vec<String>,
    /// Processes of the shim's, its helpers among them.
    children: usize,
    /// Open descriptors of the shim and of its launcher.
    descriptors: Vec<usize>,
    /// Mounts of the shim's directories in its and in the launcher's mount namespace.
    mounts: Vec<usize>,
    scratch: BTreeSet<String>,
    logs: BTreeSet<String>,
}

impl Ground {
    /// Of a shim whose launcher works already.
    fn of(shim: &Shim) -> Self {
        let pid = shim.process.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.expect("the shim lives");
        let children: Vec<&str> = children.split_ascii_whitespace().collect();
        let own = pid.to_string();
        let processes = || children.iter().copied().chain([own.as_str()]);
        let count = |path: String| fs::read_dir(path).map_or(0, Iterator::count);
        let own_directory = shim.directory.path().to_string_lossy().into_owned();
        let lines = |path: String| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.lines()
                .filter(|line| line.contains(&own_directory))
                .count()
        };
        let mut cgroups = Freezer::detect()
            .and_then(|freezer| freezer.children(&shim.cgroup))
            .expect("listed");
        cgroups.sort();
        Self {
            cgroups,
            children: children.len(),
            descriptors: processes()
                .map(|pid| count(format!("/proc/{pid}/fd")))
                .collect(),
            mounts: processes()
                .map(|pid| lines(format!("/proc/{pid}/mountinfo")))
                .collect(),
            scratch: names(&seen(shim, "scratch")),
            logs: names(&seen(shim, "logs")),
        }
    }
}

/// So many looks that find the same, as one process that is not scheduled makes a few.
const LOOKS_AT_REST: u32 = 10;

/// As it is when nothing changes any more.
fn settled(shim: &Shim) -> Ground {
    let mut last = Ground::of(shim);
    let mut same_for = 0;
    let quiet = until(|| {
        shim.process_pause(20_000);
        let now = Ground::of(shim);
        same_for = if now == last { same_for + 1 } else { 0 };
        last = now;
        same_for >= LOOKS_AT_REST
    });
    assert!(quiet, "it never comes to rest: {last:?}");
    last
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("readable").flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// A directory as the shim sees it, which may have mounts of its own.
fn seen(shim: &Shim, name: &str) -> PathBuf {
    let root = PathBuf::from(format!("/proc/{}/root", shim.process.id()));
    root.join(shim.path(name).strip_prefix("/").expect("absolute"))
}

/// The error of a start that left everything as it was.
fn refused(shim: &Shim, client: &mut Client, spec: LaunchSpec) -> LaunchError {
    let before = settled(shim);
    let name = spec.name.clone();
    let error = match client.launch(spec) {
        Err(ClientError::Refused(CallError::Launch { error })) => error,
        Err(other) => panic!("{name}: {other}: {other:?}"),
        Ok(_) => panic!("{name} has started"),
    };
    // A zombie is reaped a moment later.
    let mut after = Ground::of(shim);
    until(|| {
        after = Ground::of(shim);
        after == before
    });
    assert_eq!(after, before, "{name}: {error}");
    assert_eq!(client.list().expect("listed"), []);
    // Where its process took long to die its name is free a moment later, too.
    let free = Reply::Found {
        container: None,
        starting: false,
        command: None,
    };
    assert!(until(|| {
        let name = name.clone();
        client.ask(Request::Find { name }).expect("answered") == free
    }));
    error
}

fn works(shim: &Shim, client: &mut Client, name: &str) {
    let launched = client
        .launch(shim.spec(name, "echo well"))
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    wait_dead(&launched);
    let log = seen(shim, "logs").join(name);
    assert_eq!(fs::read_to_string(log).expect("a log"), "well\n");
    let names = vec![name.to_owned()];
    assert!(until(|| client
        .ask(Request::Acknowledge {
            names: names.clone()
        })
        .is_ok()));
    assert!(until(|| {
        let cgroups = Cgroups::detect().expect("detected");
        cgroups
            .remove_tree(&format!("{}/{name}", shim.cgroup))
            .is_empty()
    }));
    fs::remove_dir_all(seen(shim, "scratch").join(name)).expect("removed");
}

/// A client of a shim whose launcher works, as one refused start shows.
fn ready(shim: &Shim) -> Client {
    let mut client = shim.client();
    let mut spec = shim.spec("first.1", "true");
    spec.root.store = shim.path("missing");
    let error = client.launch(spec).expect_err("refused");
    assert!(
        matches!(
            error,
            ClientError::Refused(CallError::Launch {
                error: LaunchError::Step { .. }
            })
        ),
        "{error}"
    );
    client
}

/// A shim in a mount namespace of its own, in which this was done; `$D` is its directory.
/// The directory is to be kept as long.
fn on_ground(preparation: &str) -> (Shim, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("shim");
    let script = format!(
        "#!/bin/sh\nD=$(dirname \"$1\") exec unshare --mount --propagation private sh -ec \
         '{preparation}; exec {PROGRAM} \"$@\"' shim \"$@\"\n"
    );
    write_program(&program, script.as_bytes());
    (Shim::start_as(&program), directory)
}

#[test]
fn a_filesystem_without_room_fails_a_start_at_whatever_point_it_fills() {
    if !available() {
        return;
    }
    let mut steps = BTreeSet::new();
    for inodes in 2..14 {
        let (shim, _directory) = on_ground(&format!(
            "mount -t tmpfs -o nr_inodes={inodes} none $D/scratch"
        ));
        let mut client = ready(&shim);
        let mut spec = shim.spec("full.1", "exec sleep 1000");
        // One more file in it.
        spec.files = vec![(
            "/etc/new/hosts".to_owned(),
            "127.0.0.1 localhost\n".to_owned(),
        )];
        spec.program.workdir = "/srv/deep/down".to_owned();
        let before = settled(&shim);
        match client.launch(spec) {
            Ok(launched) => {
                client.kill_all().expect("killed");
                wait_dead(&launched);
            }
            Err(ClientError::Refused(CallError::Launch {
                error: LaunchError::Step { step, errno, .. },
            })) => {
                assert_eq!(errno, libc::ENOSPC, "{step}");
                steps.insert(step);
                let mut after = Ground::of(&shim);
                until(|| {
                    after = Ground::of(&shim);
                    after == before
                });
                assert_eq!(after, before);
            }
            Err(other) => panic!("{inodes} inodes: {other}: {other:?}"),
        }
    }
    assert!(steps.len() >= 3, "it filled at several points: {steps:?}");
}

#[test]
fn read_only_directories_fail_a_start_by_their_names() {
    if !available() {
        return;
    }
    let cases = [
        ("scratch", "make the container's own directory"),
        ("logs", "open the log"),
    ];
    for (directory, expected) in cases {
        let (shim, _directory) = on_ground(&format!(
            "mount --bind $D/{directory} $D/{directory}; mount -o remount,ro,bind $D/{directory}"
        ));
        let mut client = ready(&shim);
        let error = refused(&shim, &mut client, shim.spec("ro.1", "true"));
        let LaunchError::Step { step, errno, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!((step.as_str(), *errno), (expected, libc::EROFS), "{error}");
    }
}

#[test]
fn a_layer_that_is_none_fails_the_start_and_nothing_else() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let store = shim.path("store");
    fs::write(store.join("file"), "no directory").expect("written");
    symlink("base", store.join("link")).expect("linked");
    symlink("/", store.join("out")).expect("linked");
    fs::create_dir(store.join("hollow")).expect("made");
    let mut client = ready(&shim);
    for layer in ["missing", "file", "link", "out", "base/missing", "out/etc"] {
        let mut spec = shim.spec("layer.1", "true");
        spec.root.layers = vec![PathBuf::from("base"), PathBuf::from(layer)];
        let error = refused(&shim, &mut client, spec);
        assert!(
            matches!(&error, LaunchError::Step { step, .. } if step == "open a layer"),
            "{layer}: {error}"
        );
    }
    let mut spec = shim.spec("hollow.1", "true");
    spec.root.layers = vec![PathBuf::from("hollow")];
    let error = refused(&shim, &mut client, spec);
    assert_eq!(error.exit_code(), Some(127), "{error}");
    works(&shim, &mut client, "well.1");
}

#[test]
fn what_an_image_has_where_the_kernels_files_go_is_covered() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = ready(&shim);
    let make = |layer: &str, name: &str, fill: &dyn Fn(&Path)| {
        let path = shim.path("store").join(layer);
        fs::create_dir_all(&path).expect("made");
        fill(&path.join(name));
    };
    let etc = shim.path("store/base/etc");
    make("file", "proc", &|path| {
        fs::write(path, "").expect("written")
    });
    make("link", "proc", &|path| symlink(&etc, path).expect("linked"));
    make("device", "dev", &|path| {
        fs::write(path, "").expect("written")
    });
    make("out", "dev", &|path| symlink("/etc", path).expect("linked"));
    for layer in ["file", "link", "device", "out"] {
        let name = format!("{layer}.1");
        let mut spec = shim.spec(
            &name,
            "head -c 4 /proc/self/comm; head -c 1 /dev/zero | wc -c",
        );
        spec.root.layers = vec![PathBuf::from(layer), PathBuf::from("base")];
        let launched = client
            .launch(spec)
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        wait_dead(&launched);
        assert_eq!(shim.log(&name), "head1\n");
    }
    assert_eq!(names(&etc), BTreeSet::from(["passwd".to_owned()]));
}

#[test]
fn a_program_that_is_none_is_told_apart_from_one_that_is_missing() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = ready(&shim);
    let bin = shim.path("store/base/bin");
    let program = |name: &str, content: &[u8]| write_program(&bin.join(name), content);
    program("cut", b"\x7fELF\x02\x01\x01");
    program("stray", b"#!/bin/nowhere\n");
    fs::create_dir(bin.join("directory")).expect("made");
    let cases = [
        ("/bin/missing", 127),
        ("missing", 127),
        ("/bin/sh/below", 127),
        ("/bin/cut", 126),
        ("/bin/stray", 126),
        ("/bin/directory", 126),
        ("/etc/passwd", 126),
    ];
    for (command, code) in cases {
        let mut spec = shim.spec("none.1", "");
        spec.program.argv = vec![command.to_owned()];
        let error = refused(&shim, &mut client, spec);
        assert_eq!(error.exit_code(), Some(code), "{command}: {error}");
        assert!(error.to_string().contains(command), "{error}");
    }
    works(&shim, &mut client, "well.1");
}

#[test]
fn a_limit_too_small_even_to_start_ends_the_start_and_not_the_launcher() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = ready(&shim);
    let mut spec = shim.spec("tiny.1", "true");
    spec.limits = CgroupLimits {
        memory_bytes: Some(4_096),
        pids: Some(1),
        cpu_millis: Some(1),
        cpu_weighted: true,
        ..CgroupLimits::default()
    };
    let error = refused(&shim, &mut client, spec);
    assert!(!matches!(error, LaunchError::LauncherDied), "{error}");
    works(&shim, &mut client, "well.1");
}

#[test]
fn a_client_for_whom_no_descriptor_is_left_is_turned_away_and_the_next_one_served() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = ready(&shim);
    let pid = rustix::process::Pid::from_raw(client.shim_pid());
    // It has it from this process, and not everybody may raise it again.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| {
        let limit = Rlimit { current, maximum };
        prlimit(pid, Resource::Nofile, limit).expect("limited")
    };
    settled(&shim);
    let open = names(Path::new(&format!("/proc/{}/fd", client.shim_pid())));
    let free = (0_u64..).find(|number| !open.contains(&number.to_string()));
    let before = limit(free);
    let error = Client::connect(&shim.socket(), SOON).expect_err("there is no room");
    assert!(!matches!(error, ClientError::TimedOut), "{error}");
    client.list().expect("others are served");
    limit(before.current);
    shim.client().list().expect("there is room again");
}
