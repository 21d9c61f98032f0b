//! The clients part: connections, what waits to be sent on them, who is subscribed.
//!
//! ```text
//! accepted ── Hello of our version ──▶ greeted ── Subscribe ──▶ subscribed
//!     └── closed by the client, an error, or too much that it does not read ──▶ dropped
//! ```
//! Requests leave this part as data; replies and messages enter it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use conman_linux::inherited_fd;
use conman_shim_protocol::{Call, Message, decode, seqpacket};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::token::Token;
use crate::connection::Connection;
use crate::handover::{Handover, KeptClient, number};
use crate::poller::Poller;

/// Concurrent clients: the daemon, its successor during an upgrade, the command line.
const MAX_CLIENTS: usize = 32;

/// The lowest number of a client. Shims that take the same handovers use lower ones for other
/// descriptors.
const FIRST_NUMBER: u64 = 16;

/// The connected clients.
#[derive(Debug)]
pub(super) struct Clients {
    by_number: BTreeMap<u64, Connection>,
    /// Closed to refuse a client when no other descriptor is left.
    spare: Option<File>,
    next_number: u64,
    /// Clients whose connections have ended since this was last read.
    departed: Vec<u64>,
}

impl Clients {
    pub(super) fn new() -> Self {
        Self {
            by_number: BTreeMap::new(),
            spare: spare(),
            next_number: FIRST_NUMBER,
            departed: Vec::new(),
        }
    }

    pub(super) fn accept(&mut self, poller: &Poller<Token>, listener: &OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(listener, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => {
                // Otherwise epoll would report it repeatedly, and it would wait for ever.
                self.spare = None;
                drop(rustix::net::accept_with(listener, flags));
                self.spare = spare();
                tracing::error!("refused a client: no file descriptor is left (see nofile)");
                return;
            }
            // A client that has closed already is not an error.
            Err(_) => return,
        };
        let own = nix::unistd::geteuid();
        let allowed = rustix::net::sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid.as_raw() == own.as_raw() || peer.uid.is_root());
        if !allowed || self.by_number.len() >= MAX_CLIENTS {
            tracing::warn!(allowed, "refused a client");
            return;
        }
        let number = self.next_number;
        if let Err(error) = poller.add(Token::Client(number), &socket, EventFlags::IN) {
            tracing::error!(%error, "cannot poll a client's socket");
            return;
        }
        self.next_number += 1;
        self.by_number.insert(number, Connection::new(socket));
    }

    /// Sends what waits for a client whose socket takes it again.
    pub(super) fn flush(&mut self, poller: &Poller<Token>, client: u64) {
        let Some(connection) = self.by_number.get_mut(&client) else {
            return;
        };
        if connection.flush().is_err() {
            self.remove(client);
            return;
        }
        self.update(poller, client);
    }

    /// Returns the client's next request with its descriptors, if there is one. Drops a client that has
    /// closed its connection or sends anything else.
    pub(super) fn receive(
        &mut self,
        client: u64,
        buffer: &mut [u8],
    ) -> Option<(Call, Vec<OwnedFd>)> {
        let received = match seqpacket::receive(self.by_number.get(&client)?, buffer) {
            Ok(Some(received)) => decode::<Call>(received.bytes)
                .map(|call| (call, received.fds))
                .map_err(io::Error::other),
            Ok(None) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) => Err(error),
        };
        match received {
            Ok(request) => Some(request),
            Err(error) => {
                if error.kind() != io::ErrorKind::WouldBlock {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::warn!(%error, "dropped a client");
                    }
                    self.remove(client);
                }
                None
            }
        }
    }

    fn remove(&mut self, client: u64) {
        if self.by_number.remove(&client).is_some() {
            self.departed.push(client);
        }
    }

    /// Returns each client whose connection has ended once.
    pub(super) fn departed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.departed)
    }

    pub(super) fn is_greeted(&self, client: u64) -> bool {
        self.by_number.get(&client).is_some_and(|one| one.greeted)
    }

    /// The client speaks our version.
    pub(super) fn greet(&mut self, client: u64) {
        if let Some(connection) = self.by_number.get_mut(&client) {
            connection.greeted = true;
        }
    }

    /// From now on the client gets what is published.
    pub(super) fn subscribe(&mut self, client: u64) {
        if let Some(connection) = self.by_number.get_mut(&client) {
            connection.subscribed = true;
        }
    }

    pub(super) fn send(
        &mut self,
        poller: &Poller<Token>,
        client: u64,
        message: &Message,
        fd: Option<OwnedFd>,
    ) {
        let Some(connection) = self.by_number.get_mut(&client) else {
            return;
        };
        if let Err(error) = connection.send(message, fd) {
            tracing::warn!(%error, "dropped a client");
            self.remove(client);
            return;
        }
        self.update(poller, client);
    }

    /// Sends a message to all subscribers.
    pub(super) fn publish(&mut self, poller: &Poller<Token>, message: &Message) {
        let subscribed = |(number, one): (&u64, &Connection)| one.subscribed.then_some(*number);
        let numbers: Vec<u64> = self.by_number.iter().filter_map(subscribed).collect();
        for number in numbers {
            self.send(poller, number, message, None);
        }
    }

    /// Polls a client for writability only while messages wait.
    fn update(&self, poller: &Poller<Token>, client: u64) {
        if let Some(connection) = self.by_number.get(&client) {
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, connection.is_waiting());
            poller.change(Token::Client(client), connection, flags);
        }
    }

    /// A client that does not keep up is dropped before a replacement, as always; it can request what it
    /// missed.
    pub(super) fn drop_waiting(&mut self) {
        self.by_number.retain(|_, client| !client.is_waiting());
    }

    /// Names them in a handover.
    pub(super) fn hand_over(&self, handover: &mut Handover) {
        let kept = |(token, client): (&u64, &Connection)| KeptClient {
            token: *token,
            fd: number(client),
            greeted: client.greeted,
            subscribed: client.subscribed,
        };
        handover.clients = self.by_number.iter().map(kept).collect();
        handover.next_client = self.next_number;
    }

    /// Takes over the connections of the program that this one replaces.
    pub(super) fn resume(
        &mut self,
        poller: &Poller<Token>,
        handover: &mut Handover,
    ) -> io::Result<()> {
        for client in handover.clients.drain(..) {
            let socket = inherited_fd(client.fd)?;
            poller.add(Token::Client(client.token), &socket, EventFlags::IN)?;
            let connection = Connection::kept(socket, client.greeted, client.subscribed);
            self.by_number.insert(client.token, connection);
        }
        self.next_number = self.next_number.max(handover.next_client);
        Ok(())
    }

    /// All their sockets.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.by_number.values().map(|client| client.as_fd())
    }
}

