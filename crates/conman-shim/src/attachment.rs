use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::seqpacket;
use crate::terminal::{MAX_TYPED, TerminalEvent, TerminalInput};

/// A blocking client of a terminal; for tests and the command line.
#[derive(Debug)]
pub struct Attachment {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Attachment {
    /// Uses the socket that came with [`crate::Reply::Attached`].
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            buffer: seqpacket::buffer(),
        }
    }

    /// Returns the next event; `None` on a timeout, or when the shim has closed the socket.
    pub fn next(&mut self, timeout: Duration) -> io::Result<Option<TerminalEvent>> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if rustix::io::retry_on_intr(|| poll(&mut fds, timeout.as_ref()))? == 0 {
            return Ok(None);
        }
        let received = seqpacket::receive(&self.socket, &mut self.buffer)?;
        let Some(received) = received else {
            return Ok(None);
        };
        let event = TerminalEvent::decode(received.bytes);
        event.map(Some).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the shim's terminal event is malformed",
            )
        })
    }

    /// Types; blocks while the program does not read.
    pub fn type_in(&self, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(MAX_TYPED) {
            self.send(&TerminalInput::Typed(part.to_vec()))?;
        }
        Ok(())
    }

    pub fn send(&self, input: &TerminalInput) -> io::Result<()> {
        seqpacket::send(&self.socket, &input.encode(), &[])
    }
}

impl AsFd for Attachment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
