//! The system calls that a container may make.
//!
//! Allowed calls are listed. Listed but refused calls answer EPERM, all others ENOSYS, so that the C
//! library falls back for calls that are newer than the list. [`crate::seccomp_filter`] makes the program
//! for the kernel.

use Arguments::{Equal, Matching, NewValue};

/// What a kernel without the feature answers, so that programs do without it.
const EINVAL: u32 = 22;
const EPROTONOSUPPORT: u32 = 93;
const EPERM: u32 = 1;
/// The call succeeds and does nothing.
const SUCCESS: u32 = 0;

/// Clone flags that make namespaces (clone(2)); NEWTIME overlaps the exit signal and is clone3's.
const NAMESPACE_FLAGS: u32 = 0x7E02_0000;

/// Socket families (linux/socket.h).
const UNIX: u32 = 1;
const IPV4: u32 = 2;
const IPV6: u32 = 10;
const NETLINK: u32 = 16;

/// Protocols of internet sockets (linux/in.h): the default one, ICMP, TCP, UDP, ICMPv6. Others, such as
/// MPTCP and UDP-Lite, are rarely used parts of the kernel; programs fall back to TCP or UDP.
pub(crate) const IPV4_PROTOCOLS: [u32; 4] = [0, 1, 6, 17];
pub(crate) const IPV6_PROTOCOLS: [u32; 4] = [0, 6, 17, 58];

/// The only family of socket pairs. The kernel creates sockets of any family before it refuses a pair.
const PAIR_FAMILIES: [u32; 1] = [1];

/// Netlink protocols: ROUTE (for addresses, in name resolution), `SOCK_DIAG` (for sockets, in ss),
/// `KOBJECT_UEVENT` (for libudev). The others answer like a kernel without them: programs that write to
/// the audit log, such as `useradd`, fail at EPERM.
pub(crate) const NETLINK_PROTOCOLS: [u32; 3] = [0, 4, 15];

/// Execution domains that are harmless: Linux, 32-bit addresses, without randomisation, and their
/// query.
const PERSONALITIES: [u32; 5] = [0x0, 0x0008, 0x2_0000, 0x2_0008, 0xFFFF_FFFF];

/// TIOCSTI puts characters into a terminal's input, TIOCLINUX selects in a console, TIOCSETD loads
/// a line discipline, TIOCEXCL keeps others from opening the terminal. With `FS_IOC_SETFLAGS`, threads
/// of the kernel compress a session's files, outside of its limit of processor time.
pub(crate) const REFUSED_IOCTLS: [u32; 5] = [0x5412, 0x541C, 0x5423, 0x540C, 0x4008_6602];

/// The type of BTRFS's ioctls, with its bits. A subvolume that a session made in its root would have no limit of its
/// disk space, would keep the root from being removed, and would take one of a million device numbers of the host;
/// others commit the file system of all sessions.
pub(crate) const IOCTL_TYPE: u32 = 0xFF00;
pub(crate) const BTRFS_IOCTLS: u32 = 0x9400;

/// Those of that type that all file systems have: FICLONE, FICLONERANGE and FIDEDUPERANGE share extents of files.
pub(crate) const CLONING_IOCTLS: [u32; 3] = [0x4004_9409, 0x4020_940D, 0xC018_9436];

/// `SOL_SOCKET` (asm-generic/socket.h).
const SOCKET_LEVEL: u32 = 1;

/// Options that attach a program to a socket: `SO_ATTACH_FILTER`, `SO_ATTACH_BPF` and
/// `SO_ATTACH_REUSEPORT_{CBPF,EBPF}`. Compiled programs take memory of one pool of the kernel
/// (`net.core.bpf_jit_limit`) that no cgroup is charged for. While it is exhausted, no system call filter
/// can be installed, so no session starts.
pub(crate) const ATTACHING_OPTIONS: [u32; 4] = [26, 50, 51, 52];

