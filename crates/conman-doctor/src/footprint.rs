//! What one idle session takes of a host.

use serde::Serialize;

/// What one idle session of a runtime takes of a host, including its program of one process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Footprint {
    pub runtime: &'static str,
    /// Task ids: processes and their threads.
    pub tasks: f64,
    /// Tasks in the cgroup of the container daemon.
    pub daemon_tasks: f64,
    /// Tasks reserved in the sessions' cgroup for starts under way.
    pub start_tasks: u64,
    /// Open files of the whole host.
    pub open_files: f64,
    /// Open files of conman's daemon.
    pub conman_files: f64,
    /// Open files of dockerd.
    pub dockerd_files: f64,
    /// Open files of containerd.
    pub containerd_files: f64,
    /// Mounts in the host's mount namespace.
    pub host_mounts: f64,
    /// Kernel keys that count against root.
    pub root_keys: f64,
    /// Bytes of them.
    pub root_key_bytes: f64,
    /// Memory cgroups.
    pub memory_cgroups: f64,
    /// inotify instances that count against root.
    pub inotify_instances: f64,
    /// Descriptors that conman's daemon polls by epoll: for the death of the session's first process, twice
    /// while the node is preempted. Each takes kernel memory, which is bounded.
    pub epoll_watches: u32,
    /// Compiled system call filters in bytes: those of its program and of a few commands at a time. Each is
    /// one of some 360 instructions, of which each takes some 11 bytes; Docker's are twice as long.
    pub filter_bytes: u32,
    /// Memory beyond what the program uses, in bytes.
    pub memory_bytes: f64,
    /// Disk space beyond what the program writes, in bytes.
    pub disk_bytes: f64,
    pub inodes: f64,
    /// Ports of Docker's bridge.
    pub bridge_ports: f64,
    /// Entries of the host's neighbour tables that its links may take, in each family.
    pub neighbours: u64,
    /// Terminals that its programs may open, unless its spec sets another limit.
    pub ptys: u64,
    /// User namespaces; a cgroup namespace goes with each.
    pub user_namespaces: f64,
    /// Ranges of ids of one container's files on the host, and the number of ranges.
    pub id_ranges: f64,
    pub id_ranges_there_are: u64,
}

impl Footprint {
    /// A session that Docker runs with networking disabled, or on its bridge.
    ///
    /// Measured with Docker 20.10 as the difference between 40 and 20 sessions of busybox on a host: 14 tasks
    /// each (containerd's shim has eleven), 44 open files without a network and 58 with one; memory over
    /// 1,000 containers.
    pub fn docker(bridge: bool, unified_cgroups: bool) -> Self {
        Self {
            runtime: "docker",
            tasks: 14.0,
            daemon_tasks: 12.0,
            // runc is in the container's cgroup before the program, with up to eight threads; eight
            // starts at a time.
            start_tasks: 64,
            open_files: if bridge { 58.0 } else { 44.0 },
            conman_files: 1.0,
            dockerd_files: if bridge { 6.0 } else { 5.2 },
            containerd_files: 4.1,
            host_mounts: if bridge { 2.0 } else { 1.0 },
            root_keys: 1.0,
            root_key_bytes: 72.0,
            // Docker's, below the parent cgroup that conman names.
            memory_cgroups: 2.0,
            // containerd's shim watches memory events by inotify with cgroup v2.
            inotify_instances: if unified_cgroups { 1.0 } else { 0.0 },
            epoll_watches: 2,
            filter_bytes: 32 * 1024,
            memory_bytes: 4_300_000.0,
            disk_bytes: 128.0 * 1024.0,
            inodes: 48.0,
            bridge_ports: if bridge { 1.0 } else { 0.0 },
            neighbours: 0,
            ptys: 0,
            user_namespaces: 0.0,
            id_ranges: 0.0,
            id_ranges_there_are: 0,
        }
    }

    /// A session of the native runtime; the ranges of ids bound their number.
    ///
    /// Measured as the difference of 200 sessions of busybox on a host: two tasks each, of which one is the init,
    /// 4.2 open files, 26 inodes and 84 KiB on disk; no key, and no mount in the host's namespace. They share one
    /// shim, whose descriptors do not depend on them. The memory is the maximum of a session among ten thousand.
    pub fn native(id_ranges: u64) -> Self {
        Self {
            runtime: "native",
            tasks: 2.0,
            daemon_tasks: 0.0,
            // The init and the program's process are the only ones of a start.
            start_tasks: 0,
            open_files: 4.2,
            conman_files: 1.0,
            dockerd_files: 0.0,
            containerd_files: 0.0,
            host_mounts: 0.0,
            root_keys: 0.0,
            root_key_bytes: 0.0,
            // Only with a memory limit.
            memory_cgroups: 1.0,
            inotify_instances: 0.0,
            epoll_watches: 2,
            filter_bytes: 16 * 1024,
            memory_bytes: 1_000_000.0,
            disk_bytes: 84.0 * 1024.0,
            inodes: 26.0,
            bridge_ports: 0.0,
            neighbours: 0,
            ptys: 4,
            user_namespaces: 1.0,
            id_ranges: 1.0,
            id_ranges_there_are: id_ranges,
        }
    }

    /// A session with gVisor as its kernel: a native one, in which gVisor and its gofer run.
    ///
    /// Measured with a version of September 2026 and busybox asleep: its filters have 596, 209, 107 and 6 instructions;
    /// each process of the session has one more of the last.
    pub fn gvisor(id_ranges: u64) -> Self {
        Self {
            runtime: "gvisor",
            tasks: 26.0,
            open_files: 90.0,
            filter_bytes: 12 * 1024,
            memory_bytes: 24_000_000.0,
            ptys: 0,
            ..Self::native(id_ranges)
        }
    }

    /// A session with another OCI runtime: a native one, in which the runtime waits for the session's program.
    ///
    /// The figures are those of `runc`, whose threads and memory are Go's; `crun` has one thread and 4 MB.
    pub fn oci(id_ranges: u64) -> Self {
        Self {
            runtime: "another OCI runtime",
            tasks: 10.0,
            open_files: 20.0,
            memory_bytes: 12_000_000.0,
            ..Self::native(id_ranges)
        }
    }

    /// The same with links that may take so many entries of the neighbour tables.
    #[must_use]
    pub fn with_neighbours(self, neighbours: u64) -> Self {
        Self { neighbours, ..self }
    }

    /// The same with descriptors of conman's daemon that it keeps open, and may poll, for the session.
    #[must_use]
    pub fn with_descriptors(self, descriptors: u32) -> Self {
        Self {
            open_files: self.open_files + f64::from(descriptors),
            conman_files: self.conman_files + f64::from(descriptors),
            epoll_watches: self.epoll_watches + descriptors,
            ..self
        }
    }
}
