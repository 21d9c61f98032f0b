//! Makes a node restart a session that lost its node.

use std::ops::ControlFlow;
use std::time::Duration;

use conman_fleet::SessionLocation;
use conman_node::{EnsureError, RestartError, WithoutImage};
use conman_proto::{Generation, Problem, ResolvedSpec, SessionId};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::time::Instant;

use super::asking::Said;
use super::refusals::{
    NO_SUCH_IMAGE, NO_SUCH_RUNTIME, is_for_want_of_something, is_of_another, reasons,
};
use super::{MAX_CANDIDATES, Seeker, wish_of};
use crate::serve::chain;

/// How long nodes are asked whether they have the image, before one is tried without it: a fleet
/// may be large, and Docker slow. Far below the bound of a restart order.
const ASK_PATIENCE: Duration = Duration::from_secs(5);

/// A session to restart.
#[derive(Debug, Clone)]
pub(in crate::serve) struct LostSession {
    pub(in crate::serve) id: SessionId,
    pub(in crate::serve) generation: Generation,
    pub(in crate::serve) spec: ResolvedSpec,
    /// The node that it was on.
    pub(in crate::serve) from: String,
    /// The number of this restart in a row.
    pub(in crate::serve) count: u32,
}

impl Seeker {
    /// Makes a node restart a session that lost its node; each node is asked once. Returns the node
    /// that it runs on, or why it runs on none. Nodes without its image or runtime are skipped. If
    /// all lack it, one of them tries anyway, so that the attempt is counted.
    pub(in crate::serve) async fn restart(&self, lost: &LostSession) -> Result<String, String> {
        let placement = self.map.place(&lost.id, &wish_of(&lost.spec));
        let first = placement.candidates.len();
        let order = in_turn(placement.candidates, lost.count);
        let mut trouble = reasons(&placement.refused);
        let (mut asked, mut lacks_image) = (0, None);
        let begun = Instant::now();
        for (number, name) in order.iter().chain(&placement.second).enumerate() {
            // Second-choice nodes only lack the image or the runtime.
            if asked >= MAX_CANDIDATES || number >= first && asked > 0 {
                break;
            }
            if lacks_image.is_some() && begun.elapsed() >= ASK_PATIENCE {
                break;
            }
            match self.restart_on(lost, name, WithoutImage::Refuse).await {
                Said::Problem(problem) if is_for_want_of_something(&problem) => {
                    trouble = told_by(name, &problem);
                    if problem.slug() == NO_SUCH_IMAGE {
                        lacks_image.get_or_insert(name);
                    }
                }
                said => match self.restarted(lost, name, said).await {
                    ControlFlow::Break(outcome) => return outcome,
                    ControlFlow::Continue(why) => {
                        asked += 1;
                        trouble = why;
                    }
                },
            }
        }
        // So that the attempts end: otherwise none would be counted.
        if let Some(name) = lacks_image.filter(|_| asked == 0) {
            let said = self.restart_on(lost, name, WithoutImage::Try).await;
            return match self.restarted(lost, name, said).await {
                ControlFlow::Break(outcome) => outcome.map_err(|_| trouble),
                ControlFlow::Continue(why) => Err(why),
            };
        }
        Err(trouble)
    }

    async fn restart_on(
        &self,
        lost: &LostSession,
        name: &str,
        without_image: WithoutImage,
    ) -> Said {
        if name == self.map.me() {
            return self.restart_here(lost, without_image).await;
        }
        let (id, generation) = (&lost.id, lost.generation);
        let address = &self.map.node(name).address;
        let from = utf8_percent_encode(&lost.from, NON_ALPHANUMERIC);
        let elsewhere = without_image == WithoutImage::Refuse;
        let target = format!(
            "/peer/sessions/{id}/restart?from={from}&generation={generation}&elsewhere={elsewhere}"
        );
        self.post(id, address, target).await
    }

    /// The result of a restart by a node's answer, or why the next node is to be asked.
    async fn restarted(
        &self,
        lost: &LostSession,
        name: &str,
        said: Said,
    ) -> ControlFlow<Result<String, String>, String> {
        match said {
            Said::Ready => ControlFlow::Break(Ok(name.to_owned())),
            Said::Elsewhere => ControlFlow::Break(self.whose(&lost.id).await),
            Said::Problem(problem) => ControlFlow::Continue(told_by(name, &problem)),
            Said::Refused(by) => ControlFlow::Continue(by.to_string()),
            Said::Nothing => ControlFlow::Continue(format!("node `{name}` did not answer")),
        }
    }

    /// The node that owns a session at present.
    pub(in crate::serve) async fn whose(&self, id: &SessionId) -> Result<String, String> {
        match self.map.whereabouts(id).await {
            Ok(SessionLocation::There(owner)) => Ok(owner.node.name.to_string()),
            Ok(SessionLocation::Here { .. }) => Ok(self.map.me().to_owned()),
            Ok(_) => Err("it is not to be restarted any more".to_owned()),
            Err(error) => Err(chain(&error)),
        }
    }

    async fn restart_here(&self, lost: &LostSession, without_image: WithoutImage) -> Said {
        let (id, generation) = (&lost.id, lost.generation);
        let begun = self
            .node
            .sessions()
            .restart(id, generation, &lost.from, without_image);
        match begun.await {
            Ok(_) => Said::Ready,
            Err(RestartError::NotWanted { .. }) => Said::Elsewhere,
            Err(RestartError::NotStarted { source, .. }) if is_of_another(&source) => {
                Said::Elsewhere
            }
            Err(error) => {
                let detail = chain(&error);
                let slug = match &error {
                    RestartError::NotStarted {
                        source: EnsureError::NoSuchImage { .. },
                        ..
                    } => NO_SUCH_IMAGE,
                    RestartError::NotStarted {
                        source: EnsureError::NoSuchRuntime { .. },
                        ..
                    } => NO_SUCH_RUNTIME,
                    RestartError::NotStarted { .. } | RestartError::NotWanted { .. } => {
                        "not-restarted"
                    }
                };
                Said::Problem(Problem::new(slug, "It was not restarted", 503, detail))
            }
        }
    }
}

/// The order in which nodes are asked to restart a session: what failed on one may succeed on the
/// next.
fn in_turn(mut candidates: Vec<String>, count: u32) -> Vec<String> {
    let first = candidates.len().min(MAX_CANDIDATES);
    if first > 0 {
        let failed = usize::try_from(count.saturating_sub(1)).unwrap_or_default();
        candidates[..first].rotate_left(failed % first);
    }
    candidates
}

fn told_by(node: &str, problem: &Problem) -> String {
    format!("node `{node}`: {}", problem.detail)
}
