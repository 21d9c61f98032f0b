//! The thread that learns which links disappear.
//!
//! The kernel drops notifications when they do not fit into the socket's buffer. A sweep finds out about the
//! links that these were about.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use netlink_packet_core::{NetlinkHeader, NetlinkPayload};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size, set_socket_timeout};

use crate::netlink::{open_netlink, receive};
use crate::plane::{Links, lock};

/// The kernel's group of notifications about links (`RTMGRP_LINK`).
const LINK_GROUP: u32 = 1;

/// The kernel's largest notification is far smaller.
const DATAGRAM_BYTES: usize = 32 * 1_024;

/// Interval of checks whether the plane is still used; also the pause after an unexpected error.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread in the network namespace of the calling thread. It ends with the last other holder of
/// the links.
pub(crate) fn start(links: &Arc<Mutex<Links>>, buffer_bytes: usize) -> io::Result<()> {
    let notifications = open_netlink(None, LINK_GROUP)?;
    set_socket_recv_buffer_size(&notifications, buffer_bytes)?;
    set_socket_timeout(&notifications, Timeout::Recv, Some(CHECK_INTERVAL))?;
    let links = Arc::downgrade(links);
    std::thread::Builder::new()
        .name("conman-links".to_owned())
        .spawn(move || watch(&notifications, &links))?;
    Ok(())
}

fn watch(notifications: &OwnedFd, links: &Weak<Mutex<Links>>) {
    let mut buffer = vec![0; DATAGRAM_BYTES];
    loop {
        let notified = receive(notifications.as_fd(), &mut buffer);
        let Some(links) = links.upgrade() else {
            return;
        };
        match notified {
            Ok(messages) => {
                for index in messages.into_iter().filter_map(deleted_link) {
                    lock(&links).link_is_gone(index);
                }
            }
            Err(error) => match Errno::from_io_error(&error) {
                // There is none, or some were lost.
                Some(Errno::AGAIN | Errno::NOBUFS) => {}
                _ => {
                    tracing::warn!(%error, "cannot read a notification about links");
                    std::thread::park_timeout(CHECK_INTERVAL);
                }
            },
        }
    }
}

/// The index of a link that was deleted.
fn deleted_link((_, payload): (NetlinkHeader, NetlinkPayload<RouteNetlinkMessage>)) -> Option<u32> {
    match payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link))
            // A bridge announces the same of ports that leave it.
            if link.header.interface_family == AddressFamily::Unspec =>
        {
            Some(link.header.index)
        }
        _ => None,
    }
}
