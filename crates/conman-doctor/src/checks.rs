//! Which limits are checked, and what each means for a number of sessions.

use crate::advice::advice;
use crate::diagnosis::{Check, Diagnosis, Verdict};
use crate::footprint::Footprint;
use crate::host::Host;
use crate::limit::{Limit, Raise, proposal};
use crate::pools;
use crate::site::Site;

/// Greatest `kernel.pid_max` of a 64-bit kernel: `PID_MAX_LIMIT`.
const HIGHEST_PID_MAX: u64 = 4_194_304;
/// No greater value is proposed for other kernel settings: some are signed, and of 32 bits.
pub(crate) const HIGHEST_SETTING: u64 = u64::MAX >> 33;
/// Ports of a Linux bridge: `BR_MAX_PORTS` less one, as attaching the 1,024th fails with
/// "exchange full".
const BRIDGE_PORTS: u64 = 1_023;
/// Ids that the kernel has for memory cgroups: `MEM_CGROUP_ID_MAX` (include/linux/memcontrol.h).
const MEMORY_CGROUP_IDS: u64 = 65_535;
/// Memory that is left to the daemons and the kernel, in bytes.
const MEMORY_RESERVE_BYTES: u64 = 1 << 30;
/// Available memory below which sessions are refused: with less, the kernel begins to kill.
const MEMORY_FLOOR_BYTES: u64 = 64 << 20;
/// Descriptors that conman's daemon needs in addition to those of its sessions.
const CONMAN_RESERVE: u64 = 512;
/// Descriptors reserved for requests to conman's daemon; sessions are refused before they are used.
const CONMAN_FLOOR: u64 = 64;

/// Returns the limit that binds first before there are `wanted` sessions more than `site.alive`, if one
/// does.
pub fn room(host: &Host, footprint: &Footprint, wanted: u64, site: &Site<'_>) -> Option<Check> {
    let diagnosis = examine(host, footprint, wanted, site);
    let binding = diagnosis.checks.into_iter();
    binding
        .filter(|check| check.verdict == Verdict::Binds)
        .min_by_key(|check| check.binds_at)
}

/// Checks what a host lacks for `target` sessions of a runtime's footprint, in addition to existing ones.
pub fn examine(host: &Host, footprint: &Footprint, target: u64, site: &Site<'_>) -> Diagnosis {
    let limits = [
        tasks_and_files(host, footprint),
        namespaces(host, footprint, site),
        kernel_objects(host, footprint, site),
        bridge(host, footprint),
        fixed(host, footprint, site),
        sessions_cgroup(host, footprint, site),
        daemons(host, footprint, target, site),
        space(host, footprint, site),
    ];
    let limits = limits.into_iter().flatten();
    let checks = limits
        .filter(|limit| limit.each > 0.0)
        .map(|limit| limit.judge(target))
        .chain(advice(host, footprint, target, site));
    let checks: Vec<Check> = checks.collect();
    let first = checks
        .iter()
        .filter_map(|check| Some((check.binds_at?, check.name)))
        .min();
    Diagnosis {
        target,
        runtime: footprint.runtime.to_owned(),
        holds: first.map(|(sessions, _)| sessions),
        first_limit: first.map(|(_, name)| name),
        checks,
    }
}

/// A limit that is a kernel setting.
pub(crate) fn setting(
    host: &Host,
    name: &'static str,
    bounds: &'static str,
    used: Option<u64>,
    each: f64,
) -> Limit {
    let highest = match name {
        "kernel.pid_max" => HIGHEST_PID_MAX,
        "kernel.threads-max" | "fs.file-max" => u64::MAX,
        _ => HIGHEST_SETTING,
    };
    let raise = Raise::Sysctl { highest };
    Limit::new(name, bounds, host.sysctl(name), used, each, raise)
}

fn tasks_and_files(host: &Host, footprint: &Footprint) -> Vec<Limit> {
    let tasks = host.tasks();
    let (each, files) = (footprint.tasks, footprint.open_files);
    vec![
        setting(host, "kernel.pid_max", "ids of tasks", tasks, each),
        setting(host, "kernel.threads-max", "tasks", tasks, each),
        setting(host, "fs.file-max", "open files", host.open_files(), files),
    ]
}

