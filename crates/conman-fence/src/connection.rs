//! One client of the shim: what it sends, and what waits for it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use conman_shim_protocol::{Message, encode, seqpacket};

use crate::containers::MAX_CONTAINERS;

/// Messages that wait for a client that does not read: all ends that are possible, which a new
/// subscriber gets at once, and some answers. A client further behind is dropped and can ask again
/// after reconnecting.
const MAX_WAITING: usize = MAX_CONTAINERS + 1_024;

/// One client. Nothing here waits.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    waiting: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    pub(crate) greeted: bool,
    pub(crate) subscribed: bool,
}

impl Connection {
    /// `socket` does not block.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            waiting: VecDeque::new(),
            greeted: false,
            subscribed: false,
        }
    }

    /// A connection of the program that this one replaces.
    pub(crate) fn kept(socket: OwnedFd, greeted: bool, subscribed: bool) -> Self {
        Self {
            greeted,
            subscribed,
            ..Self::new(socket)
        }
    }

    /// Sends or queues. An error means that the client is to be dropped.
    pub(crate) fn send(&mut self, message: &Message, fd: Option<OwnedFd>) -> io::Result<()> {
        let bytes = encode(message).map_err(io::Error::other)?;
        if self.waiting.len() >= MAX_WAITING {
            return Err(io::Error::other("the client does not read"));
        }
        self.waiting.push_back((bytes, fd));
        self.flush()
    }

    /// Sends as much as the socket takes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while let Some((bytes, fd)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
            match seqpacket::send(&self.socket, bytes, &fds) {
                Ok(()) => {
                    self.waiting.pop_front();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the socket must become writable first.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {

    use conman_shim_protocol::{ContainerState, ContainerView};

    use super::*;

    #[test]
    fn a_client_may_be_told_of_every_end_there_can_be_before_it_reads_and_no_more_without_end() {
        let (ours, _theirs) = seqpacket::pair().expect("a pair");
        rustix::io::ioctl_fionbio(&ours, true).expect("set");
        let mut connection = Connection::new(ours);
        let container = ContainerView {
            name: "a.1".to_owned(),
            pid: 7,
            state: ContainerState::Lost,
            exec_in: None,
            foreign: false,
            fenced: false,
        };
        let message = Message::Ended { container };
        for _ in 0..MAX_CONTAINERS {
            connection.send(&message, None).expect("it waits");
        }
        assert!(connection.is_waiting());
        let mut all = 0..MAX_CONTAINERS;
        assert!(all.any(|_| connection.send(&message, None).is_err()));
    }
}
