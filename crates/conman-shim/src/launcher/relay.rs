//! Copies between a command's pipes and sockets, in a process of the session's cgroup.
//!
//! A program can hold the lock of a pipe for as long as it likes, for example with a splice(2) from a source
//! that has no data. Every other process that reads, writes or closes the pipe then sleeps until that program
//! dies, whether its descriptor is non-blocking or not. The shim has to kill the program, and the daemon serves
//! other sessions, so neither has a session's pipe. A relay that sleeps delays its own command only, and ends once
//! the program's end has closed the pipes. It enters none of the session's namespaces.
//!
//! A command ends when its first process does, not when the last process that has its outputs open does. The
//! reader then shuts down its sending side of an output's socket. The relay passes on what is readable at that
//! time and closes the socket. From then on it reads the pipe and drops what it reads, so that the processes that
//! the command has left behind are not ended by writing.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use conman_linux::{CloneOptions, SessionCgroup, SoleThread, clone_process, inherited_fd};
use conman_shim_protocol::{LaunchError, STREAMS, seqpacket};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, FdFlags, fcntl_setfd, ioctl_fionbio, ioctl_fionread};

use super::child::wait_to_go_on;
use super::launch::offer_to_oom_killer;
use super::steps::{process_step, step};
use super::under_way::go_on;

/// Bytes that are copied at once.
const PIECE_BYTES: usize = 16 * 1_024;

/// The near ends of a command's pipes, each with the socket that it is connected to.
#[derive(Debug)]
pub(super) struct Relay {
    /// Socket and pipe.
    input: Option<[OwnedFd; 2]>,
    /// Pipe and socket of each output.
    outputs: [[OwnedFd; 2]; 2],
}

impl Relay {
    /// Makes pipes for the sockets of standard input, output and error, and returns their far ends. A standard
    /// input that is no socket is returned as it is.
    pub(super) fn connect(streams: [OwnedFd; STREAMS]) -> io::Result<(Self, Vec<OwnedFd>)> {
        let [input, output, error] = streams;
        let (stdout, far_stdout) = io::pipe()?;
        let (stderr, far_stderr) = io::pipe()?;
        let (input, far_input) = if is_socket(&input)? {
            let (far, near) = io::pipe()?;
            ioctl_fionbio(&near, true)?;
            (Some([input, near.into()]), far.into())
        } else {
            (None, input)
        };
        let relay = Self {
            input,
            outputs: [[stdout.into(), output], [stderr.into(), error]],
        };
        Ok((relay, vec![far_input, far_stdout.into(), far_stderr.into()]))
    }

    /// Starts the relay's process as a child of the shim. `helper` is called with its PID before it can do
    /// anything.
    pub(super) fn start(
        &self,
        sole: &SoleThread,
        cgroup: &SessionCgroup,
        helper: &mut dyn FnMut(i32) -> io::Result<()>,
    ) -> Result<(), LaunchError> {
        let (ours, theirs) = seqpacket::pair().map_err(step("make a socket"))?;
        let keep: Vec<_> = [theirs.as_fd()]
            .into_iter()
            .chain(self.fds())
            .chain(cgroup.entrances())
            .collect();
        let options = CloneOptions {
            sibling: true,
            into_cgroup: cgroup.unified(),
            keep_only: Some(&keep),
            ..CloneOptions::default()
        };
        let process = clone_process(sole, &options, || self.run(cgroup, &theirs));
        let process = process.map_err(process_step("clone a relay"))?;
        let reported = helper(process.pid()).map_err(step("report"));
        let begun = reported
            .and_then(|()| offer_to_oom_killer(&process))
            .and_then(|()| go_on(&ours));
        if begun.is_err() {
            let _ = process.kill();
        }
        begun
    }

    fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let outputs = self.outputs.iter().flatten();
        self.input.iter().flatten().chain(outputs).map(AsFd::as_fd)
    }

    /// The process's whole run.
    fn run(&self, cgroup: &SessionCgroup, socket: &OwnedFd) -> i32 {
        let begun = wait_to_go_on(socket).is_ok() && cgroup.join().is_ok();
        let copied = begun && Copying::of(self).and_then(Copying::run).is_ok();
        i32::from(!copied)
    }
}

/// The descriptors in the relay's process. Each is closed as soon as one of its two sides is.
#[derive(Debug)]
struct Copying {
    /// Socket and pipe.
    input: Option<[File; 2]>,
    /// What the program has not read.
    waiting: Vec<u8>,
    outputs: [Option<Output>; 2],
}

#[derive(Debug)]
struct Output {
    pipe: File,
    /// `None` once the command has ended: the rest has no reader.
    socket: Option<File>,
}

/// A polled descriptor.
#[derive(Debug, Clone, Copy)]
enum End {
    InputSocket,
    InputPipe,
    OutputPipe(usize),
    OutputSocket(usize),
}

