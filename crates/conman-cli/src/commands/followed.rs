//! Finds out what happened to a session's container while a log, a command or a terminal of it
//! was followed. All of them end with the container, for whatever reason; the user has to know if
//! neither the program nor the user ended it.

use std::time::Duration;

use conman_proto::{EndCause, Generation, OnNodeLoss, Session, SessionId, SessionState};

use crate::client::{Client, ClientError};
use crate::failure::{Exit, Failure};

/// How long the daemon may take to notice a container's end.
const LOOKS: u32 = 8;
const INTERVAL: Duration = Duration::from_millis(250);

/// Prefix of the `reason` of a session whose node was lost before it recorded the end.
const LOST: &str = "its node was lost";

/// A container of which something is followed.
#[derive(Debug)]
pub(super) struct Followed {
    id: SessionId,
    generation: Generation,
    node: String,
}

/// What happened to it.
#[derive(Debug)]
pub(super) enum Fate {
    /// It ended regularly, or on request.
    Ended,
    /// It runs.
    Runs,
    /// It was ended by its node, or replaced by another: the report.
    Gone(Failure),
    /// It is unknown, and why.
    Unknown(Failure),
}

impl Followed {
    /// The session's container at present.
    pub(super) async fn now(client: &Client, id: &SessionId) -> Result<Self, ClientError> {
        let session = client.get::<Session>(&path(id)).await?;
        Ok(Self {
            id: session.id,
            generation: session.generation,
            node: session.node,
        })
    }

    /// Checks it once the followed thing has ended; `again` is the command that follows again.
    pub(super) async fn fate(&self, client: &Client, again: &str) -> Fate {
        for look in 0..LOOKS {
            if look > 0 {
                tokio::time::sleep(INTERVAL).await;
            }
            let fate = match client.get::<Session>(&path(&self.id)).await {
                Ok(session) => self.judge(&session, again),
                Err(error) => {
                    let failure = Failure::from(error);
                    Some(match failure.exit() {
                        Exit::NotFound => Fate::Ended,
                        _ => Fate::Unknown(failure),
                    })
                }
            };
            if let Some(fate) = fate {
                return fate;
            }
        }
        Fate::Runs
    }

    /// `None` while it seems to run.
    fn judge(&self, session: &Session, again: &str) -> Option<Fate> {
        let Self {
            id,
            generation,
            node,
        } = self;
        if session.generation > *generation {
            let detail = format!(
                "{id}: its container on node {node} (generation {generation}) is gone; generation \
                 {} is {} on node {}",
                session.generation, session.state, session.node
            );
            return Some(Fate::Gone(
                gone(detail).next(format!("`{again}` continues with the new one")),
            ));
        }
        let reason = session.reason.as_deref().unwrap_or_default();
        let cause = session.end.as_ref().map(|end| end.cause);
        let for_its_node = match cause {
            Some(cause) => matches!(
                cause,
                EndCause::Preempted | EndCause::Drained | EndCause::NodeLost
            ),
            None => reason.starts_with(LOST),
        };
        if !for_its_node {
            let runs = [
                SessionState::Starting,
                SessionState::Running,
                SessionState::Frozen,
                SessionState::Paused,
            ];
            return (!runs.contains(&session.state)).then_some(Fate::Ended);
        }
        let detail = format!(
            "{id}: its container on node {node} (generation {generation}) was ended: {reason}"
        );
        let start = match session.spec.on_node_loss {
            OnNodeLoss::Restart => "the fleet starts it on another node automatically".to_owned(),
            OnNodeLoss::Wait => format!(
                "another node starts it on request (`conman run {id}`, or its next connection)"
            ),
        };
        Some(Fate::Gone(gone(detail).next(format!(
            "{start}, and `{again}` then continues with the new one"
        ))))
    }
}

fn gone(detail: String) -> Failure {
    let title = "The session's container is gone";
    Failure::new(Exit::Unreachable, "container-gone", title, detail)
}

fn path(id: &SessionId) -> String {
    format!("/v1/sessions/{id}")
}

#[cfg(test)]
mod tests {
    use conman_proto::SessionEnd;

    use super::*;
    use crate::story::tests::session;

    /// The report about generation 3 on n1, if any.
    fn end_report(session: &Session) -> Option<String> {
        let followed = Followed {
            id: "alice".parse().expect("a name"),
            generation: Generation::new(3).expect("not zero"),
            node: "n1".to_owned(),
        };
        match followed.judge(session, "conman logs -f alice")? {
            Fate::Ended => Some("ended".to_owned()),
            Fate::Gone(Failure::Reported {
                exit: Exit::Unreachable,
                problem,
                next: Some(next),
            }) => Some(format!("{}; {next}", problem.detail)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_became_of_a_container_is_told_where_it_was_nobodys_wish() {
        use SessionState::{Failed, Frozen, Running, Starting, Stopped, Stopping};

        for state in [Starting, Running, Frozen] {
            assert_eq!(end_report(&session(3, state, None)), None, "{state}");
        }
        for (state, reason) in [
            (Stopped, None),
            (Stopped, Some("asked for by the API")),
            (Stopped, Some("idle for 60 s")),
            (
                Failed,
                Some("the program ended by itself, with exit code 1"),
            ),
        ] {
            let ended = end_report(&session(3, state, reason));
            assert_eq!(ended.as_deref(), Some("ended"), "{reason:?}");
        }
        use EndCause::{Drained, NodeLost, Preempted};
        for (state, cause, reason) in [
            (Stopping, Some(Preempted), "preempted: a notice"),
            (Stopped, Some(Drained), "drained: room for others"),
            (
                Stopped,
                Some(NodeLost),
                "its node was lost: its machine was rebooted",
            ),
            // From the record of a node that could not record its end.
            (
                Running,
                None,
                "its node was lost, and no other has taken it over yet",
            ),
        ] {
            let mut gone = session(3, state, Some(reason));
            gone.end = cause.map(|cause| SessionEnd { cause, phase: None });
            let text = end_report(&gone).expect("told");
            for part in ["alice", "node n1", reason, "`conman logs -f alice`"] {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert!(text.contains("`conman run alice`"), "{text}");
            gone.spec.on_node_loss = OnNodeLoss::Restart;
            let text = end_report(&gone).expect("told");
            assert!(text.contains("the fleet starts it"), "{text}");
            assert!(!text.contains("conman run"), "{text}");
        }
        for state in [Starting, Running, Stopped] {
            let mut next = session(4, state, None);
            "n2".clone_into(&mut next.node);
            let text = end_report(&next).expect("told");
            let now = format!("generation 4 is {state} on node n2");
            for part in ["node n1 (generation 3) is gone", &now] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}
