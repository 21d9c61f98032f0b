//! The streams of a program that the shim keeps: a terminal or pipes, the last output, and its watchers.
//!
//! A terminal is one of the host's, so that no container needs its own devpts; its slave belongs to the
//! container's user. A client that attaches gets a SEQPACKET socket ([`StreamEvent`], [`StreamInput`]). A program
//! is never slowed by a watcher: each reads from the ring at its own pace, and one that is too slow receives
//! how much was dropped. Streams die with the shim's process, but survive a replacement of the shim's program, and the end of
//! the daemon or of a watcher.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use conman_fence::WatcherPlace;
use conman_shim_protocol::{
    MAX_INPUT_BYTES, OutputStream, Position, StreamEvent, StreamInput, TerminalSize, seqpacket,
};
use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, unlockpt};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::tcgetpgrp;
use rustix::fs::{Gid, Uid, fchown};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::output_ring::OutputRing;

/// Input that waits for the program to read it; beyond, watchers' input is not read.
const MAX_INPUT: usize = 16 * 1_024;

/// Most output in one message to a watcher.
const MESSAGE_BYTES: usize = 16 * 1_024;

/// The near ends of a program's streams, and their state.
#[derive(Debug)]
pub(crate) struct Streams {
    /// The outputs that some process has open. A terminal is one.
    pub(crate) outputs: Vec<(OutputStream, OwnedFd)>,
    /// Of a terminal, a copy of the output.
    pub(crate) input: Option<OwnedFd>,
    /// What the program has not read.
    pub(crate) waiting: VecDeque<u8>,
    /// Close the input once that is written.
    pub(crate) input_ends: bool,
    pub(crate) ring: OutputRing,
    /// The size of a terminal.
    pub(crate) size: Option<TerminalSize>,
}

impl Streams {
    /// Opens a terminal; its slave belongs to the user.
    pub(crate) fn terminal(
        size: TerminalSize,
        owner: Option<(u32, u32)>,
    ) -> io::Result<(Self, OwnedFd)> {
        let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let master = posix_openpt(flags)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let master = OwnedFd::from(master);
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let slave = ioctl_tiocgptpeer(&master, flags)?;
        if let Some((user, group)) = owner {
            fchown(
                &slave,
                Some(Uid::from_raw(user)),
                Some(Gid::from_raw(group)),
            )?;
        }
        ioctl_fionbio(&master, true)?;
        let input = master.try_clone()?;
        let streams = Self {
            outputs: vec![(OutputStream::Stdout, master)],
            input: Some(input),
            waiting: VecDeque::new(),
            input_ends: false,
            ring: OutputRing::of_terminal(),
            size: Some(size),
        };
        streams.apply_size(size)?;
        Ok((streams, slave))
    }

    /// Opens sockets for the relay to the program's pipes, and returns their far ends. Without `stdin`, the
    /// program reads the end of its input.
    pub(crate) fn pipes(stdin: bool) -> io::Result<(Self, [OwnedFd; 3])> {
        let (input, far_input) = if stdin {
            let (near, far) = relayed()?;
            (Some(near), far)
        } else {
            (None, File::open("/dev/null")?.into())
        };
        let (stdout, far_stdout) = relayed()?;
        let (stderr, far_stderr) = relayed()?;
        let streams = Self {
            outputs: vec![
                (OutputStream::Stdout, stdout),
                (OutputStream::Stderr, stderr),
            ],
            input,
            waiting: VecDeque::new(),
            input_ends: false,
            ring: OutputRing::default(),
            size: None,
        };
        Ok((streams, [far_input, far_stdout, far_stderr]))
    }

