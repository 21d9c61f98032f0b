//! The table of probes.

use std::pin::Pin;

use crate::outside::{
    accounts, binds, burdens, deaths, entering, host, http_backends, images, limits, logs,
    starvation, terminals,
};
use crate::world::{Verdict, World};

pub(crate) type Run = for<'w> fn(&'w World) -> Pin<Box<dyn Future<Output = Verdict> + 'w>>;

/// How a probe is run.
#[derive(Debug, Clone, Copy)]
pub(crate) enum How {
    /// A function of `inside.py` of the same name, in a session with others.
    Inside,
    /// With sessions of its own.
    Outside(Run),
    /// The same, while no other probe runs.
    Alone(Run),
}

/// One attack.
#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) name: &'static str,
    pub(crate) area: &'static str,
    /// What it is, or the published attacks that it tries again.
    pub(crate) known: &'static str,
    pub(crate) how: How,
    /// Takes long: for acceptance.
    pub(crate) long: bool,
}

/// The probes whose names contain one of these words, or all.
pub(crate) fn selected(words: &[String], long: bool) -> Vec<&'static Probe> {
    let wanted = |probe: &&Probe| {
        let named = words.iter().any(|word| probe.name.contains(&**word));
        named || words.is_empty() && (long || !probe.long)
    };
    TABLE.iter().filter(wanted).collect()
}

const fn inside(area: &'static str, name: &'static str, known: &'static str) -> Probe {
    Probe {
        name,
        area,
        known,
        how: How::Inside,
        long: false,
    }
}

/// Entries of probes that are functions of this crate.
macro_rules! entry {
    ($how:ident, $area:literal, $module:ident :: $name:ident, $known:literal) => {
        Probe {
            name: stringify!($name),
            area: $area,
            known: $known,
            how: How::$how(|world| Box::pin($module::$name(world))),
            long: false,
        }
    };
    (long $how:ident, $area:literal, $module:ident :: $name:ident, $known:literal) => {
        Probe {
            long: true,
            ..entry!($how, $area, $module::$name, $known)
        }
    };
}

