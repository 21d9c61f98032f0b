//! What holds a container in besides filters and capabilities: who it is, what it may use up, and
//! what it cannot reach. As in the tests of hardening, every layer is tried with the others off, and
//! the trial itself without it.

#![cfg(target_arch = "x86_64")]

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{SocketAddr, UnixListener};

use conman_linux::{Mount, Namespaces, unshare_namespaces};
use conman_shim::{BindSpec, ContainerState, ExecSpec, Hardening, LaunchSpec};

use crate::support::probe::{Arg, Probe, launch_probe, nothing_but_namespaces, run_probe};
use crate::support::{Shim, available, has_own_ids, launcher, maps_binds, until, wait_dead};

fn output(shim: &Shim, name: &str, script: &str, change: impl FnOnce(&mut LaunchSpec)) -> String {
    let mut spec = shim.spec(name, script);
    spec.hardening = nothing_but_namespaces();
    change(&mut spec);
    shim.output(spec)
}

fn exit_of(shim: &Shim, name: &str, probe: Probe, hardening: Hardening) -> ContainerState {
    run_probe(shim, name, probe, 0o755, |spec| spec.hardening = hardening)
}

#[test]
fn read_only_paths_refuse_what_the_container_owns() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // Its own network namespace's, so nothing else refuses it.
    let script = "echo 1 > /proc/sys/net/ipv4/ip_forward && cat /proc/sys/net/ipv4/ip_forward";
    let log = output(&shim, "open.1", script, |_| {});
    assert_eq!(log, "1\n");
    let log = output(&shim, "masked.1", script, |spec| {
        spec.hardening.masked_proc = true;
    });
    assert!(log.contains("Read-only file system"), "{log}");
}

#[test]
fn what_is_the_hosts_roots_alone_is_out_of_reach_for_root_inside() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "touch /own; chmod 400 /own; cat /own && echo own; \
                  cat /proc/kmsg /proc/slabinfo | wc -c; \
                  echo x > /proc/sys/kernel/core_pattern; \
                  hostname other && hostname";
    let log = output(&shim, "root.1", script, |_| {});
    assert!(log.starts_with("own\n"), "{log}");
    for path in ["/proc/kmsg", "/proc/slabinfo", "core_pattern"] {
        assert!(
            log.lines().any(|line| line.contains(path)
                && (line.contains("denied") || line.contains("not permitted"))),
            "{path}: {log}"
        );
    }
    // Nothing came of the two files, and what is its own it may change.
    assert!(log.contains("\n0\n") && log.ends_with("other\n"), "{log}");
}

#[test]
fn root_inside_is_nobody_outside_and_the_hosts_files_stay_the_hosts() {
    if !available() || !maps_binds() {
        return;
    }
    let shim = Shim::start();
    let work = shim.path("work");
    std::fs::create_dir(&work).expect("made");
    let file = |name: &str, owner: u32| {
        std::fs::write(work.join(name), "content\n").expect("written");
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(work.join(name), mode).expect("set");
        chown(work.join(name), Some(owner), Some(owner)).expect("owned");
    };
    file("inside", conman_core::DEFAULT_BIND_FIRST_ID + 65_535);
    file("outside", 0);
    let mut spec = shim.spec(
        "who.1",
        "cat /work/inside; stat -c %u /work/outside; cat /work/outside; chown 0 /work/outside; exec sleep 1000",
    );
    spec.hardening = nothing_but_namespaces();
    spec.binds = vec![BindSpec {
        target: "/work".to_owned(),
        read_only: false,
        first_id: conman_core::DEFAULT_BIND_FIRST_ID,
    }];
    let mount = Mount::copy_of(rustix::fs::CWD, &work).expect("copied");
    let mut client = shim.client();
    let launched = client
        .launch_with(spec, &[mount])
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    assert!(until(|| shim.log("who.1").contains("chown")));
    let log = shim.log("who.1");
    assert!(log.starts_with("content\n65534\n"), "{log}");
    assert!(log.contains("Permission denied"), "{log}");
    let status = std::fs::read_to_string(format!("/proc/{}/status", launched.pid));
    let status = status.expect("it lives");
    for field in ["Uid:", "Gid:"] {
        let line = status.lines().find(|line| line.starts_with(field));
        let ids = line.expect("a line").split_ascii_whitespace().skip(1);
        for id in ids {
            assert!(id.parse::<u32>().expect("an id") >= 0x4000_0000, "{status}");
        }
    }
    let process = launched.process.as_ref().expect("a hold");
    process.kill().expect("killed");
    wait_dead(&launched);
}

