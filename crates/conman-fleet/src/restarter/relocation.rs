//! Restarts the sessions of a node that is being drained on other nodes.

use std::sync::{Arc, Weak};

use async_trait::async_trait;
use conman_core::error_chain;
use conman_core::restart::{self, Verdict};
use conman_node::{Node, Relocate, end_of};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;

use crate::Locator;
use crate::locator::LostSession;

/// Relocates sessions for a drain.
#[derive(Debug)]
pub(super) struct Relocator {
    /// Weak, so that the node does not keep itself alive.
    locator: Weak<Locator>,
    node: Weak<Node>,
}

impl Relocator {
    pub(super) fn new(locator: &Arc<Locator>, node: &Arc<Node>) -> Self {
        Self {
            locator: Arc::downgrade(locator),
            node: Arc::downgrade(node),
        }
    }
}

#[async_trait]
impl Relocate for Relocator {
    async fn relocate(&self, id: &SessionId, generation: Generation) -> Result<String, String> {
        let stopping = || "the daemon is stopping".to_owned();
        let locator = self.locator.upgrade().ok_or_else(stopping)?;
        let node = self.node.upgrade().ok_or_else(stopping)?;
        let record = node
            .sessions()
            .record(id)
            .await
            .map_err(|error| error_chain(&error))?;
        let Some(record) = record.filter(|record| record.generation == generation) else {
            // Another node was first.
            return locator.owner(id).await;
        };
        let from = node.name().to_owned();
        let end = end_of(&record);
        let now = Timestamp::now();
        match restart::judge(&record.spec, record.created_at, &from, end, now) {
            Verdict::Restart(next) => {
                let lost = LostSession {
                    id: id.clone(),
                    generation,
                    spec: record.spec,
                    from,
                    count: next.count,
                };
                locator.restart(&lost).await
            }
            Verdict::GivenUp { count } => Err(format!("it was restarted {count} times already")),
            Verdict::No => Err("it is not to be restarted".to_owned()),
        }
    }

    fn may_run_elsewhere(&self, id: &SessionId, spec: &ResolvedSpec) -> bool {
        let locator = self.locator.upgrade();
        locator.is_some_and(|locator| locator.may_run_elsewhere(id, spec))
    }
}
