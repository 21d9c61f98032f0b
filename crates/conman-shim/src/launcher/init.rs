//! A container's first process that is not its program.
//!
//! It clones the program's process, which finishes the start, and then executes the init ([`InitProgram`]), which
//! costs a container little memory: a copy of the launcher would cost more.
//!
//! Processes of the container cannot trace the init, read its memory and descriptors in /proc, kill it or make it more
//! likely to be killed when memory runs out. It has the score of the program, which is the lowest that a process of
//! the container can have, and less memory than any other.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use conman_linux::{
    Capabilities, CloneOptions, InitProgram, SoleThread, bound_capabilities, clone_process,
    limit_capabilities, no_new_privileges,
};
use conman_shim_protocol::LaunchError;
use nix::sys::signal::SigSet;
use nix::unistd::{Pid, chdir, setpgid};
use rustix::pipe::{PipeFlags, pipe_with};

use super::steps::{process_step, step};

/// Returns only with the reason for a failure. `program` is the run of the program's process, which has these
/// descriptors: the init's own file is executable. It is given a pipe that ends when the init is executed: until then
/// this process shows the launcher's memory and privileges, and the program must not run.
pub(super) fn become_init(
    init: &InitProgram,
    sole: &SoleThread,
    descriptors: &[BorrowedFd<'_>],
    program: impl FnOnce(&OwnedFd) -> i32,
) -> LaunchError {
    let (executed, _executing) = match pipe_with(PipeFlags::CLOEXEC) {
        Ok(pipe) => pipe,
        Err(errno) => return step("make a pipe for the init")(errno.into()),
    };
    // Signals that come before the init waits for them are queued.
    let begun = SigSet::all().thread_set_mask().map_err(io::Error::from);
    let run = || match SigSet::empty().thread_set_mask() {
        Ok(()) => program(&executed),
        Err(_) => 1,
    };
    let descriptors: Vec<_> = descriptors
        .iter()
        .copied()
        .chain([executed.as_fd()])
        .collect();
    let options = CloneOptions {
        keep_only: Some(&descriptors),
        ..CloneOptions::default()
    };
    let cloned = begun.and_then(|()| clone_process(sole, &options, run));
    match cloned.and_then(|_| reduce()) {
        Ok(()) => step("execute the init")(init.execute()),
        Err(error) => process_step("start the program below its init")(error),
    }
}

/// Takes from the process what the init does not need: it signals a program that may be any user's.
fn reduce() -> io::Result<()> {
    // Not a session: for each, the kernel makes a group of the scheduler, even where `sched_autogroup_enabled` is 0, and
    // visits it with every limit of processor time that is set.
    let own = Pid::from_raw(0);
    setpgid(own, own)?;
    chdir(Path::new("/"))?;
    bound_capabilities(Capabilities::KILL)?;
    limit_capabilities(Capabilities::KILL, false)?;
    no_new_privileges()
}
