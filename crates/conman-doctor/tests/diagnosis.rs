//! An invented machine, examined and mended.

use std::fs;
use std::path::Path;

use conman_doctor::{Diagnosis, Fix, Footprint, Host, Remedy, Site, Verdict, examine, room};
use tempfile::TempDir;

/// `/proc/meminfo`, with what every kernel writes.
fn meminfo(available_kib: u64) -> String {
    let others = [
        "MemFree",
        "Buffers",
        "Cached",
        "SwapCached",
        "Active",
        "Inactive",
        "SwapTotal",
        "SwapFree",
        "Dirty",
        "Writeback",
        "Mapped",
        "Slab",
        "Committed_AS",
        "VmallocTotal",
        "VmallocUsed",
        "VmallocChunk",
    ];
    let others: String = others.map(|name| format!("{name}:  0 kB\n")).concat();
    format!("MemTotal: 65000000 kB\nMemAvailable:   {available_kib} kB\n{others}")
}

/// `/proc/PID/limits` with this limit of open files.
fn limits(files: &str) -> String {
    let others = [
        "cpu time",
        "file size",
        "data size",
        "stack size",
        "core file size",
        "resident set",
        "processes",
        "locked memory",
        "address space",
        "file locks",
        "pending signals",
        "msgqueue size",
        "realtime timeout",
    ];
    let others = others.map(|name| format!("Max {name}  unlimited  unlimited  units\n"));
    let priorities = "Max nice priority  0  0\nMax realtime priority  0  0\n";
    let files = format!("Max open files  {files}  {files}  files\n");
    others.concat() + priorities + &files
}

/// A small machine with a dockerd; every limit but those that a test changes is ample.
fn machine() -> TempDir {
    let root = tempfile::tempdir().expect("a temporary directory can be made");
    for (path, text) in [
        ("proc/loadavg", "0.10 0.20 0.30 1/400 12345\n"),
        ("proc/sys/kernel/pid_max", "4194304\n"),
        ("proc/sys/kernel/threads-max", "1000000\n"),
        ("proc/sys/kernel/pty/max", "4096\n"),
        ("proc/sys/kernel/pty/nr", "3\n"),
        ("proc/sys/kernel/keys/root_maxkeys", "1000000\n"),
        ("proc/sys/kernel/keys/root_maxbytes", "25000000\n"),
        ("proc/key-users", "    0:     9 8/8 3/1000000 40/25000000\n"),
        ("proc/sys/fs/file-max", "400000000\n"),
        ("proc/sys/fs/file-nr", "1000\t0\t9000000\n"),
        ("proc/sys/fs/mount-max", "100000\n"),
        ("proc/sys/fs/inotify/max_user_instances", "128\n"),
        ("proc/sys/fs/epoll/max_user_watches", "900000\n"),
        ("proc/sys/user/max_pid_namespaces", "96000\n"),
        ("proc/sys/user/max_mnt_namespaces", "96000\n"),
        ("proc/sys/user/max_net_namespaces", "96000\n"),
        ("proc/sys/user/max_ipc_namespaces", "96000\n"),
        ("proc/sys/user/max_uts_namespaces", "96000\n"),
        ("proc/sys/net/core/somaxconn", "4096\n"),
        ("proc/sys/net/core/bpf_jit_limit", "800000000\n"),
        ("proc/sys/net/ipv4/tcp_tw_reuse", "1\n"),
        ("proc/sys/net/core/netdev_max_backlog", "30000\n"),
        ("proc/sys/net/ipv4/neigh/default/gc_thresh3", "65536\n"),
        ("proc/1/mountinfo", "1\n2\n3\n"),
        (
            "proc/cgroups",
            "#subsys_name\thierarchy\tnum_cgroups\tenabled\nmemory\t4\t50\t1\n",
        ),
        ("proc/meminfo", &meminfo(64_000_000)),
        ("proc/self/limits", &limits("1048576")),
        ("proc/77/comm", "dockerd\n"),
        ("proc/77/limits", &limits("1048576")),
        ("proc/77/cgroup", "0::/system.slice/docker.service\n"),
        ("proc/77/fd/0", ""),
        ("sys/fs/cgroup/cgroup.controllers", "cpu io memory pids\n"),
        ("sys/fs/cgroup/system.slice/pids.max", "max\n"),
        (
            "sys/fs/cgroup/system.slice/docker.service/pids.max",
            "max\n",
        ),
        (
            "sys/fs/cgroup/system.slice/docker.service/pids.current",
            "30\n",
        ),
        ("etc/docker/daemon.json", "{\"live-restore\": true}\n"),
    ] {
        write(root.path(), path, text);
    }
    root
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
    fs::write(path, text).expect("it can be written");
}

