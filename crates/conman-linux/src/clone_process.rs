//! Creates processes with clone3(2).

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::thread::UnshareFlags;

use crate::PidFd;
use crate::privileges::as_effective_user;

/// Exit status of a child whose function panicked.
const PANICKED: i32 = 101;

/// The first descriptor after the standard ones.
const FIRST_OWN_FD: u32 = 3;

/// Resets signal handlers in the child (clone3(2), Linux 5.5); the C library does not name it.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// Puts the child into a cgroup at birth (Linux 5.7).
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Namespaces, by their clone flags.
pub type Namespaces = UnshareFlags;

/// The flags of [`Namespaces`] that are namespaces and that clone3 accepts.
const ALLOWED: Namespaces = Namespaces::NEWUSER
    .union(Namespaces::NEWPID)
    .union(Namespaces::NEWNS)
    .union(Namespaces::NEWNET)
    .union(Namespaces::NEWUTS)
    .union(Namespaces::NEWIPC)
    .union(Namespaces::NEWCGROUP);

/// Proof that this process has one thread.
///
/// Between fork and exec the child of a process with several threads may only make async-signal-safe
/// calls, since another thread may hold a lock of the allocator. With one thread there is no such danger,
/// and the child may run any code. The holder of this must not start a thread while it exists; it cannot be
/// sent to another thread.
#[derive(Debug)]
pub struct SoleThread {
    not_send: PhantomData<*const ()>,
}

impl SoleThread {
    /// Checks that there is one thread.
    pub fn prove() -> io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        if threads == 1 {
            return Ok(Self {
                not_send: PhantomData,
            });
        }
        Err(io::Error::other(format!(
            "this process has {threads} threads and may not fork"
        )))
    }
}

/// How to create the child.
#[derive(Debug, Default)]
pub struct CloneOptions<'fd> {
    /// The new namespaces; it shares the others with the caller.
    pub namespaces: Option<Namespaces>,
    /// It becomes a child of the caller's parent, which reaps it, instead of the caller's child.
    pub sibling: bool,
    /// A directory of the unified hierarchy to create it in. Never one that has had `cgroup.kill`: the child
    /// would be killed at once.
    pub into_cgroup: Option<BorrowedFd<'fd>>,
    /// The only descriptors, besides the three standard ones, that the child's function may use:
    /// all others are closed before it runs. `None` leaves all open.
    pub keep_only: Option<&'fd [BorrowedFd<'fd>]>,
    /// The owner of its user namespace; otherwise the caller's effective user. The kernel charges inotify
    /// instances, queued signals and locked memory of the namespace to this user, and a parent's effective
    /// user has every capability in the namespaces that it owns. The caller must be root.
    pub owner: Option<u32>,
}

/// `struct clone_args` of clone3(2), second revision.
#[repr(C, align(8))]
#[derive(Debug, Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Creates a child process, which runs `child` on a copy of the caller's memory and exits with the returned
/// status. Descriptors are inherited, signal handlers reset.
///
/// Returns only in the parent. Errors are those of clone3(2).
pub fn clone_process(
    _sole: &SoleThread,
    options: &CloneOptions<'_>,
    child: impl FnOnce() -> i32,
) -> io::Result<PidFd> {
    match options.owner {
        Some(owner) => as_effective_user(owner, || clone_here(options, child)),
        None => clone_here(options, child),
    }
}