/// `SECCOMP_SET_MODE_FILTER`, and `PR_SET_SECCOMP` with `SECCOMP_MODE_FILTER`: filters take memory of the
/// same pool.
const SECCOMP_SET_MODE_FILTER: u32 = 1;
const PR_SET_SECCOMP: u32 = 22;
const SECCOMP_MODE_FILTER: u32 = 2;

/// `RLIMIT_CORE`. Sessions have 1, with which the kernel starts no program that handles core dumps; 0 does
/// not prevent it. Some programs end if they cannot set it, so a change succeeds without effect.
const RLIMIT_CORE: u32 = 4;

/// `MAP_HUGETLB`, `MFD_HUGETLB` and `SHM_HUGETLB`: huge pages are reserved by the host, and no memory cgroup
/// is charged for them.
const MAP_HUGETLB: u32 = 0x4_0000;
const MFD_HUGETLB: u32 = 0x4;
const SHM_HUGETLB: u32 = 0x800;

/// What happens to a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allow,
    Refuse,
    Unknown,
    /// Allowed if its argument is one of these, else refused.
    OneOf(u32, &'static [u32]),
    /// Refused if its second argument is one of the first or has the type of the others, except the last.
    Ioctl(&'static [u32], u32, &'static [u32]),
    /// Answered with this error if its argument has one of these bits.
    NoBits(u32, u32, u32),
    /// Answered with this if all of these match, else allowed.
    Except(&'static [Arguments], u32),
    /// Decided by the first of these values that its first argument has; refused if it has none. With
    /// a list, the third argument must be in it; otherwise the call is answered with this error.
    ByFirst(&'static [(u32, Option<&'static [u32]>)], u32),
}

/// A condition on an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arguments {
    /// The low half of it is this.
    Equal(u32, u32),
    /// The low half of it is one of these.
    Matching(u32, &'static [u32]),
    /// It is no null pointer.
    NewValue(u32),
}

/// A variant of the filter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Variant {
    /// The container's programs may install filters, too.
    pub(crate) own_filters: bool,
    /// The container has no IPC namespace of its own, so calls that need one are unknown.
    pub(crate) without_ipc: bool,
}

/// What happens to the call of this number.
pub(crate) fn verdict(number: i64, variant: Variant) -> Verdict {
    if variant.without_ipc && (number == libc::SYS_shmget || IPC.contains(&number)) {
        return Verdict::Unknown;
    }
    if let Some(verdict) = by_arguments(number) {
        let installs = matches!(number, libc::SYS_seccomp | libc::SYS_prctl);
        return match variant.own_filters && installs {
            true => Verdict::Allow,
            false => verdict,
        };
    }
    if IPC.contains(&number) || ALLOWED.contains(&number) {
        Verdict::Allow
    } else if REFUSED.contains(&number) {
        Verdict::Refuse
    } else {
        Verdict::Unknown
    }
}

/// What happens to calls that are allowed with some arguments.
fn by_arguments(number: i64) -> Option<Verdict> {
    Some(match number {
        libc::SYS_clone => Verdict::NoBits(0, NAMESPACE_FLAGS, EPERM),
        libc::SYS_socket => Verdict::ByFirst(
            &[
                (NETLINK, Some(&NETLINK_PROTOCOLS)),
                (IPV4, Some(&IPV4_PROTOCOLS)),
                (IPV6, Some(&IPV6_PROTOCOLS)),
                (UNIX, None),
            ],
            EPROTONOSUPPORT,
        ),
        libc::SYS_socketpair => Verdict::OneOf(0, &PAIR_FAMILIES),
        libc::SYS_personality => Verdict::OneOf(0, &PERSONALITIES),
        libc::SYS_ioctl => Verdict::Ioctl(&REFUSED_IOCTLS, BTRFS_IOCTLS, &CLONING_IOCTLS),
        libc::SYS_setsockopt => Verdict::Except(
            &[Equal(1, SOCKET_LEVEL), Matching(2, &ATTACHING_OPTIONS)],
            EINVAL,
        ),
        libc::SYS_seccomp => Verdict::Except(&[Equal(0, SECCOMP_SET_MODE_FILTER)], EINVAL),
        libc::SYS_prctl => Verdict::Except(
            &[Equal(0, PR_SET_SECCOMP), Equal(1, SECCOMP_MODE_FILTER)],
            EINVAL,
        ),
        libc::SYS_setrlimit => Verdict::Except(&[Equal(0, RLIMIT_CORE)], SUCCESS),
        libc::SYS_prlimit64 => Verdict::Except(&[Equal(1, RLIMIT_CORE), NewValue(2)], SUCCESS),
        libc::SYS_mmap => Verdict::NoBits(3, MAP_HUGETLB, EINVAL),
        libc::SYS_memfd_create => Verdict::NoBits(1, MFD_HUGETLB, EINVAL),
        libc::SYS_shmget => Verdict::NoBits(2, SHM_HUGETLB, EINVAL),
        _ => return None,
    })
}