#[test]
fn descriptors_and_core_files_are_limited_for_root_too() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "(exec 9</dev/null) && echo low; (exec 40</dev/null) && echo high; \
                  ulimit -n 1000 && echo raised; ulimit -c; ulimit -c 1 && echo cores";
    let log = output(&shim, "limited.1", script, |spec| {
        spec.program.nofile = Some(32);
    });
    assert!(log.contains("low\n"), "{log}");
    assert!(
        !log.contains("high\n") && !log.contains("raised\n"),
        "{log}"
    );
    assert!(log.contains("\n0\n") && !log.contains("cores\n"), "{log}");
    let log = output(&shim, "free.1", script, |_| {});
    assert!(log.contains("low\nhigh\nraised\n0\n"), "{log}");
    assert!(!log.contains("cores\n"), "{log}");
}

#[test]
fn a_read_only_root_is_the_only_thing_that_refuses_to_be_written() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script =
        "touch /x && echo root; touch /dev/shm/x && echo shm; rm -f /bin/busybox && echo rm";
    let log = output(&shim, "ro.1", script, |spec| spec.root.read_only = true);
    assert_eq!(log.matches("Read-only file system").count(), 2, "{log}");
    assert!(!log.contains("root\n") && !log.contains("rm\n"), "{log}");
    assert!(
        log.contains("shm\n"),
        "what is for all programs to write stays so: {log}"
    );
    let log = output(&shim, "rw.1", script, |_| {});
    assert_eq!(log, "root\nshm\nrm\n");
}

#[test]
fn a_raw_socket_takes_a_capability_that_containers_lack() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // ICMP over IPv4.
    let raw = || Probe::of(libc::SYS_socket, &[2, 3, 1].map(Arg::Number));
    let short = Hardening {
        capabilities: None,
        ..nothing_but_namespaces()
    };
    let with = exit_of(&shim, "raw.1", raw(), short);
    assert_eq!(with, ContainerState::Exited { code: libc::EPERM });
    let without = exit_of(&shim, "raw.2", raw(), nothing_but_namespaces());
    assert!(
        matches!(without, ContainerState::Exited { code } if code != libc::EPERM),
        "{without:?}"
    );
}

#[test]
fn the_filter_alone_refuses_namespaces_by_clone() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // A user namespace; without an exit signal nobody needs to reap.
    let clone = || Probe::of(libc::SYS_clone, &[Arg::Number(0x1000_0000)]);
    let filtered = Hardening {
        seccomp: true,
        ..nothing_but_namespaces()
    };
    let with = exit_of(&shim, "clone.1", clone(), filtered);
    assert_eq!(with, ContainerState::Exited { code: libc::EPERM });
    let without = exit_of(&shim, "clone.2", clone(), nothing_but_namespaces());
    assert!(
        matches!(without, ContainerState::Exited { code } if code != libc::EPERM),
        "{without:?}"
    );
}

#[test]
fn neither_the_hosts_loopback_nor_its_abstract_sockets_are_in_reach() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    listener.set_nonblocking(true).expect("set");
    let port = listener.local_addr().expect("bound").port();
    let name = format!("conman-confinement-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let _unix = UnixListener::bind_addr(&address).expect("bound");
    let script = format!(
        "echo x | /bin/busybox nc 127.0.0.1 {port} || echo refused; ip link | grep -c mtu; \
         grep -c {name} /proc/net/unix"
    );
    let log = output(&shim, "net.1", &script, |_| {});
    assert!(log.contains("refused\n1\n0\n"), "{log}");
    assert!(listener.accept().is_err(), "nobody came");
    // Others do reach them.
    std::net::TcpStream::connect(("127.0.0.1", port)).expect("connected");
    let mut text = String::new();
    let mut sockets = std::fs::File::open("/proc/net/unix").expect("readable");
    sockets.read_to_string(&mut text).expect("text");
    assert!(text.contains(&name));
}

/// Where a probe's kernel may write: a page of its own.
const PAGE: u64 = 0x1000_0000;

fn with_page() -> Probe {
    // Readable and writable; private, fixed, anonymous.
    let arguments = [PAGE, 4_096, 3, 0x32, u64::MAX].map(Arg::Number);
    Probe::of(libc::SYS_mmap, &arguments)
}

#[test]
fn a_session_that_takes_all_inotify_instances_takes_none_of_the_hosts_root() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let probe = Probe::of(libc::SYS_inotify_init1, &[])
        .repeated(4_000)
        .call(libc::SYS_mkdir, &[Arg::Text("/full"), Arg::Number(0o755)])
        .call(libc::SYS_pause, &[]);
    let launched = launch_probe(&shim, "watch.1", probe, |_| {});
    let full = shim.path("scratch/watch.1/upper/full");
    assert!(until(|| full.exists()));
    let host = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC);
    launched
        .process
        .as_ref()
        .expect("a hold")
        .kill()
        .expect("killed");
    wait_dead(&launched);
    host.expect("the host's root has instances left");
}

