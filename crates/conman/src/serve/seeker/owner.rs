//! Waits for the node of a session: until it is ready there, is lost, or can be reached.

use conman_peer::{NoAddress, PeerAddress, Whereabouts};
use conman_proto::SessionId;
use conman_proxy::Refusal;
use conman_registry::PeerStanding;

use super::asking::Said;
use super::refusals::{TOO_MANY_WAITING, refused, with_retry};
use super::{LONGEST_PAUSE, LOOK_EVERY, PAUSE, Seeker, Was, pause};

impl Seeker {
    /// Has the session's node say when it takes requests.
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
            // Its own clients have all the places for the session: how long and how many wait here
            // is not for it to say.
            Said::Problem(problem) if problem.slug() == TOO_MANY_WAITING => {
                tokio::time::sleep(LONGEST_PAUSE).await;
                Ok(())
            }
            Said::Nothing => {
                tokio::time::sleep(PAUSE).await;
                Ok(())
            }
            Said::Problem(problem) => {
                // What a node says of a session that it has lost meanwhile is of no interest.
                match self.map.whereabouts(id).await {
                    Ok(Whereabouts::There(owner)) if *owner.node.name == *name => {
                        Err(with_retry(problem))
                    }
                    // Who looks again is told where the registry does not answer.
                    Ok(_) | Err(_) => Ok(()),
                }
            }
        }
    }

    /// Returns when a node that answers, and yet is not heard of, is not the session's any more: its
    /// ownership lapses, and what it has is frozen.
    pub(super) async fn lost(&self, id: &SessionId, name: &str) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let peers = self.map.fleet().peers();
            let peer = peers.iter().find(|peer| peer.name == name);
            // Nobody can have claimed what is its own before it is declared dead.
            if peer.is_some_and(|peer| peer.standing != PeerStanding::Fenced) {
                continue;
            }
            match self.map.whereabouts(id).await {
                Ok(Whereabouts::There(owner)) if *owner.node.name == *name => {}
                Ok(_) => return,
                // While the registry does not answer, nothing has changed.
                Err(_) => {}
            }
        }
    }

    /// Returns when the node can be reached, or is not the session's any more.
    pub(super) async fn reach(&self, id: &SessionId, name: &str) {
        for times in 1.. {
            tokio::time::sleep(pause(times)).await;
            // While the registry does not answer, nothing has changed.
            let Ok(now) = self.map.whereabouts(id).await else {
                continue;
            };
            match now {
                Whereabouts::There(owner) if *owner.node.name == *name => {
                    match owner.node.address {
                        Ok(address) if self.answers(&address).await => return,
                        Ok(_) | Err(NoAddress::NotYet { .. }) => {}
                        // Who looks again is told why it cannot be.
                        Err(NoAddress::NotListening { .. } | NoAddress::Malformed { .. }) => return,
                    }
                }
                _ => return,
            }
        }
    }

    /// Whether a node answers, for as long as nobody asks anew whose the session is.
    async fn answers(&self, address: &PeerAddress) -> bool {
        let pulse = self.map.client().pulse();
        tokio::time::timeout(LONGEST_PAUSE, pulse.answers(address)).await == Ok(true)
    }
}
