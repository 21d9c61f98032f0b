//! Which limits are checked, and what each means for a number of sessions.

mod draft;
mod processes;

use crate::diagnosis::{Check, Diagnosis, Remedy, Verdict};
use crate::footprint::Footprint;
use crate::host::Host;
use crate::site::Site;
use draft::Draft;
use processes::{files, sessions_cgroup, tasks};

/// Ports of a Linux bridge: `BR_MAX_PORTS` less one, as attaching the 1,024th fails with
/// "exchange full".
const BRIDGE_PORTS: u64 = 1_023;
/// Ids that the kernel has for memory cgroups: `MEM_CGROUP_ID_MAX` (include/linux/memcontrol.h).
const MEMORY_CGROUP_IDS: u64 = 65_535;
/// Number of memory cgroups from which walking all of them at each reclaim slows down starts: at 2,000
/// sessions it does not yet, at 10,000 it takes half of all processor time.
const MANY_MEMORY_CGROUPS: u64 = 2_000;
/// Greatest `kernel.pty.max`: `NR_UNIX98_PTY_MAX` (include/linux/tty.h).
const HIGHEST_PTY_MAX: u64 = 1 << 20;
/// Memory that is left to the daemons and the kernel, in bytes.
const MEMORY_RESERVE_BYTES: u64 = 1 << 30;
/// Available memory below which sessions are refused: with less, the kernel begins to kill.
const MEMORY_FLOOR_BYTES: u64 = 64 << 20;
/// Connections that a network namespace queues before they are accepted, for many clients that reconnect
/// at once after a preemption.
const BACKLOG: u64 = 4_096;

/// The inputs of every check.
#[derive(Clone, Copy)]
struct Exam<'a> {
    host: &'a Host,
    footprint: &'a Footprint,
    target: u64,
    site: &'a Site<'a>,
}

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
    let exam = Exam {
        host,
        footprint,
        target,
        site,
    };
    let mut checks = Vec::new();
    for look in [
        tasks,
        sessions_cgroup,
        files,
        namespaces,
        kernel_objects,
        reclaim,
        network,
        space,
        docker,
    ] {
        look(&exam, &mut checks);
    }
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

