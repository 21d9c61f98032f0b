//! The second kind of certificate: every thread of a session has begun to exit.
//!
//! A PID namespace is empty only after the kernel has taken down what its processes had: memory, unlinked
//! files, triggers. A session can make that take minutes, although nothing of it runs any more. The claim
//! is that it cannot run an instruction again if all of the following holds (Linux 5.14 to 6.18; the
//! functions are the kernel's).
//!
//! 1. *A thread with `PF_EXITING` never returns to user mode.* Only `exit_signals` sets the flag, called
//!    by `do_exit`, which does not return. What follows (`exit_mm`, `exit_files`, `exit_notify`) runs the
//!    kernel's code. It counts for each **thread**: a leader that has left shows the flag while other
//!    threads run, so `/proc/PID/task/*/stat` is read, not `/proc/PID/stat`.
//! 2. *Every process was ordered to die, not the init alone.* The init kills the others in
//!    `zap_pid_ns_processes`, called by `exit_notify`, which comes after `exit_mm`: while a slow init
//!    exits, the others run. So the cgroup is written to: `cgroup.kill`.
//! 3. *Nothing is born meanwhile.* `copy_process` fails with a fatal signal pending, checked under the
//!    lock under which signals are sent; so a thread that was sent SIGKILL makes no other thread or
//!    process. A child that is made visible just after `cgroup.kill` has passed may escape it on kernels
//!    without `kill_seq`. Hence the cgroup is ordered to freeze before it is killed: `cgroup_post_fork`
//!    gives such a child `JOBCTL_TRAP_FREEZE`, so that it never reaches user mode, nor forks. Killed
//!    processes die although the cgroup is frozen (unified hierarchy; a v1 freezer would keep them, so
//!    there is no such certificate with one).
//! 4. *Two equal scans, one after the other, both after the orders, in which every thread has the flag.*
//!    A scan is not atomic: a child may be missed by the scan in which its parent was passed with the
//!    flag. It does not fork, so it is still there in the second scan, which then differs, or shows it
//!    without the flag. The orders are repeated before every scan.
//! 5. *What enters later does not run either.* Commands of conman are born in the session's cgroup
//!    (`CLONE_INTO_CGROUP`), which is frozen, and killed with it.
//! 6. *What comes after the flag changes nothing that another node shares.* Closing files flushes and
//!    unlocks them after the flag. So a session with a bind has no such certificate; its other files are
//!    this node's alone. Data in the send buffers of its sockets may still be sent, as after any death.
//!
//! It is used where another node waits and this one takes no new sessions: in a preemption, and while a node is
//! drained. It is not used elsewhere:
//! - *`DELETE`, restarts, idle and expired sessions* answer when the name and what the session used are free, on this
//!   very node: the next start would find the memory, disk and place of the old one taken. The same holds for a
//!   rebalance, during which the node admits sessions.
//! - *The fence* releases nothing. What it kills is what it could not freeze, and the kill's end is in the bound B for
//!   as long as threads may run; whether the kernel then needs longer to take them down does not matter to another
//!   node, which waits for T and asks for no certificate.
//!
//! A thread in an uninterruptible wait without the flag is in a system call, and may still change
//! something: there is no certificate. Exceptions: root of the host, who can thaw the cgroup or move a
//! process into it, and processes that other programs put into the PID namespace without joining the
//! cgroup, as Docker's do. Docker sessions have no such certificate.

use std::collections::BTreeSet;

/// A thread as a scan has found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ThreadSeen {
    pub process: i32,
    pub thread: i32,
    /// Distinguishes threads that had the same number one after the other.
    pub started: u64,
    /// Whether it has `PF_EXITING`.
    pub exiting: bool,
}

/// The scans of one session, each made after everything in its cgroup was ordered to freeze and to die.
#[derive(Debug, Default)]
pub struct ExitProof {
    last: Option<BTreeSet<ThreadSeen>>,
}

impl ExitProof {
    /// Takes the next scan. Returns whether nothing of the session runs any more.
    #[must_use]
    pub fn scanned(&mut self, threads: impl IntoIterator<Item = ThreadSeen>) -> bool {
        let threads: BTreeSet<ThreadSeen> = threads.into_iter().collect();
        if !threads.iter().all(|thread| thread.exiting) {
            self.last = None;
            return false;
        }
        let before = self.last.replace(threads);
        before.is_some() && before == self.last
    }

    /// A scan or an order before it has failed: what was seen before does not count.
    pub fn failed(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(process: i32, thread: i32, exiting: bool) -> ThreadSeen {
        ThreadSeen {
            process,
            thread,
            started: 1,
            exiting,
        }
    }

    #[test]
    fn one_thread_without_the_flag_is_enough_to_refuse() {
        let mut proof = ExitProof::default();
        for _ in 0..3 {
            // Its leader has left.
            assert!(!proof.scanned([thread(7, 7, true), thread(7, 8, false)]));
        }
    }

    #[test]
    fn two_equal_scans_prove_it_and_a_difference_or_an_error_begins_again() {
        let mut proof = ExitProof::default();
        let (one, both) = (
            vec![thread(7, 7, true)],
            [7, 8].map(|id| thread(id, id, true)),
        );
        assert!(!proof.scanned(one.clone()));
        assert!(!proof.scanned(both));
        assert!(proof.scanned(both));
        proof.failed();
        assert!(!proof.scanned(both));
        assert!(proof.scanned(both));
    }

    #[test]
    fn an_empty_cgroup_is_proof_after_two_scans_too() {
        let mut proof = ExitProof::default();
        assert!(!proof.scanned([]));
        assert!(proof.scanned([]));
    }
}
