//! Waits for the node of a session: until the session is ready there or lost, or the node
//! reachable.

use conman_fleet::{NoAddress, PeerAddress, SessionLocation};
use conman_proto::SessionId;
use conman_proxy::Refusal;
use conman_registry::PeerStanding;

use super::asking::Said;
use super::refusals::{TOO_MANY_WAITING, refused, with_retry};
use super::{LONGEST_PAUSE, LOOK_EVERY, PAUSE, Seeker, Was, pause};

impl Seeker {
    /// Waits until the session's node reports that it takes requests.
    pub(super) async fn ready(
        &self,
        id: &SessionId,
        name: &str,
        may_start: bool,
    ) -> Result<(), Refusal> {
        let was = Was {
            node: name.to_owned(),
            is_lost: false,
        };
        let said = self
            .ask(id, &self.map.node(name).address, may_start, &was)
            .await;
        match said {
            Said::Ready | Said::Elsewhere => Ok(()),
            Said::Refused(by) => Err(refused(&by)),
            // The node's own clients have all the places for the session. How long and how many
            // requests wait here does not depend on that.
            Said::Problem(problem) if problem.slug() == TOO_MANY_WAITING => {
                tokio::time::sleep(LONGEST_PAUSE).await;
                Ok(())
            }
            Said::Nothing => {
                tokio::time::sleep(PAUSE).await;
                Ok(())
            }
            Said::Problem(problem) => {
                // A node's answer about a session that it has lost meanwhile is of no interest.
                match self.map.whereabouts(id).await {
                    Ok(SessionLocation::There(owner)) if *owner.node.name == *name => {
                        Err(with_retry(problem))
                    }
                    // The next look-up reports that the registry does not answer.
                    Ok(_) | Err(_) => Ok(()),
                }
            }
        }
    }

    /// Returns when a node that answers but is silent in the registry does not own the session any
    /// more: its ownership expires, and its sessions are frozen.
    pub(super) async fn lost(&self, id: &SessionId, name: &str) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let peers = self.map.fleet().peers();
            let peer = peers.iter().find(|peer| peer.name == name);
            // Other nodes cannot claim its sessions before it is declared dead.
            if peer.is_some_and(|peer| peer.standing != PeerStanding::Fenced) {
                continue;
            }
            match self.map.whereabouts(id).await {
                Ok(SessionLocation::There(owner)) if *owner.node.name == *name => {}
                Ok(_) => return,
                // While the registry does not answer, nothing has changed.
                Err(_) => {}
            }
        }
    }

    /// Returns when the node can be reached, or does not own the session any more.
    pub(super) async fn reach(&self, id: &SessionId, name: &str) {
        for times in 1.. {
            tokio::time::sleep(pause(times)).await;
            // While the registry does not answer, nothing has changed.
            let Ok(now) = self.map.whereabouts(id).await else {
                continue;
            };
            match now {
                SessionLocation::There(owner) if *owner.node.name == *name => {
                    match owner.node.address {
                        Ok(address) if self.answers(&address).await => return,
                        Ok(_) | Err(NoAddress::NotYet { .. }) => {}
                        // The next look-up reports why it cannot be reached.
                        Err(NoAddress::NotListening { .. } | NoAddress::Malformed { .. }) => return,
                    }
                }
                _ => return,
            }
        }
    }

    /// Whether a node answers; valid until the session's owner is looked up again.
    async fn answers(&self, address: &PeerAddress) -> bool {
        let pulse = self.map.client().pulse();
        tokio::time::timeout(LONGEST_PAUSE, pulse.answers(address)).await == Ok(true)
    }
}
