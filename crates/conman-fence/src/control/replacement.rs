//! The replacement part: replaces the shim's program, in the same process.
//!
//! ```text
//! requested ─▶ checking ── the candidate can take over ──▶ draining ── no start under way ──▶ exec
//!                  └────────── it cannot, or is late ──────────┴────▶ everything as before ◀───┘
//! ```
//! While it drains, new starts wait; everything else continues.

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use conman_linux::{CloneOptions, PidFd, Signal, SoleThread, clone_process};
use conman_shim_protocol::{CallError, Reply, seqpacket};
use nix::sys::prctl::set_pdeathsig;
use nix::unistd::execve;
use rustix::event::epoll::EventFlags;
use rustix::io::{FdFlags, fcntl_setfd};

use super::token::Token;
use crate::effect::Effect;
use crate::handover::{Sealed, VARIABLE, judge, number};
use crate::poller::Poller;

/// Bound on the candidate's answer: it reads some megabytes from memory.
const CHECK_NS: u64 = 5_000_000_000;

/// Bound on starts under way; usually milliseconds.
const DRAIN_NS: u64 = 3_000_000_000;

/// Exit status of a candidate that could not be executed.
const NOT_EXECUTED: i32 = 127;

/// Logged with a program that was refused or has failed.
pub(super) const CANNOT_REPLACE: &str =
    "cannot replace the shim's program; install the right one, then run `conman shim --replace`";

/// The program, and a replacement of it that is under way.
#[derive(Debug)]
pub(super) struct Replacement {
    /// The program's path at its start; the file may have been replaced since.
    program: PathBuf,
    request: Option<ReplacementRequest>,
}

#[derive(Debug)]
struct ReplacementRequest {
    candidate: Candidate,
    /// The client and its call.
    caller: Option<(u64, u64)>,
    stage: Stage,
    until_ns: u64,
}

#[derive(Debug)]
enum Stage {
    Checking { process: PidFd, socket: OwnedFd },
    Draining,
}

/// A program whose file was checked.
#[derive(Debug)]
pub(super) struct Candidate {
    program: PathBuf,
    file: FileIdentity,
}

