//! Ends and stops of child processes.

use std::io;

use rustix::io::Errno;

use crate::init_program::signal_of_program;
use crate::{Ended, PidFd};

/// An event of a child of the calling process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildEvent {
    /// It is dead and has been reaped: its PID may be reused from now on.
    Ended { pid: i32, ended: Ended },
    /// It lives, and is stopped because it has made the calling process its tracer
    /// (`PTRACE_TRACEME`). It runs again only when it is detached or killed. The PID may be that of
    /// a thread.
    Traced { pid: i32 },
}

/// Returns the next event of any child; `None` when there is none now. Never waits.
///
/// wait(2) also reports the stops of traced children, and ends of traced threads, as events of
/// children. An end is reported here only for a whole process that is dead, as its pidfd shows.
pub fn next_child_event() -> io::Result<Option<ChildEvent>> {
    loop {
        // Not reaped yet, so that the PID is not reused while it is checked.
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        let Some(change) = wait(libc::P_ALL, 0, options)? else {
            return Ok(None);
        };
        let pid = change.pid;
        let ended = match change.code {
            libc::CLD_EXITED => exited(pid, change.status),
            libc::CLD_KILLED | libc::CLD_DUMPED => Ended::Signalled(change.status),
            _ => {
                take(pid, libc::WSTOPPED)?;
                return Ok(Some(ChildEvent::Traced { pid }));
            }
        };
        let is_dead = match PidFd::open(pid) {
            Ok(process) => process.is_dead()?,
            Err(error) => !error.denies_process(),
        };
        take(pid, libc::WEXITED)?;
        if is_dead {
            return Ok(Some(ChildEvent::Ended { pid, ended }));
        }
    }
}

/// The end of a child that has exited and is not reaped. That of a session's init is that of the session's program.
fn exited(pid: i32, code: i32) -> Ended {
    // Only these can be a signal, and most ends are none.
    let name = (code > 128).then(|| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    let signal = name
        .flatten()
        .and_then(|name| signal_of_program(&name, code));
    signal.map_or(Ended::Exited(code), Ended::Signalled)
}

/// Waits for the end of a child that nothing else reaps, and reaps it. Returns how it ended; `None` if it was
/// reaped before.
pub fn reap(child: &PidFd) -> io::Result<Option<Ended>> {
    let id = libc::id_t::try_from(child.pid()).unwrap_or(0);
    let change = wait(libc::P_PID, id, libc::WEXITED)?;
    Ok(change.map(|change| match change.code {
        libc::CLD_EXITED => Ended::Exited(change.status),
        _ => Ended::Signalled(change.status),
    }))
}

/// Reaps a child that is dead. It may have been reaped before.
pub fn reap_if_dead(child: &PidFd) -> io::Result<()> {
    take(child.pid(), libc::WEXITED)
}

/// Consumes an event that was left in place.
fn take(pid: i32, kind: i32) -> io::Result<()> {
    let id = libc::id_t::try_from(pid).unwrap_or(0);
    wait(libc::P_PID, id, kind | libc::WNOHANG).map(|_| ())
}

#[derive(Debug)]
struct Change {
    pid: i32,
    code: i32,
    status: i32,
}

#[expect(
    unsafe_code,
    reason = "no safe wrapper of waitid(2) has the PID and every signal"
)]
fn wait(kind: libc::idtype_t, id: libc::id_t, options: i32) -> io::Result<Option<Change>> {
    loop {
        // SAFETY: `siginfo_t` is made of integers and pointers, for which zero is a valid value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is valid for writes of a whole `siginfo_t` and outlives the call.
        let result = unsafe { libc::waitid(kind, id, &raw mut info, options) };
        if result != 0 {
            match Errno::from_io_error(&io::Error::last_os_error()) {
                Some(Errno::INTR) => continue,
                Some(Errno::CHILD) => return Ok(None),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        // SAFETY: waitid succeeded, so `info` holds the fields of SIGCHLD, or is zero still where no
        // child has changed (waitid(2)); both are initialised integers.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        return Ok((pid != 0).then_some(Change {
            pid,
            code: info.si_code,
            status,
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    /// The event of this child; other tests of this process have children too.
    fn event_of(pid: u32) -> ChildEvent {
        let pid = pid.cast_signed();
        let process = PidFd::open(pid).expect("a child that is not reaped");
        assert!(process.wait_dead(Duration::from_secs(20)).expect("waited"));
        let id = libc::id_t::try_from(pid).expect("a pid");
        let change = wait(libc::P_PID, id, libc::WEXITED | libc::WNOWAIT);
        let change = change.expect("waited").expect("dead");
        take(pid, libc::WEXITED).expect("reaped");
        let ended = match change.code {
            libc::CLD_EXITED => Ended::Exited(change.status),
            _ => Ended::Signalled(change.status),
        };
        ChildEvent::Ended { pid, ended }
    }

    #[test]
    fn every_kind_of_end_is_told_even_by_a_signal_without_a_name() {
        for (script, ended) in [
            ("exit 42", Ended::Exited(42)),
            ("kill -9 $$", Ended::Signalled(9)),
            ("kill -40 $$", Ended::Signalled(40)),
        ] {
            let child = Command::new("/bin/sh").args(["-c", script]).spawn();
            let pid = child.expect("spawned").id();
            let expected = ChildEvent::Ended {
                pid: pid.cast_signed(),
                ended,
            };
            assert_eq!(event_of(pid), expected);
        }
    }
}
