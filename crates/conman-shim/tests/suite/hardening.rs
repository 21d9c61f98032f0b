//! Each layer of protection is tried with the others off as far as they can be, so that what is
//! refused is refused by that layer; and once without it, so that the trial is known to work.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::print_stderr, reason = "a skipped test says so there")]

use conman_linux::Cgroups;
use conman_shim::{ContainerState, Hardening, LaunchSpec};

use crate::support::probe::{Arg, Probe, nothing_but_namespaces, run_probe};
use crate::support::{SOON, Shim, available, has_own_ids, next_end, subscribe, until, wait_dead};

const EPERM: i32 = libc::EPERM;

fn with_seccomp() -> Hardening {
    Hardening {
        seccomp: true,
        ..nothing_but_namespaces()
    }
}

/// Exit codes with the system call filter and without it.
fn with_and_without(
    shim: &Shim,
    name: &str,
    probe: impl Fn() -> Probe,
) -> (ContainerState, ContainerState) {
    let with = run_probe(shim, &format!("{name}.1"), probe(), 0o755, |spec| {
        spec.hardening = with_seccomp();
    });
    let without = run_probe(shim, &format!("{name}.2"), probe(), 0o755, |spec| {
        spec.hardening = nothing_but_namespaces();
    });
    (with, without)
}

fn unprivileged_bpf() -> bool {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled");
    disabled.is_ok_and(|text| text.trim() == "0")
}

#[test]
fn the_filter_alone_refuses_what_opens_the_kernel() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let number = Arg::Number;
    let calls: [(&str, i64, Vec<Arg>); 9] = [
        ("unshare", libc::SYS_unshare, vec![number(0x0400_0000)]),
        ("user", libc::SYS_unshare, vec![number(0x1000_0000)]),
        (
            "mount",
            libc::SYS_mount,
            vec![Arg::Text("none"), Arg::Text("/tmp"), Arg::Text("tmpfs")],
        ),
        ("bpf", libc::SYS_bpf, vec![number(9_999)]),
        (
            // Asks for a setting, 0; a key's number may end like that of any error.
            "keyctl",
            libc::SYS_keyctl,
            vec![number(14), number(u64::MAX)],
        ),
        ("uring", libc::SYS_io_uring_setup, vec![number(1)]),
        ("alg", libc::SYS_socket, vec![number(38), number(5)]),
        ("vsock", libc::SYS_socket, vec![number(40), number(1)]),
        ("packet", libc::SYS_socket, vec![number(17), number(3)]),
    ];
    for (name, call, arguments) in calls {
        let (with, without) = with_and_without(&shim, name, || Probe::of(call, &arguments));
        assert_eq!(with, ContainerState::Exited { code: EPERM }, "{name}");
        if name == "bpf" && without == with && !unprivileged_bpf() {
            eprintln!("skipped in part: this kernel itself refuses bpf(2) to containers");
            continue;
        }
        assert!(
            matches!(without, ContainerState::Exited { code } if code != EPERM),
            "{name}: {without:?}"
        );
    }
}

#[test]
fn the_filter_alone_refuses_what_others_would_notice() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let number = Arg::Number;
    // Netlink: for the audit log, of connectors.
    let calls: [(&str, i64, Vec<Arg>, i32); 7] = [
        ("aio", libc::SYS_io_setup, vec![number(1)], libc::ENOSYS),
        ("lock", libc::SYS_mlockall, vec![number(0)], EPERM),
        (
            "pair",
            libc::SYS_socketpair,
            [30, 1].map(number).to_vec(),
            EPERM,
        ),
        (
            "excl",
            libc::SYS_ioctl,
            [0, 0x540C].map(number).to_vec(),
            EPERM,
        ),
        (
            "line",
            libc::SYS_ioctl,
            [0, 0x5423].map(number).to_vec(),
            EPERM,
        ),
        (
            "audit",
            libc::SYS_socket,
            [16, 3, 9].map(number).to_vec(),
            libc::EPROTONOSUPPORT,
        ),
        (
            "generic",
            libc::SYS_socket,
            [16, 3, 16].map(number).to_vec(),
            libc::EPROTONOSUPPORT,
        ),
    ];
    for (name, call, arguments, code) in calls {
        let (with, without) = with_and_without(&shim, name, || Probe::of(call, &arguments));
        assert_eq!(with, ContainerState::Exited { code }, "{name}");
        assert_ne!(without, with, "{name}");
    }
    let addresses = || Probe::of(libc::SYS_socket, &[16, 3, 0].map(number));
    let (with, without) = with_and_without(&shim, "route", addresses);
    assert_eq!(with, without);
    assert_eq!(with, ContainerState::Exited { code: 3 });
}

#[test]
fn the_filter_makes_the_c_library_do_without_clone3() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (with, without) = with_and_without(&shim, "clone3", || Probe::of(libc::SYS_clone3, &[]));
    assert_eq!(with, ContainerState::Exited { code: libc::ENOSYS });
    assert_eq!(without, ContainerState::Exited { code: libc::EINVAL });
}