/// Identifies a file that was checked.
#[derive(Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Replacement {
    pub(super) fn new(program: PathBuf) -> Self {
        Self {
            program,
            request: None,
        }
    }

    pub(super) fn program(&self) -> &Path {
        &self.program
    }

    /// Checks that a replacement may begin; `refused` says why not.
    pub(super) fn admit(
        &self,
        program: Option<PathBuf>,
        refused: Option<&str>,
    ) -> Result<Candidate, CallError> {
        let program = program.unwrap_or_else(|| self.program.clone());
        let under_way = || self.request.as_ref().map(|_| "a replacement is under way");
        if let Some(reason) = refused.or_else(under_way) {
            return Err(not_replaced(&program, reason));
        }
        match check_file(&program) {
            Ok(file) => Ok(Candidate { program, file }),
            Err(reason) => Err(not_replaced(&program, &reason)),
        }
    }

    /// Executes the candidate in a child, which reports whether it could take over this state. Returns the
    /// child's PID.
    pub(super) fn begin(
        &mut self,
        candidate: Candidate,
        caller: Option<(u64, u64)>,
        state: io::Result<Sealed>,
        sole: &SoleThread,
        poller: &Poller<Token>,
        now_ns: u64,
    ) -> Result<i32, CallError> {
        let started = state.and_then(|state| start(&candidate.program, &state, sole, poller));
        let (process, socket) =
            started.map_err(|error| not_replaced(&candidate.program, &error.to_string()))?;
        let pid = process.pid();
        self.request = Some(ReplacementRequest {
            candidate,
            caller,
            stage: Stage::Checking { process, socket },
            until_ns: now_ns + CHECK_NS,
        });
        Ok(pid)
    }

    /// The candidate has answered or ended.
    pub(super) fn candidate_answered(&mut self, buffer: &mut [u8], now_ns: u64) -> Vec<Effect> {
        let Some(request) = &mut self.request else {
            return Vec::new();
        };
        let Stage::Checking { socket, .. } = &request.stage else {
            return Vec::new();
        };
        let answer = match seqpacket::receive(socket, buffer) {
            Ok(Some(received)) => judge(received.bytes),
            Ok(None) => Err("it exited without an answer".to_owned()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Vec::new(),
            Err(error) => Err(error.to_string()),
        };
        match answer {
            Ok(()) => {
                // Its socket is removed from the epoll when it is dropped.
                request.stage = Stage::Draining;
                request.until_ns = now_ns + DRAIN_NS;
                vec![Effect::HoldStarts(true)]
            }
            Err(reason) => self.give_up(&reason),
        }
    }

    pub(super) fn on_time(&mut self, now_ns: u64) -> Vec<Effect> {
        let late = self.request.as_ref().filter(|one| one.until_ns <= now_ns);
        match late.map(|request| &request.stage) {
            None => Vec::new(),
            Some(Stage::Checking { .. }) => self.give_up("it does not answer"),
            Some(Stage::Draining) => self.give_up("starts are under way; try again"),
        }
    }

    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.request.as_ref().map(|request| request.until_ns)
    }

    /// Ends the replacement that is under way, if any.
    pub(super) fn give_up(&mut self, reason: &str) -> Vec<Effect> {
        let Some(request) = self.request.take() else {
            return Vec::new();
        };
        if let Stage::Checking { process, .. } = &request.stage {
            // It may have ended.
            let _ = process.kill();
        }
        let error = not_replaced(&request.candidate.program, reason);
        tracing::error!(%error, "{}", CANNOT_REPLACE);
        let failed = request.caller.map(|(client, call)| Effect::Reply {
            client,
            call,
            reply: Reply::Failed { error },
        });
        let resume = Effect::HoldStarts(false);
        std::iter::once(resume).chain(failed).collect()
    }

    /// Whether it only waits until no start is under way.
    pub(super) fn is_draining(&self) -> bool {
        let stage = self.request.as_ref().map(|request| &request.stage);
        matches!(stage, Some(Stage::Draining))
    }

    pub(super) fn caller(&self) -> Option<(u64, u64)> {
        self.request.as_ref()?.caller
    }

    /// Returns the candidate if its file is the one that was checked.
    pub(super) fn candidate(&self) -> io::Result<&Candidate> {
        let request = self.request.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let candidate = &request.candidate;
        if check_file(&candidate.program).as_ref() == Ok(&candidate.file) {
            return Ok(candidate);
        }
        Err(io::Error::other("it has changed since it was checked"))
    }
}

