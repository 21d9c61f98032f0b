//! What a hostile session can reach on Docker but not on the native runtime.

/// Probes of the hostile battery (`cargo xtask hostile --runtime docker`) that succeed in a session on Docker, and
/// their consequences. `cargo xtask acceptance` fails on any others.
pub const ON_DOCKER: &[(&str, &str)] = &[
    (
        "asynchronous_io",
        "it can take all of fs.aio-max-nr, and the host's programs get EAGAIN",
    ),
    (
        "cgroup_files",
        "it sees its place among the host's cgroups, read-only",
    ),
    (
        "core_handlers",
        "it can lower RLIMIT_CORE from 1, and then its crashes run the host's program in core_pattern",
    ),
    (
        "foreign_entries",
        "system calls of i386 are open to it, an older and larger part of the kernel",
    ),
    (
        "huge_pages",
        "it can take the host's huge pages, which no limit of its memory counts",
    ),
    ("host_paths", "it learns paths of the host from its mounts"),
    (
        "identity_map",
        "root in it is root of the host if it escapes",
    ),
    ("io_ports", "modify_ldt is open to it"),
    ("io_uring", "io_uring is open to it, on engines before 25"),
    ("locked_memory", "it can lock all of its memory"),
    (
        "netlink_families",
        "it can open netlink families that no program needs",
    ),
    (
        "own_filters",
        "it can take all of net.core.bpf_jit_limit, and then no session starts",
    ),
    ("shared_devices", "it can change the modes of its devices"),
    (
        "socket_families",
        "it can talk to the hypervisor through vsock, on engines before 25",
    ),
    (
        "socket_filters",
        "it can take all of net.core.bpf_jit_limit, and then no session starts",
    ),
    (
        "socket_protocols",
        "it can use MPTCP, UDP-Lite and other rarely used protocols",
    ),
    (
        "terminal_discipline",
        "it can load line disciplines for its terminal",
    ),
    (
        "terminal_exclusive",
        "it can keep others from opening its terminal",
    ),
    (
        "terminal_input",
        "it can put characters into its terminal's input",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_security_page_has_the_list() {
        let page = include_str!("../../../deploy/security.md");
        for (probe, consequence) in ON_DOCKER {
            let row = format!("| `{probe}` | {consequence} |");
            assert!(page.contains(&row), "deploy/security.md lacks {row}");
        }
    }
}
