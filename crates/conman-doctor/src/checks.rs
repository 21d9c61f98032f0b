use crate::diagnosis::{Check, Diagnosis, Remedy, Verdict};
use crate::footprint::Footprint;
use crate::host::{CgroupLimit, Host, ProcessLimit};
use crate::site::Site;

/// Ports of a Linux bridge: `BR_MAX_PORTS` less one, as attaching the 1,024th fails with
/// "exchange full".
const BRIDGE_PORTS: u64 = 1_023;
/// Ids that the kernel has for memory cgroups: `MEM_CGROUP_ID_MAX` (include/linux/memcontrol.h).
const MEMORY_CGROUP_IDS: u64 = 65_535;
/// Greatest `kernel.pid_max` of a 64-bit kernel: `PID_MAX_LIMIT`.
const HIGHEST_PID_MAX: u64 = 4_194_304;
/// Left to everything else on the host when a value is proposed: a quarter.
const HEADROOM: f64 = 1.25;
/// Descriptors that conman's daemon needs beside those of its sessions.
const CONMAN_RESERVE: u64 = 512;
/// Memory that is left to the daemons and the kernel, in bytes.
const MEMORY_RESERVE_BYTES: u64 = 1 << 30;
/// What is left when sessions are refused for it: less, and the kernel begins to kill.
const MEMORY_FLOOR_BYTES: u64 = 64 << 20;
/// Descriptors that conman's daemon keeps for requests when sessions are refused for them.
const CONMAN_FLOOR: u64 = 64;
/// Connections that a network namespace queues before they are accepted, where many clients
/// come back at once after a preemption elsewhere.
const BACKLOG: u64 = 4_096;

/// The limit that binds first before there are `wanted` sessions more than `site.alive`, if one
/// does.
pub fn room(host: &Host, footprint: &Footprint, wanted: u64, site: &Site<'_>) -> Option<Check> {
    let diagnosis = examine(host, footprint, wanted, site);
    let binding = diagnosis.checks.into_iter();
    binding
        .filter(|check| check.verdict == Verdict::Binds)
        .min_by_key(|check| check.binds_at)
}

