//! Notices when somebody else changes what a fabric has made: routes, and entries and links of its devices.

use std::io;
use std::os::unix::net::UnixDatagram as StdDatagram;

use netlink_packet_core::NetlinkBuffer;
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use crate::fabric_routes::PROTOCOL;
use crate::netlink::{DATAGRAM_BYTES, open_netlink};

/// The kernel's groups of notifications about links, neighbours, addresses and routes (`RTMGRP_*`).
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x100 | 0x40 | 0x400;

/// Types of messages (`RTM_*`).
const NEW_LINK: u16 = 16;
const DELETED_LINK: u16 = 17;
const NEW_ADDRESS: u16 = 20;
const DELETED_ADDRESS: u16 = 21;
const DELETED_ROUTE: u16 = 25;
const DELETED_NEIGHBOUR: u16 = 29;

/// Offset of the protocol in `struct rtmsg`, and of the index in `struct ifinfomsg`, `struct ifaddrmsg`
/// and `struct ndmsg`.
const ROUTE_PROTOCOL: usize = 5;
const INDEX: usize = 4;

#[derive(Debug)]
pub(crate) struct FabricWatch {
    /// A netlink socket; tokio has no type for one, and only its descriptor is used.
    socket: UnixDatagram,
}

impl FabricWatch {
    /// Opens it in the network namespace of the calling thread.
    pub(crate) fn open() -> io::Result<Self> {
        let socket = open_netlink(None, GROUPS)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = UnixDatagram::from_std(StdDatagram::from(socket))?;
        Ok(Self { socket })
    }

    /// Waits for a change of a route of a fabric or of one of these devices, or for lost notifications.
    pub(crate) async fn changed(&self, devices: &[u32]) {
        let mut buffer = vec![0; DATAGRAM_BYTES];
        loop {
            let received = self.socket.async_io(Interest::READABLE, || {
                let (_, length) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
                Ok(length)
            });
            match received.await {
                Ok(length) if !concerns(&buffer[..length.min(buffer.len())], devices) => {}
                // An error: notifications may be lost.
                _ => return,
            }
        }
    }
}

fn concerns(mut datagram: &[u8], devices: &[u32]) -> bool {
    while let Ok(message) = NetlinkBuffer::new_checked(datagram) {
        let payload = message.payload();
        let index = payload.get(INDEX..INDEX + 4);
        let index = index.and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
        let is_device = index.is_some_and(|index| devices.contains(&u32::from_ne_bytes(index)));
        let concerns = match message.message_type() {
            NEW_LINK | DELETED_LINK | NEW_ADDRESS | DELETED_ADDRESS | DELETED_NEIGHBOUR => {
                is_device
            }
            DELETED_ROUTE => payload.get(ROUTE_PROTOCOL) == Some(&PROTOCOL),
            _ => false,
        };
        if concerns {
            return true;
        }
        let length = (message.length() as usize).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or_default();
    }
    false
}
