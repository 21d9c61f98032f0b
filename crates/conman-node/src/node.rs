//! The node's interface for the rest of the daemon.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use conman_core::listing::ListQuery;
use conman_core::naming::Instance;
use conman_core::{EndCause, SpecPolicy};
use conman_linux::NetnsSockets;
use conman_proto::{
    DrainPlan, DrainReport, DrainRequest, EnsureResponse, EventKind, ExecId, Generation, KeptExec,
    PreemptPlan, PreemptReport, PreemptRequest, RuntimeKind, Session, SessionId, SessionList,
    SessionRequest, SessionState, StopReport,
};
use conman_registry::{Journal, Registry, RegistryError, SessionRecord, Standing};
use conman_runtime::{
    AttachOptions, ContainerKey, ExecIo, ExecPlan, LogChunk, LogOptions, Runtime, RuntimeError,
};
use conman_vitals::essential;
use futures_util::stream::BoxStream;
use jiff::Timestamp;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::attached::Attached;
use crate::cleanup::CleanupQueue;
use crate::context::Context;
use crate::drain::{self, Drain};
use crate::emergency::{self, EmergencyHandle, Endpoint};
use crate::end_orders::{self, EndOrders};
use crate::error::{
    AccessError, DrainError, EnsureError, NodeStartError, NotHere, PreemptError, RestartError,
    RouteError, StopError,
};
use crate::events::node_event;
use crate::hold::Seats;
use crate::host_limits::{HostLimit, HostLimits};
use crate::kill_table::KillTable;
use crate::options::NodeOptions;
use crate::revival::{self, Former, Relocate, WithoutImage};
use crate::route::SessionRoute;
use crate::runtime_health::RuntimeHealth;
use crate::session::View;
use crate::sessions::Sessions;
use crate::{access, adoption, cleanup, disk_watch, ensure, lost, reconcile, runtime_health, view};

/// How long starts under way may delay a shutdown that leaves the sessions running.
const START_PATIENCE: Duration = Duration::from_secs(3);

/// The sessions of one machine.
#[derive(Debug)]
pub struct Node {
    context: Arc<Context>,
    emergency: EmergencyHandle,
    health: Arc<RuntimeHealth>,
    started_at: Timestamp,
    background: Mutex<Vec<JoinHandle<()>>>,
}

impl Node {
    /// Takes over what an earlier daemon left, and begins to serve.
    ///
    /// Adoption uses only the records and the kernel. When this returns, every session that still runs is
    /// known and can be reached and killed, and every other one is released. Afterwards, in the background,
    /// the runtimes are asked for more: starts whose answer was lost and containers without a record are
    /// ended, leftovers removed.
    ///
    /// The tasks run on the calling tokio runtime.
    pub async fn start(
        options: NodeOptions,
        registry: Arc<dyn Registry>,
        journal: Arc<Journal>,
        runtimes: Vec<Arc<dyn Runtime>>,
    ) -> Result<Arc<Self>, NodeStartError> {
        if runtimes.is_empty() {
            return Err(NodeStartError::NoRuntime);
        }
        let endpoint = gce_endpoint(&options)?;
        let thread = |action| move |source| NodeStartError::Thread { action, source };
        let sockets = NetnsSockets::start()
            .map_err(thread("start the threads that make sockets in namespaces"))?;
        let table = Arc::new(KillTable::default());
        let means = emergency::Means {
            table: Arc::clone(&table),
            registry: Arc::clone(&registry),
            journal: Arc::clone(&journal),
            budget_ms: options.preempt_budget_ms,
            instance: options.instance.clone(),
            memory: emergency::Memory::start(&options.state_dir)
                .map_err(thread("start the thread that writes down preemptions"))?,
        };
        let emergency = emergency::start(means).map_err(thread("start the emergency thread"))?;
        let context = Arc::new(Context {
            starts: Arc::new(Semaphore::new(options.limits.max_starting.max(1))),
            registry,
            journal,
            runtimes: runtimes
                .into_iter()
                .map(|runtime| (runtime.kind(), runtime))
                .collect(),
            table,
            sockets: Arc::new(sockets),
            sessions: Sessions::default(),
            host_limits: HostLimits::default(),
            held: Arc::new(Seats::default()),
            cleanup: CleanupQueue::default(),
            end_orders: EndOrders::default(),
            drain: Drain::new(&options.state_dir),
            relocate: OnceLock::new(),
            stray_expected: Notify::new(),
            options,
        });
        let adopted = match adoption::adopt(&context).await {
            Ok(adopted) => adopted,
            Err(error) => {
                emergency.stop();
                return Err(error);
            }
        };
        context.note(node_event(EventKind::NodeStarted, adopted.to_string()));
        tracing::info!(instance = %context.options.instance, "{adopted}");
        drain::resume(&context).await;
        resume_preemption(&context, &emergency).await;
        if let Some(endpoint) = endpoint {
            emergency::watch_gce(&emergency, &endpoint);
        }
        let health = Arc::new(RuntimeHealth::default());
        let background = vec![
            tokio::spawn(essential(cleanup::NAME, cleanup::run(Arc::clone(&context)))),
            tokio::spawn(essential(
                end_orders::NAME,
                end_orders::run(Arc::clone(&context)),
            )),
            tokio::spawn(essential(
                reconcile::NAME,
                reconcile::run(Arc::clone(&context)),
            )),
            tokio::spawn(essential(
                disk_watch::NAME,
                disk_watch::run(Arc::clone(&context)),
            )),
            tokio::spawn(essential(
                runtime_health::NAME,
                runtime_health::run(Arc::clone(&context), Arc::clone(&health)),
            )),
        ];
        Ok(Arc::new(Self {
            context,
            emergency,
            health,
            started_at: Timestamp::now(),
            background: Mutex::new(background),
        }))
    }

