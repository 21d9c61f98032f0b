//! Waits for the node of a session: until the session is ready there, or lost.

use conman_proto::SessionId;
use conman_registry::PeerStanding;
use tokio::time::timeout;

use super::node_requests::NodeAnswer;
use super::{LOST_NODE_INTERVAL, Locator};
use crate::node_waits::{LONGEST_PAUSE, pause};
use crate::{LocateError, SessionLocation, node_api};

impl Locator {
    /// Waits until the session's node reports that it takes requests.
    pub(super) async fn until_ready(
        &self,
        id: &SessionId,
        name: &str,
        may_start: bool,
    ) -> Result<(), LocateError> {
        let target = node_api::ready(id, may_start, name, false);
        let error = match self.post(name, target).await {
            NodeAnswer::Ready | NodeAnswer::Elsewhere => return Ok(()),
            NodeAnswer::Failed(error) => error,
        };
        match error {
            LocateError::Refused(_) => Err(error),
            // How long and how many requests wait here does not depend on that.
            _ if error.is_crowded() => {
                tokio::time::sleep(LONGEST_PAUSE).await;
                Ok(())
            }
            LocateError::Answered { .. } => {
                // A node's answer about a session that it has lost meanwhile is of no interest.
                match self.map.locate_fresh(id).await {
                    Ok(SessionLocation::There(owner)) if *owner.node.name == *name => Err(error),
                    // The next look-up waits for the registry.
                    Ok(_) | Err(_) => Ok(()),
                }
            }
            _ => {
                tokio::time::sleep(pause(1)).await;
                Ok(())
            }
        }
    }

    /// Returns when a node that answers but is silent in the registry no longer owns the session:
    /// its ownership expires, and its sessions are frozen.
    pub(super) async fn until_lost(&self, id: &SessionId, name: &str) {
        let mut changes = self.map.fleet().peer_changes();
        loop {
            let _ = timeout(LOST_NODE_INTERVAL, changes.changed()).await;
            let peers = self.map.fleet().peers();
            let peer = peers.iter().find(|peer| peer.name == name);
            // Other nodes cannot claim its sessions before it is declared dead.
            if peer.is_some_and(|peer| peer.standing != PeerStanding::Fenced) {
                continue;
            }
            match self.map.locate_fresh(id).await {
                Ok(SessionLocation::There(owner)) if *owner.node.name == *name => {}
                Ok(_) => return,
                // While the registry does not answer, nothing has changed.
                Err(_) => {}
            }
        }
    }
}