fn namespaces(
    &Exam {
        host,
        footprint,
        target,
        site,
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    let of_all = [
        ("user.max_pid_namespaces", "PID namespaces of root"),
        ("user.max_mnt_namespaces", "mount namespaces of root"),
        ("user.max_net_namespaces", "network namespaces of root"),
        ("user.max_ipc_namespaces", "IPC namespaces of root"),
        ("user.max_uts_namespaces", "UTS namespaces of root"),
    ];
    let of_own = [
        ("user.max_user_namespaces", "user namespaces of root"),
        ("user.max_cgroup_namespaces", "cgroup namespaces of root"),
    ];
    let of_own = of_own
        .into_iter()
        .filter(|_| footprint.user_namespaces > 0.0);
    for (key, bounds) in of_all.into_iter().chain(of_own) {
        // The kernel does not report the number in use; other programs of such a host use few.
        checks.push(
            Draft::new(key, bounds, host.sysctl(key), site.alive, 1.0)
                .sysctl(target, u64::MAX >> 33),
        );
    }
    if footprint.id_ranges > 0.0 {
        checks.push(
            Draft::new(
                "ranges of ids",
                "user and group ids on the host, a range of them for each session",
                Some(footprint.id_ranges_there_are),
                site.alive,
                footprint.id_ranges,
            )
            .manual(target, || {
                "spread the sessions over more machines: there are no more ids".to_owned()
            }),
        );
    }
}

fn kernel_objects(
    &Exam {
        host,
        footprint,
        target,
        site,
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    if footprint.host_mounts > 0.0 {
        let key = "fs.mount-max";
        checks.push(
            Draft::new(
                key,
                "mounts of one mount namespace",
                host.sysctl(key),
                host.mounts(),
                footprint.host_mounts,
            )
            .sysctl(target, u64::MAX >> 33),
        );
    }
    let (keys, key_bytes) = host.root_keys().unzip();
    let keys = [
        (
            "kernel.keys.root_maxkeys",
            "kernel keys of root",
            keys,
            footprint.root_keys,
        ),
        (
            "kernel.keys.root_maxbytes",
            "bytes of kernel keys of root",
            key_bytes,
            footprint.root_key_bytes,
        ),
    ];
    for (key, bounds, used, each) in keys {
        checks.push(
            Draft::new(key, bounds, host.sysctl(key), used, each).sysctl(target, u64::MAX >> 33),
        );
    }
    let key = "fs.epoll.max_user_watches";
    checks.push(
        Draft::new(
            key,
            "descriptors that root's programs wait for by epoll",
            host.sysctl(key),
            // The kernel does not report it.
            site.alive
                .map(|alive| alive * u64::from(footprint.epoll_watches)),
            f64::from(footprint.epoll_watches),
        )
        .sysctl(target, u64::MAX >> 33),
    );
    if footprint.inotify_instances > 0.0 {
        let key = "fs.inotify.max_user_instances";
        checks.push(
            Draft::new(
                key,
                "inotify instances of root",
                host.sysctl(key),
                None,
                footprint.inotify_instances,
            )
            .sysctl(target, u64::MAX >> 33),
        );
    }
    checks.push(
        Draft::new(
            "memory cgroups",
            "ids that the kernel has for memory cgroups, dying ones included",
            Some(MEMORY_CGROUP_IDS),
            host.memory_cgroups(),
            footprint.memory_cgroups,
        )
        .manual(target, || {
            "spread the sessions over more machines: the kernel has no more ids".to_owned()
        }),
    );
    terminals(host, footprint, target, checks);
}

/// Few sessions open all terminals that they may, so a lack of them is no reason to refuse a session. What
/// `kernel.pty.reserve` holds back for the host, sessions never get.
fn terminals(host: &Host, footprint: &Footprint, target: u64, checks: &mut Vec<Check>) {
    let key = "kernel.pty.max";
    let value = host.sysctl(key);
    let reserve = host.sysctl("kernel.pty.reserve").unwrap_or_default();
    let needed = (target.saturating_mul(footprint.ptys) + reserve).min(HIGHEST_PTY_MAX);
    let lacks = value.is_some_and(|value| value < needed);
    let draft = Draft::new(
        key,
        "terminals of the host and of all sessions",
        value,
        host.number("/proc/sys/kernel/pty/nr"),
        0.0,
    );
    let draft = draft.note(
        "one for each session with `tty`, each kept command, each `exec -it`; and up to `ptys` that \
         the programs of a native session open, 16 by default",
    );
    checks.push(Check {
        verdict: match value {
            None => Verdict::Unknown,
            Some(_) if lacks => Verdict::Advice,
            Some(_) => Verdict::Enough,
        },
        needed: Some(needed),
        remedy: lacks.then_some(Remedy::Sysctl { key, value: needed }),
        ..draft.check()
    });
}

/// Settings for reclaim, when memory is short or the kernel believes so.
fn reclaim(
    &Exam {
        host,
        footprint,
        target,
        ..
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    if footprint.memory_cgroups <= 0.0 || target <= MANY_MEMORY_CGROUPS {
        return;
    }
    let key = "vm.watermark_boost_factor";
    // A kernel without the setting does not boost.
    let Some(value) = host.sysctl(key) else {
        return;
    };
    checks.push(Check {
        verdict: match value {
            0 => Verdict::Enough,
            _ => Verdict::Advice,
        },
        needed: Some(0),
        remedy: (value > 0).then_some(Remedy::Sysctl { key, value: 0 }),
        note: Some(
            "after each shortage of large blocks the kernel reclaims although memory is free, and \
             asks every memory cgroup for what it can give: starts slow down with their number"
                .to_owned(),
        ),
        ..Draft::new(
            key,
            "memory that is reclaimed ahead, in 1/10,000 of the high watermark",
            Some(value),
            None,
            0.0,
        )
        .check()
    });
}

fn network(
    &Exam {
        host,
        footprint,
        target,
        ..
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    let key = "net.core.somaxconn";
    let value = host.sysctl(key);
    checks.push(Check {
        verdict: match value {
            None => Verdict::Unknown,
            Some(value) if value < BACKLOG => Verdict::Advice,
            Some(_) => Verdict::Enough,
        },
        needed: Some(BACKLOG),
        remedy: value
            .filter(|value| *value < BACKLOG)
            .map(|_| Remedy::Sysctl {
                key,
                value: BACKLOG,
            }),
        note: Some("clients that all reconnect at once wait in this queue".to_owned()),
        ..Draft::new(
            key,
            "connections that wait to be accepted",
            value,
            None,
            0.0,
        )
        .check()
    });
    if footprint.bridge_ports == 0.0 {
        return;
    }
    checks.push(
        Draft::new(
            "bridge ports",
            "containers on one bridge",
            Some(BRIDGE_PORTS),
            bridge_ports_used(host),
            footprint.bridge_ports,
        )
        .manual(target, || {
            "use `network = \"loopback\"`, which needs no bridge, for sessions without egress"
                .to_owned()
        }),
    );
    for (key, bounds, reason) in [
        (
            "net.ipv4.neigh.default.gc_thresh3",
            "entries of the ARP table",
            "sessions beyond it cannot be reached over the bridge",
        ),
        (
            "net.core.netdev_max_backlog",
            "packets that wait for a CPU",
            "ARP requests go to every port of the bridge at once",
        ),
    ] {
        checks.push(
            Draft::new(key, bounds, host.sysctl(key), None, footprint.bridge_ports)
                .note(reason)
                .sysctl(target, u64::MAX >> 33),
        );
    }
}

fn bridge_ports_used(host: &Host) -> Option<u64> {
    let ports = std::fs::read_dir(host.path("/sys/class/net/docker0/brif")).ok()?;
    u64::try_from(ports.count()).ok()
}

fn space(
    &Exam {
        host,
        footprint,
        target,
        site,
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    let reserve = match site.alive {
        Some(_) => MEMORY_FLOOR_BYTES,
        None => MEMORY_RESERVE_BYTES,
    };
    checks.push(
        Draft::new(
            "memory",
            "bytes that are available",
            host.available_memory(),
            Some(reserve),
            footprint.memory_bytes,
        )
        .note("the sessions' programs need memory in addition")
        .manual(target, || {
            "use a machine with more memory, or a runtime that needs less".to_owned()
        }),
    );
    let folders = site.folders;
    let Some(folder) = folders.first() else {
        return;
    };
    let (bytes, inodes) = folders
        .iter()
        .filter_map(|folder| host.space(folder))
        .min()
        .unzip();
    let where_to = folders.join(", ");
    checks.push(
        Draft::new("disk", "free bytes", bytes, None, footprint.disk_bytes)
            .note(&format!(
                "in {where_to}; the files of the sessions' programs need space in addition"
            ))
            .manual(target, || format!("make room below {folder}")),
    );
    // Some file systems have no fixed number of inodes, and report 0.
    if inodes != Some(0) {
        checks.push(
            Draft::new("inodes", "free inodes", inodes, None, footprint.inodes)
                .note(&format!("in {where_to}"))
                .manual(target, || {
                    format!("use a file system with more inodes below {folder}")
                }),
        );
    }
}

fn docker(
    &Exam {
        host, footprint, ..
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    if footprint.runtime != "docker" {
        return;
    }
    let configured = host
        .text("/etc/docker/daemon.json")
        .and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .and_then(|config| config.get("live-restore")?.as_bool());
    let lacks = configured != Some(true);
    let remedy = Remedy::Manual {
        what: "put \"live-restore\": true into /etc/docker/daemon.json and reload Docker \
               (`systemctl reload docker`)"
            .to_owned(),
    };
    let name = "live-restore";
    checks.push(Check {
        verdict: if lacks {
            Verdict::Advice
        } else {
            Verdict::Enough
        },
        remedy: lacks.then_some(remedy),
        note: Some("without it a restart of Docker stops every session".to_owned()),
        ..Draft::new(
            name,
            "whether containers survive a restart of Docker",
            None,
            None,
            0.0,
        )
        .check()
    });
}
