//! Gives a thread real-time priority.

use std::io;

/// Scheduling priority among real-time threads: the lowest, which still precedes every ordinary thread,
/// whatever its nice value and its cgroup's weight (sched(7)).
const PRIORITY: libc::c_int = 1;

/// Runs the calling thread before every ordinary thread, on any processor. Its child threads and processes
/// are ordinary again. Only for periods in which it waits nearly always: otherwise it takes a processor
/// from all others, except for the twentieth that the kernel reserves for them.
///
/// Needs CAP_SYS_NICE. Kernels with CONFIG_RT_GROUP_SCHED refuse it with EPERM in v1 cgroups without a
/// real-time budget, and cannot enable v2's cpu controller meanwhile.
pub fn run_before_ordinary_threads() -> io::Result<()> {
    set_policy(libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, PRIORITY)
}

/// Undoes it; the thread has its earlier nice value.
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