fn diagnose(root: &TempDir, target: u64) -> Diagnosis {
    let host = Host::below(root.path());
    let footprint = Footprint::docker(false, false);
    examine(&host, &footprint, target, &at_root())
}

fn at_root() -> Site<'static> {
    Site {
        folders: &["/"],
        ..Site::default()
    }
}

fn binding(diagnosis: &Diagnosis) -> Vec<&'static str> {
    let binds = |verdict| verdict == Verdict::Binds;
    let checks = diagnosis.checks.iter();
    checks
        .filter(|check| binds(check.verdict))
        .map(|check| check.name)
        .collect()
}

#[test]
fn an_ample_machine_is_fit_and_says_what_would_bind_next() {
    let root = machine();
    let diagnosis = diagnose(&root, 1_000);
    assert!(diagnosis.is_fit(), "{}", diagnosis.to_text());
    assert!(Fix::plan(&diagnosis).is_empty());
    let text = diagnosis.to_text();
    assert!(text.contains("fit for 1000 docker sessions"), "{text}");
    assert!(diagnosis.holds.is_some_and(|holds| holds >= 1_000));
}

#[test]
fn a_limit_binds_at_what_is_left_of_it_over_what_a_session_takes() {
    let root = machine();
    write(root.path(), "proc/sys/kernel/pid_max", "32768\n");
    let diagnosis = diagnose(&root, 10_000);
    assert_eq!(binding(&diagnosis), ["kernel.pid_max"]);
    assert_eq!(diagnosis.first_limit, Some("kernel.pid_max"));
    assert_eq!(diagnosis.holds, Some((32_768 - 400) / 14));
    let check = &diagnosis.checks[0];
    // 10,000 sessions of 14 tasks, 400 others, and a quarter more.
    assert_eq!(check.needed, Some(175_500));
    assert_eq!(
        check.remedy,
        Some(Remedy::Sysctl {
            key: "kernel.pid_max",
            value: 175_500
        })
    );
    assert!(
        diagnosis
            .to_text()
            .contains("sysctl -w kernel.pid_max=175500")
    );
}

#[test]
fn what_no_kernel_setting_mends_is_left_to_its_owner() {
    let root = machine();
    let cgroup = "sys/fs/cgroup/system.slice/docker.service/pids.max";
    write(root.path(), cgroup, "4915\n");
    write(root.path(), "proc/77/limits", &limits("20000"));
    let diagnosis = diagnose(&root, 10_000);
    assert_eq!(
        binding(&diagnosis),
        ["dockerd: pids.max", "dockerd: nofile"]
    );
    assert_eq!(diagnosis.holds, Some((4_915 - 30) / 12));
    assert!(Fix::plan(&diagnosis).is_empty());
    let text = diagnosis.to_text();
    assert!(text.contains("TasksMax=infinity"), "{text}");
    assert!(text.contains("LimitNOFILE=65002"), "{text}");
}

#[test]
fn what_cannot_be_read_is_unknown_and_binds_nowhere() {
    let root = machine();
    fs::remove_file(root.path().join("proc/sys/fs/mount-max")).expect("it is there");
    let diagnosis = diagnose(&root, 1_000);
    let unknown: Vec<_> = diagnosis
        .checks
        .iter()
        .filter(|check| check.verdict == Verdict::Unknown)
        .map(|check| check.name)
        .collect();
    assert_eq!(unknown, ["fs.mount-max"]);
    assert!(diagnosis.is_fit());
}

