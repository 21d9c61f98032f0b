//! Waits for a session's node, for connections and for the API: until the node can be reached, or
//! the session has moved. The requests that wait are counted.

use std::future::pending;
use std::time::{Duration, Instant};

use conman_peer::PeerAddress;
use conman_proto::SessionId;
use conman_registry::{PeerStanding, RegistryError};
use tokio::sync::SemaphorePermit;
use tokio::time::{sleep, timeout};

use crate::hold_metrics::{Cause, HeldRequest};
use crate::{FleetMap, NoAddress, Node, SessionLocation};

/// Pause between two attempts, at first and at most.
const PAUSE: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long a request waits for the announcement of a node that has just joined: it arrives within
/// a second or two, unless the node has many sessions to adopt first.
const ANNOUNCED_SOON: Duration = Duration::from_secs(5);
const ANNOUNCED_INTERVAL: Duration = Duration::from_millis(250);

/// How long a request waits for a node that renews its heartbeat and does not answer this one. With the
/// attempt before it and the last check, a request fails within five seconds.
const CUT_OFF_AFTER: Duration = Duration::from_secs(2);

/// The same for a node whose machine refuses the connection, which takes no time: its daemon may be stopping,
/// and renews its heartbeat until its last request is answered.
const REFUSED_FOR: Duration = Duration::from_secs(4);

/// A node whose heartbeat is older does not renew it: its daemon has ended, or it will be declared dead.
const RENEWED_WITHIN: Duration = Duration::from_secs(2);

/// A node renews its heartbeat, so that no other takes over its sessions, and does not answer this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutOff;

/// The place of a request that waits for a node.
#[derive(Debug)]
pub struct Waiting<'map> {
    _held: HeldRequest,
    _place: SemaphorePermit<'map>,
}

/// The pause after so many attempts in a row.
#[must_use]
pub(crate) fn pause(times: u32) -> Duration {
    (PAUSE * 2_u32.saturating_pow(times.min(8).saturating_sub(1))).min(LONGEST_PAUSE)
}

impl FleetMap {
    /// A place to wait for a node that cannot be reached; `None` if all are taken.
    #[must_use]
    pub fn wait_for(&self, node: &str) -> Option<Waiting<'_>> {
        let place = self.places.try_acquire().ok()?;
        let peer = self.peer(node);
        Some(Waiting {
            _held: HeldRequest::new(Cause::of(peer.as_ref(), Cause::Silent)),
            _place: place,
        })
    }

    /// Returns when the node can be reached, or no longer owns the session. Cancel safe.
    ///
    /// # Errors
    /// The node is cut off from this one, and from nothing else that matters to the session.
    pub async fn until_reachable(&self, id: &SessionId, name: &str) -> Result<(), CutOff> {
        let mut changes = self.fleet().peer_changes();
        loop {
            // A node that has joined again gets the whole time again.
            let began = Instant::now();
            let known = self.incarnation(name);
            let is_other = async {
                while self.incarnation(name) == known {
                    // Cancel safe: a change that is not seen stays one.
                    if changes.changed().await.is_err() {
                        return pending().await;
                    }
                }
            };
            tokio::select! {
                reached = self.poll_until_reachable(id, name, began) => return reached,
                // It has joined again or was declared dead: looks again at once.
                () = is_other => {}
            }
        }
    }

    /// The node's incarnation, unless it is declared dead.
    fn incarnation(&self, name: &str) -> Option<u64> {
        let peer = self.peer(name)?;
        (peer.standing != PeerStanding::Fenced).then_some(peer.incarnation)
    }

    async fn poll_until_reachable(
        &self,
        id: &SessionId,
        name: &str,
        began: Instant,
    ) -> Result<(), CutOff> {
        let mut times = 0;
        loop {
            times += 1;
            sleep(pause(times)).await;
            // While the registry does not answer, nothing has changed.
            let Ok(now) = self.locate_fresh(id).await else {
                continue;
            };
            match now {
                SessionLocation::There(owner) if *owner.node.name == *name => {
                    match owner.node.address {
                        Ok(address) => {
                            let limit = match self.answers(&address).await {
                                Some(true) => return Ok(()),
                                Some(false) => REFUSED_FOR,
                                None => CUT_OFF_AFTER,
                            };
                            if began.elapsed() >= limit && self.renews(name) {
                                return Err(CutOff);
                            }
                        }
                        Err(NoAddress::NotYet { .. }) => {}
                        // The next look-up reports why it cannot be reached.
                        Err(NoAddress::NotListening { .. } | NoAddress::Malformed { .. }) => {
                            return Ok(());
                        }
                    }
                }
                _ => return Ok(()),
            }
        }
    }

    /// Whether a node renews its heartbeat.
    pub(crate) fn renews(&self, name: &str) -> bool {
        self.peer(name).is_some_and(|peer| {
            peer.standing == PeerStanding::Live
                && Duration::from_millis(peer.heartbeat_ago_ms) < RENEWED_WITHIN
        })
    }

    /// Returns when the registry can be read again. Cancel safe.
    pub(crate) async fn until_registry_answers(&self, id: &SessionId) {
        for times in 1.. {
            let located = self.locate_fresh(id).await;
            if !matches!(located, Err(RegistryError::Unavailable { .. })) {
                return;
            }
            sleep(pause(times)).await;
        }
    }

    /// Whether a node answers; valid until the session's owner is looked up again. `None` if there is no answer
    /// in time.
    async fn answers(&self, address: &PeerAddress) -> Option<bool> {
        let liveness = self.client().liveness();
        timeout(LONGEST_PAUSE, liveness.answers(address)).await.ok()
    }

    /// Another node by its name. Waits until a node that has just joined has announced its address,
    /// with a time limit. Does not wait if too many requests wait for nodes already.
    pub async fn announced(&self, name: &str) -> Node {
        let until = Instant::now() + ANNOUNCED_SOON;
        let mut waiting = None;
        loop {
            let peer = self.peer(name);
            let joins = peer.as_ref().is_some_and(|peer| {
                peer.standing == PeerStanding::Live && peer.announcement.is_none()
            });
            if joins && waiting.is_none() {
                waiting = self.wait_for(name);
            }
            if !joins || waiting.is_none() || Instant::now() >= until {
                return self.node(name);
            }
            sleep(ANNOUNCED_INTERVAL).await;
        }
    }
}
