//! Ways into a session: connections, commands, its log.

use std::sync::Arc;

use conman_core::{ActivityGuard, ActivityKind};
use conman_linux::SignalNumber;
use conman_proto::{
    ExecStatus, Generation, LinkRequest, PortRange, ProcessList, SessionId, SessionLink,
    SessionState, SessionStats,
};
use conman_runtime::{
    ContainerKey, ExecIo, ExecPlan, LogChunk, LogOptions, PausedBy, Runtime, RuntimeError,
};
use futures_util::stream::{self, BoxStream, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::context::Context;
use crate::error::{AccessError, NotHere, RouteError};
use crate::links;
use crate::pause::{self, PauseState};
use crate::processes;
use crate::revival::{self, Former};
use crate::route::SessionRoute;
use crate::session::{MAX_ATTACHED, SessionHandle};
use crate::start_waits::{self, HeldConnection};
use crate::stats;

/// Exit code of a command that SIGKILL has ended.
const KILLED: i32 = 137;

/// The ways into a node's sessions: connections, commands, terminals, logs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct AccessHandle {
    pub(crate) context: Arc<Context>,
}

impl AccessHandle {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// Returns the route to a session's program. A connection to one that is starting is held; one that does
    /// not run is started if `may_start` and its template allow it (`start_on_connect`).
    ///
    /// When the session runs, returns at once, without waiting for a contended lock.
    pub async fn route(&self, id: &SessionId, may_start: bool) -> Result<SessionRoute, RouteError> {
        let context = &self.context;
        let Some(handle) = context.sessions.current(id) else {
            return Err(RouteError::NoSuchSession { id: id.clone() });
        };
        if let Some(route) = to_running(context, &handle)? {
            return Ok(route);
        }
        let began = Instant::now();
        let held = HeldConnection::begin(&context.held, &handle, &context.options.limits)?;
        let bound = start_waits::bound(context, &handle);
        let route = start_waits::wait_for_route(context, handle, may_start);
        let route = timeout_at(began + bound, route).await;
        drop(held);
        metrics::histogram!("conman_session_hold_duration_seconds")
            .record(began.elapsed().as_secs_f64());
        route.map_err(|_| RouteError::HoldTimedOut {
            id: id.clone(),
            waited: bound,
        })?
    }

    /// Returns whether clients without a token may connect to this port of a session; `None` if no container of
    /// the session is here.
    #[must_use]
    pub fn has_public_port(&self, id: &SessionId, port: u16) -> Option<bool> {
        let handle = self.context.sessions.current(id)?;
        let is_public = |ports: &PortRange| ports.public && ports.contains(port);
        (!handle.is_ended()).then(|| handle.spec().ports.iter().any(is_public))
    }

    /// Returns the route to a session for another node, which believes that this one owns `generation` of
    /// it. Never waits.
    pub fn own_route(
        &self,
        id: &SessionId,
        generation: Generation,
    ) -> Result<SessionRoute, NotHere> {
        let handle = self.context.sessions.current(id);
        let handle = handle.ok_or(NotHere::NotOwner)?;
        if handle.is_ended() || handle.generation().is_some_and(|own| own < generation) {
            return Err(NotHere::NotOwner);
        }
        match to_running(&self.context, &handle) {
            Ok(Some(route)) => Ok(route),
            // The caller that asks why it is not ready learns that it has no port.
            Ok(None) | Err(_) => Err(NotHere::NotReady),
        }
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
        revival::revive(self, id, may_start, former).await
    }

    /// Pauses a running session: its processes do not run until it is resumed, by an order or, if its template
    /// lets them (`resume_on_connect`), by what begins in it.
    pub async fn pause(&self, id: &SessionId) -> Result<(), AccessError> {
        let (handle, _) = shown(&self.context, id)?;
        let begun = handle.activity.begun();
        let order = (PausedBy::Operator, "on request");
        pause::pause(&self.context, &handle, begun, order).await
    }

    /// Resumes a paused session. Succeeds for one that runs.
    pub async fn resume(&self, id: &SessionId) -> Result<(), AccessError> {
        let (handle, _) = shown(&self.context, id)?;
        pause::resume(&self.context, &handle).await
    }

