//! System calls that a session may not make on the host's kernel, or only with some arguments. The system call filter
//! of native containers has these rules, and so have the filters that OCI runtimes install.

use Condition::{Equal, Matching, NewValue};

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
pub const IPV4_PROTOCOLS: [u32; 4] = [0, 1, 6, 17];
pub const IPV6_PROTOCOLS: [u32; 4] = [0, 6, 17, 58];

/// The only family of socket pairs. The kernel creates sockets of any family before it refuses a pair.
const PAIR_FAMILIES: [u32; 1] = [1];

/// Netlink protocols: ROUTE (for addresses, in name resolution), `SOCK_DIAG` (for sockets, in ss),
/// `KOBJECT_UEVENT` (for libudev). The others answer like a kernel without them: programs that write to
/// the audit log, such as `useradd`, fail at EPERM.
pub const NETLINK_PROTOCOLS: [u32; 3] = [0, 4, 15];

/// Execution domains that are harmless: Linux, 32-bit addresses, without randomisation, and their
/// query.
const PERSONALITIES: [u32; 5] = [0x0, 0x0008, 0x2_0000, 0x2_0008, 0xFFFF_FFFF];

/// TIOCSTI puts characters into a terminal's input, TIOCLINUX selects in a console, TIOCSETD loads
/// a line discipline, TIOCEXCL keeps others from opening the terminal. With `FS_IOC_SETFLAGS`, threads
/// of the kernel compress a session's files, outside of its limit of processor time.
pub const REFUSED_IOCTLS: [u32; 5] = [0x5412, 0x541C, 0x5423, 0x540C, 0x4008_6602];

/// The type of BTRFS's ioctls, with its bits. A subvolume that a session made in its root would have no limit of its
/// disk space, would keep the root from being removed, and would take one of a million device numbers of the host;
/// others commit the file system of all sessions.
pub const IOCTL_TYPE: u32 = 0xFF00;
pub const BTRFS_IOCTLS: u32 = 0x9400;

/// Those of that type that all file systems have: FICLONE, FICLONERANGE and FIDEDUPERANGE share extents of files.
pub const CLONING_IOCTLS: [u32; 3] = [0x4004_9409, 0x4020_940D, 0xC018_9436];

/// `SOL_SOCKET` (asm-generic/socket.h).
const SOCKET_LEVEL: u32 = 1;

/// Options that attach a program to a socket: `SO_ATTACH_FILTER`, `SO_ATTACH_BPF` and
/// `SO_ATTACH_REUSEPORT_{CBPF,EBPF}`. Compiled programs take memory of one pool of the kernel
/// (`net.core.bpf_jit_limit`) that no cgroup is charged for. While it is exhausted, no system call filter
/// can be installed, so no session starts.
pub const ATTACHING_OPTIONS: [u32; 4] = [26, 50, 51, 52];

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

/// A system call of this architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SystemCall {
    /// The C library's name of its number.
    constant: &'static str,
    pub number: i64,
}

impl SystemCall {
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.constant.trim_start_matches("SYS_")
    }
}

/// What happens to a system call that is allowed with some arguments. "Refused" means answered with EPERM. Only the low
/// half of an argument counts, since the kernel ignores the high one, except for [`Condition::NewValue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentRule {
    /// Allowed if its argument is one of these, else refused.
    OneOf(u32, &'static [u32]),
    /// Refused if its second argument is one of the first or has the type of the others, except the last.
    Ioctl(&'static [u32], u32, &'static [u32]),
    /// Answered with this error if its argument has one of these bits.
    NoBits(u32, u32, u32),
    /// Answered with this if all of these match, else allowed.
    Except(&'static [Condition], u32),
    /// Decided by the first of these values that its first argument has; refused if it has none. With
    /// a list, the third argument must be in it; otherwise the call is answered with this error.
    ByFirst(&'static [(u32, Option<&'static [u32]>)], u32),
}

/// A condition on an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// It is this.
    Equal(u32, u32),
    /// It is one of these.
    Matching(u32, &'static [u32]),
    /// It is no null pointer.
    NewValue(u32),
}

macro_rules! call {
    ($constant:ident) => {
        SystemCall {
            constant: stringify!($constant),
            number: libc::$constant,
        }
    };
}