/// A descriptor that is closed when none is left for a client.
fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::{FenceState, Request, encode};

    use super::*;

    /// A client, and its end of the connection.
    fn connected() -> (Clients, Poller<Token>, u64, OwnedFd) {
        let (ours, theirs) = seqpacket::pair().expect("a pair");
        rustix::io::ioctl_fionbio(&ours, true).expect("set");
        let (mut clients, poller) = (Clients::new(), Poller::new().expect("an epoll"));
        let client = FIRST_NUMBER;
        poller
            .add(Token::Client(client), &ours, EventFlags::IN)
            .expect("polled");
        clients.by_number.insert(client, Connection::new(ours));
        (clients, poller, client, theirs)
    }

    #[test]
    fn a_request_is_returned_and_a_client_that_sends_anything_else_is_dropped() {
        let (mut clients, _poller, client, theirs) = connected();
        let mut buffer = seqpacket::buffer();
        assert!(clients.receive(client, &mut buffer).is_none());
        assert_eq!(clients.fds().count(), 1, "it has only not sent anything");
        let call = Call {
            id: 7,
            request: Request::Fence,
        };
        let bytes = encode(&call).expect("encoded");
        seqpacket::send(&theirs, &bytes, &[]).expect("sent");
        let (received, fds) = clients.receive(client, &mut buffer).expect("a request");
        assert_eq!((received.id, fds.len()), (7, 0));
        seqpacket::send(&theirs, b"nonsense", &[]).expect("sent");
        assert!(clients.receive(client, &mut buffer).is_none());
        assert_eq!(clients.fds().count(), 0);
    }

    #[test]
    fn only_subscribers_get_what_is_published() {
        let (mut clients, poller, client, theirs) = connected();
        rustix::io::ioctl_fionbio(&theirs, true).expect("set");
        let state = FenceState::Unarmed;
        let mut buffer = seqpacket::buffer();
        clients.publish(&poller, &Message::Fence { state });
        assert!(seqpacket::receive(&theirs, &mut buffer).is_err());
        clients.subscribe(client);
        clients.publish(&poller, &Message::Fence { state });
        assert!(seqpacket::receive(&theirs, &mut buffer).is_ok_and(|one| one.is_some()));
    }
}
