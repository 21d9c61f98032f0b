//! What holds a container in besides filters and capabilities: who it is, what it may use up, and
//! what it cannot reach. As in the tests of hardening, every layer is tried with the others off, and
//! the trial itself without it.

#![cfg(target_arch = "x86_64")]

#[path = "support/probe.rs"]
mod probe;
mod support;

use std::io::Read;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{SocketAddr, UnixListener};

use conman_linux::Mount;
use conman_shim::{BindSpec, ContainerState, Hardening, LaunchSpec};

use probe::{Arg, Probe, nothing_but_namespaces, run_probe};
use support::{Shim, available, maps_binds, until, wait_dead};

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
fn root_inside_is_nobody_outside_and_files_of_others_stay_theirs() {
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
    file("inside", 65_535);
    file("outside", 65_536);
    let mut spec = shim.spec(
        "who.1",
        "cat /work/inside; stat -c %u /work/outside; cat /work/outside; chown 0 /work/outside; exec sleep 1000",
    );
    spec.hardening = nothing_but_namespaces();
    spec.binds = vec![BindSpec {
        target: "/work".to_owned(),
        read_only: false,
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