    /// Brings a session to running, or joins a start under way; with `wait: false` returns once
    /// the start is recorded.
    ///
    /// A running one is returned as it is: its spec never changes. One that is stopping is awaited
    /// (bounded) and started again, one that has ended is started again, each in a greater generation.
    /// Cancelling does not cancel a start.
    pub async fn ensure(
        &self,
        id: &SessionId,
        request: &SessionRequest,
        wait: bool,
    ) -> Result<EnsureResponse, EnsureError> {
        let spec =
            conman_core::resolve(&self.context.options.policy, id, request).map_err(|errors| {
                EnsureError::BadSpec {
                    id: id.clone(),
                    errors,
                }
            })?;
        let ensured = ensure::ensure(&self.context, id, &spec, wait).await?;
        Ok(EnsureResponse {
            session: view::session(&self.context, &ensured.handle),
            created: ensured.created,
            spec_matches: conman_core::matches(&ensured.handle.spec, &spec),
        })
    }

    /// One session.
    #[must_use]
    pub fn get(&self, id: &SessionId) -> Option<Session> {
        let handle = self.context.sessions.shown(id)?;
        Some(view::session(&self.context, &handle))
    }

    /// A page of sessions, ordered by id.
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

    /// Kills a session, and returns once it is certified dead and released, or is stuck. `why` is
    /// shown as its reason. Stopping one that has ended succeeds. Cancelling does not cancel it.
    pub async fn stop(&self, id: &SessionId, why: &str) -> Result<StopReport, StopError> {
        ensure::stop(&self.context, id, why).await
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

    /// Returns whether the node still holds its ownership.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.context.options.standing.borrow().clone()
    }

    /// Runs a command in a running session.
    pub async fn exec(&self, id: &SessionId, plan: ExecPlan) -> Result<ExecIo, AccessError> {
        access::exec(&self.context, id, plan).await
    }

    /// Attaches to the terminal of a running session's program, or of a kept command in it.
    pub async fn attach(
        &self,
        id: &SessionId,
        exec: Option<ExecId>,
        options: AttachOptions,
    ) -> Result<Attached, AccessError> {
        access::attach(&self.context, id, exec, options).await
    }

    /// Runs a command in a running session, in a terminal that is kept.
    pub async fn keep_exec(&self, id: &SessionId, plan: ExecPlan) -> Result<KeptExec, AccessError> {
        access::keep_exec(&self.context, id, plan).await
    }

    /// The kept commands of a running session, the oldest first.
    pub async fn kept_execs(&self, id: &SessionId) -> Result<Vec<KeptExec>, AccessError> {
        access::kept_execs(&self.context, id).await
    }

    /// Kills a kept command, if it has not ended, and forgets it.
    pub async fn end_exec(&self, id: &SessionId, exec: ExecId) -> Result<(), AccessError> {
        access::end_exec(&self.context, id, exec).await
    }

