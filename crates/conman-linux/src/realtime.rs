use std::io;

/// Scheduling priority among threads of a real-time policy: the lowest, which is before every thread
/// of none, whatever its niceness and its cgroup's weight (sched(7)).
const PRIORITY: libc::c_int = 1;

/// Has the calling thread run before every thread of an ordinary policy, on whatever processor it
/// becomes ready. What it starts is ordinary again. For a while in which it waits nearly always: one
/// that does not takes a processor from all others, but for the twentieth that the kernel leaves them.
///
/// Needs CAP_SYS_NICE. Kernels with CONFIG_RT_GROUP_SCHED refuse it with EPERM in v1 cgroups that have
/// been given no real-time, and cannot enable v2's cpu controller meanwhile.
pub fn run_before_ordinary_threads() -> io::Result<()> {
    set_policy(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, PRIORITY)
}

/// Takes that back; the thread's niceness is what it was.
pub fn run_as_ordinary_thread() -> io::Result<()> {
    set_policy(libc::SCHED_OTHER, 0)
}

#[expect(unsafe_code, reason = "sched_setscheduler(2) has no safe wrapper")]
fn set_policy(policy: libc::c_int, priority: libc::c_int) -> io::Result<()> {
    // The kernel's `struct sched_param`; not every C library's function makes the call.
    // SAFETY: 0 is the calling thread, and the parameter lives until the call has returned.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::io::Errno;

    use super::*;

    /// Of the calling thread (proc_pid_stat(5)).
    fn policy() -> libc::c_int {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("readable");
        let (_, fields) = stat.rsplit_once(')').expect("a name");
        let policy = fields.split_ascii_whitespace().nth(38);
        policy.expect("a policy").parse().expect("a number")
    }

    #[test]
    #[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
    fn a_thread_goes_before_others_and_what_it_starts_does_not() {
        let tried = thread::spawn(|| {
            run_before_ordinary_threads()?;
            let own = policy();
            let started = thread::spawn(policy).join().expect("no panic");
            run_as_ordinary_thread()?;
            io::Result::Ok((own, started, policy()))
        });
        match tried.join().expect("no panic") {
            Ok(policies) => assert_eq!(policies, (libc::SCHED_RR, 0, 0), "0 is SCHED_OTHER"),
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                println!("skipped: this cgroup has no real-time");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