#[test]
fn the_32_bit_entry_kills() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // getpid of i386: the init is 1.
    let (with, without) = with_and_without(&shim, "legacy", || Probe::default().legacy_call(20));
    assert_eq!(
        with,
        ContainerState::Signalled {
            signal: libc::SIGSYS
        }
    );
    assert!(
        matches!(without, ContainerState::Exited { .. }),
        "{without:?}"
    );
}

#[test]
fn without_the_capability_root_may_not_mount() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "mount -t tmpfs none /tmp; echo $?";
    let mut spec = shim.spec("short.1", script);
    spec.hardening = Hardening {
        capabilities: None,
        ..nothing_but_namespaces()
    };
    let log = shim.output(spec);
    assert!(log.ends_with("1\n") && !log.contains("\n0\n"), "{log}");
    let mut spec = shim.spec("all.1", script);
    spec.hardening = nothing_but_namespaces();
    assert_eq!(shim.output(spec), "0\n");
}

#[test]
fn capabilities_are_bounded_and_new_privileges_forbidden() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let status =
        "grep -E '^(CapPrm|CapEff|CapBnd|CapInh|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status";
    let log = shim.output(shim.spec("status.1", status));
    // chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot.
    let bits: u64 = [0, 1, 3, 4, 5, 6, 7, 10, 18]
        .iter()
        .map(|bit| 1_u64 << bit)
        .sum();
    for name in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(log.contains(&format!("{name}:\t{bits:016x}")), "{log}");
    }
    for line in [
        "CapInh:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
}

#[test]
fn set_user_id_programs_gain_nothing_under_no_new_privileges() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let euid = || Probe::of(libc::SYS_geteuid, &[]);
    let user = |forbid: bool| {
        move |spec: &mut LaunchSpec| {
            spec.program.uid = 7;
            spec.hardening = Hardening {
                no_new_privileges: forbid,
                ..nothing_but_namespaces()
            };
        }
    };
    let with = run_probe(&shim, "suid.1", euid(), 0o4755, user(true));
    assert_eq!(with, ContainerState::Exited { code: 7 });
    let without = run_probe(&shim, "suid.2", euid(), 0o4755, user(false));
    assert_eq!(without, ContainerState::Exited { code: 0 });
    // Under all other layers, such programs work where they may, as sudo does.
    let may = |spec: &mut LaunchSpec| {
        spec.program.uid = 7;
        spec.hardening.no_new_privileges = false;
    };
    let confined = run_probe(&shim, "suid.3", euid(), 0o4755, may);
    assert_eq!(confined, ContainerState::Exited { code: 0 });
    let mut spec = shim.spec(
        "suid.4",
        "grep -e NoNewPrivs -e Seccomp: -e CapBnd /proc/self/status",
    );
    may(&mut spec);
    let log = shim.output(spec);
    assert!(
        log.contains("NoNewPrivs:\t0") && log.contains("Seccomp:\t2"),
        "{log}"
    );
    assert!(log.contains("CapBnd:\t00000000000404fb"), "{log}");
}

#[test]
fn a_program_without_capabilities_may_make_sockets_for_echo_requests() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    // AF_INET, IPPROTO_ICMP.
    let socket = |kind: u64| Probe::of(libc::SYS_socket, &[2, kind, 1].map(Arg::Number));
    let user = |spec: &mut LaunchSpec| spec.program.uid = 7;
    let (datagrams, packets) = (2, 3);
    let echo = run_probe(&shim, "ping.1", socket(datagrams), 0o755, user);
    assert_eq!(
        echo,
        ContainerState::Exited { code: 3 },
        "its first descriptor"
    );
    let raw = run_probe(&shim, "ping.2", socket(packets), 0o755, user);
    assert_eq!(raw, ContainerState::Exited { code: 1 }, "EPERM");
}

#[test]
fn paths_in_proc_are_masked_and_read_only() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "cat /proc/interrupts /proc/diskstats /proc/locks /proc/config.gz 2>/dev/null | wc -c; grep ' /proc/sys ' /proc/self/mountinfo; ls /proc/acpi | wc -l";
    let mut spec = shim.spec("masked.1", script);
    spec.hardening = Hardening {
        masked_proc: true,
        ..nothing_but_namespaces()
    };
    let log = shim.output(spec);
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!((lines[0], lines[2]), ("0", "0"), "{log}");
    assert!(lines[1].contains(" ro,"), "{log}");
    let mut spec = shim.spec("open.1", script);
    spec.hardening = nothing_but_namespaces();
    let log = shim.output(spec);
    assert!(
        !log.starts_with("0\n") && !log.contains("/proc/sys"),
        "{log}"
    );
}

#[test]
fn the_user_namespace_alone_keeps_device_nodes_away() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut spec = shim.spec(
        "node.1",
        "mknod /tmp/disk b 254 0; echo $?; mknod /tmp/mem c 1 1; echo $?; ls /tmp",
    );
    spec.hardening = nothing_but_namespaces();
    let log = shim.output(spec);
    assert_eq!(log.matches("Operation not permitted").count(), 2, "{log}");
    assert!(log.ends_with("1\n"), "{log}");
}