#[test]
fn dockers_bridge_and_unified_cgroups_bring_limits_of_their_own() {
    let root = machine();
    let host = Host::below(root.path());
    let footprint = Footprint::docker(true, host.has_unified_cgroups());
    write(root.path(), "etc/docker/daemon.json", "{}");
    let diagnosis = examine(&host, &footprint, 2_000, &at_root());
    assert_eq!(
        binding(&diagnosis),
        ["fs.inotify.max_user_instances", "bridge ports"]
    );
    let last = diagnosis.checks.last().expect("live-restore");
    assert_eq!((last.name, last.verdict), ("live-restore", Verdict::Advice));
}

#[test]
fn a_fix_raises_settings_keeps_earlier_ones_and_goes_on_after_a_failure() {
    let root = machine();
    write(root.path(), "proc/sys/kernel/pid_max", "32768\n");
    write(root.path(), "proc/sys/fs/mount-max", "100\n");
    write(
        root.path(),
        "etc/sysctl.d/90-conman.conf",
        "# before: 1\nkernel.pty.max = 9999\nfs.mount-max = 200\n",
    );
    let fix = Fix::plan(&diagnose(&root, 10_000));
    // A folder where the setting should be cannot be written.
    fs::remove_file(root.path().join("proc/sys/kernel/pid_max")).expect("it is there");
    fs::create_dir(root.path().join("proc/sys/kernel/pid_max")).expect("it can be made");
    let applied = fix.apply(&Host::below(root.path()));
    assert_eq!(applied.set, ["fs.mount-max = 12504"]);
    assert_eq!(applied.failed.len(), 1, "{:?}", applied.failed);
    let read = |path: &str| fs::read_to_string(root.path().join(path)).expect("it is there");
    assert_eq!(read("proc/sys/fs/mount-max"), "12504");
    assert_eq!(
        read("etc/sysctl.d/90-conman.conf"),
        "# Written by `conman doctor --target 10000 --fix`.\n\
         # before: 32768\nkernel.pid_max = 175500\n\
         # before: 100\nfs.mount-max = 12504\n\
         kernel.pty.max = 9999\n"
    );
}

#[test]
fn reclaim_ahead_of_need_is_switched_off_where_it_would_visit_many_memory_cgroups() {
    let root = machine();
    let key = "vm.watermark_boost_factor";
    write(root.path(), "proc/sys/vm/watermark_boost_factor", "15000\n");
    let few = diagnose(&root, 2_000);
    assert!(few.checks.iter().all(|check| check.name != key));
    let many = diagnose(&root, 10_000);
    let check = |diagnosis: &Diagnosis| {
        let mut checks = diagnosis.checks.iter();
        let check = checks.find(|check| check.name == key);
        check.expect("looked at").clone()
    };
    assert_eq!(check(&many).verdict, Verdict::Advice);
    assert_eq!(check(&many).binds_at, None);
    let applied = Fix::plan(&many).apply(&Host::below(root.path()));
    assert_eq!(applied.set, ["vm.watermark_boost_factor = 0"]);
    let mended = diagnose(&root, 10_000);
    assert_eq!(check(&mended).verdict, Verdict::Enough);
    assert!(Fix::plan(&mended).is_empty());
}

#[test]
fn terminals_for_all_that_sessions_may_open_are_advised_and_refuse_no_session() {
    let root = machine();
    write(root.path(), "proc/sys/kernel/pty/reserve", "1024\n");
    let host = Host::below(root.path());
    let check = |target| {
        let diagnosis = examine(&host, &Footprint::native(10_000), target, &at_root());
        let mut checks = diagnosis.checks.into_iter();
        checks.find(|check| check.name == "kernel.pty.max")
    };
    let few = check(768).expect("checked");
    assert_eq!((few.verdict, few.needed), (Verdict::Enough, Some(4_096)));
    let many = check(1_000).expect("checked");
    assert_eq!((many.verdict, many.binds_at), (Verdict::Advice, None));
    let (key, value) = ("kernel.pty.max", 5_024);
    assert_eq!(many.remedy, Some(Remedy::Sysctl { key, value }));
}

