//! The path of one request to its session's node.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_core::no_template;
use conman_core::placement::{Placement, Unfit};
use conman_fleet::{
    Attempt, BufferedRequest, CallError, ExpectedGeneration, LocateError, Missing, Node,
    SessionLocation, StartAttempts, StartOn, Waiting, X_CONMAN_TURNED,
};
use conman_node::StopError;
use conman_proto::{FieldError, Generation, SessionId, SessionState, StopReport};
use conman_registry::{RegistryError, SessionRecord};
use http::Method;
use tokio::time::Instant;

use super::start_answer::{lacks, wants_another};
use super::{BodyLimit, Hop, buffer, placement_request, unanswered, unreachable};
use crate::node_errors::{chain, locate_problem};
use crate::problem::{ApiError, Kind};

/// How often a misdirected request is sent to the next node, while the session moves.
const MAX_TRIES: u32 = 6;

/// How much longer than the takeover delay a PUT or a DELETE waits for a session whose node
/// cannot be reached: other nodes may have begun to count later, and the session must be claimed
/// after that.
const AFTER_TAKEOVER: Duration = Duration::from_secs(18);

/// Pause between two attempts while a node cannot be reached, at first and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A request for a session that does not run on this node, or that is to be started on some node.
pub(super) struct ForwardedRequest {
    hop: Hop,
    id: SessionId,
    request: BufferedRequest,
    next: Next,
}

/// Result of an attempt.
enum Step {
    Answer(Response),
    /// The session is elsewhere.
    Moved,
    /// This node refuses it; another one may accept it.
    Elsewhere(Response),
    /// Its node may have ended this generation, but has not confirmed it.
    Unanswered(Unreached, Generation),
    /// Its node cannot be reached.
    Unreachable(Unreached),
    /// Its node accepts no requests of this one.
    Refused(ApiError),
}

/// What an attempt depends on.
struct Known {
    fresh: bool,
    /// The node that was just unreachable; it is not tried again at once.
    unreached: Option<Unreached>,
    /// The generation that may have been ended already.
    deleted: Option<Generation>,
}

/// A node that cannot be reached, and why.
struct Unreached {
    node: Arc<str>,
    why: String,
}

impl ForwardedRequest {
    pub(super) async fn begin(
        hop: Hop,
        id: SessionId,
        (request, limit): (Request, BodyLimit),
        next: Next,
    ) -> Response {
        let request = match buffer(request, limit).await {
            Ok(request) => request,
            Err(refusal) => return refusal.into_response(),
        };
        let forwarded = Self {
            hop,
            id,
            request,
            next,
        };
        let mut response = forwarded
            .run()
            .await
            .unwrap_or_else(ApiError::into_response);
        response.headers_mut().remove(X_CONMAN_TURNED);
        response
    }

