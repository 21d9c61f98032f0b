//! Processes, threads and open files: of the host, of all sessions, of the daemons.

use super::Exam;
use super::draft::{Draft, proposal};
use crate::diagnosis::Check;
use crate::host::{CgroupLimit, ProcessLimit};

/// Greatest `kernel.pid_max` of a 64-bit kernel: `PID_MAX_LIMIT`.
const HIGHEST_PID_MAX: u64 = 4_194_304;
/// Descriptors that conman's daemon needs in addition to those of its sessions.
const CONMAN_RESERVE: u64 = 512;
/// Descriptors reserved for requests to conman's daemon; sessions are refused before they are used.
const CONMAN_FLOOR: u64 = 64;

pub(super) fn tasks(
    &Exam {
        host,
        footprint,
        target,
        ..
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
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

/// Limits on the cgroup above all sessions, or on one of its ancestors.
pub(super) fn sessions_cgroup(
    &Exam {
        host,
        footprint,
        target,
        site,
    }: &Exam<'_>,
    checks: &mut Vec<Check>,
) {
    let Some(cgroup) = site.cgroup else {
        return;
    };
    let mut check = |name, bounds, limit: Option<CgroupLimit>, each: f64, reserve: u64| {
        // Without a limit there is nothing to report.
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

pub(super) fn files(
    &Exam {
        host,
        footprint,
        target,
        site,
    }: &Exam<'_>,
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
            // The daemon itself is running this check.
            Some(_) => (
                host.own_files().map(|used| used + CONMAN_FLOOR),
                "every open tunnel takes two more",
            ),
            None => (
                Some(CONMAN_RESERVE),
                "every open tunnel takes two more; the value is the doctor's own limit",
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

fn number(limit: Option<ProcessLimit>) -> Option<u64> {
    match limit? {
        ProcessLimit::At(limit) => Some(limit),
        ProcessLimit::Unlimited => None,
    }
}