/// Every probe. A published attack gives its number to the name; others of the same kind, of runc,
/// containerd, crun, youki and Docker, stand next to it.
#[rustfmt::skip]
pub(crate) static TABLE: &[Probe] = &[
    entry!(Outside, "escape", entering::cve_2024_21626, "CVE-2024-21626 (runc): exec with a work directory by descriptor"),
    entry!(Outside, "escape", entering::work_directory_by_link, "CVE-2024-21626 through a symbolic link"),
    entry!(Outside, "escape", entering::work_directory_of_an_image, "CVE-2024-21626 by an image's WorkingDir"),
    entry!(Outside, "escape", entering::missing_work_directory, "a work directory that does not exist"),
    entry!(Outside, "escape", entering::descriptors_of_the_first_process, "descriptors beyond 0 to 2"),
    entry!(Outside, "escape", entering::descriptors_of_a_command, "descriptors beyond 0 to 2"),
    entry!(Outside, "escape", entering::cve_2016_9962, "CVE-2016-9962 (runc): looking at a process that enters"),
    entry!(Outside, "escape", entering::cve_2019_5736, "CVE-2019-5736 (runc): overwriting the runtime's program"),
    inside("escape", "new_user_namespace", "the first step of most kernel exploits"),
    inside("escape", "new_namespaces", "unshare and clone"),
    inside("escape", "join_namespaces", "setns"),
    inside("escape", "mounts", "mount"),
    inside("escape", "remounts", "masks and read-only paths taken away"),
    inside("escape", "mounts_by_descriptor", "open_tree, move_mount, mount_setattr"),
    inside("escape", "cve_2022_0185", "CVE-2022-0185 (Linux): fsopen, fsconfig"),
    inside("escape", "cve_2022_0492", "CVE-2022-0492 (Linux): release_agent of a cgroup v1"),
    inside("escape", "cgroup_files", "cgroups mounted or named"),
    inside("escape", "leaving_a_chroot", "chroot and fchdir"),
    inside("escape", "file_handles", "shocker: open_by_handle_at"),
    inside("escape", "processes_of_others", "roots and processes beyond the session's"),
    inside("escape", "descriptors_of_others", "descriptors in /proc that lead out"),
    entry!(Outside, "limits", limits::default_limits, "a session of which nothing is said"),
    entry!(Outside, "limits", limits::anonymous_memory, "memory"),
    entry!(Outside, "limits", limits::shared_memory, "disk by /dev/shm"),
    entry!(Outside, "limits", limits::memory_files, "memory by memfd_create"),
    entry!(Outside, "limits", limits::system_v_memory, "memory by shmget"),
    entry!(Outside, "limits", limits::pipe_buffers, "memory by pipes"),
    entry!(Outside, "limits", limits::socket_buffers, "memory by unix sockets"),
    entry!(Outside, "limits", limits::network_buffers, "memory by TCP connections"),
    entry!(Outside, "limits", limits::fork_bomb, "processes"),
    entry!(Outside, "limits", limits::thread_bomb, "threads"),
    entry!(Alone, "limits", limits::cpu_share, "eight spinning processes at a tenth of a CPU"),
    entry!(Outside, "limits", limits::large_file, "disk"),
    entry!(Outside, "limits", limits::unlinked_file, "disk by a file without a name"),
    entry!(Outside, "limits", limits::allocated_file, "disk by fallocate"),
    entry!(Outside, "limits", limits::many_files, "inodes"),
    entry!(Outside, "limits", limits::cve_2022_31030, "CVE-2022-31030 (containerd): endless output of a command"),
    inside("limits", "resource_limits", "open files, signals, queues, locked memory"),
    inside("limits", "locked_memory", "mlockall"),
    inside("limits", "huge_pages", "huge pages of the host"),
    inside("limits", "core_handlers", "programs in core_pattern, run by the host for each crash"),
    inside("limits", "socket_filters", "all of net.core.bpf_jit_limit by programs of sockets"),
    inside("limits", "own_filters", "all of net.core.bpf_jit_limit by filters of system calls"),
    entry!(Outside, "limits", limits::filters_of_a_template, "filters of system calls beyond the template that allows them"),
    entry!(Outside, "accounts", accounts::inotify_instances, "inotify instances of the host's root"),
    entry!(Outside, "accounts", accounts::queued_signals_of_root, "queued signals of the host's root"),
    entry!(Outside, "accounts", accounts::message_queues, "POSIX message queues"),
    entry!(long Alone, "accounts", burdens::shared_pools, "whatever the kernel counts for the whole host"),
    inside("accounts", "asynchronous_io", "io_setup and fs.aio-max-nr"),
    inside("accounts", "keys", "keyrings"),
    entry!(Alone, "starvation", starvation::starved_commands, "execs into a session without CPU"),
    entry!(Alone, "starvation", starvation::starved_death, "the death of a session without CPU"),
    entry!(long Alone, "starvation", burdens::long_deaths, "what the kernel has to clean up after a death"),
    entry!(Alone, "starvation", starvation::starts_that_hang, "starts that do not come up"),
    inside("starvation", "priorities", "nice, real-time and I/O priorities"),
    inside("starvation", "out_of_memory_score", "oom_score_adj"),
    entry!(Outside, "starvation", host::killed_before_sessions, "oom_score_adj of conman itself"),
    entry!(Outside, "files", binds::set_user_id_in_a_bind, "a set-user-id program for the host"),
    entry!(Outside, "files", binds::owner_in_a_bind, "a file of the host's root"),
    entry!(Outside, "files", binds::device_in_a_bind, "a device for the host"),
    entry!(Outside, "files", binds::capability_in_a_bind, "file capabilities for the host"),
    entry!(Outside, "files", binds::write_to_a_read_only_bind, "a read-only bind"),
    entry!(Outside, "files", binds::bind_source_by_link, "a bind's source by a link in a shared directory"),
    entry!(Outside, "files", binds::cve_2019_16884, "CVE-2019-16884 (runc), CVE-2019-18837 (crun): binds over /proc"),
    entry!(Outside, "files", binds::cve_2021_30465, "CVE-2021-30465 (runc): a race for a bind's target"),
    entry!(Outside, "files", binds::cve_2024_45310, "CVE-2024-45310 (runc): directories made on the host"),
    entry!(Outside, "files", host::modes_on_the_host, "what conman makes under umask 0"),
    entry!(Outside, "files", host::cve_2021_41091, "CVE-2021-41091 (Docker), CVE-2021-41103 and CVE-2024-25621 (containerd): state directories"),
    entry!(Outside, "files", logs::allocated_log, "blocks beyond a log's end"),
    entry!(Outside, "files", logs::leased_log, "a lease on a log"),
    entry!(Outside, "files", logs::leased_log_of_standard_output, "a lease by standard output"),
    entry!(Outside, "files", logs::locked_log, "a lock on a log"),
    entry!(Outside, "files", logs::flooded_log, "64 MiB of log"),
    entry!(Outside, "files", logs::stretched_log, "a log of 1 TiB"),
    entry!(Outside, "files", logs::erased_log, "a log without what was written"),
    entry!(Outside, "files", logs::overwritten_log, "a log that says something else"),
    entry!(Outside, "files", logs::mode_of_the_log, "a set-user-id log"),
    inside("files", "masked_files", "facts about the host in /proc"),
    inside("files", "kernel_addresses", "kallsyms"),
    inside("files", "kernel_settings", "core_pattern, modprobe, binfmt_misc and all of /proc/sys"),
    inside("files", "kernel_triggers", "sysrq-trigger, uevent_helper"),
    inside("files", "pressure_triggers", "triggers in /proc/pressure, which make a death long"),
    inside("files", "host_paths", "paths of the host in mountinfo"),
    inside("files", "cve_2021_21334", "CVE-2021-21334 (containerd): variables of others"),
    inside("files", "cve_2022_0847", "CVE-2022-0847 (Linux): Dirty Pipe"),
    inside("files", "locks_of_others", "flock and POSIX locks across sessions"),
    inside("files", "leases_of_others", "leases across sessions"),
    entry!(Outside, "files", host::inotify_of_others, "inotify across sessions"),
    inside("files", "shared_memory_of_others", "/dev/shm and System V IPC"),
    inside("devices", "device_nodes", "mknod"),
    inside("devices", "shared_devices", "changes to the nodes in /dev"),
    inside("devices", "entropy", "ioctls of /dev/random"),
    inside("calls", "bpf", "bpf"),
    inside("calls", "perf_events", "perf_event_open"),
    inside("calls", "user_faults", "userfaultfd"),
    inside("calls", "io_uring", "io_uring"),
    inside("calls", "kexec", "kexec"),
    inside("calls", "kernel_modules", "modules"),
    inside("calls", "power", "reboot"),
    inside("calls", "swap_accounting_quotas", "swapon, acct, quotactl"),
    inside("calls", "clocks", "clocks"),
    inside("calls", "kernel_log", "syslog"),
    inside("calls", "host_name", "sethostname"),
    inside("calls", "io_ports", "iopl, ioperm, modify_ldt"),
    inside("calls", "personalities", "personality"),
    inside("calls", "fanotify", "fanotify"),
    inside("calls", "memory_policies", "NUMA"),
    inside("calls", "foreign_entries", "i386 and x32"),
    inside("calls", "socket_families", "socket families"),
    inside("calls", "socket_protocols", "rarely used protocols"),
    inside("calls", "raw_sockets", "raw sockets"),
    inside("calls", "netlink_families", "netlink families"),
    inside("calls", "network_administration", "interfaces and marks"),
    inside("calls", "netfilter", "iptables"),
    inside("calls", "cve_2020_15257", "CVE-2020-15257 (containerd): sockets without a file"),
    inside("calls", "sockets_of_others", "ports of others and of the host"),
    inside("signals", "capabilities", "capabilities"),
    inside("signals", "cve_2022_29162", "CVE-2022-29162 (runc), CVE-2022-24769 (Docker), CVE-2022-27650 (crun), CVE-2025-27612 (youki): inheritable capabilities"),
    inside("signals", "set_user_id_programs", "set-user-id programs inside"),
    inside("signals", "cve_2023_25173", "CVE-2023-25173 (containerd), CVE-2022-36109 (Docker): groups"),
    inside("signals", "identity_map", "ids of the host"),
    inside("signals", "memory_of_others", "process_vm_readv, pidfd_getfd, kcmp"),
    inside("signals", "suspended_filter", "a tracer that suspends the filter"),
    entry!(Outside, "signals", entering::cve_2024_40635, "CVE-2024-40635 (containerd): a user id beyond 32 bits"),
    entry!(Outside, "signals", deaths::forged_death, "PTRACE_TRACEME in the first process"),
    entry!(Outside, "signals", deaths::stopped_first_process, "a stopped first process"),
    entry!(Outside, "signals", deaths::forged_end_of_a_command, "PTRACE_TRACEME in a command"),
    entry!(Outside, "signals", deaths::kill_everything, "SIGKILL to all"),
    entry!(Outside, "images", images::cve_2019_19921, "CVE-2019-19921, CVE-2023-27561 (runc), CVE-2025-54867 (youki): /proc is a link"),
    entry!(Outside, "images", images::cve_2025_31133, "CVE-2025-31133 (runc), CVE-2025-62161 (youki): /dev/null is a link"),
    entry!(Outside, "images", images::cve_2025_52565, "CVE-2025-52565 (runc): /dev/console is a link"),
    entry!(Outside, "images", images::cve_2025_52881, "CVE-2025-52881 (runc): writes to /proc led elsewhere"),
    entry!(Outside, "images", images::files_led_out_by_links, "links in /etc"),
    entry!(Outside, "images", images::endless_user_files, "/etc/passwd without end"),
    entry!(Outside, "images", images::cve_2016_3697, "CVE-2016-3697 (runc): a user named by a number"),
    entry!(Outside, "images", images::cve_2022_23648, "CVE-2022-23648 (containerd): volumes that lead out"),
    entry!(Outside, "images", images::entries_out_of_a_layer, "entries of a layer that lead out"),
    entry!(Outside, "images", images::hard_link_to_the_host, "a hard link to a file of the host"),
    entry!(Outside, "images", images::device_in_a_layer, "a device in a layer"),
    entry!(Outside, "images", images::huge_configuration, "1.5 MB of environment, 100,000 arguments"),
    entry!(Outside, "http", http_backends::cookie_for_a_domain, "Set-Cookie with a Domain"),
    entry!(Outside, "http", http_backends::cookie_of_conman, "Set-Cookie of conman's own"),
    entry!(Outside, "http", http_backends::service_worker_for_all, "Service-Worker-Allowed"),
    entry!(Outside, "http", http_backends::clear_site_data, "Clear-Site-Data"),
    entry!(Outside, "http", http_backends::strict_transport_security, "Strict-Transport-Security"),
    entry!(Outside, "http", http_backends::alternative_services, "Alt-Svc"),
    entry!(Outside, "http", http_backends::orders_to_a_web_server, "X-Accel-Redirect, X-Sendfile and their like"),
    entry!(Outside, "http", http_backends::browser_in_the_path_form, "a browser under /s/{id}/"),
    entry!(Outside, "http", http_backends::endless_early_hints, "103 Early Hints without end"),
    entry!(Outside, "http", http_backends::endless_head, "an answer's head without end"),
    entry!(Outside, "http", http_backends::smuggled_answers, "two answers to one request"),
    entry!(Outside, "http", http_backends::endless_body, "bodies and frames without end"),
    entry!(Outside, "http", http_backends::path_confusion, "paths into another session"),
    entry!(Outside, "http", http_backends::api_through_the_proxy, "the API on the sessions listener"),
    entry!(Outside, "http", http_backends::trickled_head, "an answer's head, byte by byte"),
    entry!(Alone, "http", http_backends::idle_connections_to_the_api, "1,300 idle connections"),
    entry!(long Alone, "http", http_backends::idle_connections_to_sessions, "17,000 idle connections"),
    inside("terminals", "terminal_input", "TIOCSTI"),
    inside("terminals", "terminal_selection", "TIOCLINUX"),
    inside("terminals", "terminal_discipline", "TIOCSETD"),
    inside("terminals", "terminal_exclusive", "TIOCEXCL"),
    inside("terminals", "terminal_console", "TIOCCONS"),
    inside("terminals", "terminal_hangup", "vhangup"),
    inside("terminals", "terminals_of_others", "pseudo terminals of others"),
    entry!(Outside, "terminals", terminals::exclusive_terminal, "TIOCEXCL on a kept terminal"),
    entry!(Outside, "terminals", terminals::control_sequences, "escape sequences for an operator's terminal"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_function_of_the_script_is_in_the_table() {
        let names: BTreeSet<&str> = TABLE.iter().map(|probe| probe.name).collect();
        assert_eq!(names.len(), TABLE.len());
        let script = include_str!("inside.py");
        let attacks: BTreeSet<&str> = script
            .split("@attack\ndef ")
            .skip(1)
            .filter_map(|rest| rest.split('(').next())
            .filter(|name| *name != "leave_traces")
            .collect();
        let inside = TABLE
            .iter()
            .filter(|probe| matches!(probe.how, How::Inside));
        assert_eq!(attacks, inside.map(|probe| probe.name).collect());
    }
}