    async fn run(&self) -> Result<Response, ApiError> {
        let began = Instant::now();
        let mut pause = PAUSE;
        let (mut fresh, mut tries) = (false, 0);
        let (mut unreached, mut deleted) = (None, None);
        let patience = self.hop.map.fleet().takeover() + AFTER_TAKEOVER;
        let mut waiting = None;
        loop {
            let known = Known {
                fresh,
                unreached: unreached.take(),
                deleted,
            };
            let step = self.step(known, &mut waiting).await?;
            fresh = true;
            tries += 1;
            match step {
                Step::Answer(response) => return Ok(response),
                Step::Moved | Step::Elsewhere(_) if tries < MAX_TRIES => {
                    metrics::counter!("conman_api_peer_refusals_total").increment(1);
                    // The first time, the registry was not read yet.
                    if tries > 1 {
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                }
                Step::Moved => {
                    return Err(Kind::MOVES.because(format!(
                        "session `{}` changed its node each of {MAX_TRIES} times that it was \
                         asked for; try again",
                        self.id
                    )));
                }
                Step::Elsewhere(response) => return Ok(response),
                Step::Unanswered(node, generation) => {
                    deleted = Some(generation);
                    unreached = Some(node);
                }
                // The registry was not read yet; another node may own it.
                Step::Unreachable(node) if tries == 1 => unreached = Some(node),
                // A request that starts or ends a session waits for the node's takeover.
                Step::Unreachable(node) if self.decides() && began.elapsed() < patience => {
                    if waiting.is_none() {
                        let place = self.hop.map.wait_for(&node.node);
                        let crowded = || match deleted {
                            Some(_) => unanswered(&node.why),
                            None => crowded(&node),
                        };
                        waiting = Some(place.ok_or_else(crowded)?);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    tries = 2;
                }
                // It may have been done all the same.
                Step::Unreachable(node) if deleted.is_some() => return Err(unanswered(&node.why)),
                Step::Unreachable(node) => return Err(unreachable(&node.why)),
                // The location may be out of date; the registry was not read yet.
                Step::Refused(_) if tries == 1 => {}
                Step::Refused(error) => return Err(error),
            }
        }
    }

    fn is_put(&self) -> bool {
        self.request.parts.method == Method::PUT
    }

    /// Whether the request creates or ends a session.
    fn decides(&self) -> bool {
        self.is_put() || self.ends()
    }

    /// Whether it ends the session.
    fn ends(&self) -> bool {
        self.is_of_session() && self.request.parts.method == Method::DELETE
    }

    /// Whether it is about the session itself, not about something in it.
    fn is_of_session(&self) -> bool {
        let path = self.request.parts.uri.path();
        path.strip_prefix("/v1/sessions/") == Some(self.id.as_str())
    }

    /// One attempt; not with a node that was just unreachable.
    async fn step(
        &self,
        known: Known,
        waiting: &mut Option<Waiting<'_>>,
    ) -> Result<Step, ApiError> {
        let Known {
            mut fresh,
            unreached,
            deleted,
        } = known;
        if self.hop.node.is_live(&self.id) {
            if let Some(deleted) = deleted {
                return Err(self.begun_anew(deleted, self.hop.map.me()));
            }
            if self.is_put() {
                return Ok(self.here_or_elsewhere().await);
            }
            // A start without a generation yet has nothing to report, and another node may be first.
            self.hop.node.claimed(&self.id).await;
            if self.hop.node.owns(&self.id) {
                return Ok(self.here().await);
            }
            fresh = true;
        }
        let location = self.hop.map.locate(&self.id, &mut fresh).await;
        let location = location.map_err(|error| Kind::NO_REGISTRY.because(chain(&error)))?;
        if let Some(deleted) = deleted {
            match self.since(deleted, &location) {
                Some(ended) => return ended,
                // Nothing has changed.
                None => fresh = true,
            }
        }
        if !matches!(location, SessionLocation::There(_)) {
            // The wait is over; a start may take much longer.
            *waiting = None;
        }
        match location {
            SessionLocation::There(owner) => match unreached {
                Some(unreached) if unreached.node == owner.node.name => {
                    Ok(Step::Unreachable(unreached))
                }
                Some(_) | None => self.there(&owner.node, owner.generation).await,
            },
            SessionLocation::Here { .. } => Ok(self.here_or_elsewhere().await),
            SessionLocation::NoOwner
            | SessionLocation::Released { .. }
            | SessionLocation::Lost { .. }
                if self.is_put() =>
            {
                self.place().await
            }
            SessionLocation::NoOwner => Ok(self.here().await),
            // Only the registry's answer proves that it has ended.
            SessionLocation::Released { .. } if !fresh => Ok(Step::Moved),
            SessionLocation::Released { node, .. } if node == self.hop.map.me() => {
                Ok(self.here().await)
            }
            SessionLocation::Released { node, generation } => {
                self.ended_there(&node, generation).await
            }
            SessionLocation::Lost { node, generation } => self.by_record(&node, generation).await,
        }
    }

    /// Calls the handler of this node.
    async fn here(&self) -> Step {
        let (parts, body) = (self.request.parts.clone(), self.request.body.clone());
        let request = Request::from_parts(parts, Body::from(body));
        let response = self.next.clone().run(request).await;
        if response.headers().contains_key(X_CONMAN_TURNED) {
            return Step::Moved;
        }
        Step::Answer(response)
    }

    /// The result for the generation that was to be ended, if it is not the session's any more: it
    /// has ended, one way or another, and a later one must not be ended instead.
    fn since(&self, deleted: Generation, now: &SessionLocation) -> Option<Result<Step, ApiError>> {
        let (node, generation) = match now {
            SessionLocation::NoOwner => {
                let report = StopReport {
                    id: self.id.clone(),
                    generation: deleted,
                    state: SessionState::Stopped,
                    reason: None,
                    dead_ms: None,
                    released_ms: None,
                };
                return Some(Ok(Step::Answer(Json(report).into_response())));
            }
            SessionLocation::Here { generation } => (self.hop.map.me(), *generation),
            SessionLocation::There(owner) => (&*owner.node.name, owner.generation),
            SessionLocation::Released { node, generation }
            | SessionLocation::Lost { node, generation } => (node.as_str(), *generation),
        };
        (generation != deleted).then(|| Err(self.begun_anew(deleted, node)))
    }

    fn begun_anew(&self, deleted: Generation, node: &str) -> ApiError {
        Kind::NODE_SILENT.because(format!(
            "the node that was to end generation {deleted} of session `{}` has not confirmed it, \
             and a later one has started on node `{node}`; check before you repeat it",
            self.id
        ))
    }

    /// Likewise, if another node may start it instead.
    async fn here_or_elsewhere(&self) -> Step {
        match self.here().await {
            Step::Answer(response) if self.is_put() && wants_another(&response) => {
                Step::Elsewhere(response)
            }
            step => step,
        }
    }

    async fn call(
        &self,
        node: &Node,
        expected: Option<ExpectedGeneration>,
    ) -> Result<Response, CallError> {
        let called = self.hop.map.call(node, &self.request, expected).await;
        called.map(|response| response.map(Body::new))
    }

    async fn there(&self, node: &Node, generation: Generation) -> Result<Step, ApiError> {
        let expected = ExpectedGeneration {
            generation,
            ended: false,
        };
        let announced = match node.has_not_announced() {
            true => Some(self.hop.map.announced(&node.name).await),
            false => None,
        };
        let node = announced.as_ref().unwrap_or(node);
        let sent = self.call(node, Some(expected)).await;
        let step = match sent {
            Err(CallError::Unanswered { why }) if self.ends() => {
                let node = Arc::clone(&node.name);
                Step::Unanswered(Unreached { node, why }, generation)
            }
            sent => stepped(node, sent)?,
        };
        if matches!(step, Step::Moved) {
            let fleet = self.hop.map.fleet();
            fleet.forget_location(&self.id, generation);
        }
        Ok(step)
    }

    /// Asks the node that has ended it, which has its log; or uses its record if that node is lost.
    async fn ended_there(&self, name: &str, generation: Generation) -> Result<Step, ApiError> {
        let expected = ExpectedGeneration {
            generation,
            ended: true,
        };
        let node = self.hop.map.node(name);
        match stepped(&node, self.call(&node, Some(expected)).await)? {
            Step::Moved | Step::Unreachable(_) => self.by_record(name, generation).await,
            Step::Refused(error) => match self.by_record(name, generation).await {
                Ok(step) => Ok(step),
                Err(_) => Err(error),
            },
            answer => Ok(answer),
        }
    }

    /// Answers from the registry for a session without a reachable node. `located`: the generation
    /// that was on that node.
    async fn by_record(&self, node: &str, located: Generation) -> Result<Step, ApiError> {
        let record = self.hop.node.record(&self.id).await;
        let record = record.map_err(|error| Kind::NO_REGISTRY.because(chain(&error)))?;
        let Some(record) = record else {
            return Ok(self.here().await);
        };
        if record.generation != located {
            // It was started again since; a repeated DELETE must not end the new generation.
            return Ok(Step::Moved);
        }
        let shown = self.is_of_session();
        if shown && self.request.parts.method == Method::GET {
            let mut session = self.hop.node.recorded(node, &record);
            if !record.state.is_ended() {
                let lost = "its node was lost, and no other has taken it over yet";
                session.reason.get_or_insert_with(|| lost.to_owned());
            }
            return Ok(Step::Answer(Json(session).into_response()));
        }
        if shown && self.request.parts.method == Method::DELETE {
            return match record.state.is_ended() {
                true => self.called_off(node, &record).await,
                false => self.ended(record).await,
            };
        }
        if !record.state.is_ended() {
            // The next node that it runs on can do what is requested.
            return Err(Kind::MOVES.because(format!(
                "session `{}` is on node `{node}`, which is lost, and no other has it yet; retry \
                 when one has, or when its node is back, or PUT it to start it on another node \
                 now",
                self.id
            )));
        }
        Err(Kind::NODE_LOST.because(format!(
            "session `{}` was on node `{node}`, which is lost or has forgotten it; PUT it to start \
             it on another node",
            self.id
        )))
    }

    /// Ends a session that its lost node did not end.
    async fn ended(&self, record: SessionRecord) -> Result<Step, ApiError> {
        let why = crate::routes::sessions::stopped_by(&self.request.caller);
        match self.hop.node.stop_lost(record, why).await {
            Ok(report) => Ok(Step::Answer(Json(report).into_response())),
            Err(StopError::Moved { .. }) => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the record of an ended session, so that no node starts it again.
    async fn called_off(&self, node: &str, record: &SessionRecord) -> Result<Step, ApiError> {
        let forgotten = self.hop.node.forget(&self.id, record.generation).await;
        match forgotten {
            Ok(()) => {}
            // Another node has started it meanwhile, or is about to.
            Err(RegistryError::Superseded { .. } | RegistryError::Owned { .. }) => {
                return Ok(Step::Moved);
            }
            Err(error) => return Err(Kind::NO_REGISTRY.because(chain(&error))),
        }
        let session = self.hop.node.recorded(node, record);
        let report = StopReport {
            id: self.id.clone(),
            generation: record.generation,
            state: session.state,
            reason: session.reason,
            dead_ms: None,
            released_ms: None,
        };
        Ok(Step::Answer(Json(report).into_response()))
    }

    /// Makes one of the nodes that may run the session start it.
    async fn place(&self) -> Result<Step, ApiError> {
        let parts = &self.request.parts;
        let policy = self.hop.node.policy();
        let wanted = placement_request::of(&parts.uri, &self.request.body, policy)?;
        let placement = self.hop.map.place(&self.id, &wanted);
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
        let step = if name == self.hop.map.me() {
            self.here().await
        } else {
            let node = self.hop.map.node(name);
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
        let peers = self.hop.map.fleet().peers();
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
        Err(Kind::BAD_SPEC.with_fields(vec![FieldError {
            field: "template".to_owned(),
            message: no_template(name, &known, "The fleet's"),
        }]))
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

fn stepped(node: &Node, called: Result<Response, CallError>) -> Result<Step, ApiError> {
    match called {
        Ok(response) => Ok(Step::Answer(response)),
        Err(CallError::Misdirected { .. }) => Ok(Step::Moved),
        Err(CallError::Unreachable { why }) => {
            let node = Arc::clone(&node.name);
            Ok(Step::Unreachable(Unreached { node, why }))
        }
        Err(error @ CallError::Refused(_)) => Ok(Step::Refused(error.into())),
        Err(error @ CallError::Unanswered { .. }) => Err(error.into()),
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

fn crowded(node: &Unreached) -> ApiError {
    Kind::CROWDED.because(format!(
        "{}. The limit of requests that wait for unreachable nodes is met; try \
         again in a moment",
        node.why
    ))
}
