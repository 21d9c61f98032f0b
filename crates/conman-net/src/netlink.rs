//! A netlink socket inside a session's network namespace: requests in batches, answers matched by sequence number.
//!
//! It blocks, and is used while a session starts: all changes of a link are sent at once.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

/// Messages sent at once: their answers fit into the smallest receive buffer, and no other user of rtnl
/// waits long.
const BATCH: usize = 32;

/// The kernel answers while it takes a request, so that a missing answer is lost.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest datagram: the kernel fills 32 KiB at most for a dump.
pub(crate) const DATAGRAM_BYTES: usize = 64 * 1_024;

/// The kernel rounds lengths of messages up to this.
const ALIGNMENT: usize = 4;

/// Attempts of a dump that changes of the kernel's tables interrupt.
pub(crate) const DUMP_ATTEMPTS: usize = 10;

/// A socket for routing messages in one network namespace.
#[derive(Debug)]
pub(crate) struct RouteSocket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

/// A change of the kernel's tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// Creates something that must not exist.
    Create(RouteNetlinkMessage),
    /// Creates something, or replaces what exists in its place.
    Replace(RouteNetlinkMessage),
    /// Changes or deletes something that exists.
    Apply(RouteNetlinkMessage),
}

impl RouteSocket {
    /// Uses a socket that was opened in the namespace.
    pub(crate) fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        Ok(Self {
            socket,
            sequence: 0,
            buffer: vec![0; DATAGRAM_BYTES],
        })
    }

    /// Makes changes, in this order, of which every one must succeed. The error is the first one's.
    pub(crate) fn change_all(&mut self, changes: &[Change]) -> io::Result<()> {
        changes
            .chunks(BATCH)
            .try_for_each(|batch| self.change_batch(batch))
    }

    fn change_batch(&mut self, batch: &[Change]) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut waiting = BTreeSet::new();
        for change in batch {
            let (message, flags) = change.clone().into_parts();
            waiting.insert(self.push(&mut bytes, &message, flags | NLM_F_ACK));
        }
        self.send(&bytes)?;
        let mut first_error = Ok(());
        while !waiting.is_empty() {
            for (header, payload) in self.receive()? {
                // Answers of an earlier, interrupted call have other numbers.
                if let NetlinkPayload::Error(error) = payload
                    && waiting.remove(&header.sequence_number)
                    && error.code.is_some()
                {
                    first_error = first_error.and(Err(error.to_io()));
                }
            }
        }
        first_error
    }

    /// Lists what a request for a list names. If a change interrupts it, it is repeated.
    pub(crate) fn dump(
        &mut self,
        request: &RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_ATTEMPTS {
            if let Some(list) = self.dump_once(request)? {
                return Ok(list);
            }
        }
        Err(interrupted())
    }

    /// Returns the answer to a request for one thing.
    pub(crate) fn get(&mut self, request: &RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let mut bytes = Vec::new();
        let sequence = self.push(&mut bytes, request, 0);
        self.send(&bytes)?;
        loop {
            for (header, payload) in self.receive()? {
                match payload {
                    _ if header.sequence_number != sequence => {}
                    NetlinkPayload::InnerMessage(message) => return Ok(message),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
    }

    /// `None` when it is not consistent.
    fn dump_once(
        &mut self,
        request: &RouteNetlinkMessage,
    ) -> io::Result<Option<Vec<RouteNetlinkMessage>>> {
        let mut bytes = Vec::new();
        let sequence = self.push(&mut bytes, request, NLM_F_DUMP);
        self.send(&bytes)?;
        let (mut list, mut consistent) = (Vec::new(), true);
        loop {
            for (header, payload) in self.receive()? {
                if header.sequence_number != sequence {
                    continue;
                }
                consistent &= header.flags & netlink_packet_core::NLM_F_DUMP_INTR == 0;
                match payload {
                    NetlinkPayload::InnerMessage(message) => list.push(message),
                    NetlinkPayload::Done(_) => return Ok(consistent.then_some(list)),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Appends a request, and returns its sequence number.
    fn push(&mut self, bytes: &mut Vec<u8>, message: &RouteNetlinkMessage, flags: u16) -> u32 {
        // Number 0 is that of notifications.
        self.sequence = self.sequence.checked_add(1).unwrap_or(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, message.clone().into());
        message.finalize();
        let start = bytes.len();
        bytes.resize(start + message.buffer_len().next_multiple_of(ALIGNMENT), 0);
        message.serialize(&mut bytes[start..]);
        self.sequence
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        sendto(&self.socket, bytes, SendFlags::empty(), &kernel)?;
        Ok(())
    }

    /// Receives one datagram, and parses its messages.
    fn receive(&mut self) -> io::Result<Vec<(NetlinkHeader, NetlinkPayload<RouteNetlinkMessage>)>> {
        let attempt = || recv(&self.socket, &mut self.buffer[..], RecvFlags::empty());
        let (_, length) = rustix::io::retry_on_intr(attempt)?;
        let mut rest = self.buffer.get(..length).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "a message of the kernel is too large",
            )
        })?;
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let length = (message.header.length as usize).next_multiple_of(ALIGNMENT);
            rest = rest.get(length..).unwrap_or_default();
            messages.push(message.into_parts());
        }
        Ok(messages)
    }
}

impl Change {
    /// The message, and the flags of its request.
    pub(crate) fn into_parts(self) -> (RouteNetlinkMessage, u16) {
        match self {
            Self::Create(message) => (message, NLM_F_CREATE | NLM_F_EXCL),
            Self::Replace(message) => (message, NLM_F_CREATE | NLM_F_REPLACE),
            Self::Apply(message) => (message, 0),
        }
    }
}

pub(crate) fn interrupted() -> io::Error {
    io::Error::other("other changes interrupt the list of links or routes")
}

/// Opens a socket of a netlink family (`None` is routing) that is a member of these groups (bits).
pub(crate) fn open_netlink(
    family: Option<rustix::net::Protocol>,
    groups: u32,
) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        family,
    )?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}