#[test]
fn devices_in_an_image_are_dead_and_dev_holds_the_harmless_ones() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let node = shim.path("store/base/etc/null");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &node,
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::from_raw_mode(0o666),
        rustix::fs::makedev(1, 3),
    )
    .expect("a node");
    let mut spec = shim.spec("dev.1", "cat /etc/null; echo $?; head -c 2 /dev/zero | wc -c; ls /dev; touch /dev/x; echo $?; touch /dev/shm/y; echo $?");
    spec.hardening = nothing_but_namespaces();
    let log = shim.output(spec);
    assert!(
        log.contains("can't open '/etc/null': Permission denied\n1\n2\n"),
        "{log}"
    );
    let names =
        "fd\nfull\nnull\nptmx\npts\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n";
    assert!(log.contains(names), "{log}");
    assert!(log.contains("Read-only file system\n1\n0\n"), "{log}");
}

#[test]
fn neither_mounts_nor_processes_of_the_host_are_in_sight() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "cat /proc/self/mountinfo; echo --; ls /proc | grep -E '^[0-9]+$' | wc -l; ls /sys 2>/dev/null | sed s/^/sys-/; cat /proc/self/cgroup";
    let mut spec = shim.spec("sight.1", script);
    spec.hardening = nothing_but_namespaces();
    let log = shim.output(spec);
    let (mounts, rest) = log.split_once("--\n").expect("both parts");
    let mut points: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .collect();
    points.sort_unstable();
    assert_eq!(points, ["/", "/dev", "/dev/shm", "/proc"], "{mounts}");
    assert!(
        !mounts.contains("/store") && !mounts.contains("scratch"),
        "the host's paths are not told: {mounts}"
    );
    // The init, the shell, ls, grep and wc at the most.
    let processes: u32 = rest
        .lines()
        .next()
        .and_then(|line| line.parse().ok())
        .expect("a number");
    assert!((1..=5).contains(&processes), "{rest}");
    assert!(!rest.contains("sys-"), "{rest}");
    assert!(
        !rest.contains("shimtest"),
        "the cgroup namespace hides the path: {rest}"
    );
}

#[test]
fn leaving_a_chroot_leads_to_the_containers_own_root() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let escape = |look_at: &'static str| {
        let mut probe = Probe::of(libc::SYS_chroot, &[Arg::Text("/tmp")]);
        for _ in 0..8 {
            probe = probe.call(libc::SYS_chdir, &[Arg::Text("..")]);
        }
        probe
            .call(libc::SYS_chroot, &[Arg::Text(".")])
            .call(libc::SYS_access, &[Arg::Text(look_at)])
    };
    let open = |spec: &mut LaunchSpec| spec.hardening = nothing_but_namespaces();
    // Which the launchpad does not have.
    let own = run_probe(&shim, "own.1", escape("/bin/busybox"), 0o755, open);
    assert_eq!(own, ContainerState::Exited { code: 0 });
}

#[test]
fn a_fork_bomb_stays_within_its_limit_and_dies_with_its_init() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    // The shell that cannot fork any more ends; what it has forked and the init stay.
    let bomb = "(while true; do sleep 1000 & done 2>/dev/null) & exec sleep 1000";
    let launched = client.launch(shim.spec("bomb.1", bomb)).expect("launched");
    let cgroup = format!("{}/bomb.1", shim.cgroup);
    let cgroups = Cgroups::detect().expect("detected");
    let full = until(|| cgroups.pids_below(&cgroup).len() >= 30);
    assert!(full, "{:?}", cgroups.pids_below(&cgroup));
    assert!(cgroups.pids_below(&cgroup).len() <= 32);
    let process = launched.process.as_ref().expect("a hold");
    process.kill().expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
    assert!(conman_observer::alive_below(&cgroup).is_empty());
}

#[test]
fn a_memory_hog_is_killed_by_its_own_limit() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let hog = "exec dd if=/dev/zero of=/dev/null bs=200M count=1";
    let launched = client.launch(shim.spec("hog.1", hog)).expect("launched");
    wait_dead(&launched);
    let ended = next_end(&mut client);
    assert_eq!(ended.state, ContainerState::Signalled { signal: 9 });
    // The control: within the limit it ends well.
    let modest = "exec dd if=/dev/zero of=/dev/null bs=8M count=1";
    let launched = client
        .launch(shim.spec("modest.1", modest))
        .expect("launched");
    wait_dead(&launched);
    assert_eq!(
        next_end(&mut client).state,
        ContainerState::Exited { code: 0 }
    );
}

#[test]
fn neither_a_shared_id_nor_another_containers_files_are_in_reach() {
    if !available() || !has_own_ids() {
        return;
    }
    let shim = Shim::start();
    let first = shim.output(shim.spec("a.1", "cat /proc/self/uid_map"));
    let second = shim.output(shim.spec("b.1", "cat /proc/self/uid_map"));
    let base = |text: &str| {
        text.split_ascii_whitespace()
            .nth(1)
            .and_then(|id| id.parse::<u32>().ok())
    };
    assert!(base(&first).expect("an id") >= 0x8000_0000);
    assert_ne!(base(&first), base(&second));
}
