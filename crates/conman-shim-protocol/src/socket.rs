//! A connection to the shim for clients with an event loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::messages::{DecodeError, Message, decode};
use crate::seqpacket;
use crate::stream_messages::{KEPT_OUTPUT_BYTES, StreamEvent, StreamInput};

/// Longest message about streams: a terminal's screen with the modes before it, a kind and a position.
const MAX_EVENT_BYTES: usize = KEPT_OUTPUT_BYTES + 1_024;

/// One message from the shim.
#[derive(Debug)]
pub struct Incoming {
    /// An error concerns only this message: the next one may be valid.
    pub message: Result<Message, DecodeError>,
    pub fds: Vec<OwnedFd>,
}

/// Connects to a shim of the caller's own user or root's, for clients with their own event loop: the
/// socket never blocks. `WouldBlock` when too many connections wait to be accepted.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    if !peer.uid.is_root() && peer.uid.as_raw() != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the socket belongs to another user",
        ));
    }
    Ok(socket)
}

/// Sends an encoded call completely, or fails; `WouldBlock` while the shim does not read.
pub fn send(socket: impl AsFd, call: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    seqpacket::send(socket, call, fds)
}

/// Returns the next message; `None` once the shim has closed. The first call allocates `buffer`.
pub fn receive(socket: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Option<Incoming>> {
    if buffer.is_empty() {
        *buffer = seqpacket::buffer();
    }
    let received = seqpacket::receive(socket, buffer)?;
    Ok(received.map(|received| Incoming {
        message: decode(received.bytes),
        fds: received.fds,
    }))
}

/// Returns the next event of kept streams, on the socket that came with [`crate::Reply::Attached`]; `None`
/// once the shim has closed. The first call allocates `buffer`.
pub fn receive_event(socket: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<Option<StreamEvent>> {
    buffer.resize(MAX_EVENT_BYTES, 0);
    let Some(received) = seqpacket::receive(socket, buffer)? else {
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

/// Sends input to the shim completely, or fails; `WouldBlock` while it does not read.
pub fn send_input(socket: impl AsFd, input: &StreamInput) -> io::Result<()> {
    seqpacket::send(socket, &input.encode(), &[])
}