/// What a host lacks for `target` sessions of a runtime's footprint, beside those that are there.
pub fn examine(host: &Host, footprint: &Footprint, target: u64, site: &Site<'_>) -> Diagnosis {
    let mut checks = Vec::new();
    tasks(host, footprint, target, &mut checks);
    sessions_cgroup(host, footprint, target, site, &mut checks);
    files(host, footprint, target, site, &mut checks);
    namespaces(host, footprint, target, site, &mut checks);
    kernel_objects(host, footprint, target, &mut checks);
    network(host, footprint, target, &mut checks);
    space(host, footprint, target, site, &mut checks);
    docker(host, footprint, &mut checks);
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

fn tasks(host: &Host, footprint: &Footprint, target: u64, checks: &mut Vec<Check>) {
    let used = host.tasks();
    let note = "a session's program may use more, up to its own limit `pids`";
    for (key, bounds, highest) in [
        (
            "kernel.pid_max",
            "ids of processes and threads",
            HIGHEST_PID_MAX,
        ),
        ("kernel.threads-max", "processes and threads", u64::MAX),
    ] {
        let draft = Draft::new(key, bounds, host.sysctl(key), used, footprint.tasks).note(note);
        checks.push(draft.sysctl(target, highest));
    }
    if footprint.daemon_tasks <= 0.0 {
        return;
    }
    for daemon in ["dockerd", "containerd"] {
        let Some(&pid) = host.processes(daemon).first() else {
            continue;
        };
        let Some((limit, used)) = host.pids_limit_of(pid) else {
            continue;
        };
        let name = if daemon == "dockerd" {
            "dockerd: pids.max"
        } else {
            "containerd: pids.max"
        };
        checks.push(
            Draft::new(
                name,
                "processes and threads in the daemon's cgroup, the containers' shims among them",
                Some(limit),
                Some(used),
                footprint.daemon_tasks,
            )
            .manual(target, || {
                format!("set TasksMax=infinity in {daemon}'s systemd unit and restart it")
            }),
        );
    }
}

/// Limits that somebody set on the cgroup above all sessions, or on one above that.
fn sessions_cgroup(
    host: &Host,
    footprint: &Footprint,
    target: u64,
    site: &Site<'_>,
    checks: &mut Vec<Check>,
) {
    let Some(cgroup) = site.cgroup else {
        return;
    };
    let mut check = |name, bounds, limit: Option<CgroupLimit>, each: f64, reserve: u64| {
        // Without a limit there is nothing to tell.
        let Some(CgroupLimit { file, limit, used }) = limit else {
            return;
        };
        let mut draft = Draft::new(name, bounds, Some(limit), used, each);
        draft.reserve = reserve;
        checks.push(draft.manual(target, || {
            format!(
                "raise {file}, or the matching setting of the systemd unit or slice that it \
                 belongs to"
            )
        }));
    };
    check(
        "sessions: pids.max",
        "processes and threads of all sessions",
        host.cgroup_limit("pids", cgroup, &[("pids.max", "pids.current")]),
        footprint.tasks - footprint.daemon_tasks,
        footprint.start_tasks,
    );
    check(
        "sessions: memory",
        "bytes of memory of all sessions",
        host.cgroup_limit(
            "memory",
            cgroup,
            &[
                ("memory.max", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ],
        ),
        footprint.memory_bytes,
        0,
    );
    check(
        "sessions: cgroup.max.descendants",
        "cgroups of all sessions",
        host.cgroup_limit("", cgroup, &[("cgroup.max.descendants", "cgroup.stat")]),
        footprint.memory_cgroups,
        0,
    );
}

fn files(
    host: &Host,
    footprint: &Footprint,
    target: u64,
    site: &Site<'_>,
    checks: &mut Vec<Check>,
) {
    let key = "fs.file-max";
    checks.push(
        Draft::new(
            key,
            "open files of the host",
            host.sysctl(key),
            host.open_files(),
            footprint.open_files,
        )
        .sysctl(target, u64::MAX),
    );
    let own = host.limit_of("self", "Max open files");
    if own != Some(ProcessLimit::Unlimited) {
        let (used, note) = match site.alive {
            // The one who asks is the daemon.
            Some(_) => (
                host.own_files().map(|used| used + CONMAN_FLOOR),
                "every open tunnel takes two more",
            ),
            None => (
                Some(CONMAN_RESERVE),
                "every open tunnel takes two more; this is the limit of who runs the doctor",
            ),
        };
        checks.push(
            Draft::new(
                "conman: nofile",
                "open files of conman's daemon",
                number(own),
                used,
                footprint.conman_files,
            )
            .note(note)
            .manual(target, || {
                format!(
                    "set LimitNOFILE={} in conman's systemd unit, and fs.nr_open no lower",
                    proposal(footprint.conman_files, target, CONMAN_RESERVE + 2 * target)
                )
            }),
        );
    }
    for (daemon, name, each) in [
        ("dockerd", "dockerd: nofile", footprint.dockerd_files),
        (
            "containerd",
            "containerd: nofile",
            footprint.containerd_files,
        ),
    ] {
        if each <= 0.0 {
            continue;
        }
        let Some(&pid) = host.processes(daemon).first() else {
            continue;
        };
        let limit = host.limit_of(&pid.to_string(), "Max open files");
        if limit == Some(ProcessLimit::Unlimited) {
            continue;
        }
        let used = host.files_of(pid);
        checks.push(
            Draft::new(name, "open files of the daemon", number(limit), used, each).manual(
                target,
                || {
                    let value = proposal(each, target, used.unwrap_or_default());
                    format!("set LimitNOFILE={value} in {daemon}'s systemd unit and restart it")
                },
            ),
        );
    }
}

fn namespaces(
    host: &Host,
    footprint: &Footprint,
    target: u64,
    site: &Site<'_>,
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
        // The kernel does not tell how many there are; on a host for sessions few are others'.
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

fn kernel_objects(host: &Host, footprint: &Footprint, target: u64, checks: &mut Vec<Check>) {
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
    for (key, bounds, used, each) in keys.into_iter().filter(|key| key.3 > 0.0) {
        checks.push(
            Draft::new(key, bounds, host.sysctl(key), used, each).sysctl(target, u64::MAX >> 33),
        );
    }
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
    let key = "kernel.pty.max";
    checks.push(
        Draft::new(
            key,
            "terminals",
            host.sysctl(key),
            host.number("/proc/sys/kernel/pty/nr"),
            0.0,
        )
        .note("one for each `exec -it` under way")
        .sysctl(target, u64::MAX >> 33),
    );
}

fn network(host: &Host, footprint: &Footprint, target: u64, checks: &mut Vec<Check>) {
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
        note: Some("clients that all come back at once wait here for their turn".to_owned()),
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
    host: &Host,
    footprint: &Footprint,
    target: u64,
    site: &Site<'_>,
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
        .note("what the sessions' programs use comes on top")
        .manual(target, || {
            "use a machine with more memory, or a runtime with less of its own".to_owned()
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
                "in {where_to}; what the sessions' programs write comes on top"
            ))
            .manual(target, || format!("make room below {folder}")),
    );
    // Some file systems have no fixed number of them, and say 0.
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

fn docker(host: &Host, footprint: &Footprint, checks: &mut Vec<Check>) {
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
            "what a restart of Docker leaves alone",
            None,
            None,
            0.0,
        )
        .check()
    });
}

