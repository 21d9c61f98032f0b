//! Starts, stops, shows and restarts sessions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use conman_core::EndCause;
use conman_core::listing::ListQuery;
use conman_proto::{
    EnsureResponse, Generation, ResolvedSpec, Session, SessionId, SessionList, SessionPatch,
    SessionRequest, SessionState, StopReport,
};
use conman_registry::{RegistryError, SessionRecord};
use conman_runtime::ContainerKey;

use crate::context::Context;
use crate::error::{EnsureError, PatchError, RestartError, StopError};
use crate::revival::{self, WithoutImage};
use crate::session::View;
use crate::session_table::Occupancy;
use crate::{end_orders, ensure, gentle_stop, lost, patch, view};

/// The sessions of a node: starts, stops, shows and restarts them. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SessionsHandle {
    context: Arc<Context>,
}

impl SessionsHandle {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// Brings a session to running, or joins a start under way; with `wait: false` returns once
    /// the start is recorded.
    ///
    /// A request without any field is for a session that is known, by its former spec.
    /// A running one is returned as it is: its spec never changes. One that is stopping is awaited
    /// (bounded) and started again, one that has ended is started again, each in a greater generation.
    /// Cancelling does not cancel a start.
    pub async fn ensure(
        &self,
        id: &SessionId,
        request: &SessionRequest,
        wait: bool,
    ) -> Result<EnsureResponse, EnsureError> {
        let known = match *request == SessionRequest::default() {
            true => self.known_spec(id).await?,
            false => None,
        };
        let resolved = |id: &SessionId| {
            conman_core::resolve(&self.context.policy.get(), id, request).map_err(|errors| {
                EnsureError::BadSpec {
                    id: id.clone(),
                    errors,
                }
            })
        };
        let spec = known.map_or_else(|| resolved(id), Ok)?;
        let ensured = ensure::ensure(&self.context, id, &spec, wait).await?;
        Ok(EnsureResponse {
            session: view::session(&self.context, &ensured.handle),
            created: ensured.created,
            spec_matches: conman_core::matches(&ensured.handle.spec(), &spec),
        })
    }

    /// The spec of a session's latest life, here or, as far as the registry knows, on another node.
    async fn known_spec(&self, id: &SessionId) -> Result<Option<ResolvedSpec>, EnsureError> {
        if let Some(spec) = self.spec(id) {
            return Ok(Some(spec));
        }
        let record = self.record(id).await;
        let record = record.map_err(|error| EnsureError::Registry {
            id: id.clone(),
            source: Arc::new(error),
        })?;
        Ok(record.map(|record| ResolvedSpec {
            restarted: None,
            ..record.spec
        }))
    }

    /// Returns the spec of a session's latest life, to start it again.
    #[must_use]
    pub fn spec(&self, id: &SessionId) -> Option<ResolvedSpec> {
        let handle = self.context.sessions.shown(id)?;
        Some(ResolvedSpec {
            restarted: None,
            ..(*handle.spec()).clone()
        })
    }

    /// Returns why a start would be refused, whatever the session.
    #[must_use]
    pub fn refusal(&self) -> Option<EnsureError> {
        ensure::refusal(&self.context)
    }

    /// Like [`Self::ensure`] with a spec that is resolved, and waits until the session is ready.
    pub async fn start(
        &self,
        id: &SessionId,
        spec: &ResolvedSpec,
    ) -> Result<EnsureResponse, EnsureError> {
        let ensured = ensure::ensure(&self.context, id, spec, true).await?;
        Ok(EnsureResponse {
            session: view::session(&self.context, &ensured.handle),
            created: ensured.created,
            spec_matches: conman_core::matches(&ensured.handle.spec(), spec),
        })
    }

    /// Returns one session.
    #[must_use]
    pub fn get(&self, id: &SessionId) -> Option<Session> {
        let handle = self.context.sessions.shown(id)?;
        Some(view::session(&self.context, &handle))
    }

    /// Returns a page of sessions, ordered by id.
    #[must_use]
    pub fn list(&self, query: &ListQuery) -> SessionList {
        let shown = self.context.sessions.shown_after(query.after.as_ref());
        let page = query.page(
            shown
                .iter()
                .map(|handle| view::session(&self.context, handle)),
        );
        SessionList {
            sessions: page.items,
            next: page.next,
            warnings: Vec::new(),
        }
    }

    /// Changes a session while it runs. Durable once this returns. Not cancel safe: the change may be
    /// recorded and have no effect before the next start of the daemon.
    pub async fn patch(&self, id: &SessionId, patch: &SessionPatch) -> Result<Session, PatchError> {
        let handle = patch::patch(&self.context, id, patch).await?;
        Ok(view::session(&self.context, &handle))
    }

    /// Kills a session, and returns once it is certified dead and released, or is stuck. `why` is
    /// shown as its reason. Stopping one that has ended succeeds. Cancelling does not cancel it.
    pub async fn stop(&self, id: &SessionId, why: &str) -> Result<StopReport, StopError> {
        ensure::stop(&self.context, id, why).await
    }