    /// A session's log, as long as its container exists.
    pub async fn logs(
        &self,
        id: &SessionId,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, AccessError> {
        access::logs(&self.context, id, options).await
    }

    /// Returns the route to a session's program. A connection to one that is starting is held; one that does
    /// not run is started if `may_start` and its template allow it (`start_on_connect`).
    ///
    /// When the session runs, returns at once, without waiting for a contended lock.
    pub async fn route(&self, id: &SessionId, may_start: bool) -> Result<SessionRoute, RouteError> {
        access::route(&self.context, id, may_start).await
    }

    /// Whether a life of the session exists or begins here.
    #[must_use]
    pub fn is_live(&self, id: &SessionId) -> bool {
        let current = self.context.sessions.current(id);
        current.is_some_and(|handle| !handle.is_ended())
    }

    /// Whether a life of the session exists here that the registry assigns to this node.
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

    /// Returns the route to a session for another node, which believes that this one owns `generation` of
    /// it. Never waits.
    pub fn own_route(
        &self,
        id: &SessionId,
        generation: Generation,
    ) -> Result<SessionRoute, NotHere> {
        access::own_route(&self.context, id, generation)
    }

    /// Returns the route to a session that runs here, or whose `former` node has given it up or is lost. This
    /// node claims such a session and starts it by its record, if it ended with its node and no start has
    /// succeeded since, or if `may_start` and its template allow it. Waits while it starts; cancelling does
    /// not cancel the start.
    pub async fn revive(
        &self,
        id: &SessionId,
        may_start: bool,
        former: Former<'_>,
    ) -> Result<SessionRoute, RouteError> {
        revival::revive(&self.context, id, may_start, former).await
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
        revival::restart(&self.context, id, generation, (from, without_image)).await
    }

    /// Makes other nodes start the sessions that a drain releases and that want it. Only the first call has
    /// an effect.
    pub fn relocate_by(&self, relocate: Arc<dyn Relocate>) {
        let _ = self.context.relocate.set(relocate);
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

    /// A session of another node, as its record shows it.
    #[must_use]
    pub fn recorded(&self, node: &str, record: &SessionRecord) -> Session {
        view::recorded(&self.context, node, record)
    }

    /// What happened on this node.
    #[must_use]
    pub fn journal(&self) -> &Arc<Journal> {
        &self.context.journal
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.context.options.name
    }

    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.context.options.instance
    }

    /// Templates and limits of specs.
    #[must_use]
    pub fn policy(&self) -> &SpecPolicy {
        &self.context.options.policy
    }

    /// Where a browser reaches a session.
    #[must_use]
    pub fn browser_url(&self, id: &SessionId) -> String {
        self.context.options.browser_urls.url(id)
    }

    /// The node as the API shows it.
    #[must_use]
    pub fn view(&self) -> conman_proto::Node {
        view::node(&self.context, &self.health, self.started_at)
    }

    /// Returns problems that do not make the node unready, for people.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.health.warnings();
        warnings.extend(disk_watch::warning(&self.context));
        warnings
    }

    /// Number of sessions that have a container, which therefore count in the host's usage. Sessions that are
    /// still starting do not count: they may have no container yet.
    #[must_use]
    pub fn settled(&self) -> usize {
        self.context.sessions.settled()
    }

    /// The containers that this node's records name, of all sessions that have not ended.
    #[must_use]
    pub fn containers(&self) -> Vec<ContainerKey> {
        let live = self.context.sessions.live().into_iter();
        let keys = live.filter_map(|life| {
            Some(ContainerKey {
                session: life.id.clone(),
                generation: life.generation()?,
            })
        });
        keys.collect()
    }

    /// Sets the limit of the host that binds first for sessions of a runtime, if one does.
    pub fn limit_by_host(&self, runtime: RuntimeKind, limit: Option<HostLimit>) {
        self.context.host_limits.set(runtime, limit);
    }

    /// Returns once a start was refused because of a limit of the host. Cancel safe: the next call returns
    /// for what this one missed.
    pub async fn host_limit_met(&self) {
        self.context.host_limits.met.notified().await;
    }

    /// Returns what a preemption would do now.
    #[must_use]
    pub fn preempt_plan(&self, budget_ms: Option<u32>) -> PreemptPlan {
        self.emergency.plan(budget_ms)
    }

    /// Kills, certifies and releases every session, and admits no more. A second notice gets the first one's
    /// report. The caller handles `dry_run`.
    ///
    /// The emergency thread does the work; cancelling does not cancel it.
    pub async fn preempt(
        &self,
        request: &PreemptRequest,
        source: &str,
    ) -> Result<PreemptReport, PreemptError> {
        self.emergency.preempt(request, source)?.wait().await
    }

    /// Admits sessions again after a preemption.
    pub async fn readmit(&self) -> Result<(), PreemptError> {
        self.emergency.readmit().await
    }

    /// Returns what a drain would do now.
    #[must_use]
    pub fn drain_plan(&self, request: &DrainRequest) -> DrainPlan {
        drain::plan_now(&self.context, request)
    }

