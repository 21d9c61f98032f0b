//! Requests nodes, one after the other, to start a session. This is the only such loop: a PUT, a
//! connection, a restart and a drain use it.
//!
//! ```text
//! candidates, best first ─ started, or no other node has a better chance ─▶ the node's answer
//!        │               ├ lacks the image or runtime ─▶ the next; not requested again
//!        │               └ has no room, or refuses    ─▶ the next, MAX_CANDIDATES in all
//!        └ second choice, if all candidates only lacked the image or runtime
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::placement::Placement;
use conman_proto::Problem;
use tokio::time::Instant;

/// Most nodes that are requested to start one session, not counting those that lack its image or
/// runtime, which answer at once.
pub(crate) const MAX_CANDIDATES: usize = 4;

const NO_SUCH_IMAGE: &str = "no-such-image";
const NO_SUCH_RUNTIME: &str = "no-such-runtime";

/// What has to change before a node starts a session that it did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Missing {
    /// Its configuration.
    Runtime,
    /// It needs the image.
    Image,
    /// It has to accept this node's requests.
    Trust,
    /// Nothing but time: it has no room, or cannot be reached.
    Room,
}

impl Missing {
    /// Whether a problem says that the node lacks the image or the runtime.
    #[must_use]
    pub fn of(problem: &Problem) -> Option<Self> {
        match problem.slug() {
            NO_SUCH_RUNTIME => Some(Self::Runtime),
            NO_SUCH_IMAGE => Some(Self::Image),
            _ => None,
        }
    }
}

/// The result of one request to start a session.
#[derive(Debug)]
pub enum Attempt<A> {
    /// It started, or no other node has a better chance.
    Final(A),
    /// Another node may start it.
    Failed(Missing, A),
}

/// Requests one node to start the session.
#[async_trait]
pub trait StartOn {
    type Answer: Send;

    /// `node`: the name of a node, which may be this one.
    async fn start_on(&mut self, node: &str) -> Attempt<Self::Answer>;
}

/// The answer of a node that did not start the session.
#[derive(Debug)]
pub struct FailedStart<A> {
    pub missing: Missing,
    pub node: String,
    pub answer: A,
}

/// The attempts to start one session.
#[derive(Debug)]
pub struct StartAttempts<A> {
    /// Nodes that lack the image or the runtime.
    lacking: BTreeSet<String>,
    /// The answer of the one of them that lacked least.
    least_lacking: Option<FailedStart<A>>,
}

impl<A> Default for StartAttempts<A> {
    fn default() -> Self {
        Self {
            lacking: BTreeSet::new(),
            least_lacking: None,
        }
    }
}

