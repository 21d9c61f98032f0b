//! Builds dockerd's create request from a plan.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, HealthConfig, HostConfig, HostConfigLogConfig, Mount, MountType,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum, ThrottleDevice,
};
use conman_linux::IoLimits;

use crate::ContainerPlan;
use crate::shared::container_files::{ContainerFiles, egress_environment, generation_environment};
use conman_core::naming::{
    self, CgroupDriver, Instance, LABEL_GENERATION, LABEL_INSTANCE, LABEL_SESSION,
};

/// Label: where the container's files are, for their removal.
pub(super) const LABEL_FILES: &str = "dev.conman.files";

/// Label: the program has a terminal, so its log has no frames.
pub(super) const LABEL_TTY: &str = "dev.conman.tty";

/// As for native sessions: the OOM killer ends them before the host's programs.
const OOM_SCORE: i64 = 500;

/// Capabilities that the container's root keeps: to own and serve files, to change to other users
/// of the container, and to listen on low ports of its network. Docker would also grant MKNOD,
/// NET_RAW, SETFCAP, SETPCAP, SYS_CHROOT and AUDIT_WRITE.
const CAPABILITIES: [&str; 8] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
];

/// Paths that are hidden from containers: what Docker hides, which this list replaces, and what native
/// sessions are not shown either. A trigger in `/proc/pressure` costs a grace period of the kernel when its
/// writer dies.
const MASKED: [&str; 25] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/diskstats",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/locks",
    "/proc/pressure",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/system/cpu/cpu0/thermal_throttle",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// Docker's driver that keeps logs as bytes: the usual one, `json-file`, replaces what is not UTF-8.
const LOG_DRIVER: &str = "local";

/// Maximum size of a log file. There are two: while the newer one fills, the older one stays.
const LOG_MAX_SIZE: &str = "8m";
const LOG_MAX_FILES: &str = "2";

const NANOS_PER_CPU: f64 = 1e9;

pub(super) fn container_body(
    plan: &ContainerPlan,
    instance: &Instance,
    cgroup_driver: CgroupDriver,
    max_cpus: f64,
) -> ContainerCreateBody {
    let spec = &plan.spec;
    let mut environment: BTreeMap<_, _> = egress_environment(spec).into_iter().collect();
    environment.extend(spec.env.clone());
    environment.extend(generation_environment(&plan.key));
    let (entrypoint, arguments) = command(plan);
    ContainerCreateBody {
        image: Some(spec.image.clone()),
        hostname: Some(plan.key.session.to_string()),
        entrypoint,
        cmd: arguments,
        env: Some(
            environment
                .into_iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect(),
        ),
        labels: Some(labels(plan, instance)),
        network_disabled: Some(!spec.network.traits().by_docker),
        tty: Some(spec.tty),
        open_stdin: Some(spec.tty),
        // An image's health check would make dockerd run extra commands in the container.
        healthcheck: Some(HealthConfig {
            test: Some(vec!["NONE".to_owned()]),
            ..HealthConfig::default()
        }),
        host_config: Some(host_config(plan, instance, cgroup_driver, max_cpus)),
        ..ContainerCreateBody::default()
    }
}

/// Limits the container's I/O on a disk, named by its node in `/dev`.
pub(super) fn limit_io(body: &mut ContainerCreateBody, disk: &Path, limits: &IoLimits) {
    let rate = |rate: Option<u64>| {
        rate.map(|rate| {
            vec![ThrottleDevice {
                path: Some(disk.to_string_lossy().into_owned()),
                rate: Some(i64::try_from(rate).unwrap_or(i64::MAX)),
            }]
        })
    };
    let host = body.host_config.get_or_insert_default();
    host.blkio_device_read_bps = rate(limits.read_bytes_per_s);
    host.blkio_device_write_bps = rate(limits.write_bytes_per_s);
}

/// Returns the entrypoint and the arguments; `None` means the image's. Arguments alone replace
/// those of the image and keep its entrypoint.
fn command(plan: &ContainerPlan) -> (Option<Vec<String>>, Option<Vec<String>>) {
    let given = |words: &Vec<String>| (!words.is_empty()).then(|| words.clone());
    (given(&plan.spec.command), given(&plan.spec.args))
}

