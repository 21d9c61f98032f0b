//! Replacing the shim's program, in the same process.
//!
//! ```text
//! asked ─▶ checking ── the candidate says that it can ──▶ draining ── no start under way ──▶ exec
//!              └──────────── it does not, or is late ─────────┴────▶ everything as before ◀──┘
//! ```
//! While it drains, new starts wait; everything else continues.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use conman_linux::{CloneOptions, PidFd, Signal, clone_process};
use nix::unistd::execve;
use rustix::event::epoll::EventFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::set_parent_process_death_signal;

use super::ending::IS_ENDING;
use super::poller::Token;
use super::{Control, adopting, boottime_ns};
use crate::handover::{Handover, Sealed, VARIABLE, judge, number};
use crate::ledger::Record;
use crate::protocol::{CallError, Reply};
use crate::seqpacket;

/// Bound on the candidate's answer: it reads some megabytes from memory.
const CHECK_NS: u64 = 5_000_000_000;

/// Bound on starts under way; usually milliseconds.
const DRAIN_NS: u64 = 3_000_000_000;

/// Exit status of a candidate that could not be executed.
const NOT_EXECUTED: i32 = 127;

/// Logged with a program that was refused or has failed.
pub(super) const GOES_ON: &str =
    "cannot replace the shim's program; install the right one, then run `conman shim --replace`";

/// A replacement that has been asked for.
#[derive(Debug)]
pub(super) struct Replacing {
    program: PathBuf,
    file: FileIdentity,
    asked_by: Option<(u64, u64)>,
    stage: Stage,
    until_ns: u64,
}

#[derive(Debug)]
enum Stage {
    Checking { process: PidFd, socket: OwnedFd },
    Draining,
}

impl Replacing {
    pub(super) fn until_ns(&self) -> u64 {
        self.until_ns
    }
}