#[expect(unsafe_code, reason = "clone3(2) has no safe wrapper")]
fn clone_here(options: &CloneOptions<'_>, child: impl FnOnce() -> i32) -> io::Result<PidFd> {
    let namespaces = options.namespaces.unwrap_or(Namespaces::empty()) & ALLOWED;
    let mut raw_pidfd: libc::c_int = -1;
    let mut args = CloneArgs {
        flags: u64::from(namespaces.bits()) | libc::CLONE_PIDFD as u64 | CLONE_CLEAR_SIGHAND,
        pidfd: (&raw mut raw_pidfd) as u64,
        ..CloneArgs::default()
    };
    if options.sibling {
        // The exit signal is then the caller's and must not be given.
        args.flags |= libc::CLONE_PARENT as u64;
    } else {
        args.exit_signal = libc::SIGCHLD as u64;
    }
    if let Some(cgroup) = options.into_cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::try_from(cgroup.as_raw_fd()).unwrap_or(0);
    }
    // SAFETY: `args` is a valid clone_args of the size passed and outlives the call; `pidfd`
    // points to an int that does, too. No memory is shared (neither CLONE_VM nor a stack is
    // given), so the child continues here on its own copy of this stack, as after fork(2). The
    // caller has one thread (`SoleThread`, which the only caller holds), so no lock of the C library or of the allocator is
    // held by a thread that the child lacks.
    let result = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut args,
            std::mem::size_of::<CloneArgs>(),
        )
    };
    match result {
        0 => {
            let run = || {
                if let Some(keep) = options.keep_only {
                    close_all_but(keep);
                }
                child()
            };
            let status = catch_unwind(AssertUnwindSafe(run)).unwrap_or(PANICKED);
            // SAFETY: _exit(2) takes any status and does not return. It runs no destructor and no
            // atexit handler of the parent's state, which is the point.
            unsafe { libc::_exit(status) }
        }
        pid if pid > 0 => {
            // SAFETY: clone3 succeeded with CLONE_PIDFD, so the kernel wrote an open descriptor
            // that no other code knows; it is close-on-exec by definition.
            let fd = unsafe { OwnedFd::from_raw_fd(raw_pidfd) };
            Ok(PidFd::from_parts(fd, i32::try_from(pid).unwrap_or(-1)))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes every descriptor from 3 on that is not in `keep`.
#[expect(unsafe_code, reason = "close_range(2) has no safe wrapper")]
fn close_all_but(keep: &[BorrowedFd<'_>]) {
    let mut kept: Vec<u32> = keep
        .iter()
        .filter_map(|fd| u32::try_from(fd.as_raw_fd()).ok())
        .filter(|fd| *fd >= FIRST_OWN_FD)
        .collect();
    kept.sort_unstable();
    let mut from = FIRST_OWN_FD;
    for fd in kept.into_iter().map(Some).chain([None]) {
        let to = fd.map_or(u32::MAX, |fd| fd.saturating_sub(1));
        if from <= to {
            // SAFETY: this process has just been cloned; it is a copy, and the owners of these
            // descriptors in it are copies whose destructors never run, since it ends by _exit.
            // Its one function may use only what is kept (`CloneOptions::keep_only`).
            unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
        }
        from = fd.map_or(u32::MAX, |fd| fd + 1);
    }
}

/// Moves the calling thread into new namespaces, of those that [`clone_process`] supports; a PID namespace
/// applies only to its children.
#[expect(unsafe_code, reason = "unshare(2) can unshare more than namespaces")]
pub fn unshare_namespaces(namespaces: Namespaces) -> io::Result<()> {
    let namespaces = namespaces & ALLOWED;
    // SAFETY: unshare(2) is unsafe because CLONE_FILES makes descriptors invalid in other threads;
    // the mask above leaves namespaces only.
    Ok(unsafe { rustix::thread::unshare_unsafe(namespaces) }?)
}

/// Sets the default action for every signal, including ignored ones, which exec would keep.
#[expect(unsafe_code, reason = "signal(2) may install handlers")]
pub fn reset_signal_actions() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL installs no handler, so nothing is called in signal context. Signals
        // that cannot be changed and the C library's own two answer with an error and stay.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Marks every descriptor from `first` on as close-on-exec.
#[expect(unsafe_code, reason = "close_range(2) has no safe wrapper")]
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_CLOEXEC the call closes nothing and only sets a flag, which no
    // owner of a descriptor relies on being clear.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if result == 0 {
        return Ok(());
    }
    // Linux before 5.11 has no such flag.
    let entries: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|fd: &i32| u32::try_from(*fd).is_ok_and(|fd| fd >= first))
        .collect();
    for fd in entries {
        // SAFETY: F_SETFD changes nothing but the flag, and EBADF (the directory's own descriptor,
        // closed since) has no effect.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    Ok(())
}