/// Allowed with some arguments.
pub const BY_ARGUMENTS: &[(SystemCall, ArgumentRule)] = &[
    (
        call!(SYS_clone),
        ArgumentRule::NoBits(0, NAMESPACE_FLAGS, EPERM),
    ),
    (
        call!(SYS_socket),
        ArgumentRule::ByFirst(
            &[
                (NETLINK, Some(&NETLINK_PROTOCOLS)),
                (IPV4, Some(&IPV4_PROTOCOLS)),
                (IPV6, Some(&IPV6_PROTOCOLS)),
                (UNIX, None),
            ],
            EPROTONOSUPPORT,
        ),
    ),
    (
        call!(SYS_socketpair),
        ArgumentRule::OneOf(0, &PAIR_FAMILIES),
    ),
    (
        call!(SYS_personality),
        ArgumentRule::OneOf(0, &PERSONALITIES),
    ),
    (
        call!(SYS_ioctl),
        ArgumentRule::Ioctl(&REFUSED_IOCTLS, BTRFS_IOCTLS, &CLONING_IOCTLS),
    ),
    (
        call!(SYS_setsockopt),
        ArgumentRule::Except(
            &[Equal(1, SOCKET_LEVEL), Matching(2, &ATTACHING_OPTIONS)],
            EINVAL,
        ),
    ),
    (
        call!(SYS_seccomp),
        ArgumentRule::Except(&[Equal(0, SECCOMP_SET_MODE_FILTER)], EINVAL),
    ),
    (
        call!(SYS_prctl),
        ArgumentRule::Except(
            &[Equal(0, PR_SET_SECCOMP), Equal(1, SECCOMP_MODE_FILTER)],
            EINVAL,
        ),
    ),
    (
        call!(SYS_setrlimit),
        ArgumentRule::Except(&[Equal(0, RLIMIT_CORE)], SUCCESS),
    ),
    (
        call!(SYS_prlimit64),
        ArgumentRule::Except(&[Equal(1, RLIMIT_CORE), NewValue(2)], SUCCESS),
    ),
    (
        call!(SYS_mmap),
        ArgumentRule::NoBits(3, MAP_HUGETLB, EINVAL),
    ),
    (
        call!(SYS_memfd_create),
        ArgumentRule::NoBits(1, MFD_HUGETLB, EINVAL),
    ),
    (
        call!(SYS_shmget),
        ArgumentRule::NoBits(2, SHM_HUGETLB, EINVAL),
    ),
];

/// Refused with EPERM. clone3 is in neither list: its flags are in memory, which a filter cannot read,
/// and at ENOSYS the C library uses clone. Nor are `io_setup` and related calls: their number is limited
/// for the whole host, and programs that get ENOSYS use threads.
pub const REFUSED: &[SystemCall] = &[
    call!(SYS_unshare),
    call!(SYS_setns),
    call!(SYS_mount),
    call!(SYS_umount2),
    call!(SYS_pivot_root),
    call!(SYS_fsopen),
    call!(SYS_fsconfig),
    call!(SYS_fsmount),
    call!(SYS_fspick),
    call!(SYS_open_tree),
    call!(SYS_move_mount),
    call!(SYS_mount_setattr),
    call!(SYS_bpf),
    call!(SYS_keyctl),
    call!(SYS_add_key),
    call!(SYS_request_key),
    call!(SYS_io_uring_setup),
    call!(SYS_io_uring_enter),
    call!(SYS_io_uring_register),
    call!(SYS_perf_event_open),
    call!(SYS_userfaultfd),
    call!(SYS_kexec_load),
    call!(SYS_kexec_file_load),
    call!(SYS_init_module),
    call!(SYS_finit_module),
    call!(SYS_delete_module),
    call!(SYS_reboot),
    call!(SYS_swapon),
    call!(SYS_swapoff),
    call!(SYS_acct),
    call!(SYS_quotactl),
    call!(SYS_settimeofday),
    call!(SYS_clock_settime),
    call!(SYS_clock_adjtime),
    call!(SYS_adjtimex),
    call!(SYS_open_by_handle_at),
    call!(SYS_name_to_handle_at),
    call!(SYS_syslog),
    call!(SYS_vhangup),
    call!(SYS_sethostname),
    call!(SYS_setdomainname),
    call!(SYS_lookup_dcookie),
    call!(SYS_fanotify_init),
    call!(SYS_process_vm_writev),
    call!(SYS_process_vm_readv),
    call!(SYS_kcmp),
    call!(SYS_move_pages),
    call!(SYS_mbind),
    call!(SYS_set_mempolicy),
    call!(SYS_migrate_pages),
    call!(SYS_pidfd_getfd),
    call!(SYS_mlockall),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_iopl),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_ioperm),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_modify_ldt),
];
