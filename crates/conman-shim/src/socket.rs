use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::protocol::{DecodeError, Message, decode};
use crate::seqpacket;

/// A client's end of a connection that never blocks, for those who wait in a way of their own.
#[derive(Debug)]
pub struct ShimSocket {
    fd: OwnedFd,
}

/// One message of the shim's.
#[derive(Debug)]
pub struct Incoming {
    /// An error is one message's alone: the next may be understood again.
    pub message: Result<Message, DecodeError>,
    pub fds: Vec<OwnedFd>,
}

impl ShimSocket {
    /// Connects to a shim of the caller's own user or root's. `WouldBlock` when too many wait to
    /// be accepted.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        let peer = rustix::net::sockopt::socket_peercred(&fd)?;
        if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it is another user's",
            ));
        }
        Ok(Self { fd })
    }

    /// Sends an encoded call whole, or fails; `WouldBlock` while the shim does not read.
    pub fn send(&self, call: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        seqpacket::send(&self.fd, call, fds)
    }

    /// The next message; `None` once the shim has closed.
    pub fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<Option<Incoming>> {
        if buffer.is_empty() {
            *buffer = seqpacket::buffer();
        }
        let received = seqpacket::receive(&self.fd, buffer)?;
        Ok(received.map(|received| Incoming {
            message: decode(received.bytes),
            fds: received.fds,
        }))
    }
}

impl AsFd for ShimSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for ShimSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
