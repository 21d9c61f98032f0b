//! Makes a node start a session that is PUT and that no node owns.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::no_template;
use conman_core::placement::{Placement, Unfit};
use conman_fleet::{Attempt, LocateError, Missing, PlacementRequest, StartAttempts, StartOn};

use super::forwarded_request::{ForwardedRequest, Step, stepped};
use super::placement_request;
use super::start_answer::{lacks, wants_another};
use crate::node_errors::locate_problem;
use crate::problem::{ApiError, IntoApiError as _, Kind};

impl ForwardedRequest {
    /// Makes one of the nodes that may run the session start it.
    pub(super) async fn place(&self) -> Result<Step, ApiError> {
        let parts = &self.request.parts;
        let policy = self.forwarder.node.policy();
        let sessions = self.forwarder.node.sessions();
        let record = match placement_request::is_empty(&self.request.body) {
            // Of a session that is known: it starts by its former spec.
            true => sessions.record(&self.id).await.ok().flatten(),
            false => None,
        };
        let wanted = match record {
            Some(record) => PlacementRequest::from(&record.spec),
            None => placement_request::of(&parts.uri, &self.request.body, &policy),
        };
        let placement = self.forwarder.map.place(&self.id, &wanted);
        let mut attempts = StartAttempts::default();
        let mut start = PutStart(self);
        match attempts.round(&placement, Duration::MAX, &mut start).await {
            Ok(answer) => return answer,
            // It may be started once a node that has the runtime takes sessions.
            Err(Some(failed))
                if failed.missing == Missing::Runtime && placement.runtime_elsewhere => {}
            Err(Some(failed)) if failed.missing == Missing::Runtime => {
                return without_runtime(failed.answer?, &placement);
            }
            Err(Some(failed)) => return failed.answer,
            Err(None) => self.require_template(wanted.template.as_deref())?,
        }
        let problem = locate_problem(&LocateError::no_node(&self.id, &placement));
        Err(ApiError::from(Box::new(problem)))
    }

    async fn start_on(&self, name: &str) -> Result<Attempt<Result<Step, ApiError>>, ApiError> {
        let step = if name == self.forwarder.map.me() {
            self.here().await
        } else {
            let node = self.forwarder.map.node(name);
            stepped(&node, self.call(&node, None).await)?
        };
        Ok(match step {
            Step::Moved => Attempt::Final(Ok(Step::Moved)),
            Step::Answer(response) => {
                let (response, lacks) = lacks(response).await?;
                let missing = lacks.or(wants_another(&response).then_some(Missing::Room));
                let answer = Ok(Step::Answer(response));
                match missing {
                    Some(missing) => Attempt::Failed(missing, answer),
                    None => Attempt::Final(answer),
                }
            }
            step @ Step::Refused(_) => Attempt::Failed(Missing::Trust, Ok(step)),
            step => Attempt::Failed(Missing::Room, Ok(step)),
        })
    }

    /// Refuses a template that no node has, including dead ones: waiting would not help.
    fn require_template(&self, name: Option<&str>) -> Result<(), ApiError> {
        let Some(name) = name else {
            return Ok(());
        };
        let peers = self.forwarder.map.fleet().peers();
        let mut known = BTreeSet::new();
        for peer in peers.iter() {
            match &peer.announcement {
                Some(told) => known.extend(told.templates.iter().map(String::as_str)),
                // It may have it.
                None => return Ok(()),
            }
        }
        if known.contains(name) {
            return Ok(());
        }
        let known: Vec<&str> = known.into_iter().collect();
        Err(Kind::BAD_SPEC.in_field("template", no_template(name, &known, "The fleet's")))
    }
}

/// Sends a PUT to one node.
struct PutStart<'a>(&'a ForwardedRequest);

#[async_trait]
impl StartOn for PutStart<'_> {
    type Answer = Result<Step, ApiError>;

    async fn start_on(&mut self, node: &str) -> Attempt<Self::Answer> {
        let attempt = self.0.start_on(node).await;
        attempt.unwrap_or_else(|error| Attempt::Final(Err(error)))
    }
}

/// The last node's answer, or the reasons of all of them.
fn without_runtime(step: Step, placement: &Placement) -> Result<Step, ApiError> {
    let refused = placement.refused.iter();
    let reasons: Vec<String> = refused
        .filter(|refused| matches!(refused.why, Unfit::NoRuntime { .. }))
        .map(|refused| format!("node `{}` {}", refused.node, refused.why))
        .collect();
    if reasons.is_empty() {
        return Ok(step);
    }
    let reasons = reasons.join("; ");
    Err(Kind::NO_SUCH_RUNTIME.because(format!(
        "{reasons}. Use a template with another runtime, or name this one in a node's configuration"
    )))
}