impl<A: Send> StartAttempts<A> {
    /// Requests each node of `placement` in turn. `search_limit`: how long to look for another node
    /// once one lacked the image or the runtime.
    ///
    /// # Errors
    /// No node started it: the answer of the node that lacked least, the last one of several;
    /// `None` if no node was requested.
    pub async fn round<S: StartOn<Answer = A> + Send>(
        &mut self,
        placement: &Placement,
        search_limit: Duration,
        start: &mut S,
    ) -> Result<A, Option<FailedStart<A>>> {
        let began = Instant::now();
        let candidates = placement.candidates.len();
        let (mut failed, mut count): (Option<FailedStart<A>>, _) = (None, 0);
        let nodes = placement.candidates.iter().chain(&placement.second);
        for (number, node) in nodes.enumerate() {
            if self.lacking.contains(node) {
                continue;
            }
            // Second-choice nodes only have an image or a runtime that the candidates lack.
            if number >= candidates && failed.is_some() {
                break;
            }
            if self.least_lacking.is_some() && began.elapsed() >= search_limit {
                break;
            }
            let (missing, answer) = match start.start_on(node).await {
                Attempt::Final(answer) => return Ok(answer),
                Attempt::Failed(missing, answer) => (missing, answer),
            };
            tracing::debug!(node, ?missing, "the node did not start the session");
            let last = match missing {
                Missing::Runtime | Missing::Image => {
                    self.lacking.insert(node.clone());
                    &mut self.least_lacking
                }
                Missing::Trust | Missing::Room => {
                    count += 1;
                    &mut failed
                }
            };
            if last.as_ref().is_none_or(|last| missing >= last.missing) {
                let node = node.clone();
                *last = Some(FailedStart {
                    missing,
                    node,
                    answer,
                });
            }
            if count >= MAX_CANDIDATES {
                break;
            }
        }
        Err(failed.or_else(|| self.least_lacking.take()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each node lacks, by its name.
    struct Script {
        missing: fn(&str) -> Option<Missing>,
        requested: Vec<String>,
    }

    #[async_trait]
    impl StartOn for Script {
        type Answer = String;

        async fn start_on(&mut self, node: &str) -> Attempt<String> {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.requested.push(node.to_owned());
            match (self.missing)(node) {
                None => Attempt::Final(node.to_owned()),
                Some(missing) => Attempt::Failed(missing, node.to_owned()),
            }
        }
    }

    fn placement(candidates: &[&str], second: &[&str]) -> Placement {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Placement {
            candidates: names(candidates),
            second: names(second),
            runtime_elsewhere: false,
            refused: Vec::new(),
        }
    }

    async fn round(
        attempts: &mut StartAttempts<String>,
        (placement, search_limit): (&Placement, Duration),
        missing: fn(&str) -> Option<Missing>,
    ) -> (Result<String, Option<(Missing, String)>>, String) {
        let mut script = Script {
            missing,
            requested: Vec::new(),
        };
        let result = attempts.round(placement, search_limit, &mut script).await;
        let result = result.map_err(|failed| failed.map(|failed| (failed.missing, failed.node)));
        (result, script.requested.concat())
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_without_the_image_do_not_count_and_are_not_requested_again() {
        let nodes = placement(&["a", "b", "c", "d", "e", "f", "g"], &["x"]);
        let lacks = |node: &str| match node {
            "a" | "c" => Some(Missing::Image),
            _ => Some(Missing::Room),
        };
        let mut attempts = StartAttempts::default();
        let (result, requested) = round(&mut attempts, (&nodes, Duration::MAX), lacks).await;
        assert_eq!(result, Err(Some((Missing::Room, "f".to_owned()))));
        assert_eq!(
            requested, "abcdef",
            "four without room, and not the second choice"
        );
        let (_, requested) = round(&mut attempts, (&nodes, Duration::MAX), lacks).await;
        assert_eq!(requested, "bdef");
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_choice_is_requested_if_the_candidates_only_lack_something() {
        let nodes = placement(&["a", "b"], &["x", "y"]);
        let lacks = |node: &str| match node {
            "a" => Some(Missing::Image),
            "b" => Some(Missing::Runtime),
            _ => None,
        };
        let (result, requested) = round(
            &mut StartAttempts::default(),
            (&nodes, Duration::MAX),
            lacks,
        )
        .await;
        assert_eq!((result, &*requested), (Ok("x".to_owned()), "abx"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_answer_of_the_node_that_lacks_least_is_returned() {
        let nodes = placement(&["a", "b"], &[]);
        for (lacks, least) in [
            (
                (|node| Some([Missing::Image, Missing::Runtime][usize::from(node == "b")]))
                    as fn(&str) -> _,
                (Missing::Image, "a"),
            ),
            (|_| Some(Missing::Image), (Missing::Image, "b")),
            (
                |node| Some([Missing::Trust, Missing::Image][usize::from(node == "b")]),
                (Missing::Trust, "a"),
            ),
        ] {
            let (result, _) = round(
                &mut StartAttempts::default(),
                (&nodes, Duration::MAX),
                lacks,
            )
            .await;
            assert_eq!(result, Err(Some((least.0, least.1.to_owned()))));
        }
        let none = placement(&[], &[]);
        let (result, _) = round(
            &mut StartAttempts::default(),
            (&none, Duration::MAX),
            |_| None,
        )
        .await;
        assert_eq!(result, Err(None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_search_for_an_image_ends_in_time() {
        let nodes = placement(&["a", "b", "c", "d", "e", "f", "g"], &[]);
        let lacks = |_: &str| Some(Missing::Image);
        let (result, requested) = round(
            &mut StartAttempts::default(),
            (&nodes, Duration::from_secs(5)),
            lacks,
        )
        .await;
        assert_eq!(result, Err(Some((Missing::Image, "e".to_owned()))));
        assert_eq!(requested, "abcde");
    }
}
