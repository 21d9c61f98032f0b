//! Going on as the program that is in place now, before anything of the shim's has begun.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};

use super::replacing::check_file;
use crate::handover::{Handover, Sealed, VARIABLE, judge_successor, number};
use crate::seqpacket;

/// What this process runs, wherever its file is by now.
const OWN: &str = "/proc/self/exe";

/// Bound on the other program's answer, which takes some milliseconds, besides its exec. Nobody watches
/// over the fence meanwhile: half of the time that a fleet reckons with for a shim's restart, if it is
/// not told another one.
const CHECK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// What is still to be done, of a program that has come back from [`renew`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Renewal {
    Done,
    /// The other one has not answered within [`CHECK`]: it is to be asked again with more patience,
    /// once the fence is watched over.
    Pending,
}

/// Longer than any verdict.
const VERDICT_BYTES: usize = 4_096;

/// After another shim was waited for: executes what is at the path that this program had, where that
/// is another one since, as after an upgrade. Otherwise an older program would succeed a newer one.
/// The lock is given up by that, so that the other program takes its turn for it.
pub(super) fn renew(program: &Path) -> Renewal {
    let (Ok(own), Ok(found)) = (check_file(Path::new(OWN)), check_file(program)) else {
        // None that root can trust: better an old one than none.
        return Renewal::Done;
    };
    if own == found {
        return Renewal::Done;
    }
    match ask(program) {
        Ok(Answer::Can) => {}
        Ok(Answer::Late) => {
            tracing::info!(
                program = %program.display(),
                "the program that was put in this one's place does not answer soon; beginning as \
                 what it was, and asking it again meanwhile"
            );
            return Renewal::Pending;
        }
        Err(reason) => {
            tracing::warn!(
                program = %program.display(), reason,
                "the program that was put in this one's place does not answer as a shim; going on \
                 as what it was: put the right one there, and run `conman shim --replace`"
            );
            return Renewal::Done;
        }
    }
    tracing::info!(program = %program.display(), "the program was replaced; beginning as that");
    let error = same(program).exec();
    tracing::warn!(
        program = %program.display(), %error,
        "the program that was put in this one's place cannot be executed; going on as what it was"
    );
    Renewal::Done
}

/// Of a program that may be a shim.
enum Answer {
    Can,
    Late,
}

/// With the arguments of this process.
fn same(program: &Path) -> Command {
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    command.args(arguments);
    command
}

/// Whether it is a shim that can go on here, asked as before a replacement: one that is cut short, or
/// none of ours, would leave nobody.
fn ask(program: &Path) -> Result<Answer, String> {
    let failed = |error: std::io::Error| error.to_string();
    let (ours, theirs) = seqpacket::pair().map_err(failed)?;
    // Of nothing that there is yet.
    let nothing = Handover {
        listener: number(&ours),
        lock: number(&theirs),
        ..Handover::default()
    };
    let sealed = Sealed {
        handover: nothing,
        ..Sealed::default()
    };
    let memory = sealed.write().map_err(failed)?;
    for fd in [memory.as_fd(), theirs.as_fd()] {
        fcntl_setfd(fd, FdFlags::empty()).map_err(|error| error.to_string())?;
    }
    let said = format!("check {} {}", number(&memory), number(&theirs));
    let child = same(program).env(VARIABLE, said).spawn();
    drop((memory, theirs));
    let mut child = child.map_err(failed)?;
    let mut answer = [PollFd::new(&ours, PollFlags::IN)];
    let verdict = match poll(&mut answer, Some(&CHECK)) {
        Ok(0) => Ok(Answer::Late),
        Ok(_) => heard(&ours).map(|()| Answer::Can),
        Err(error) => Err(error.to_string()),
    };
    // It is ending by itself, or may not end for long: it is reaped with the shim's other children.
    let _ = child.kill();
    verdict
}

fn heard(socket: impl AsFd) -> Result<(), String> {
    let mut buffer = vec![0; VERDICT_BYTES];
    match seqpacket::receive(socket, &mut buffer) {
        Ok(Some(received)) => judge_successor(received.bytes),
        Ok(None) => Err("it ends without an answer".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