    /// Resumes a session that is paused, for what begins in it. Refused where only an order resumes it.
    pub(crate) async fn awake(&self, id: &SessionId) -> Result<(), AccessError> {
        let (handle, _) = shown(&self.context, id)?;
        match pause::state(&self.context, &handle) {
            PauseState::Runs => Ok(()),
            PauseState::ResumedByUse => pause::resume(&self.context, &handle).await,
            PauseState::ResumedByOrder => Err(AccessError::NotRunning {
                id: id.clone(),
                state: SessionState::Paused,
            }),
        }
    }

    /// Sends a signal to the first process of a running session. An init forwards it to the program.
    pub async fn signal(&self, id: &SessionId, signal: SignalNumber) -> Result<(), AccessError> {
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        let process = handle.view().process.ok_or_else(|| not_running(&handle))?;
        // First: it may end by that at once.
        *handle.signalled() = Some(signal);
        match runtime.signal(&key, &process, signal).await {
            Ok(true) => Ok(()),
            // It has just ended.
            Ok(false) => Err(not_running(&handle)),
            Err(source) => Err(failed(id)(source)),
        }
    }

    /// Runs a command in a running session.
    pub async fn exec(&self, id: &SessionId, plan: ExecPlan) -> Result<ExecIo, AccessError> {
        self.awake(id).await?;
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        let watched = WatchedCommand {
            _activity: handle.activity.begin_as(ActivityKind::Command),
            oom_kills: runtime.oom_kills(&key),
            runtime: Arc::clone(runtime),
            key: key.clone(),
        };
        let began = runtime.exec(&key, plan);
        let began = answering(&self.context, runtime, "run a command in", began).await;
        let mut io = unless_ending(&handle, began)?;
        io.status = with_session_end(handle, io.status, Some(watched));
        Ok(io)
    }

    /// Attaches a link to a running session.
    pub async fn attach_link(
        &self,
        id: &SessionId,
        request: &LinkRequest,
    ) -> Result<SessionLink, AccessError> {
        let Running { handle, .. } = running(&self.context, id)?;
        links::attach(&self.context, &handle, request).await
    }

    /// Lists the links that are attached to a running session.
    pub async fn links(&self, id: &SessionId) -> Result<Vec<SessionLink>, AccessError> {
        let Running { handle, .. } = running(&self.context, id)?;
        links::list(&self.context, &handle).await
    }

    /// Detaches a link from a running session.
    pub async fn detach_link(&self, id: &SessionId, name: String) -> Result<(), AccessError> {
        let Running { handle, .. } = running(&self.context, id)?;
        links::detach(&self.context, &handle, name).await
    }

    /// Returns what a running session uses.
    pub async fn stats(&self, id: &SessionId) -> Result<SessionStats, AccessError> {
        let Running {
            handle, runtime, ..
        } = running(&self.context, id)?;
        stats::of_session(handle, runtime).await
    }

    /// Returns the processes of a running session.
    pub async fn processes(&self, id: &SessionId) -> Result<ProcessList, AccessError> {
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        let listed = processes::of_container(runtime, key).await;
        unless_ending(&handle, listed)
    }

    /// Returns what every running session of this node uses.
    pub async fn all_stats(&self) -> Vec<SessionStats> {
        stats::of_node(&self.context).await
    }

    /// Returns a session's log, as long as its container exists.
    pub async fn logs(
        &self,
        id: &SessionId,
        options: LogOptions,
    ) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, AccessError> {
        let (handle, generation) = shown(&self.context, id)?;
        let runtime = runtime_of(&self.context, &handle)?;
        let key = ContainerKey::new(id.clone(), generation);
        // Following a log costs the shim as much as an attached client.
        let place = if options.follow && handle.spec().tty {
            Some(place(&handle)?)
        } else {
            None
        };
        let log = runtime.logs(&key, options);
        let log = answering(&self.context, runtime, "read the log of", log).await;
        let log = log.map_err(|source| match source {
            RuntimeError::NoSuchContainer { .. } => AccessError::NotKept { id: id.clone() },
            source => failed(id)(source),
        })?;
        Ok(match place {
            Some(place) => {
                let held = stream::unfold((log, place), |(mut log, place)| async move {
                    let chunk = log.next().await?;
                    Some((chunk, (log, place)))
                });
                held.boxed()
            }
            None => log,
        })
    }
}