fn number(limit: Option<ProcessLimit>) -> Option<u64> {
    match limit? {
        ProcessLimit::At(limit) => Some(limit),
        ProcessLimit::Unlimited => None,
    }
}

/// What a limit must be for `target` sessions, with some room beside them.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "limits are far below 2^52, and a proposal need not be exact"
)]
fn proposal(each: f64, target: u64, used: u64) -> u64 {
    ((target as f64).mul_add(each, used as f64) * HEADROOM).ceil() as u64
}

/// A limit before it is judged.
struct Draft {
    name: &'static str,
    bounds: &'static str,
    value: Option<u64>,
    used: Option<u64>,
    each: f64,
    /// What sessions must leave.
    reserve: u64,
    note: Option<String>,
}

impl Draft {
    fn new(
        name: &'static str,
        bounds: &'static str,
        value: Option<u64>,
        used: Option<u64>,
        each: f64,
    ) -> Self {
        Self {
            name,
            bounds,
            value,
            used,
            each,
            reserve: 0,
            note: None,
        }
    }

    fn note(mut self, note: &str) -> Self {
        self.note = Some(note.to_owned());
        self
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "limits beyond 2^52 bind nowhere, and are cut to what binds nowhere"
    )]
    fn binds_at(&self) -> Option<u64> {
        if self.each <= 0.0 {
            return None;
        }
        let taken = self.used.unwrap_or_default().saturating_add(self.reserve);
        let left = self.value?.saturating_sub(taken);
        Some((left as f64 / self.each) as u64)
    }

    fn check(self) -> Check {
        Check {
            name: self.name,
            bounds: self.bounds,
            verdict: Verdict::Enough,
            value: self.value,
            used: self.used,
            per_session: self.each,
            binds_at: self.binds_at(),
            needed: None,
            remedy: None,
            note: self.note,
        }
    }

    fn judged(self, target: u64, remedy: impl FnOnce(u64) -> Remedy) -> Check {
        let needed = proposal(self.each, target, self.used.unwrap_or_default());
        let mut check = self.check();
        match (check.value, check.binds_at) {
            (None, _) if check.per_session > 0.0 => check.verdict = Verdict::Unknown,
            (_, Some(sessions)) if sessions < target => {
                check.verdict = Verdict::Binds;
                check.needed = Some(needed);
                check.remedy = Some(remedy(needed));
            }
            _ => {}
        }
        check
    }

    /// A limit that is a kernel setting, up to `highest`.
    fn sysctl(self, target: u64, highest: u64) -> Check {
        let key = self.name;
        self.judged(target, |needed| {
            if needed > highest {
                return Remedy::Manual {
                    what: format!(
                        "spread the sessions over more machines: {key} cannot exceed {highest}"
                    ),
                };
            }
            Remedy::Sysctl { key, value: needed }
        })
    }

    /// A limit that somebody else must raise.
    fn manual(self, target: u64, what: impl FnOnce() -> String) -> Check {
        self.judged(target, |_| Remedy::Manual { what: what() })
    }
}
