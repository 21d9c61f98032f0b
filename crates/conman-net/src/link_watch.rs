//! The task that learns which links disappear.
//!
//! The kernel drops notifications when they do not fit into the socket's buffer. A sweep finds out about the
//! links that these were about.

use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::{AsyncSocket as _, SocketAddr};
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::time::sleep;

use crate::plane::{Links, lock};

/// Pause before a broken connection is opened again.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

type Notification = (NetlinkMessage<RouteNetlinkMessage>, SocketAddr);

/// Starts the task; the network namespace of the calling thread is the host's. The task ends with the last other
/// holder of the links, at the next notification.
pub(crate) fn start(links: &Arc<Mutex<Links>>, buffer_bytes: usize) -> io::Result<()> {
    let mut notifications = open(buffer_bytes)?;
    let links = Arc::downgrade(links);
    tokio::spawn(async move {
        while watch(&mut notifications, &links).await {
            tracing::warn!(
                "cannot read notifications about links; until that is repaired only sweeps find out about links \
                 that disappear"
            );
            notifications = loop {
                sleep(REOPEN_INTERVAL).await;
                if let Ok(opened) = open(buffer_bytes) {
                    break opened;
                }
            };
        }
    });
    Ok(())
}

/// The queue behind it is not bounded. It is short: the task that reads it only changes a map.
fn open(buffer_bytes: usize) -> io::Result<impl Stream<Item = Notification> + Unpin + use<>> {
    let (mut connection, _, notifications) = new_multicast_connection(&[MulticastGroup::Link])?;
    let socket = connection.socket_mut().socket_mut();
    socket.set_rx_buf_sz(i32::try_from(buffer_bytes).unwrap_or(i32::MAX))?;
    tokio::spawn(connection);
    Ok(notifications)
}

/// Returns whether the connection has ended, not the links' other holders.
async fn watch(
    notifications: &mut (impl Stream<Item = Notification> + Unpin),
    links: &Weak<Mutex<Links>>,
) -> bool {
    while let Some((notification, _)) = notifications.next().await {
        let Some(links) = links.upgrade() else {
            return false;
        };
        if let Some(index) = deleted_link(notification.payload) {
            lock(&links).link_is_gone(index);
        }
    }
    true
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