    /// No process has an output open any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.outputs.is_empty()
    }

    pub(crate) fn output(&self, stream: OutputStream) -> Option<&OwnedFd> {
        let mut outputs = self.outputs.iter();
        outputs.find_map(|(one, fd)| (*one == stream).then_some(fd))
    }

    fn apply_size(&self, size: TerminalSize) -> io::Result<()> {
        let Some(master) = self.output(OutputStream::Stdout) else {
            return Ok(());
        };
        Ok(tcsetwinsize(
            master,
            Winsize {
                ws_row: size.rows,
                ws_col: size.cols,
                ws_xpixel: 0,
                ws_ypixel: 0,
            },
        )?)
    }

    /// Sets a terminal's size; the kernel notifies the program. Without a size, the program is asked to redraw.
    pub(crate) fn resize(&mut self, size: Option<TerminalSize>) {
        let (Some(old), Some(master)) = (self.size, self.output(OutputStream::Stdout)) else {
            return;
        };
        let size = size.filter(|size| size.rows > 0 && size.cols > 0);
        let notified = match size {
            Some(size) if size != old => self.apply_size(size),
            _ => tcgetpgrp(master)
                .and_then(|group| killpg(group, Signal::SIGWINCH))
                .map_err(io::Error::from),
        };
        self.size = size.or(self.size);
        if let Err(error) = notified {
            tracing::debug!(%error, "cannot notify a terminal's program of its size");
        }
    }

    /// Whether watchers may send input.
    pub(crate) fn takes_input(&self) -> bool {
        self.waiting.len() + MAX_INPUT_BYTES <= MAX_INPUT
    }

    pub(crate) fn take(&mut self, input: StreamInput) {
        match input {
            // Nothing reads it.
            StreamInput::Bytes(_) if self.input.is_none() || self.input_ends => {}
            StreamInput::Bytes(bytes) => self.waiting.extend(bytes),
            StreamInput::End => self.input_ends = self.size.is_none(),
            StreamInput::Resize(size) if Some(size) != self.size => self.resize(Some(size)),
            StreamInput::Resize(_) => {}
        }
    }

    /// Passes input to the program as far as it reads.
    pub(crate) fn pass_input(&mut self) {
        while let Some(input) = &self.input {
            let (bytes, _) = self.waiting.as_slices();
            if bytes.is_empty() {
                if self.input_ends {
                    self.input = None;
                }
                return;
            }
            match rustix::io::write(input, bytes) {
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // The program has closed it.
                Err(_) => self.close_input(),
            }
        }
    }

    pub(crate) fn close_input(&mut self) {
        self.input = None;
        self.waiting.clear();
    }

    /// The next message for a watcher; `None` when it has everything.
    fn next(&self, place: WatcherPlace) -> Option<(StreamEvent, WatcherPlace)> {
        let (start, end) = (self.ring.start(), self.ring.end());
        let wanted = match place {
            WatcherPlace::Ended => return None,
            WatcherPlace::At(at) if at >= start => {
                return match self.ring.piece(at, MESSAGE_BYTES) {
                    Some((stream, bytes)) => {
                        let next = WatcherPlace::At(at + bytes.len() as u64);
                        Some((StreamEvent::Output(stream, bytes), next))
                    }
                    None => (self.has_ended()).then_some((StreamEvent::End, WatcherPlace::Ended)),
                };
            }
            WatcherPlace::At(at) => Some(at),
            WatcherPlace::New { after } => after,
        };
        let dropped = start.saturating_sub(wanted.unwrap_or(0));
        let at = wanted.unwrap_or(0).clamp(start, end);
        if self.ring.is_terminals() && wanted.is_none_or(|wanted| wanted < start) {
            let offset = end;
            let screen = StreamEvent::Screen(Position { offset, dropped }, self.ring.screen());
            return Some((screen, WatcherPlace::At(end)));
        }
        let offset = at;
        Some((
            StreamEvent::Position(Position { offset, dropped }),
            WatcherPlace::At(at),
        ))
    }
}

/// A socket of the shim's, which does not block, and the relay's end of it.
fn relayed() -> io::Result<(OwnedFd, OwnedFd)> {
    let (near, far) = UnixStream::pair()?;
    near.set_nonblocking(true)?;
    Ok((near.into(), far.into()))
}

