//! Messages with descriptors over sequenced-packet sockets.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
    sendmsg, socketpair,
};

use crate::messages::MAX_MESSAGE_BYTES;

/// Cgroup hierarchies that a process joins: memory, pids, cpu, freezer or the unified one.
const MAX_HIERARCHIES: usize = 4;

/// Descriptors in one message: a root, a log, /dev, files, binds, an OCI runtime's root and files, the limit of processor
/// time and cgroups; fewer in a request, with the socket for a link. The kernel takes 253.
pub const MAX_FDS: usize = 3
    + crate::spec::MAX_FILES
    + crate::spec::MAX_BINDS
    + crate::spec::MAX_RUNTIME_FILES
    + 1
    + 1
    + MAX_HIERARCHIES;

/// What came in one message.
#[derive(Debug)]
pub struct Received<'buffer> {
    pub bytes: &'buffer [u8],
    pub fds: Vec<OwnedFd>,
}

/// A buffer for the longest message, and one byte to detect a longer one.
pub fn buffer() -> Vec<u8> {
    vec![0; MAX_MESSAGE_BYTES + 1]
}

/// Two connected ends, close-on-exec, blocking.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends one message completely, or fails.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "too many descriptors in a message",
        ));
    }
    let flags = SendFlags::NOSIGNAL;
    let sent = rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags)
    })?;
    if sent == bytes.len() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::WriteZero,
        "a message was cut",
    ))
}

/// Receives one message; `None` when the peer has closed. A message that is cut, of its bytes or of
/// its descriptors, is an error.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<Received<'_>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    })?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    if message
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message is too long",
        ));
    }
    if message.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    Ok(Some(Received {
        bytes: &buffer[..message.bytes],
        fds,
    }))
}
