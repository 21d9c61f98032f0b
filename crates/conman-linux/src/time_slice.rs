//! Gives a thread short time slices.

use std::io;
use std::time::Duration;

/// Time that an ordinary thread may run before another one that is due gets its processor. The kernel's
/// default is 0.7 to 2.8 ms; its bounds are 0.1 and 100 ms (`__setparam_fair` in kernel/sched/syscalls.c).
///
/// A request to a session crosses several processes, and waits for a slice of each busy session at
/// every one of them.
const SLICE: Duration = Duration::from_micros(150);

/// Gives the calling thread short time slices, and all threads and processes that it starts. So it waits
/// less for other threads with short slices, and displaces those with longer ones when it wakes up. Its
/// share of the processors, which its nice value and cgroup decide, stays the same.
///
/// Kernels before 6.12 accept the call and ignore the slice.
pub fn run_in_short_slices() -> io::Result<()> {
    let mut attributes = read_attributes()?;
    attributes.sched_runtime = u64::try_from(SLICE.as_nanos()).unwrap_or(u64::MAX);
    write_attributes(&attributes)
}

#[expect(unsafe_code, reason = "sched_getattr(2) has no wrapper")]
fn read_attributes() -> io::Result<libc::sched_attr> {
    // SAFETY: the structure has only numbers, for which zero is valid.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::sched_attr>();
    // SAFETY: 0 is the calling thread, and the kernel writes at most `size` bytes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    outcome(result).map(|()| attributes)
}

#[expect(unsafe_code, reason = "sched_setattr(2) has no wrapper")]
fn write_attributes(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: 0 is the calling thread; the structure states its size, as `read_attributes` got it.
    outcome(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const *attributes, 0) })
}

fn outcome(result: libc::c_long) -> io::Result<()> {
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn slice() -> u64 {
        read_attributes().expect("readable").sched_runtime
    }

    #[test]
    #[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
    fn a_thread_and_what_it_starts_have_short_slices_and_the_same_nice_value() {
        let tried = thread::spawn(|| {
            let nice = read_attributes().expect("readable").sched_nice;
            run_in_short_slices().expect("permitted");
            let own = read_attributes().expect("readable");
            let started = thread::spawn(slice).join().expect("no panic");
            (nice, own.sched_nice, own.sched_runtime, started)
        });
        let (nice_before, nice, own, started) = tried.join().expect("no panic");
        assert_eq!(nice, nice_before);
        if own == 0 {
            println!("skipped: this kernel has no slices of a thread's own");
            return;
        }
        assert_eq!((own, started), (150_000, 150_000));
    }
}
