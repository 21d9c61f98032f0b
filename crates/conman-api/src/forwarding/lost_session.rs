//! Answers about a session whose node cannot be reached, from its record.

use axum::Json;
use axum::response::IntoResponse as _;
use conman_node::StopError;
use conman_proto::{Generation, StopReport};
use conman_registry::{RegistryError, SessionRecord};
use http::Method;

use super::forwarded_request::{ForwardedRequest, Step};
use crate::node_errors::chain;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::routes::sessions::stopped_by;
use crate::{fleet_list, hidden_env};

impl ForwardedRequest {
    /// Answers from the registry for a session without a reachable node. `located`: the generation
    /// that was on that node.
    pub(super) async fn by_record(
        &self,
        node: &str,
        located: Generation,
    ) -> Result<Step, ApiError> {
        let record = self.forwarder.node.sessions().record(&self.id).await;
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
            let sessions = self.forwarder.node.sessions();
            let peers = self.forwarder.map.fleet().peers();
            let session = fleet_list::recorded(sessions, &peers, node, &record);
            let session = hidden_env::of_session(&self.request.caller, session);
            return Ok(Step::Answer(Json(session).into_response()));
        }
        if shown && self.request.parts.method == Method::DELETE {
            return match record.state.is_ended() {
                true => self.remove_record(node, &record).await,
                false => self.end(record).await,
            };
        }
        if !record.state.is_ended() {
            // The next node that it runs on can do what is requested.
            return Err(Kind::MOVES.because(format!(
                "session `{}` is on node `{node}`, which is lost, and no other has it yet",
                self.id
            )));
        }
        Err(Kind::NODE_LOST.because(format!(
            "session `{}` was on node `{node}`, which is lost or has forgotten it",
            self.id
        )))
    }

    /// Ends a session that its lost node did not end.
    async fn end(&self, record: SessionRecord) -> Result<Step, ApiError> {
        let why = stopped_by(&self.request.caller);
        match self.forwarder.node.sessions().stop_lost(record, why).await {
            Ok(report) => Ok(Step::Answer(Json(report).into_response())),
            Err(StopError::Moved { .. }) => Ok(Step::Moved),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the record of an ended session, so that no node starts it again.
    async fn remove_record(&self, node: &str, record: &SessionRecord) -> Result<Step, ApiError> {
        let forgotten = self
            .forwarder
            .node
            .sessions()
            .forget(&self.id, record.generation)
            .await;
        match forgotten {
            Ok(()) => {}
            // Another node has started it meanwhile, or is about to.
            Err(RegistryError::Superseded { .. } | RegistryError::Owned { .. }) => {
                return Ok(Step::Moved);
            }
            Err(error) => return Err(Kind::NO_REGISTRY.because(chain(&error))),
        }
        let session = self.forwarder.node.sessions().recorded(node, record);
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
}