pub(crate) fn template_starts_on_connect(context: &Context, template: Option<&str>) -> bool {
    let policy = context.policy.get();
    template
        .and_then(|name| policy.templates.get(name))
        .is_some_and(|template| template.start_on_connect)
}

pub(crate) fn template_resumes_on_connect(context: &Context, template: Option<&str>) -> bool {
    let policy = context.policy.get();
    template
        .and_then(|name| policy.templates.get(name))
        .is_some_and(|template| template.resume_on_connect)
}

/// The route to a session that runs; `None` for one that does not run or is frozen. The kernel would
/// accept a connection to a frozen one, and the program would not answer.
pub(crate) fn to_running(
    context: &Context,
    handle: &SessionHandle,
) -> Result<Option<SessionRoute>, RouteError> {
    let Some(port) = handle.spec().default_port() else {
        return Err(RouteError::NoPort {
            id: handle.id.clone(),
        });
    };
    if context.is_fenced() || handle.pausing.is_paused() {
        return Ok(None);
    }
    let (generation, process) = {
        let view = handle.view.borrow();
        let is_ending_or_dead = handle.is_ending() || handle.leaving.is_shut();
        if view.state != SessionState::Running || is_ending_or_dead {
            return Ok(None);
        }
        (view.generation, view.process.clone())
    };
    let (Some(generation), Some(process)) = (generation, process) else {
        return Ok(None);
    };
    Ok(Some(SessionRoute {
        id: handle.id.clone(),
        generation,
        port,
        spec: handle.spec(),
        process,
        activity: Arc::clone(&handle.activity),
        traffic: Arc::clone(&handle.traffic),
        closing: handle.closing.subscribe(),
        runtime: context.runtime(handle.spec().runtime).cloned(),
        sockets: Arc::clone(&context.sockets),
        leaving: Arc::clone(&handle.leaving),
    }))
}

/// Takes one of the places for clients attached to the session's terminals.
pub(crate) fn place(handle: &SessionHandle) -> Result<OwnedSemaphorePermit, AccessError> {
    let place = Arc::clone(&handle.attached).try_acquire_owned();
    place.map_err(|_| AccessError::TooManyAttached {
        id: handle.id.clone(),
        limit: MAX_ATTACHED,
    })
}

/// A session that runs, with what runs it.
pub(crate) struct Running<'a> {
    pub(crate) handle: Arc<SessionHandle>,
    pub(crate) runtime: &'a Arc<dyn Runtime>,
    pub(crate) key: ContainerKey,
}

pub(crate) fn running<'a>(
    context: &'a Context,
    id: &SessionId,
) -> Result<Running<'a>, AccessError> {
    let (handle, _) = shown(context, id)?;
    let (runtime, key) = container_of(context, &handle)?;
    Ok(Running {
        handle,
        runtime,
        key,
    })
}

/// Returns the container of a session that runs.
pub(crate) fn container_of<'a>(
    context: &'a Context,
    handle: &SessionHandle,
) -> Result<(&'a Arc<dyn Runtime>, ContainerKey), AccessError> {
    let id = handle.id.clone();
    let state = handle.state();
    if state == SessionState::Running && context.is_fenced() {
        return Err(AccessError::Fenced { id });
    }
    let (SessionState::Running, false, Some(generation)) =
        (state, handle.is_ending(), handle.generation())
    else {
        return Err(not_running(handle));
    };
    Ok((
        runtime_of(context, handle)?,
        ContainerKey::new(id, generation),
    ))
}

/// A session that is about to end is still shown as running for a moment.
pub(crate) fn not_running(handle: &SessionHandle) -> AccessError {
    let state = match handle.state() {
        SessionState::Running => SessionState::Stopping,
        state => state,
    };
    AccessError::NotRunning {
        id: handle.id.clone(),
        state,
    }
}

/// Whether the session ends, or its first process has begun to exit: the kernel kills the session's commands before
/// that one is dead.
pub(crate) fn is_ending_or_dead(handle: &SessionHandle) -> bool {
    let process = handle.view().process;
    let is_exiting = process.is_none_or(|process| process.is_exiting());
    is_exiting || handle.is_ending() || handle.state() != SessionState::Running
}

