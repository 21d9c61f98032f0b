//! The socket on which a starting container gets its link ([`crate::NetworkSpec::Linked`]).
//!
//! The client creates a pair and sends one end with the launch. The container's first process sends its
//! network namespace, continues its set-up, and waits for the answer before it executes its program. The
//! shim and the launcher only pass the socket on, so that neither waits for the link.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::seqpacket;

/// The first process's message; it carries two descriptors.
const NAMESPACE: &[u8] = b"namespace";

/// The answer that the link is there. Any other is an error text.
const CONNECTED: &[u8] = b"connected";

/// Most bytes of an error text.
const MAX_TEXT: usize = 1_024;

/// A container's network namespace.
#[derive(Debug)]
pub struct OwnNamespace {
    /// `/proc/PID/ns/net`, opened.
    pub file: OwnedFd,
    /// A netlink socket for routing messages that was opened inside.
    pub netlink: OwnedFd,
}

/// Two connected ends: the client's, which never blocks, and the container's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (client, container) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::io::ioctl_fionbio(&client, true)?;
    Ok((client, container))
}

/// Receives the container's namespace; `None` when the container has ended before it was created.
/// `WouldBlock` while there is no message.
pub fn receive(client: impl AsFd) -> io::Result<Option<OwnNamespace>> {
    let mut buffer = [0; NAMESPACE.len() + 1];
    let Some(received) = seqpacket::receive(client, &mut buffer)? else {
        return Ok(None);
    };
    let mut fds = received.fds.into_iter();
    match (received.bytes, fds.next(), fds.next()) {
        (NAMESPACE, Some(file), Some(netlink)) => Ok(Some(OwnNamespace { file, netlink })),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the container's network message is malformed",
        )),
    }
}

/// Lets the container start its program, or fail with this text.
pub fn answer(client: impl AsFd, connected: Result<(), &str>) -> io::Result<()> {
    let text = match connected {
        Ok(()) => CONNECTED,
        Err(text) => {
            let end = text.floor_char_boundary(MAX_TEXT);
            &text.as_bytes()[..end]
        }
    };
    seqpacket::send(client, text, &[])
}

/// Sends a container's namespace from inside.
pub fn offer(container: &OwnedFd, file: BorrowedFd<'_>, netlink: BorrowedFd<'_>) -> io::Result<()> {
    seqpacket::send(container, NAMESPACE, &[file, netlink])
}

/// Waits until the client has made the link.
pub fn wait(container: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0; MAX_TEXT + 1];
    match seqpacket::receive(container, &mut buffer)? {
        Some(received) if received.bytes == CONNECTED => Ok(()),
        Some(received) => Err(io::Error::other(
            String::from_utf8_lossy(received.bytes).into_owned(),
        )),
        None => Err(io::Error::other("the client has ended")),
    }
}
