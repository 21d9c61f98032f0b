//! The thread that learns which links disappear.
//!
//! The kernel drops notifications when they do not fit into the socket's buffer, and reports that with
//! ENOBUFS. Then the thread lists all links instead.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use netlink_packet_core::{NetlinkHeader, NetlinkPayload};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::link_messages::all_links;
use crate::netlink::{RouteSocket, open_netlink, receive, set_receive_buffer};
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
    metrics::describe_counter!(
        "conman_net_rereads_total",
        "Lists of all links that were read because notifications were lost"
    );
    let mut watch = Watch {
        notifications: open_netlink(None, LINK_GROUP)?,
        lists: RouteSocket::open()?,
        links: Arc::downgrade(links),
    };
    set_receive_buffer(watch.notifications.as_fd(), buffer_bytes)?;
    set_socket_timeout(&watch.notifications, Timeout::Recv, Some(CHECK_INTERVAL))?;
    std::thread::Builder::new()
        .name("conman-links".to_owned())
        .spawn(move || watch.run())?;
    Ok(())
}

struct Watch {
    notifications: OwnedFd,
    lists: RouteSocket,
    links: Weak<Mutex<Links>>,
}

impl Watch {
    fn run(&mut self) {
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let mut missed = false;
        loop {
            // The kernel drops all notifications, and reports that no more, until the queue is empty.
            let flags = match missed {
                true => RecvFlags::DONTWAIT,
                false => RecvFlags::empty(),
            };
            let notified = receive(self.notifications.as_fd(), &mut buffer, flags);
            let Some(links) = self.links.upgrade() else {
                return;
            };
            match notified {
                Ok(messages) => {
                    for index in messages.into_iter().filter_map(deleted_link) {
                        lock(&links).link_is_gone(index);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !missed {
                        continue;
                    }
                    match self.reread(&links) {
                        Ok(()) => missed = false,
                        Err(error) => {
                            tracing::warn!(%error, "cannot list links; addresses stay in use");
                            std::thread::park_timeout(CHECK_INTERVAL);
                        }
                    }
                }
                // Whatever the reason, notifications may be lost.
                Err(error) => {
                    if Errno::from_io_error(&error) != Some(Errno::NOBUFS) {
                        tracing::warn!(%error, "cannot read a notification about links");
                    }
                    missed = true;
                }
            }
        }
    }

    /// Finds out which links are gone from a list of those that exist.
    fn reread(&mut self, known: &Mutex<Links>) -> io::Result<()> {
        metrics::counter!("conman_net_rereads_total").increment(1);
        // Before the list: one that begins to leave later is not judged by it.
        let leaving = lock(known).leaving();
        let links = self.lists.dump(&all_links())?;
        let present: BTreeSet<u32> = links
            .iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewLink(link) => Some(link.header.index),
                _ => None,
            })
            .collect();
        for index in leaving.difference(&present) {
            lock(known).link_is_gone(*index);
        }
        Ok(())
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
