//! Whether the other nodes of the fleet accept this one, found out when it joins.

use std::time::Duration;

use bytes::Bytes;
use conman_peer::{LIVENESS, PeerAddress, PeerClient, RefusedBy, RequestError};
use conman_registry::{Fleet, PeerStanding};
use http::Request;
use http_body_util::Empty;
use tokio::time::timeout;

/// Time for all nodes that are asked. One that answers is enough.
const PATIENCE: Duration = Duration::from_secs(5);

/// Requests an answer of one live node after the other, until one accepts this node.
///
/// # Errors
/// Nodes answer, and none of them accepts this one: their credentials differ. Requests between them would
/// fail, although the registry shows all of them as live.
pub async fn require_acceptance(fleet: &dyn Fleet, client: &PeerClient) -> Result<(), RefusedBy> {
    let mut refused = None;
    // On the heap: it is large, and awaited within the start of the daemon.
    let asking = Box::pin(async {
        for peer in fleet.peers().iter() {
            if peer.name == client.me() || peer.standing != PeerStanding::Live {
                continue;
            }
            let announced = peer.announcement.as_ref();
            let url = announced.and_then(|announced| announced.peer_url.as_deref());
            let address = url.map(|url| PeerAddress::new(&peer.name, url));
            let Some(Ok(address)) = address else {
                continue;
            };
            let Ok(request) = Request::get(LIVENESS).body(Empty::<Bytes>::new()) else {
                continue;
            };
            match client.request(&address, request).await {
                Ok(_) => {
                    refused = None;
                    return;
                }
                Err(RequestError::Refused(by)) => refused = Some(by),
                Err(error) => {
                    tracing::debug!(node = peer.name, %error, "a node cannot be asked at the join");
                }
            }
        }
    });
    // What was found out by then counts.
    let _ = timeout(PATIENCE, asking).await;
    refused.map_or(Ok(()), Err)
}