impl Candidate {
    /// Executes it with this state and these descriptors. Returns only the reason for a failure.
    pub(super) fn execute(
        &self,
        memory: &OwnedFd,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Infallible> {
        let command = Command::new(&self.program, &format!("take {}", number(memory)))?;
        let error = match open_to_exec(fds).and_then(|()| command.execute()) {
            Ok(never) => match never {},
            Err(error) => error,
        };
        for fd in fds {
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
        Err(error)
    }
}

fn not_replaced(program: &Path, reason: &str) -> CallError {
    CallError::NotReplaced {
        program: program.display().to_string(),
        reason: reason.to_owned(),
    }
}

/// Starts a program that checks a state.
fn start(
    program: &Path,
    state: &Sealed,
    sole: &SoleThread,
    poller: &Poller<Token>,
) -> io::Result<(PidFd, OwnedFd)> {
    let memory = state.write()?;
    let (ours, theirs) = seqpacket::pair()?;
    let keep = [memory.as_fd(), theirs.as_fd()];
    let order = format!("check {} {}", number(&memory), number(&theirs));
    let command = Command::new(program, &order)?;
    let how = CloneOptions {
        keep_only: Some(&keep),
        ..CloneOptions::default()
    };
    let process = clone_process(sole, &how, || {
        let Err(error) = set_pdeathsig(Signal::SIGKILL)
            .map_err(io::Error::from)
            .and_then(|()| open_to_exec(&keep))
            .and_then(|()| command.execute());
        tracing::error!(%error, "cannot execute the candidate");
        NOT_EXECUTED
    })?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    poller.add(Token::Candidate, &ours, EventFlags::IN)?;
    Ok((process, ours))
}

/// A program, its arguments and its environment, prepared before anything is given up.
struct Command {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Command {
    /// With this process's arguments and environment, except for the handover variable, which is `order`.
    fn new(program: &Path, order: &str) -> io::Result<Self> {
        let text = |bytes: Vec<u8>| CString::new(bytes).map_err(io::Error::other);
        let variables = std::env::vars_os().filter(|(name, _)| name != VARIABLE);
        let variables =
            variables.map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
        let order = [VARIABLE.as_bytes(), b"=", order.as_bytes()].concat();
        Ok(Self {
            program: text(program.as_os_str().as_bytes().to_vec())?,
            arguments: std::env::args_os()
                .map(|argument| text(argument.into_vec()))
                .collect::<io::Result<_>>()?,
            environment: variables
                .chain([order])
                .map(text)
                .collect::<io::Result<_>>()?,
        })
    }

    fn execute(&self) -> io::Result<Infallible> {
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
    let own = nix::unistd::geteuid().as_raw();
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

    /// A replacement whose candidate is checked, and the candidate's end of the socket.
    fn checking() -> (Replacement, OwnedFd) {
        let program = PathBuf::from("/program");
        let mut replacement = Replacement::new(program.clone());
        let (socket, theirs) = seqpacket::pair().expect("a pair");
        rustix::io::ioctl_fionbio(&socket, true).expect("set");
        // A descriptor in place of the candidate's process: no signal reaches anything.
        let process = PidFd::received(theirs.try_clone().expect("a copy"), 0);
        let file = FileIdentity {
            device: 0,
            inode: 0,
            changed: (0, 0),
        };
        replacement.request = Some(ReplacementRequest {
            candidate: Candidate { program, file },
            caller: Some((16, 7)),
            stage: Stage::Checking { process, socket },
            until_ns: CHECK_NS,
        });
        (replacement, theirs)
    }

    fn given_up(replacement: &Replacement, effects: &[Effect], expected: &str) {
        let [
            Effect::HoldStarts(false),
            Effect::Reply {
                client,
                call,
                reply,
            },
        ] = effects
        else {
            panic!("{effects:?}");
        };
        assert_eq!((*client, *call), (16, 7));
        let Reply::Failed {
            error: CallError::NotReplaced { reason, .. },
        } = reply
        else {
            panic!("{reply:?}");
        };
        assert_eq!(reason, expected);
        assert_eq!(replacement.next_due_ns(), None);
    }

    #[test]
    fn starts_are_held_once_the_candidate_consents_and_not_for_ever() {
        let (mut replacement, theirs) = checking();
        let mut buffer = seqpacket::buffer();
        assert_eq!(replacement.candidate_answered(&mut buffer, 0), []);
        assert_eq!(replacement.on_time(CHECK_NS - 1), []);
        seqpacket::send(&theirs, br#"{"Ok":null}"#, &[]).expect("sent");
        let effects = replacement.candidate_answered(&mut buffer, 1);
        assert_eq!(effects, [Effect::HoldStarts(true)]);
        assert!(replacement.is_draining());
        let busy = replacement.admit(None, None).expect_err("one is under way");
        assert!(busy.to_string().contains("under way"), "{busy}");
        let effects = replacement.on_time(1 + DRAIN_NS);
        given_up(&replacement, &effects, "starts are under way; try again");
    }

    #[test]
    fn a_candidate_that_refuses_or_is_silent_changes_nothing() {
        let mut buffer = seqpacket::buffer();
        let (mut replacement, theirs) = checking();
        seqpacket::send(&theirs, br#"{"Err":"no"}"#, &[]).expect("sent");
        let effects = replacement.candidate_answered(&mut buffer, 1);
        given_up(&replacement, &effects, "no");
        let (mut replacement, _theirs) = checking();
        let effects = replacement.on_time(CHECK_NS);
        given_up(&replacement, &effects, "it does not answer");
    }

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