/// What is known of a command that runs.
pub(crate) struct WatchedCommand {
    /// The session counts as in use until its end.
    _activity: ActivityGuard,
    runtime: Arc<dyn Runtime>,
    key: ContainerKey,
    /// When it began.
    oom_kills: Option<u64>,
}

impl WatchedCommand {
    /// Whether memory ran out in its session while it ran.
    fn is_out_of_memory(&self) -> bool {
        let before = self.oom_kills.unwrap_or(0);
        let now = self.runtime.oom_kills(&self.key);
        now.is_some_and(|kills| kills > before)
    }
}

/// A command that was killed together with its session reports that, and not an exit code of its own; one that was
/// killed because memory ran out reports that.
pub(crate) fn with_session_end(
    handle: Arc<SessionHandle>,
    ended: oneshot::Receiver<ExecStatus>,
    watched: Option<WatchedCommand>,
) -> oneshot::Receiver<ExecStatus> {
    let (mut sender, status) = oneshot::channel();
    tokio::spawn(async move {
        let ended = tokio::select! {
            ended = ended => ended,
            // There is no waiter any more, as the runtime then notices.
            () = sender.closed() => return,
        };
        let Ok(mut ended) = ended else { return };
        let killed = ended.exit_code == Some(KILLED);
        let watched = watched.filter(|_| killed);
        ended.out_of_memory = watched.is_some_and(|command| command.is_out_of_memory());
        if ended.exit_code == Some(KILLED) && is_ending_or_dead(&handle) {
            let why = why_killed(&handle);
            ended.exit_code = None;
            ended.error = Some(format!(
                "the command was killed while it ran, because {why}"
            ));
        }
        let _ = sender.send(ended);
    });
    status
}

/// Returns why the processes of a session that ends are killed.
pub(crate) fn why_killed(handle: &SessionHandle) -> String {
    let reason = handle.view().reason.unwrap_or_default();
    match (reason.as_str(), handle.closing.borrow().as_ref()) {
        // Its task has not published the reason yet.
        ("", Some(closing)) => format!("the {}", closing.reason()),
        ("", None) => "the session ended".to_owned(),
        (reason, _) => format!("the session ended: {reason}"),
    }
}

/// A session that ends meanwhile is not running, whatever the runtime says: it only sees that the container is
/// gone.
pub(crate) fn unless_ending<T>(
    handle: &SessionHandle,
    result: Result<T, RuntimeError>,
) -> Result<T, AccessError> {
    match result {
        Ok(done) => Ok(done),
        Err(_) if is_ending_or_dead(handle) => Err(not_running(handle)),
        Err(source) => Err(failed(&handle.id)(source)),
    }
}

/// Waits for a runtime's answer for as long as the runtime is not silent.
pub(crate) async fn answering<T>(
    context: &Context,
    runtime: &Arc<dyn Runtime>,
    action: &'static str,
    answer: impl Future<Output = Result<T, RuntimeError>>,
) -> Result<T, RuntimeError> {
    let health = &context.health;
    health
        .while_it_answers(runtime.kind(), action, answer)
        .await
}

pub(crate) fn failed(id: &SessionId) -> impl FnOnce(RuntimeError) -> AccessError {
    let id = id.clone();
    move |source| AccessError::Runtime { id, source }
}

fn shown(
    context: &Context,
    id: &SessionId,
) -> Result<(Arc<SessionHandle>, Generation), AccessError> {
    let none = || AccessError::NoSuchSession { id: id.clone() };
    let handle = context.sessions.shown(id).ok_or_else(none)?;
    let generation = handle.generation().ok_or_else(none)?;
    Ok((handle, generation))
}

fn runtime_of<'a>(
    context: &'a Context,
    handle: &SessionHandle,
) -> Result<&'a Arc<dyn Runtime>, AccessError> {
    let kind = handle.spec().runtime;
    context.runtime(kind).ok_or_else(|| AccessError::Runtime {
        id: handle.id.clone(),
        source: RuntimeError::Unavailable {
            runtime: kind,
            action: "reach the container",
            reason: "this node is no longer configured to use it".to_owned(),
        },
    })
}
