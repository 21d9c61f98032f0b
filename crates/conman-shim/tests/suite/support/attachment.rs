//! A blocking watcher of kept streams.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use conman_shim::{MAX_INPUT_BYTES, StreamEvent, StreamInput, socket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A blocking watcher of kept streams.
#[derive(Debug)]
pub(crate) struct Attachment {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

impl Attachment {
    /// Uses the socket that came with [`conman_shim::Reply::Attached`].
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            buffer: Vec::new(),
        }
    }

    /// Returns the next event; `None` on a timeout, or when the shim has closed the socket.
    pub(crate) fn next(&mut self, timeout: Duration) -> io::Result<Option<StreamEvent>> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).ok();
        if rustix::io::retry_on_intr(|| poll(&mut fds, timeout.as_ref()))? == 0 {
            return Ok(None);
        }
        socket::receive_event(&self.socket, &mut self.buffer)
    }

    /// Sends input; blocks while the program does not read.
    pub(crate) fn send_input(&self, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(MAX_INPUT_BYTES) {
            self.send(&StreamInput::Bytes(part.to_vec()))?;
        }
        Ok(())
    }

    pub(crate) fn send(&self, input: &StreamInput) -> io::Result<()> {
        socket::send_input(&self.socket, input)
    }
}

impl AsFd for Attachment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