#[test]
fn native_sessions_meet_no_limit_of_dockers_and_some_of_their_own() {
    let root = machine();
    for (path, text) in [
        ("proc/sys/user/max_user_namespaces", "9000\n"),
        ("proc/sys/user/max_cgroup_namespaces", "96000\n"),
        ("proc/sys/fs/mount-max", "10\n"),
        ("proc/77/limits", limits("10").as_str()),
    ] {
        write(root.path(), path, text);
    }
    let host = Host::below(root.path());
    let footprint = Footprint::native(16_384);
    let diagnosis = examine(&host, &footprint, 20_000, &at_root());
    assert_eq!(
        binding(&diagnosis),
        ["user.max_user_namespaces", "ranges of ids"]
    );
    assert_eq!(diagnosis.holds, Some(9_000));
    let names: Vec<_> = diagnosis.checks.iter().map(|check| check.name).collect();
    for absent in ["dockerd: nofile", "live-restore", "fs.mount-max"] {
        assert!(!names.contains(&absent), "{names:?}");
    }
    assert!(
        Fix::plan(&diagnosis)
            .file_text()
            .contains("user.max_user_namespaces = 25000")
    );
}

#[test]
fn pools_that_one_session_could_exhaust_are_made_larger_than_it_can_take() {
    let root = machine();
    for (path, text) in [
        ("proc/sys/net/core/bpf_jit_limit", "10000000\n"),
        ("proc/sys/fs/file-max", "2000000\n"),
        ("proc/sys/net/ipv4/tcp_tw_reuse", "2\n"),
        ("proc/sys/user/max_user_namespaces", "96000\n"),
        ("proc/sys/user/max_cgroup_namespaces", "96000\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
    ] {
        write(root.path(), path, text);
    }
    let host = Host::below(root.path());
    let diagnosis = examine(&host, &Footprint::native(16_384), 5_000, &at_root());
    assert_eq!(binding(&diagnosis), ["net.core.bpf_jit_limit"]);
    let mut checks = diagnosis.checks.iter();
    let ports = checks.find(|check| check.name == "net.ipv4.tcp_tw_reuse");
    assert_eq!(ports.map(|check| check.verdict), Some(Verdict::Advice));
    let bandwidth = checks.find(|check| check.name == "io controller");
    assert_eq!(bandwidth.map(|check| check.verdict), Some(Verdict::Advice));
    let text = Fix::plan(&diagnosis).file_text();
    for line in [
        "net.core.bpf_jit_limit = 102400000",
        // As many as all memory holds.
        "fs.file-max = 346666666",
    ] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn the_limit_of_the_sessions_cgroup_or_of_one_above_binds_at_what_is_left_of_it() {
    let root = machine();
    for (path, text) in [
        ("pids/sessions.slice/pids.max", "1000\n"),
        ("pids/sessions.slice/pids.current", "100\n"),
        ("pids/sessions.slice/conman-1/pids.max", "max\n"),
        (
            "memory/sessions.slice/memory.limit_in_bytes",
            "9223372036854771712\n",
        ),
        ("unified/sessions.slice/cgroup.max.descendants", "500\n"),
        (
            "unified/sessions.slice/cgroup.stat",
            "nr_descendants 50\nnr_dying_descendants 7\n",
        ),
    ] {
        write(root.path(), &format!("sys/fs/cgroup/{path}"), text);
    }
    let host = Host::below(root.path());
    let site = Site {
        cgroup: Some("/sessions.slice/conman-1"),
        ..at_root()
    };
    let diagnosis = examine(&host, &Footprint::native(16_384), 1_000, &site);
    assert_eq!(
        binding(&diagnosis),
        ["sessions: pids.max", "sessions: cgroup.max.descendants"]
    );
    assert_eq!(diagnosis.holds, Some(450));
    let text = diagnosis.to_text();
    let file = "/sys/fs/cgroup/pids/sessions.slice/pids.max";
    assert!(text.contains(&format!("raise {file}")), "{text}");
}

#[test]
fn what_there_is_counts_against_limits_that_the_kernel_keeps_no_count_of() {
    let root = machine();
    write(root.path(), "proc/sys/user/max_user_namespaces", "1000\n");
    write(
        root.path(),
        "proc/sys/user/max_cgroup_namespaces",
        "96000\n",
    );
    write(root.path(), "proc/self/fd/0", "");
    let host = Host::below(root.path());
    let footprint = Footprint::native(16_384);
    let with = |alive| Site {
        alive: Some(alive),
        ..at_root()
    };
    // 900 there are: 100 more do, 101 do not.
    assert_eq!(room(&host, &footprint, 100, &with(900)), None);
    let first = room(&host, &footprint, 101, &with(900)).expect("it binds");
    assert_eq!(first.name, "user.max_user_namespaces");
    assert_eq!((first.binds_at, first.used), (Some(100), Some(900)));
    let remedy = first.remedy.expect("a remedy").to_text();
    assert_eq!(remedy, "sysctl -w user.max_user_namespaces=1252");
}

#[test]
fn the_files_that_the_daemon_has_open_are_part_of_the_limit_that_is_proposed() {
    let root = machine();
    write(root.path(), "proc/self/limits", &limits("200"));
    for number in 0..150 {
        write(root.path(), &format!("proc/self/fd/{number}"), "");
    }
    let site = Site {
        alive: Some(900),
        ..at_root()
    };
    let host = Host::below(root.path());
    let first = room(&host, &Footprint::native(16_384), 100, &site).expect("it binds");
    assert_eq!(first.name, "conman: nofile");
    let remedy = first.remedy.expect("a remedy").to_text();
    let proposed = remedy.split_once("LimitNOFILE=").expect("a number").1;
    let proposed = proposed.split_once(' ').expect("a sentence").0;
    let proposed: u64 = proposed.parse().expect("a number");
    // Those that are open, one for each session more, and two for a tunnel to each.
    assert!(proposed > 150 + 100 + 2 * 1_000, "{remedy}");
}

#[test]
fn watches_of_descriptors_bind_where_the_kernel_allows_few_and_can_be_raised() {
    let root = machine();
    write(root.path(), "proc/sys/fs/epoll/max_user_watches", "10000\n");
    let host = Host::below(root.path());
    let diagnosis = examine(&host, &Footprint::native(100_000), 10_000, &at_root());
    let name = "fs.epoll.max_user_watches";
    let check = diagnosis.checks.iter().find(|check| check.name == name);
    let check = check.expect("looked at");
    assert_eq!(
        (check.verdict, check.binds_at),
        (Verdict::Binds, Some(5_000))
    );
    let Some(Remedy::Sysctl { key, value }) = &check.remedy else {
        panic!("{:?}", check.remedy);
    };
    assert!(*key == name && *value >= 20_000);
    // Those that live take their part.
    let site = Site {
        alive: Some(4_000),
        ..at_root()
    };
    let binding = room(&host, &Footprint::native(100_000), 10_000, &site).expect("binds");
    assert_eq!((binding.name, binding.binds_at), (name, Some(1_000)));
    // So do further descriptors of each.
    let footprint = Footprint::native(100_000).with_descriptors(3);
    let binding = room(&host, &footprint, 10_000, &at_root()).expect("binds");
    assert_eq!((binding.name, binding.binds_at), (name, Some(2_000)));
}

#[test]
fn filters_that_programs_have_count_against_the_memory_for_them_and_those_inherited_once() {
    let root = machine();
    for (pid, parent, filters) in [(1, 0, 0), (10, 1, 2), (11, 10, 2), (12, 10, 3), (13, 1, 0)] {
        let status =
            format!("Name:\tx\nPPid:\t{parent}\nSeccomp:\t2\nSeccomp_filters:\t{filters}\n");
        write(root.path(), &format!("proc/{pid}/status"), &status);
    }
    let host = Host::below(root.path());
    let used = |footprint: &Footprint| {
        let diagnosis = examine(&host, footprint, 10, &at_root());
        let mut checks = diagnosis.checks.into_iter();
        let check = checks.find(|check| check.name == "net.core.bpf_jit_limit");
        check.map(|check| (check.used, check.per_session))
    };
    // Process 10 has two, process 12 one more.
    let three = Some(3 * 8 * 1_024);
    assert_eq!(used(&Footprint::native(16)), Some((three, 16_384.0)));
    assert_eq!(used(&Footprint::gvisor(16)), Some((three, 12_288.0)));
}
