use std::io;

/// Scheduling priority among threads of a real-time policy: the lowest, which is before every thread
/// of none, whatever its niceness and its cgroup's weight (sched(7)).
const PRIORITY: libc::c_int = 1;

/// Has the calling thread run before every thread of an ordinary policy, on whatever processor it
/// becomes ready. What it starts is ordinary again. For a thread that waits nearly always: one that
/// does not takes a processor from all others, but for the twentieth that the kernel leaves them.
///
/// Needs CAP_SYS_NICE. Kernels with CONFIG_RT_GROUP_SCHED refuse it with EPERM in cgroups that have
/// been given no real-time.
#[expect(unsafe_code, reason = "sched_setscheduler(2) has no safe wrapper")]
pub fn run_before_ordinary_threads() -> io::Result<()> {
    // Its fields differ between C libraries; all that are not set here are zero.
    // SAFETY: `sched_param` is plain integers, for which zero is a value.
    let mut parameters: libc::sched_param = unsafe { std::mem::zeroed() };
    parameters.sched_priority = PRIORITY;
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: 0 is the calling thread, and the parameters live until the call has returned.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
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
            io::Result::Ok((own, started))
        });
        match tried.join().expect("no panic") {
            Ok(policies) => assert_eq!(policies, (libc::SCHED_RR, libc::SCHED_OTHER)),
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                println!("skipped: this cgroup has no real-time");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