impl Copying {
    /// Takes the descriptors of this process's copy of the launcher, whose own are never dropped here.
    fn of(relay: &Relay) -> io::Result<Self> {
        let [stdout, stderr] = &relay.outputs;
        Ok(Self {
            input: relay.input.as_ref().map(files).transpose()?,
            waiting: Vec::new(),
            outputs: [Some(Output::of(stdout)?), Some(Output::of(stderr)?)],
        })
    }

    fn run(mut self) -> io::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        while self.input.is_some() || self.outputs.iter().any(Option::is_some) {
            for (end, flags) in self.wait()? {
                match end {
                    End::InputSocket => self.take_input(&mut piece),
                    End::InputPipe => self.pass_input(flags),
                    End::OutputPipe(number) => self.pass_output(number, &mut piece)?,
                    // Its reader has closed it, or is gone.
                    End::OutputSocket(_) if flags.contains(PollFlags::HUP) => return Ok(()),
                    End::OutputSocket(number) => self.finish(number, &mut piece)?,
                }
            }
        }
        Ok(())
    }

    /// Waits until something can be copied or is closed.
    fn wait(&self) -> io::Result<Vec<(End, PollFlags)>> {
        let (mut ends, mut fds) = (Vec::new(), Vec::new());
        let mut add = |end, fd, flags| {
            ends.push(end);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        if let Some([socket, pipe]) = &self.input {
            if self.waiting.is_empty() {
                add(End::InputSocket, socket.as_fd(), PollFlags::IN);
                // Its errors are reported in any case.
                add(End::InputPipe, pipe.as_fd(), PollFlags::empty());
            } else {
                add(End::InputPipe, pipe.as_fd(), PollFlags::OUT);
            }
        }
        for (number, output) in self.outputs.iter().enumerate().filter_map(open) {
            add(End::OutputPipe(number), output.pipe.as_fd(), PollFlags::IN);
            if let Some(socket) = &output.socket {
                add(End::OutputSocket(number), socket.as_fd(), PollFlags::RDHUP);
            }
        }
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready = ends.into_iter().zip(fds.iter().map(PollFd::revents));
        Ok(ready.filter(|(_, flags)| !flags.is_empty()).collect())
    }

    fn take_input(&mut self, piece: &mut [u8]) {
        let Some([socket, _]) = &mut self.input else {
            return;
        };
        match socket.read(piece) {
            Ok(count) if count > 0 => self.waiting.extend(&piece[..count]),
            Err(error) if is_temporary(&error) => {}
            Ok(_) | Err(_) => self.input = None,
        }
    }

    fn pass_input(&mut self, flags: PollFlags) {
        let Some([_, pipe]) = &mut self.input else {
            return;
        };
        if flags.contains(PollFlags::ERR) {
            // Nobody reads it any more.
            self.input = None;
            return;
        }
        match pipe.write(&self.waiting) {
            Ok(count) => drop(self.waiting.drain(..count)),
            Err(error) if is_temporary(&error) => {}
            Err(_) => self.input = None,
        }
    }

    /// Copies one piece. Waits for the reader.
    fn pass_output(&mut self, number: usize, piece: &mut [u8]) -> io::Result<()> {
        let Some(output) = &mut self.outputs[number] else {
            return Ok(());
        };
        match output.pass(piece) {
            Ok(0) => {
                self.outputs[number] = None;
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(error) if is_temporary(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The command has ended. Copies what it has written so far, and shows the reader the end.
    fn finish(&mut self, number: usize, piece: &mut [u8]) -> io::Result<()> {
        self.input = None;
        let Some(output) = &mut self.outputs[number] else {
            return Ok(());
        };
        let mut left = usize::try_from(ioctl_fionread(&output.pipe)?).unwrap_or(usize::MAX);
        while left > 0 {
            let most = left.min(piece.len());
            match output.pass(&mut piece[..most]) {
                Ok(0) => break,
                Ok(count) => left -= count,
                Err(error) if is_temporary(&error) => {}
                Err(error) => return Err(error),
            }
        }
        output.socket = None;
        Ok(())
    }
}

impl Output {
    fn of(ends: &[OwnedFd; 2]) -> io::Result<Self> {
        let [pipe, socket] = files(ends)?;
        let socket = Some(socket);
        Ok(Self { pipe, socket })
    }

    /// Copies one piece, or drops it where it has no reader. Returns its length; 0 at the end.
    fn pass(&mut self, piece: &mut [u8]) -> io::Result<usize> {
        let count = self.pipe.read(piece)?;
        if let Some(socket) = &mut self.socket {
            socket.write_all(&piece[..count])?;
        }
        Ok(count)
    }
}

pub(super) fn is_socket(fd: &OwnedFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::Socket)
}

fn open((number, output): (usize, &Option<Output>)) -> Option<(usize, &Output)> {
    Some((number, output.as_ref()?))
}

fn files([one, other]: &[OwnedFd; 2]) -> io::Result<[File; 2]> {
    let file = |fd: &OwnedFd| {
        // Without this flag it counts as inherited.
        fcntl_setfd(fd, FdFlags::empty())?;
        inherited_fd(fd.as_raw_fd()).map(File::from)
    };
    Ok([file(one)?, file(other)?])
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
