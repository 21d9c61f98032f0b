//! Makes a node restart a session that lost its node.

use std::time::Duration;

use async_trait::async_trait;
use conman_core::error_chain;
use conman_core::placement::Placement;
use conman_node::{RestartError, RouteError, WithoutImage};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use tokio::time::sleep;

use super::Locator;
use super::node_requests::NodeAnswer;
use crate::locate_error::{is_of_another, reasons};
use crate::node_waits::pause;
use crate::start_attempts::MAX_CANDIDATES;
use crate::{
    Attempt, LocateError, Missing, PlacementRequest, SessionLocation, StartAttempts, StartOn,
    node_api,
};

/// How long nodes are requested whether they have the image, before one tries without it: a fleet
/// may be large, and Docker slow. Far below the bound of a restart order.
const SEARCH_LIMIT: Duration = Duration::from_secs(5);

/// A session to restart.
#[derive(Debug, Clone)]
pub(crate) struct LostSession {
    pub(crate) id: SessionId,
    pub(crate) generation: Generation,
    pub(crate) spec: ResolvedSpec,
    /// The node that it was on.
    pub(crate) from: String,
    /// The number of this restart in a row.
    pub(crate) count: u32,
}

/// Look-ups of the owner of a session that another node may be starting: the last one after some 1.5 s.
const CLAIM_LOOKS: u32 = 6;

impl Locator {
    /// Makes a node restart a session that lost its node; each node is requested once. Returns the
    /// node that it runs on, or why it runs on none. Nodes without its image or runtime are skipped.
    /// If all lack the image, one of them tries anyway, so that the attempt is counted and the
    /// attempts end.
    pub(crate) async fn restart(&self, lost: &LostSession) -> Result<String, String> {
        let placement = self.place_anywhere(&lost.id, &lost.spec);
        let mut candidates = rotated(placement.candidates, lost.count);
        // A node that rebalances takes it again only if no other node starts it.
        candidates.sort_by_key(|node| *node == lost.from);
        let placement = Placement {
            candidates,
            ..placement
        };
        let mut restart = Restart {
            locator: self,
            lost,
            without_image: WithoutImage::Refuse,
        };
        let mut attempts = StartAttempts::default();
        let attempted = attempts.round(&placement, SEARCH_LIMIT, &mut restart).await;
        let failed = match attempted {
            Ok(outcome) => return outcome,
            Err(Some(failed)) => failed,
            Err(None) => return Err(reasons(&placement)),
        };
        if failed.missing != Missing::Image {
            return failed.answer;
        }
        restart.without_image = WithoutImage::Try;
        match restart.start_on(&failed.node).await {
            Attempt::Final(outcome) | Attempt::Failed(_, outcome) => outcome,
        }
    }

    /// Whether placement names a node other than this one for a restart.
    pub(crate) fn may_run_elsewhere(&self, id: &SessionId, spec: &ResolvedSpec) -> bool {
        let placement = self.place_anywhere(id, spec);
        let mut nodes = placement.candidates.iter();
        nodes.any(|node| node != self.map.me())
    }

    fn place_anywhere(&self, id: &SessionId, spec: &ResolvedSpec) -> Placement {
        let wanted = PlacementRequest {
            anywhere: true,
            ..PlacementRequest::from(spec)
        };
        self.map.place(id, &wanted)
    }

    /// The node that owns a session. Waits for a moment if a node starts it and has not recorded that.
    pub(crate) async fn owner(&self, id: &SessionId) -> Result<String, String> {
        for times in 0..CLAIM_LOOKS {
            if times > 0 {
                sleep(pause(times)).await;
            }
            match self.map.locate_fresh(id).await {
                Ok(SessionLocation::There(owner)) => return Ok(owner.node.name.to_string()),
                Ok(SessionLocation::Here { .. }) => return Ok(self.map.me().to_owned()),
                // The node that starts it may not have recorded that yet.
                Ok(SessionLocation::Released { .. } | SessionLocation::Lost { .. }) => {}
                Ok(SessionLocation::NoOwner) => break,
                Err(error) => return Err(error_chain(&error)),
            }
        }
        Err("it was stopped or forgotten meanwhile".to_owned())
    }

    async fn restart_here(&self, lost: &LostSession, without_image: WithoutImage) -> NodeAnswer {
        let (id, generation) = (&lost.id, lost.generation);
        let restarted = self
            .node
            .sessions()
            .restart(id, generation, &lost.from, without_image);
        match restarted.await {
            Ok(_) => NodeAnswer::Ready,
            Err(RestartError::NotWanted { .. }) => NodeAnswer::Elsewhere,
            Err(RestartError::NotStarted { source, .. }) if is_of_another(&source) => {
                NodeAnswer::Elsewhere
            }
            Err(RestartError::NotStarted { id, source }) => {
                NodeAnswer::Failed(LocateError::Route(RouteError::NotStarted { id, source }))
            }
        }
    }
}

/// A restart of one session.
struct Restart<'a> {
    locator: &'a Locator,
    lost: &'a LostSession,
    without_image: WithoutImage,
}

#[async_trait]
impl StartOn for Restart<'_> {
    type Answer = Result<String, String>;

    async fn start_on(&mut self, node: &str) -> Attempt<Self::Answer> {
        let (locator, lost) = (self.locator, self.lost);
        let answer = if node == locator.map.me() {
            locator.restart_here(lost, self.without_image).await
        } else {
            let elsewhere = self.without_image == WithoutImage::Refuse;
            let target = node_api::restart(&lost.id, &lost.from, lost.generation, elsewhere);
            locator.post(node, target).await
        };
        match answer {
            NodeAnswer::Ready => Attempt::Final(Ok(node.to_owned())),
            NodeAnswer::Elsewhere => Attempt::Final(locator.owner(&lost.id).await),
            // A failure on one node says nothing about the next.
            NodeAnswer::Failed(error) => {
                let missing = error.missing().unwrap_or(Missing::Room);
                Attempt::Failed(missing, Err(error_chain(&error)))
            }
        }
    }
}

/// The candidates in the order in which they are requested: what failed on one may succeed on the
/// next.
fn rotated(mut candidates: Vec<String>, count: u32) -> Vec<String> {
    let first = candidates.len().min(MAX_CANDIDATES);
    if first > 0 {
        let failed = usize::try_from(count.saturating_sub(1)).unwrap_or_default();
        candidates[..first].rotate_left(failed % first);
    }
    candidates
}
