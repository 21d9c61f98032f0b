//! The task that learns which links disappear.
//!
//! The kernel drops notifications when they do not fit into the socket's buffer. A sweep finds out about the
//! links that these were about.

use std::io;
use std::sync::{Arc, Mutex, Weak};

use futures_util::{Stream, StreamExt as _};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::AsyncSocket as _;
use rtnetlink::{MulticastGroup, new_multicast_connection};

use crate::plane::{Links, lock};

/// Starts the task; the network namespace of the calling thread is the host's. The task ends with the last other
/// holder of the links, at the next notification.
pub(crate) fn start(links: &Arc<Mutex<Links>>, buffer_bytes: usize) -> io::Result<()> {
    let (mut connection, _, notifications) = new_multicast_connection(&[MulticastGroup::Link])?;
    let socket = connection.socket_mut().socket_mut();
    socket.set_rx_buf_sz(i32::try_from(buffer_bytes).unwrap_or(i32::MAX))?;
    tokio::spawn(connection);
    tokio::spawn(watch(notifications, Arc::downgrade(links)));
    Ok(())
}

async fn watch(
    mut notifications: impl Stream<Item = (NetlinkMessage<RouteNetlinkMessage>, impl Sized)> + Unpin,
    links: Weak<Mutex<Links>>,
) {
    while let Some((notification, _)) = notifications.next().await {
        let Some(links) = links.upgrade() else {
            return;
        };
        if let Some(index) = deleted_link(notification.payload) {
            lock(&links).link_is_gone(index);
        }
    }
    tracing::warn!(
        "cannot read notifications about links; only sweeps find out about links that disappear"
    );
}

/// The index of a link that was deleted.
fn deleted_link(payload: NetlinkPayload<RouteNetlinkMessage>) -> Option<u32> {
    match payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(link))
            // A bridge announces the same of ports that leave it.
            if link.header.interface_family == AddressFamily::Unspec =>
        {
            Some(link.header.index)
        }
        // `Overrun` among them: some were lost.
        _ => None,
    }
}