/// A watcher of a program's streams.
#[derive(Debug)]
pub(crate) struct Watcher {
    /// The container or command.
    pub(crate) name: String,
    pub(crate) socket: OwnedFd,
    pub(crate) place: WatcherPlace,
    /// Its socket is full.
    pub(crate) is_behind: bool,
}

impl Watcher {
    /// Sends as much as the socket takes. An error means that the watcher has closed, or that there is nothing
    /// more to come.
    pub(crate) fn feed(&mut self, streams: &Streams) -> io::Result<()> {
        self.is_behind = false;
        while let Some((event, next)) = streams.next(self.place) {
            match seqpacket::send(self.socket.as_fd(), &event.encode(), &[]) {
                Ok(()) => self.place = next,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_behind = true;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        match self.place {
            WatcherPlace::Ended => Err(io::ErrorKind::UnexpectedEof.into()),
            WatcherPlace::New { .. } | WatcherPlace::At(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::KEPT_OUTPUT_BYTES;

    use super::*;

    fn at(offset: u64, dropped: u64) -> StreamEvent {
        StreamEvent::Position(Position { offset, dropped })
    }

    #[test]
    fn a_watcher_continues_where_it_wants_or_learns_what_was_dropped() {
        let (mut streams, _far) = Streams::pipes(false).expect("pipes");
        streams.ring.push(OutputStream::Stdout, b"out");
        streams.ring.push(OutputStream::Stderr, b"err");
        let new = |after| streams.next(WatcherPlace::New { after });
        assert_eq!(new(None), Some((at(0, 0), WatcherPlace::At(0))));
        assert_eq!(new(Some(4)), Some((at(4, 0), WatcherPlace::At(4))));
        assert_eq!(new(Some(99)), Some((at(6, 0), WatcherPlace::At(6))));
        let rest = StreamEvent::Output(OutputStream::Stderr, b"rr".to_vec());
        assert_eq!(
            streams.next(WatcherPlace::At(4)),
            Some((rest, WatcherPlace::At(6)))
        );
        assert_eq!(streams.next(WatcherPlace::At(6)), None);
        let more = vec![b'x'; KEPT_OUTPUT_BYTES];
        streams.ring.push(OutputStream::Stdout, &more);
        assert_eq!(
            streams.next(WatcherPlace::At(4)),
            Some((at(6, 2), WatcherPlace::At(6)))
        );
        streams.outputs.clear();
        let end = streams.ring.end();
        assert_eq!(
            streams.next(WatcherPlace::At(end)),
            Some((StreamEvent::End, WatcherPlace::Ended))
        );
    }

    #[test]
    fn a_terminals_watcher_gets_the_screen_unless_it_can_continue() {
        let size = TerminalSize { rows: 24, cols: 80 };
        let (mut streams, _far) = Streams::terminal(size, None).expect("a terminal");
        streams.ring.push(OutputStream::Stdout, b"shown");
        let screen = |offset, dropped, bytes: &[u8]| {
            StreamEvent::Screen(Position { offset, dropped }, bytes.to_vec())
        };
        let new = |after| streams.next(WatcherPlace::New { after });
        assert_eq!(
            new(None),
            Some((screen(5, 0, b"shown"), WatcherPlace::At(5)))
        );
        assert_eq!(new(Some(2)), Some((at(2, 0), WatcherPlace::At(2))));
        assert_eq!(new(Some(u64::MAX)), Some((at(5, 0), WatcherPlace::At(5))));
    }

    #[test]
    fn the_input_ends_after_what_was_sent_before() {
        use std::io::Read as _;

        let (mut streams, [stdin, ..]) = Streams::pipes(true).expect("pipes");
        streams.take(StreamInput::Bytes(b"all".to_vec()));
        streams.take(StreamInput::End);
        streams.take(StreamInput::Bytes(b"ignored".to_vec()));
        streams.pass_input();
        let mut read = String::new();
        File::from(stdin)
            .read_to_string(&mut read)
            .expect("its end");
        assert_eq!(read, "all");
        assert!(streams.input.is_none());
    }
}