fn labels(plan: &ContainerPlan, instance: &Instance) -> HashMap<String, String> {
    let tty = plan
        .spec
        .tty
        .then(|| (LABEL_TTY.to_owned(), "true".to_owned()));
    let always = HashMap::from([
        (LABEL_INSTANCE.to_owned(), instance.to_string()),
        (LABEL_SESSION.to_owned(), plan.key.session.to_string()),
        (LABEL_GENERATION.to_owned(), plan.key.generation.to_string()),
        (
            LABEL_FILES.to_owned(),
            plan.files_dir.to_string_lossy().into_owned(),
        ),
    ]);
    always.into_iter().chain(tty).collect()
}

fn host_config(
    plan: &ContainerPlan,
    instance: &Instance,
    cgroup_driver: CgroupDriver,
    max_cpus: f64,
) -> HostConfig {
    let spec = &plan.spec;
    let key = &plan.key;
    let parent = naming::cgroup_parent(instance, &key.session, key.generation, cgroup_driver);
    let memory = spec
        .memory_bytes
        .map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    HostConfig {
        cgroup_parent: Some(parent.name),
        // Reaps orphaned processes and passes signals on to the program.
        init: Some(true),
        // A container starts again only as a new generation.
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        // Those that lead out by other ways are refused for Docker when the spec is resolved.
        network_mode: (spec.network.traits().by_docker).then(|| "bridge".to_owned()),
        ipc_mode: Some("private".to_owned()),
        privileged: Some(false),
        publish_all_ports: Some(false),
        cap_drop: Some(vec!["ALL".to_owned()]),
        cap_add: Some(CAPABILITIES.map(str::to_owned).to_vec()),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        masked_paths: Some(MASKED.map(str::to_owned).to_vec()),
        // With exactly 1, the kernel starts no program of core_pattern when a program crashes.
        ulimits: Some(vec![ResourcesUlimits {
            name: Some("core".to_owned()),
            soft: Some(1),
            hard: Some(1),
        }]),
        memory,
        // Equal to the memory: no additional swap.
        memory_swap: memory,
        nano_cpus: spec.cpus.map(|cpus| nano_cpus(cpus.min(max_cpus))),
        pids_limit: Some(i64::from(spec.pids)),
        oom_score_adj: Some(OOM_SCORE),
        log_config: Some(HostConfigLogConfig {
            typ: Some(LOG_DRIVER.to_owned()),
            config: Some(HashMap::from([
                ("max-size".to_owned(), LOG_MAX_SIZE.to_owned()),
                ("max-file".to_owned(), LOG_MAX_FILES.to_owned()),
                ("compress".to_owned(), "false".to_owned()),
            ])),
        }),
        mounts: Some(mounts(plan)),
        ..HostConfig::default()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a checked spec asks for far less than 2^63"
)]
fn nano_cpus(cpus: f64) -> i64 {
    (cpus * NANOS_PER_CPU).round() as i64
}

fn mounts(plan: &ContainerPlan) -> Vec<Mount> {
    let files = ContainerFiles::at(&plan.files_dir);
    let mut mounts = Vec::new();
    if !plan.spec.network.traits().by_docker {
        // Docker leaves these empty when its networking is off.
        mounts.push(bind(files.hosts(), "/etc/hosts", true));
        mounts.push(bind(files.resolv_conf(), "/etc/resolv.conf", true));
        mounts.push(bind(files.hostname(), "/etc/hostname", true));
    }
    let asked = plan.binds.iter();
    mounts.extend(asked.map(|asked| bind(asked.source(), &asked.target, asked.read_only)));
    mounts
}

/// Unlike the older `Binds`, a mount refuses a missing source instead of creating it.
fn bind(source: PathBuf, target: &str, read_only: bool) -> Mount {
    Mount {
        typ: Some(MountType::BIND),
        source: Some(source.to_string_lossy().into_owned()),
        target: Some(target.to_owned()),
        read_only: Some(read_only),
        ..Mount::default()
    }
}
