//! Makes a node start a session without an owner from its record.

use std::collections::BTreeSet;

use conman_node::Former;
use conman_proto::{Problem, SessionId};
use conman_proxy::Refusal;
use conman_registry::RegistryError;

use super::asking::Said;
use super::refusals::{
    NO_SUCH_IMAGE, NO_SUCH_RUNTIME, is_elsewhere, is_for_want_of_something, no_node, no_registry,
    refused,
};
use super::{MAX_CANDIDATES, Seeker, Was, pause, wish_of};

/// Attempts to read a record while the registry does not answer.
const MAX_READS: u32 = 8;

impl Seeker {
    /// Makes a node start the session from its record.
    pub(super) async fn start(
        &self,
        id: &SessionId,
        may_start: bool,
        was: &Was,
    ) -> Result<(), Refusal> {
        let mut lacking = Lacking::default();
        for times in 1.. {
            let record = match self.node.sessions().record(id).await {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(()),
                // Its leader may just have gone, with the machine of a node.
                Err(RegistryError::Unavailable { .. }) if times <= MAX_READS => {
                    tokio::time::sleep(pause(times)).await;
                    continue;
                }
                Err(error) => return Err(no_registry(error)),
            };
            let placement = self.map.place(id, &wish_of(&record.spec));
            let (mut trouble, mut refusals) = (None, Vec::new());
            let mut candidates = lacking.others(&placement.candidates);
            if candidates.is_empty() {
                candidates = lacking.others(&placement.second);
            }
            for name in &candidates {
                let said = if *name == self.map.me() {
                    self.start_here(id, may_start, was).await
                } else {
                    self.ask(id, &self.map.node(name).address, may_start, was)
                        .await
                };
                match said {
                    Said::Ready | Said::Elsewhere => return Ok(()),
                    Said::Problem(problem) if is_for_want_of_something(&problem) => {
                        lacking.add(name, problem);
                    }
                    // Another node has no better chance.
                    Said::Problem(problem) if !problem.retryable => {
                        return Err(Refusal::from(problem));
                    }
                    Said::Problem(problem) => trouble = Some(problem),
                    Said::Refused(refused) => refusals.push(refused),
                    Said::Nothing => {}
                }
            }
            if placement.candidates.is_empty() {
                return Err(no_node(id, &placement.refused));
            }
            if let Some(why) = lacking.all_of([&placement.candidates, &placement.second]) {
                // It may be started once a node that has the runtime takes sessions.
                if placement.runtime_elsewhere && why.slug() == NO_SUCH_RUNTIME {
                    return Err(no_node(id, &placement.refused));
                }
                return Err(Refusal::from(why));
            }
            if let Some(last) = refusals
                .last()
                .filter(|_| refusals.len() == candidates.len())
            {
                return Err(refused(last));
            }
            tracing::debug!(session = %id, ?trouble, times, "no node could start the session yet");
            tokio::time::sleep(pause(times)).await;
        }
        Ok(())
    }

    async fn start_here(&self, id: &SessionId, may_start: bool, was: &Was) -> Said {
        let former = Former {
            node: Some(&was.node),
            is_lost: was.is_lost,
        };
        match self.node.access().revive(id, may_start, former).await {
            Ok(_) => Said::Ready,
            Err(error) if is_elsewhere(&error) => Said::Elsewhere,
            Err(error) => Said::Problem(conman_api::route_problem(&error)),
        }
    }
}

/// The nodes found to lack the session's image, or its runtime.
#[derive(Debug, Default)]
struct Lacking {
    nodes: BTreeSet<String>,
    why: Option<Problem>,
}

impl Lacking {
    fn add(&mut self, node: &str, why: Problem) {
        self.nodes.insert(node.to_owned());
        // A missing image is closer to a start than a missing runtime.
        let nearer = self
            .why
            .as_ref()
            .is_some_and(|why| why.slug() == NO_SUCH_IMAGE);
        if !nearer || why.slug() == NO_SUCH_IMAGE {
            self.why = Some(why);
        }
    }

    /// Candidates that are not in the set.
    fn others<'a>(&self, candidates: &'a [String]) -> Vec<&'a str> {
        let others = candidates.iter().map(String::as_str);
        let others = others.filter(|name| !self.nodes.contains(*name));
        others.take(MAX_CANDIDATES).collect()
    }

    /// The last answer of the node that lacked least, if no other node is left.
    fn all_of(&mut self, nodes: [&[String]; 2]) -> Option<Problem> {
        let lack = nodes.iter().all(|nodes| self.others(nodes).is_empty());
        lack.then(|| self.why.take()).flatten()
    }
}