#[test]
fn queued_signals_are_limited_for_all_users_of_a_session() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // Each timer keeps a place for its signal.
    let timers = |count| {
        let arguments = [0, 0, PAGE].map(Arg::Number);
        let timers = Probe::of(libc::SYS_timer_create, &arguments).repeated(count);
        with_page().then(timers)
    };
    let few = exit_of(&shim, "few.1", timers(4_000), nothing_but_namespaces());
    assert_eq!(few, ContainerState::Exited { code: 0 });
    let many = exit_of(&shim, "many.1", timers(4_200), nothing_but_namespaces());
    assert_eq!(many, ContainerState::Exited { code: libc::EAGAIN });
    let log = output(&shim, "limits.1", "cat /proc/self/limits", |_| {});
    for (name, most) in [
        ("Max pending signals", 4_096),
        ("Max msgqueue size", 819_200),
        ("Max locked memory", 8 << 20),
        ("Max open files", 65_536),
    ] {
        let line = log.lines().find(|line| line.starts_with(name)).expect(name);
        let values = line[name.len()..].split_ascii_whitespace().take(2);
        let values: Vec<u64> = values.map(|value| value.parse().expect(line)).collect();
        assert!(values.iter().all(|value| *value <= most), "{line}");
    }
}

#[test]
fn cgroups_are_roots_alone_and_an_empty_one_in_the_way_is_replaced() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("readable");
    let directories = |name: &str| -> Vec<std::path::PathBuf> {
        let path = format!("{}/{name}", shim.cgroup);
        let mounts = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>());
        let hierarchies = mounts.filter(|fields| fields[2].starts_with("cgroup"));
        // Not those without controllers.
        let usable = hierarchies.filter(|fields| !fields[3].contains("name="));
        usable
            .map(|fields| format!("{}{path}", fields[1]).into())
            .collect()
    };
    for directory in directories("way.1") {
        std::fs::create_dir_all(directory.join("below/it")).expect("made");
    }
    let mut client = shim.client();
    let mut spec = shim.spec("way.1", "exec sleep 1000");
    spec.limits.cpu_millis = Some(500);
    let launched = client.launch(spec).expect("launched");
    let made: Vec<_> = directories("way.1")
        .into_iter()
        .filter(|directory| {
            let procs = std::fs::read_to_string(directory.join("cgroup.procs"));
            procs.is_ok_and(|text| text.lines().any(|pid| pid == launched.pid.to_string()))
        })
        .collect();
    assert!(!made.is_empty());
    for directory in &made {
        assert!(!directory.join("below").exists(), "{directory:?}");
        for path in [directory.as_path(), directory.parent().expect("a parent")] {
            let data = std::fs::metadata(path).expect("it is there");
            let (owner, mode) = (data.uid(), data.permissions().mode() & 0o7777);
            assert_eq!((owner, mode & !0o755), (0, 0), "{path:?} {mode:o}");
        }
    }
    launched
        .process
        .as_ref()
        .expect("a hold")
        .kill()
        .expect("killed");
    wait_dead(&launched);
}

#[test]
fn the_mount_table_of_a_container_with_files_names_no_directory_of_the_host() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let log = output(&shim, "mounts.1", "cat /proc/self/mountinfo", |spec| {
        spec.files = vec![("/etc/hosts".to_owned(), "127.0.0.1 localhost\n".to_owned())];
    });
    assert!(log.contains(" /etc/hosts ro,"), "{log}");
    let host = shim.path("").to_string_lossy().into_owned();
    assert!(!log.contains(host.trim_end_matches('/')), "{log}");
}

