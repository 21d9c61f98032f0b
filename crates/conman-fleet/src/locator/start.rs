//! Makes a node start a session without an owner from its record, for a connection.

use std::time::Duration;

use async_trait::async_trait;
use conman_node::Former;
use conman_proto::SessionId;
use conman_registry::RegistryError;

use super::node_requests::NodeAnswer;
use super::{FormerNode, Locator};
use crate::locate_error::is_elsewhere;
use crate::node_waits::pause;
use crate::{Attempt, LocateError, Missing, PlacementRequest, StartAttempts, StartOn, node_api};

/// Attempts to read a record while the registry does not answer.
const MAX_READS: u32 = 8;

impl Locator {
    /// Makes a node start the session from its record. Repeats the attempts while time alone may
    /// help.
    pub(super) async fn start(
        &self,
        id: &SessionId,
        may_start: bool,
        former: &FormerNode,
    ) -> Result<(), LocateError> {
        let mut attempts = StartAttempts::default();
        for times in 1.. {
            let record = match self.node.sessions().record(id).await {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(()),
                // Its leader may just have been lost, with the machine of a node.
                Err(RegistryError::Unavailable { .. }) if times <= MAX_READS => {
                    tokio::time::sleep(pause(times)).await;
                    continue;
                }
                Err(error) => return Err(LocateError::Registry(error)),
            };
            let placement = self.map.place(id, &PlacementRequest::from(&record.spec));
            let mut start = ConnectionStart {
                locator: self,
                id,
                may_start,
                former,
            };
            let attempted = attempts.round(&placement, Duration::MAX, &mut start).await;
            let failed = match attempted {
                Ok(outcome) => return outcome,
                Err(failed) => failed,
            };
            if placement.candidates.is_empty() {
                return Err(LocateError::no_node(id, &placement));
            }
            match failed {
                // It may be started once a node that has the runtime takes sessions.
                Some(failed)
                    if failed.missing == Missing::Runtime && placement.runtime_elsewhere =>
                {
                    return Err(LocateError::no_node(id, &placement));
                }
                Some(failed) if failed.missing < Missing::Room => return failed.answer,
                Some(_) | None => {}
            }
            tracing::debug!(session = %id, times, "no node could start the session yet");
            tokio::time::sleep(pause(times)).await;
        }
        Ok(())
    }

    async fn start_here(&self, id: &SessionId, may_start: bool, former: &FormerNode) -> NodeAnswer {
        let former = Former {
            node: Some(&former.name),
            is_lost: former.is_lost,
        };
        match self.node.access().revive(id, may_start, former).await {
            Ok(_) => NodeAnswer::Ready,
            Err(error) if is_elsewhere(&error) => NodeAnswer::Elsewhere,
            Err(error) => NodeAnswer::Failed(LocateError::Route(error)),
        }
    }
}

/// A start for connections that wait for the session.
struct ConnectionStart<'a> {
    locator: &'a Locator,
    id: &'a SessionId,
    may_start: bool,
    former: &'a FormerNode,
}

#[async_trait]
impl StartOn for ConnectionStart<'_> {
    type Answer = Result<(), LocateError>;

    async fn start_on(&mut self, node: &str) -> Attempt<Self::Answer> {
        let (locator, former) = (self.locator, self.former);
        let answer = if node == locator.map.me() {
            locator.start_here(self.id, self.may_start, former).await
        } else {
            let target = node_api::ready(self.id, self.may_start, &former.name, former.is_lost);
            locator.post(node, target).await
        };
        answer.into_attempt()
    }
}