/// System V and POSIX IPC, in the container's namespace, besides `shmget`: all that reach what is in one.
#[rustfmt::skip]
pub(crate) const IPC: &[i64] = &[
    libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget,
    libc::SYS_semop, libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd,
    libc::SYS_msgrcv, libc::SYS_msgctl, libc::SYS_mq_open, libc::SYS_mq_unlink,
    libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
];

/// Refused with EPERM. clone3 is in neither list: its flags are in memory, which a filter cannot read,
/// and at ENOSYS the C library uses clone. Nor are `io_setup` and related calls: their number is limited
/// for the whole host, and programs that get ENOSYS use threads.
pub(crate) const REFUSED: &[i64] = &[
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_bpf,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_lookup_dcookie,
    libc::SYS_fanotify_init,
    libc::SYS_process_vm_writev,
    libc::SYS_process_vm_readv,
    libc::SYS_kcmp,
    libc::SYS_move_pages,
    libc::SYS_mbind,
    libc::SYS_set_mempolicy,
    libc::SYS_migrate_pages,
    libc::SYS_pidfd_getfd,
    libc::SYS_mlockall,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Allowed with any arguments.
#[rustfmt::skip]
pub(crate) const ALLOWED: &[i64] = &[
    // Files.
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64,
    libc::SYS_pwrite64, libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2,
    libc::SYS_pwritev2, libc::SYS_openat, libc::SYS_openat2, libc::SYS_close,
    libc::SYS_close_range, libc::SYS_lseek, libc::SYS_fstat, libc::SYS_newfstatat,
    libc::SYS_statx, libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_faccessat,
    libc::SYS_faccessat2, libc::SYS_fchmod, libc::SYS_fchmodat, libc::SYS_fchmodat2,
    libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_ftruncate, libc::SYS_truncate,
    libc::SYS_fallocate, libc::SYS_fadvise64, libc::SYS_fsync, libc::SYS_fdatasync,
    libc::SYS_sync, libc::SYS_syncfs, libc::SYS_sync_file_range, libc::SYS_flock,
    libc::SYS_fcntl, libc::SYS_dup, libc::SYS_dup3, libc::SYS_pipe2, libc::SYS_getdents64,
    libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir, libc::SYS_chroot, libc::SYS_umask,
    libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_unlinkat, libc::SYS_linkat,
    libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_renameat, libc::SYS_renameat2,
    libc::SYS_utimensat, libc::SYS_copy_file_range, libc::SYS_sendfile, libc::SYS_splice,
    libc::SYS_tee, libc::SYS_vmsplice, libc::SYS_readahead, libc::SYS_getxattr,
    libc::SYS_lgetxattr, libc::SYS_fgetxattr, libc::SYS_setxattr, libc::SYS_lsetxattr,
    libc::SYS_fsetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr,
    libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr,
    libc::SYS_inotify_init1, libc::SYS_inotify_add_watch, libc::SYS_inotify_rm_watch,
    // Waiting.
    libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_signalfd4,
    libc::SYS_timerfd_create, libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime,
    // Sockets, except for making them and for their options.
    libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4,
    libc::SYS_connect, libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_sendto,
    libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg,
    libc::SYS_recvmmsg, libc::SYS_getsockopt, libc::SYS_shutdown,
    // Memory.
    libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_madvise,
    libc::SYS_brk, libc::SYS_msync, libc::SYS_mincore, libc::SYS_mlock, libc::SYS_mlock2,
    libc::SYS_munlock, libc::SYS_munlockall, libc::SYS_membarrier,
    libc::SYS_get_mempolicy, libc::SYS_pkey_alloc, libc::SYS_pkey_free, libc::SYS_pkey_mprotect,
    libc::SYS_process_madvise, libc::SYS_mseal,
    // Processes.
    libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4,
    libc::SYS_waitid, libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal, libc::SYS_getpid, libc::SYS_getppid, libc::SYS_gettid,
    libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getsid, libc::SYS_setsid,
    libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list,
    libc::SYS_rseq, libc::SYS_futex, libc::SYS_futex_waitv,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity, libc::SYS_sched_setaffinity, libc::SYS_sched_getparam,
    libc::SYS_sched_setparam, libc::SYS_sched_getscheduler, libc::SYS_sched_setscheduler,
    libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
    libc::SYS_sched_rr_get_interval, libc::SYS_sched_getattr, libc::SYS_sched_setattr,
    libc::SYS_getpriority, libc::SYS_setpriority, libc::SYS_ioprio_get, libc::SYS_ioprio_set,
    libc::SYS_getrlimit, libc::SYS_getrusage,
    libc::SYS_times, libc::SYS_ptrace, libc::SYS_getcpu, libc::SYS_restart_syscall,
    libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
    // Users.
    libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid,
    libc::SYS_getresuid, libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_setuid,
    libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid, libc::SYS_setresuid,
    libc::SYS_setresgid, libc::SYS_setgroups, libc::SYS_setfsuid, libc::SYS_setfsgid,
    libc::SYS_capget, libc::SYS_capset,
    // Signals.
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_rt_sigsuspend, libc::SYS_rt_sigreturn, libc::SYS_sigaltstack,
    // Time.
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep, libc::SYS_gettimeofday, libc::SYS_getitimer, libc::SYS_setitimer,
    libc::SYS_timer_create, libc::SYS_timer_settime, libc::SYS_timer_gettime,
    libc::SYS_timer_getoverrun, libc::SYS_timer_delete,
    // About the system.
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom,
    // What only this architecture still has.
    #[cfg(target_arch = "x86_64")] libc::SYS_open,
    #[cfg(target_arch = "x86_64")] libc::SYS_creat,
    #[cfg(target_arch = "x86_64")] libc::SYS_stat,
    #[cfg(target_arch = "x86_64")] libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")] libc::SYS_access,
    #[cfg(target_arch = "x86_64")] libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")] libc::SYS_chown,
    #[cfg(target_arch = "x86_64")] libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")] libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_link,
    #[cfg(target_arch = "x86_64")] libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_rename,
    #[cfg(target_arch = "x86_64")] libc::SYS_utime,
    #[cfg(target_arch = "x86_64")] libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")] libc::SYS_futimesat,
    #[cfg(target_arch = "x86_64")] libc::SYS_getdents,
    #[cfg(target_arch = "x86_64")] libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")] libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")] libc::SYS_poll,
    #[cfg(target_arch = "x86_64")] libc::SYS_select,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_create,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")] libc::SYS_eventfd,
    #[cfg(target_arch = "x86_64")] libc::SYS_signalfd,
    #[cfg(target_arch = "x86_64")] libc::SYS_inotify_init,
    #[cfg(target_arch = "x86_64")] libc::SYS_fork,
    #[cfg(target_arch = "x86_64")] libc::SYS_vfork,
    #[cfg(target_arch = "x86_64")] libc::SYS_getpgrp,
    #[cfg(target_arch = "x86_64")] libc::SYS_alarm,
    #[cfg(target_arch = "x86_64")] libc::SYS_pause,
    #[cfg(target_arch = "x86_64")] libc::SYS_time,
    #[cfg(target_arch = "x86_64")] libc::SYS_arch_prctl,
];