#[test]
fn sessions_notice_nothing_of_each_other_at_device_nodes() {
    if !available() || !has_own_ids() {
        return;
    }
    let shim = Shim::start();
    let masked = |spec: &mut LaunchSpec| {
        spec.hardening = Hardening {
            masked_proc: true,
            ..nothing_but_namespaces()
        };
    };
    let all = ["/dev", "/dev/null", "/dev/zero", "/dev/pts", "/dev/shm"];
    let of_proc = ["/proc/keys", "/proc/acpi", "/proc/scsi", "/proc/timer_list"];
    let of_proc = of_proc
        .into_iter()
        .filter(|path| std::path::Path::new(path).exists());
    let paths: Vec<&'static str> = all.into_iter().chain(of_proc).collect();
    // Without waiting: some are the same file.
    let mut holder = Probe::default();
    for (path, fd) in paths.iter().zip(3..) {
        holder = holder
            .call(libc::SYS_open, &[Arg::Text(path)])
            .call(libc::SYS_flock, &[fd, 2 | 4].map(Arg::Number));
    }
    let holder = holder
        .call(libc::SYS_mkdir, &[Arg::Text("/held"), Arg::Number(0o755)])
        .call(libc::SYS_pause, &[]);
    let locks = launch_probe(&shim, "locks.1", holder, masked);
    assert!(until(|| shim.path("scratch/locks.1/upper/held").exists()));
    for (number, path) in paths.iter().enumerate() {
        let taker = Probe::of(libc::SYS_open, &[Arg::Text(path)])
            .call(libc::SYS_flock, &[3, 2 | 4].map(Arg::Number));
        let state = run_probe(&shim, &format!("taker.{number}"), taker, 0o755, masked);
        assert_eq!(state, ContainerState::Exited { code: 0 }, "{path}");
    }
    // Opened, read, written, closed.
    let watch = Arg::Number(0x1 | 0x2 | 0x8 | 0x10 | 0x20);
    let mut watcher = with_page().call(libc::SYS_inotify_init1, &[]);
    for path in &paths {
        let arguments = [Arg::Number(3), Arg::Text(path), watch];
        watcher = watcher.call(libc::SYS_inotify_add_watch, &arguments);
    }
    let watcher = watcher
        .call(
            libc::SYS_mkdir,
            &[Arg::Text("/watching"), Arg::Number(0o755)],
        )
        .call(libc::SYS_read, &[3, PAGE, 4_096].map(Arg::Number));
    let watching = launch_probe(&shim, "watch.1", watcher, masked);
    assert!(until(|| shim
        .path("scratch/watch.1/upper/watching")
        .exists()));
    let script = format!(
        "ls {0}; cat {0}; echo x > /dev/null; echo done",
        paths[1..].join(" ")
    );
    let script = script.replace("/dev/zero ", "");
    let log = output(&shim, "noise.1", &script, masked);
    assert!(log.ends_with("done\n"), "{log}");
    let process = watching.process.as_ref().expect("a hold");
    assert!(
        !process.is_dead().expect("asked"),
        "it has noticed something"
    );
    // What happens in the session itself it notices.
    let null = std::fs::File::open("/dev/null").expect("there is one");
    let mut program = shim.spec("unused", "echo x > /dev/null").program;
    program.uid = 0;
    let spec = ExecSpec {
        with_client: false,
        files: None,
        name: "noise".to_owned(),
        container: "watch.1".to_owned(),
        program,
        terminal: false,
        kept: None,
        ptys: 0,
        hardening: Hardening::default(),
    };
    shim.client()
        .exec(spec, [null.as_fd(); 3])
        .expect("executed");
    wait_dead(&watching);
    locks
        .process
        .as_ref()
        .expect("a hold")
        .kill()
        .expect("killed");
    wait_dead(&locks);
}

#[test]
fn the_launchpad_shows_nothing_and_cannot_be_written() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    shim.output(shim.spec("ready.1", "true"));
    let launcher = launcher(shim.process.id(), &shim.cgroup).expect("a launcher");
    let fds = format!("/proc/{}/fd", launcher.pid());
    let namespaces = std::fs::read_dir(fds)
        .expect("readable")
        .filter_map(|entry| {
            let path = entry.expect("readable").path();
            let target = std::fs::read_link(&path).ok()?;
            target.to_str()?.starts_with("mnt:").then_some(path)
        });
    let roots: Vec<Vec<String>> = namespaces.map(|path| seen_from(&path)).collect();
    assert_eq!(roots.len(), 2, "{roots:?}");
    assert!(roots.contains(&vec!["proc".to_owned()]), "{roots:?}");
}

/// What the root of a mount namespace holds; checks one that holds nothing but procfs.
fn seen_from(namespace: &std::path::Path) -> Vec<String> {
    let namespace = std::fs::File::open(namespace).expect("opened");
    let look = move || {
        unshare_namespaces(Namespaces::NEWNS).expect("a namespace of this thread's");
        let kind = Some(rustix::thread::LinkNameSpaceType::Mount);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).expect("entered");
        let names = |path: &str| -> Vec<String> {
            let entries = std::fs::read_dir(path).expect("readable");
            let names = entries.map(|entry| entry.expect("readable").file_name());
            names
                .map(|name| name.to_string_lossy().into_owned())
                .collect()
        };
        let root = names("/");
        if root == ["proc"] {
            let written = std::fs::write("/file", "").expect_err("read-only");
            assert_eq!(written.raw_os_error(), Some(libc::EROFS));
            let numbers = names("/proc")
                .into_iter()
                .filter(|name| name.parse::<u32>().is_ok());
            assert_eq!(numbers.count(), 0, "processes");
        }
        root
    };
    std::thread::spawn(look).join().expect("looked")
}