    /// Refuses new sessions from now on, and stops the present ones in order, a few at a time. Returns once
    /// that has begun; a drain that is under way or finished is not changed.
    pub async fn drain(&self, request: &DrainRequest) -> Result<DrainReport, DrainError> {
        let (context, request) = (Arc::clone(&self.context), request.clone());
        // In its own task: a cancelled caller must not leave a file without a drain.
        let draining = tokio::spawn(async move { drain::drain(&context, &request).await });
        draining.await.unwrap_or(Err(DrainError::NotDraining))
    }

    /// Returns the state of the drain; `None` without one.
    #[must_use]
    pub fn drain_report(&self) -> Option<DrainReport> {
        drain::report(&self.context)
    }

    /// Admits sessions again after a drain; those that have not had their turn stay.
    pub async fn undrain(&self) -> Result<(), DrainError> {
        let context = Arc::clone(&self.context);
        let undraining = tokio::spawn(async move { drain::undrain(&context).await });
        undraining.await.unwrap_or(Err(DrainError::NotDraining))
    }

    /// The thread for work that must continue when everything else hangs.
    #[must_use]
    pub fn emergency(&self) -> &EmergencyHandle {
        &self.emergency
    }

    /// Stops the node. With `leave` the containers keep running, for the next daemon to adopt, and starts
    /// under way get a moment to be recorded; otherwise every session is stopped first, bounded by the bound
    /// on stuck ones.
    pub async fn shutdown(&self, leave: bool) {
        self.context.sessions.shut_down();
        if leave {
            self.let_starts_be_recorded().await;
        } else {
            self.stop_all().await;
        }
        let message = if leave {
            "leaving the sessions running"
        } else {
            "all sessions stopped"
        };
        self.context
            .note(node_event(EventKind::NodeStopping, message.to_owned()));
        self.emergency.stop();
        for task in self.take_background() {
            task.abort();
        }
        self.context.journal.flush().await;
    }

    /// The next daemon adopts a start whose container is recorded, and ends any other.
    async fn let_starts_be_recorded(&self) {
        let live = self.context.sessions.live();
        let all = async {
            for handle in &live {
                let settled = |view: &View| match view.state {
                    SessionState::Starting => view.recorded,
                    _ => true,
                };
                handle.wait_for(settled).await;
            }
        };
        if timeout(START_PATIENCE, all).await.is_err() {
            tracing::warn!("some starts are not recorded yet; the next start of conman ends them");
        }
    }

    async fn stop_all(&self) {
        let live = self.context.sessions.live();
        for handle in &live {
            handle.order_stop(EndCause::ShutDown, "conman is shutting down");
        }
        let bounds = &self.context.options.bounds;
        let over = |state: SessionState| state.is_ended() || state == SessionState::Stuck;
        let all = async {
            for handle in &live {
                handle.wait_for(|view| over(view.state)).await;
            }
        };
        if timeout(bounds.stuck_after + bounds.ending, all)
            .await
            .is_err()
        {
            tracing::warn!(
                "some sessions did not stop in time; the next start of conman ends them"
            );
        }
    }

    fn take_background(&self) -> Vec<JoinHandle<()>> {
        std::mem::take(
            &mut *self
                .background
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.emergency.stop();
        for task in self.take_background() {
            task.abort();
        }
    }
}

/// Continues an earlier daemon's preemption: kills what that daemon left.
async fn resume_preemption(context: &Arc<Context>, emergency: &EmergencyHandle) {
    let state_dir = context.options.state_dir.clone();
    let recalled = tokio::task::spawn_blocking(move || emergency::recall(&state_dir)).await;
    let Some(reason) = recalled.ok().flatten() else {
        return;
    };
    tracing::warn!(
        reason,
        "the node was preempted under an earlier daemon and stays preempted; undo: conman readmit"
    );
    // At once, before any reader sees sessions as admitted.
    context.table.close(reason.clone());
    let request = PreemptRequest {
        reason: Some(reason),
        ..PreemptRequest::default()
    };
    // Its report goes to the journal; no caller waits for it.
    if let Err(error) = emergency.preempt(&request, "restart") {
        tracing::error!(%error, "cannot preempt the sessions of an earlier daemon");
    }
}

fn gce_endpoint(options: &NodeOptions) -> Result<Option<Endpoint>, NodeStartError> {
    let Some(gce) = &options.gce else {
        return Ok(None);
    };
    gce.endpoint
        .parse()
        .map(Some)
        .map_err(|error: emergency::BadEndpoint| NodeStartError::Endpoint {
            endpoint: gce.endpoint.clone(),
            reason: crate::error_chain(&error),
        })
}