/// Identifies a file that was checked.
#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Control {
    pub(super) fn begin_replacing(
        &mut self,
        asked_by: Option<(u64, u64)>,
        program: Option<PathBuf>,
    ) -> Result<(), CallError> {
        let program = program.unwrap_or_else(|| self.program.clone());
        let refused = |reason: String| CallError::NotReplaced {
            program: program.display().to_string(),
            reason,
        };
        if self.is_ending() {
            return Err(refused(IS_ENDING.to_owned()));
        }
        if self.replacing.is_some() {
            return Err(refused("a replacement is under way".to_owned()));
        }
        let file = check_file(&program).map_err(&refused)?;
        let stage = self
            .start_candidate(&program)
            .map_err(|error| refused(error.to_string()))?;
        self.replacing = Some(Replacing {
            program,
            file,
            asked_by,
            stage,
            until_ns: boottime_ns() + CHECK_NS,
        });
        self.set_timer();
        Ok(())
    }

    /// Executes the program in a child, which reports whether it could take over the present state.
    fn start_candidate(&mut self, program: &Path) -> io::Result<Stage> {
        let memory = self.hand_over(None)?.write()?;
        let (ours, theirs) = seqpacket::pair()?;
        let keep = [memory.as_fd(), theirs.as_fd()];
        let said = format!("check {} {}", number(&memory), number(&theirs));
        let command = Command::new(program, &said)?;
        let how = CloneOptions {
            keep_only: Some(&keep),
            ..CloneOptions::default()
        };
        let process = clone_process(&self.sole, &how, || {
            let Err(error) = set_parent_process_death_signal(Some(Signal::KILL))
                .map_err(io::Error::from)
                .and_then(|()| open_to_exec(&keep))
                .and_then(|()| command.execute());
            tracing::error!(%error, "cannot execute the candidate");
            NOT_EXECUTED
        })?;
        self.containers.helper(process.pid());
        rustix::io::ioctl_fionbio(&ours, true)?;
        self.poller.add(Token::Candidate, &ours, EventFlags::IN)?;
        Ok(Stage::Checking {
            process,
            socket: ours,
        })
    }

    /// The candidate has answered or ended.
    pub(super) fn hear_candidate(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let verdict = match self.replacing.as_ref().map(|replacing| &replacing.stage) {
            Some(Stage::Checking { socket, .. }) => match seqpacket::receive(socket, &mut buffer) {
                Ok(Some(received)) => Some(judge(received.bytes)),
                Ok(None) => Some(Err("it exited without an answer".to_owned())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(error) => Some(Err(error.to_string())),
            },
            _ => None,
        };
        self.buffer = buffer;
        match verdict {
            None => {}
            Some(Ok(())) => {
                if let Some(replacing) = &mut self.replacing {
                    // Its socket is removed from the epoll when it is dropped.
                    replacing.stage = Stage::Draining;
                    replacing.until_ns = boottime_ns() + DRAIN_NS;
                    self.launching.hold_back(true);
                    self.set_timer();
                }
            }
            Some(Err(reason)) => self.give_up_replacing(reason),
        }
    }

    pub(super) fn give_up_replacing_in_time(&mut self) {
        let Some(replacing) = &self.replacing else {
            return;
        };
        if boottime_ns() < replacing.until_ns {
            return;
        }
        let reason = match replacing.stage {
            Stage::Checking { .. } => "it does not answer",
            Stage::Draining => "starts are under way; try again",
        };
        self.give_up_replacing(reason.to_owned());
    }

    pub(super) fn give_up_replacing(&mut self, reason: String) {
        let Some(replacing) = self.replacing.take() else {
            return;
        };
        if let Stage::Checking { process, .. } = &replacing.stage {
            // It may have ended.
            let _ = process.kill();
        }
        self.launching.hold_back(false);
        self.launching.flush();
        let error = CallError::NotReplaced {
            program: replacing.program.display().to_string(),
            reason,
        };
        tracing::error!(%error, "{}", GOES_ON);
        if let Some((client, call)) = replacing.asked_by {
            self.reply(client, call, Reply::Failed { error }, None);
        }
        self.set_timer();
    }

    /// The last step. Returns only after a failure.
    pub(super) fn replace_when_idle(&mut self) {
        let draining = matches!(
            &self.replacing,
            Some(Replacing {
                stage: Stage::Draining,
                ..
            })
        );
        if !draining || !self.launching.is_idle() {
            return;
        }
        // The launcher has answered everything; the new program starts another one.
        self.launching.stop();
        self.sweeper.stop();
        let error = match self.execute_replacement() {
            Ok(never) => match never {},
            Err(error) => error,
        };
        self.give_up_replacing(error.to_string());
        if let Err(error) = self.ensure_launcher() {
            tracing::error!(%error, "cannot start a launcher; the next start tries again");
        }
        self.sweeper_died();
        self.launching.flush();
    }

    fn execute_replacement(&mut self) -> io::Result<std::convert::Infallible> {
        let Some(replacing) = &self.replacing else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if check_file(&replacing.program).as_ref() != Ok(&replacing.file) {
            return Err(io::Error::other("it has changed since it was checked"));
        }
        let (program, asked_by) = (replacing.program.clone(), replacing.asked_by);
        self.clients.drop_waiting();
        let memory = self.hand_over(asked_by)?.write()?;
        let command = Command::new(&program, &format!("take {}", number(&memory)))?;
        let fds: Vec<BorrowedFd<'_>> = self.kept_fds(&memory);
        let error = match open_to_exec(&fds).and_then(|()| command.execute()) {
            Ok(never) => match never {},
            Err(error) => error,
        };
        for fd in fds {
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
        Err(error)
    }

    fn hand_over(&self, asked_by: Option<(u64, u64)>) -> io::Result<Sealed> {
        let begun = self.containers.iter().map(|(name, container)| Record::Put {
            name: name.clone(),
            container: container.copy(),
        });
        let fence = Record::Fence {
            state: self.fence.kept(),
        };
        let mut handover = Handover {
            lines: std::iter::once(fence).chain(begun).collect(),
            listener: number(&self.listener),
            lock: number(&self.lock),
            adopted: adopting::held(self)
                .map(|(name, process)| (name.clone(), number(process)))
                .collect(),
            doomed: self.containers.doomed().collect(),
            condemned: self.condemned_early.iter().map(str::to_owned).collect(),
            asked_by,
            replacements: self.replacements + 1,
            freeze_ms: Some(self.fence.freeze_ms()),
            ..Handover::default()
        };
        self.launching.hand_over(&mut handover)?;
        let mut blobs = Vec::new();
        self.clients.hand_over(&mut handover);
        self.terminals.hand_over(&mut handover, &mut blobs);
        Ok(Sealed { handover, blobs })
    }

    /// Every descriptor that a handover names, and the handover's.
    fn kept_fds<'a>(&'a self, memory: &'a OwnedFd) -> Vec<BorrowedFd<'a>> {
        let own = [memory.as_fd(), self.listener.as_fd(), self.lock.as_fd()];
        own.into_iter()
            .chain(self.clients.fds())
            .chain(adopting::held(self).map(|(_, process)| process.as_fd()))
            .chain(self.terminals.fds())
            .chain(self.launching.waiting_fds())
            .collect()
    }
}

/// A program, its arguments and its environment, prepared before anything is given up.
struct Command {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Command {
    /// With this process's arguments and environment, except for the handover variable, which is `said`.
    fn new(program: &Path, said: &str) -> io::Result<Self> {
        let text = |bytes: Vec<u8>| CString::new(bytes).map_err(io::Error::other);
        let variables = std::env::vars_os().filter(|(name, _)| name != VARIABLE);
        let variables =
            variables.map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
        let said = [VARIABLE.as_bytes(), b"=", said.as_bytes()].concat();
        Ok(Self {
            program: text(program.as_os_str().as_bytes().to_vec())?,
            arguments: std::env::args_os()
                .map(|argument| text(argument.into_vec()))
                .collect::<io::Result<_>>()?,
            environment: variables
                .chain([said])
                .map(text)
                .collect::<io::Result<_>>()?,
        })
    }

    fn execute(&self) -> io::Result<std::convert::Infallible> {
        Ok(execve(&self.program, &self.arguments, &self.environment)?)
    }
}

fn open_to_exec(fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    for fd in fds {
        fcntl_setfd(fd, FdFlags::empty())?;
    }
    Ok(())
}

/// Checks that only root could have written it.
fn check_file(program: &Path) -> Result<FileIdentity, String> {
    if !program.is_absolute() {
        return Err("its path is not absolute".to_owned());
    }
    let data = std::fs::metadata(program).map_err(|error| error.to_string())?;
    let own = rustix::process::geteuid().as_raw();
    if !data.is_file() || data.mode() & 0o111 == 0 {
        return Err("it is not an executable file".to_owned());
    }
    if (data.uid() != 0 && data.uid() != own) || data.mode() & 0o022 != 0 {
        return Err("users other than root may write to it".to_owned());
    }
    Ok(FileIdentity {
        device: data.dev(),
        inode: data.ino(),
        changed: (data.ctime(), data.ctime_nsec()),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_a_program_that_nobody_else_can_write_is_considered() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("program");
        assert!(check_file(&path).is_err(), "missing");
        assert!(check_file(Path::new("program")).is_err(), "relative");
        std::fs::write(&path, "x").expect("written");
        let mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("changed");
        };
        mode(0o644);
        assert_eq!(
            check_file(&path),
            Err("it is not an executable file".to_owned())
        );
        mode(0o775);
        let error = check_file(&path).expect_err("the group may write");
        assert!(error.contains("other than root"), "{error}");
        mode(0o755);
        let first = check_file(&path).expect("fine");
        std::fs::remove_file(&path).expect("removed");
        std::fs::write(&path, "y").expect("written");
        mode(0o755);
        assert_ne!(check_file(&path), Ok(first));
    }
}