    /// Likewise, but lets its program end by itself first, if its spec gives it time (`stop_grace_ms`).
    pub async fn stop_gently(&self, id: &SessionId, why: &str) -> Result<StopReport, StopError> {
        if let Some(handle) = self.context.sessions.current(id)
            && !handle.is_ended()
        {
            let (context, why) = (Arc::clone(&self.context), why.to_owned());
            // In a separate task: a caller that leaves does not keep it alive.
            let stopping = tokio::spawn(async move {
                gentle_stop::stop(&context, &handle, EndCause::Deleted, &why).await;
            });
            // A panic is reported where it happens.
            let _ = stopping.await;
        }
        self.stop(id, why).await
    }

    /// Ends by its record a session whose node is lost: nothing of it runs, and no node starts it again by
    /// that record. Refused with [`StopError::Moved`] where a node has it, or the record has changed.
    /// Cancelling does not cancel it.
    pub async fn stop_lost(
        &self,
        record: SessionRecord,
        why: String,
    ) -> Result<StopReport, StopError> {
        lost::stop(Arc::clone(&self.context), record, why).await
    }

    /// Restarts a session whose former node, `from`, is lost, if its spec wants that and its record still has
    /// this generation. Returns the generation that runs now. Waits while it starts; cancelling does not
    /// cancel the start.
    pub async fn restart(
        &self,
        id: &SessionId,
        generation: Generation,
        from: &str,
        without_image: WithoutImage,
    ) -> Result<Generation, RestartError> {
        revival::restart(&self.context, id, generation, from, without_image).await
    }

    /// Ends a generation that the registry no longer assigns to this node, or assigns to it without a known
    /// container: it is killed, certified and released like any other. The order is kept until it is carried
    /// out.
    pub fn condemn(&self, id: &SessionId, generation: Generation, why: &str) {
        end_orders::order(&self.context, id, generation, Some(why.to_owned()));
    }

    /// Makes sure that the end of a generation that the fence knows to be dead is reported to the registry.
    pub fn note_end(&self, id: &SessionId, generation: Generation) {
        end_orders::order(&self.context, id, generation, None);
    }

    /// Returns whether a life of the session exists or begins here.
    #[must_use]
    pub fn is_live(&self, id: &SessionId) -> bool {
        let current = self.context.sessions.current(id);
        current.is_some_and(|handle| !handle.is_ended())
    }

    /// Returns whether a life of the session exists here that the registry assigns to this node.
    #[must_use]
    pub fn owns(&self, id: &SessionId) -> bool {
        let current = self.context.sessions.current(id);
        current.is_some_and(|handle| !handle.is_ended() && handle.generation().is_some())
    }

    /// Waits until the registry has answered whether a life that begins here is this node's, at most for the
    /// bound of a claim. Cancel safe: it only waits.
    pub async fn claimed(&self, id: &SessionId) {
        if let Some(handle) = self.context.sessions.current(id) {
            let answered = |view: &View| {
                let is_over = view.state.is_ended() || view.state == SessionState::Stuck;
                view.generation.is_some() || is_over
            };
            handle.wait_for(answered).await;
        }
    }

    /// Returns how many sessions there are.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        self.context.sessions.occupancy()
    }

    /// Returns the containers that this node's records name, of all sessions that have not ended.
    #[must_use]
    pub fn containers(&self) -> Vec<ContainerKey> {
        let live = self.context.sessions.live().into_iter();
        let keys =
            live.filter_map(|life| Some(ContainerKey::new(life.id.clone(), life.generation()?)));
        keys.collect()
    }

    /// Returns the registry's record of a session, of any node.
    pub async fn record(&self, id: &SessionId) -> Result<Option<SessionRecord>, RegistryError> {
        self.context.registry.get(id).await
    }

    /// Deletes the record of a generation that has ended, of any node, so that no node starts it again by
    /// that.
    pub async fn forget(
        &self,
        id: &SessionId,
        generation: Generation,
    ) -> Result<(), RegistryError> {
        self.context.registry.forget(id, generation).await
    }

    /// Forgets a session that has ended: neither this node nor the registry knows it any more.
    pub async fn forget_ended(&self, id: &SessionId) -> Result<(), RegistryError> {
        let forgotten = self.context.sessions.remove_ended(id);
        match forgotten.and_then(|handle| handle.generation()) {
            Some(generation) => self.forget(id, generation).await,
            None => Ok(()),
        }
    }

    /// Notes that a later life of a session that has ended here is on another node, so that it is counted there
    /// alone.
    pub fn note_elsewhere(&self, id: &SessionId, generation: Generation) {
        let shown = self.context.sessions.shown(id);
        let ended = shown.filter(|handle| handle.is_ended());
        if let Some(handle) = ended.filter(|handle| handle.generation() < Some(generation)) {
            handle.is_elsewhere.store(true, Ordering::Relaxed);
        }
    }

    /// Returns a session of another node, as its record shows it.
    #[must_use]
    pub fn recorded(&self, node: &str, record: &SessionRecord) -> Session {
        view::recorded(&self.context, node, record.clone())
    }

    /// Returns where a browser reaches a session.
    #[must_use]
    pub fn browser_url(&self, id: &SessionId) -> String {
        self.context.options.browser_urls.url(id)
    }
}