fn namespaces(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Vec<Limit> {
    let own_user = footprint.user_namespaces;
    let kinds = [
        ("user.max_pid_namespaces", "PID namespaces", 1.0),
        ("user.max_mnt_namespaces", "mount namespaces", 1.0),
        ("user.max_net_namespaces", "network namespaces", 1.0),
        ("user.max_ipc_namespaces", "IPC namespaces", 1.0),
        ("user.max_uts_namespaces", "UTS namespaces", 1.0),
        ("user.max_user_namespaces", "user namespaces", own_user),
        ("user.max_cgroup_namespaces", "cgroup namespaces", own_user),
    ];
    // The kernel does not report how many exist; other programs of such a host use few.
    kinds
        .into_iter()
        .map(|(name, bounds, each)| setting(host, name, bounds, site.alive, each))
        .collect()
}

/// Mounts, and objects that the kernel counts for each user.
fn kernel_objects(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Vec<Limit> {
    let (keys, key_bytes) = host.root_keys().unzip();
    // The kernel does not report these; other programs of such a host use few.
    let watched = site
        .alive
        .map(|alive| alive * u64::from(footprint.epoll_watches));
    let mounts = footprint.host_mounts;
    vec![
        setting(host, "fs.mount-max", "mounts", host.mounts(), mounts),
        setting(
            host,
            "kernel.keys.root_maxkeys",
            "keys of root",
            keys,
            footprint.root_keys,
        ),
        setting(
            host,
            "kernel.keys.root_maxbytes",
            "bytes of keys of root",
            key_bytes,
            footprint.root_key_bytes,
        ),
        setting(
            host,
            "fs.epoll.max_user_watches",
            "descriptors that root's programs wait for by epoll",
            watched,
            f64::from(footprint.epoll_watches),
        ),
        pools::compiled_filters(host, footprint, site),
        setting(
            host,
            "fs.inotify.max_user_instances",
            "inotify instances of root",
            None,
            footprint.inotify_instances,
        ),
    ]
}

/// Settings that sessions on Docker's bridge need.
fn bridge(host: &Host, footprint: &Footprint) -> Vec<Limit> {
    let ports = footprint.bridge_ports;
    vec![
        setting(
            host,
            "net.ipv4.neigh.default.gc_thresh3",
            "entries of the ARP table, without which no session on the bridge is reached",
            None,
            ports,
        ),
        setting(
            host,
            "net.core.netdev_max_backlog",
            "packets that wait for a CPU, of ARP requests that go to every port of the bridge at once",
            None,
            ports,
        ),
    ]
}

/// Limits that cannot be raised.
fn fixed(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Vec<Limit> {
    let fixed = |name, bounds, value, used, each, what: &str| {
        let raise = Raise::Manual(what.to_owned());
        Limit::new(name, bounds, Some(value), used, each, raise)
    };
    vec![
        fixed(
            "ranges of ids",
            "user and group ids on the host, a range of them for each session",
            footprint.id_ranges_there_are,
            site.alive,
            footprint.id_ranges,
            "widen `node.id_range`; where that has all ids, spread the sessions over more machines",
        ),
        fixed(
            "memory cgroups",
            "ids that the kernel has for memory cgroups, dying ones included",
            MEMORY_CGROUP_IDS,
            host.memory_cgroups(),
            footprint.memory_cgroups,
            "spread the sessions over more machines: the kernel has no more ids",
        ),
        fixed(
            "bridge ports",
            "containers on one bridge",
            BRIDGE_PORTS,
            host.entries("/sys/class/net/docker0/brif"),
            footprint.bridge_ports,
            "use `network = \"loopback\"`, which needs no bridge, for sessions without egress",
        ),
    ]
}

/// Limits of the cgroup above all sessions, or of one of its ancestors.
fn sessions_cgroup(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Vec<Limit> {
    let Some(cgroup) = site.cgroup else {
        return Vec::new();
    };
    let memory = [
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ];
    let limits = [
        (
            "sessions: pids.max",
            "processes and threads of all sessions",
            host.cgroup_limit("pids", cgroup, &[("pids.max", "pids.current")]),
            footprint.tasks - footprint.daemon_tasks,
            footprint.start_tasks,
        ),
        (
            "sessions: memory",
            "bytes of memory of all sessions",
            host.cgroup_limit("memory", cgroup, &memory),
            footprint.memory_bytes,
            0,
        ),
        (
            "sessions: cgroup.max.descendants",
            "cgroups of all sessions",
            host.cgroup_limit("", cgroup, &[("cgroup.max.descendants", "cgroup.stat")]),
            footprint.memory_cgroups,
            0,
        ),
    ];
    // Without a limit there is nothing to report.
    let limits = limits
        .into_iter()
        .filter_map(|(name, bounds, found, each, reserve)| {
            let found = found?;
            let raise = Raise::Manual(format!(
                "raise {}, or the matching setting of the systemd unit or slice that it belongs to",
                found.file
            ));
            let used = found.used.map(|used| used + reserve);
            Some(Limit::new(
                name,
                bounds,
                Some(found.limit),
                used,
                each,
                raise,
            ))
        });
    limits.collect()
}

/// Limits of conman's daemon, and of Docker's.
fn daemons(host: &Host, footprint: &Footprint, target: u64, site: &Site<'_>) -> Vec<Limit> {
    let named = [
        (
            "dockerd",
            "dockerd: nofile",
            "dockerd: pids.max",
            footprint.dockerd_files,
        ),
        (
            "containerd",
            "containerd: nofile",
            "containerd: pids.max",
            footprint.containerd_files,
        ),
    ];
    let running = named.into_iter().filter(|_| footprint.daemon_tasks > 0.0);
    let running = running.filter_map(|daemon| Some((daemon, *host.processes(daemon.0).first()?)));
    let running: Vec<_> = running.collect();
    let mut limits = Vec::new();
    for ((daemon, _, name, _), pid) in &running {
        if let Some(found) = host.pids_limit_of(*pid) {
            limits.push(Limit::new(
                name,
                "processes and threads in the daemon's cgroup, the containers' shims among them",
                Some(found.limit),
                found.used,
                footprint.daemon_tasks,
                Raise::Manual(format!(
                    "set TasksMax=infinity in {daemon}'s systemd unit and restart it"
                )),
            ));
        }
    }
    let mut nofile = |name, pid: &str, used: Option<u64>, each, unit: &str, proposed| {
        let Some(value) = host.open_files_limit(pid) else {
            return;
        };
        let raise = Raise::Manual(format!(
            "set LimitNOFILE={proposed} in {unit}'s systemd unit, fs.nr_open no lower, and restart it"
        ));
        let bounds = "open files of the daemon";
        limits.push(Limit::new(name, bounds, value, used, each, raise));
    };
    // With sessions alive, this process is the daemon; every open tunnel takes two files more.
    let used = match site.alive {
        Some(_) => host
            .entries("/proc/self/fd")
            .map(|used| used + CONMAN_FLOOR),
        None => Some(CONMAN_RESERVE),
    };
    let each = footprint.conman_files;
    let of_tunnels = 2 * (target + site.alive.unwrap_or_default());
    let proposed = proposal(each, target, used.unwrap_or(CONMAN_RESERVE) + of_tunnels);
    nofile("conman: nofile", "self", used, each, "conman", proposed);
    for ((daemon, name, _, each), pid) in running {
        let used = host.entries(&format!("/proc/{pid}/fd"));
        let proposed = proposal(each, target, used.unwrap_or_default());
        nofile(name, &pid.to_string(), used, each, daemon, proposed);
    }
    limits
}

fn space(host: &Host, footprint: &Footprint, site: &Site<'_>) -> Vec<Limit> {
    let reserve = match site.alive {
        Some(_) => MEMORY_FLOOR_BYTES,
        None => MEMORY_RESERVE_BYTES,
    };
    let limit = |name, bounds, value, used, each, what: String| {
        Limit::new(name, bounds, value, used, each, Raise::Manual(what))
    };
    let mut limits = vec![limit(
        "memory",
        "available bytes, without what the sessions' programs need",
        host.available_memory(),
        Some(reserve),
        footprint.memory_bytes,
        "use a machine with more memory, or a runtime that needs less".to_owned(),
    )];
    if site.folders.is_empty() {
        return limits;
    }
    let spaces = site.folders.iter().filter_map(|folder| host.space(folder));
    let (bytes, inodes) = spaces.min().unzip();
    let folders = site.folders.join(", ");
    limits.push(limit(
        "disk",
        "free bytes, without what the sessions' programs write",
        bytes,
        None,
        footprint.disk_bytes,
        format!("make room below {folders}"),
    ));
    // Some file systems have no fixed number of inodes, and report 0.
    if inodes != Some(0) {
        limits.push(limit(
            "inodes",
            "free inodes",
            inodes,
            None,
            footprint.inodes,
            format!("use a file system with more inodes below {folders}"),
        ));
    }
    limits
}
