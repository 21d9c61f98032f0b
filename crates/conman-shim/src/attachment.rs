use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::seqpacket;
use crate::stream_messages::{MAX_INPUT_BYTES, StreamEvent, StreamInput};

/// A blocking watcher of kept streams; for tests and the command line.
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
    pub fn next(&mut self, timeout: Duration) -> io::Result<Option<StreamEvent>> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if rustix::io::retry_on_intr(|| poll(&mut fds, timeout.as_ref()))? == 0 {
            return Ok(None);
        }
        let received = seqpacket::receive(&self.socket, &mut self.buffer)?;
        let Some(received) = received else {
            return Ok(None);
        };
        let event = StreamEvent::decode(received.bytes);
        event.map(Some).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the shim's message about streams is malformed",
            )
        })
    }

    /// Sends input; blocks while the program does not read.
    pub fn send_input(&self, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(MAX_INPUT_BYTES) {
            self.send(&StreamInput::Bytes(part.to_vec()))?;
        }
        Ok(())
    }

    pub fn send(&self, input: &StreamInput) -> io::Result<()> {
        seqpacket::send(&self.socket, &input.encode(), &[])
    }
}

impl AsFd for Attachment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
