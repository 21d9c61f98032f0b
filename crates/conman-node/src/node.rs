//! Starts and stops a node.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use conman_core::naming::Instance;
use conman_core::{EndCause, SpecPolicy, Template};
use conman_linux::NetnsSockets;
use conman_net::egress::Egress;
use conman_proto::{EventKind, PreemptRequest, SessionState};
use conman_registry::{Journal, NewEvent, Registry};
use conman_runtime::Runtime;
use conman_watchdog::essential;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::access::AccessHandle;
use crate::cleanup::CleanupQueue;
use crate::context::{Context, LivePolicy};
use crate::cordon::Cordon;
use crate::drain::{self, Drain, DrainHandle};
use crate::emergency::{self, EmergencyThread, PreemptionHandle};
use crate::end_orders::{self, EndOrders};
use crate::error::{CordonError, NodeStartError};
use crate::file_watch::MAX_NODE_WATCHES;
use crate::host_limits::HostLimits;
use crate::kill_table::KillTable;
use crate::leave::{Leave, LeaveCause};
use crate::options::NodeOptions;
use crate::runtime_health::{self, RuntimeHealth};
use crate::session::View;
use crate::session_table::SessionTable;
use crate::sessions::SessionsHandle;
use crate::status::StatusHandle;
use crate::{adoption, cleanup, cordon, disk_watch, links, oom_watch, reconcile};

/// How long starts under way may delay a shutdown that leaves the sessions running.
const START_PATIENCE: Duration = Duration::from_secs(3);

/// Interval between checks whether a daemon that stops still has clients.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Reasons to cordon the node that wait; each but the first changes nothing.
const CORDONS: usize = 4;

/// One machine's node: starts, stops, and gives out its handles.
#[derive(Debug)]
pub struct Node {
    context: Arc<Context>,
    sessions: SessionsHandle,
    access: AccessHandle,
    drain: DrainHandle,
    preemption: PreemptionHandle,
    status: StatusHandle,
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
    /// Notices that reached `emergency` before are acted on once everything is known, before any session is
    /// admitted. The tasks run on the calling tokio runtime.
    pub async fn start(
        options: NodeOptions,
        emergency: EmergencyThread,
        registry: Arc<dyn Registry>,
        journal: Arc<Journal>,
        runtimes: Vec<Arc<dyn Runtime>>,
    ) -> Result<Arc<Self>, NodeStartError> {
        if runtimes.is_empty() {
            return Err(NodeStartError::NoRuntime);
        }
        let thread = |action| move |source| NodeStartError::Thread { action, source };
        let file_thread = thread("start a thread that writes a state file");
        let sockets = NetnsSockets::start()
            .map_err(thread("start the threads that make sockets in namespaces"))?;
        let sockets = Arc::new(sockets);
        let egress = Egress::start(options.egress.clone())
            .map_err(thread("start the threads of the egress proxy"))?;
        let table = Arc::new(KillTable::default());
        let leave = Arc::new(Leave::new(options.shutdown_delay));
        let (cordons, cordon_reasons) = mpsc::channel(CORDONS);
        let means = emergency::Means {
            table: Arc::clone(&table),
            leave: Arc::clone(&leave),
            registry: Arc::clone(&registry),
            journal: Arc::clone(&journal),
            budget_ms: options.preempt_budget_ms,
            instance: options.instance.clone(),
            file: emergency::preemption_file::start(&options.state_dir).map_err(file_thread)?,
            cordons,
        };
        let context = Arc::new(Context {
            starts: Arc::new(Semaphore::new(options.limits.max_starting.max(1))),
            watches: Arc::new(Semaphore::new(MAX_NODE_WATCHES)),
            registry,
            journal,
            health: RuntimeHealth::new(runtimes.iter().map(|runtime| runtime.kind())),
            runtimes: runtimes
                .into_iter()
                .map(|runtime| (runtime.kind(), runtime))
                .collect(),
            table,
            sockets,
            egress,
            sessions: SessionTable::default(),
            host_limits: HostLimits::default(),
            held: Arc::default(),
            cleanup: CleanupQueue::default(),
            end_orders: EndOrders::default(),
            cordon: Cordon::new(&options.state_dir).map_err(file_thread)?,
            drain: Drain::new(&options.state_dir).map_err(file_thread)?,
            leave,
            relocate: OnceLock::new(),
            stray_expected: Notify::new(),
            policy: LivePolicy::new(options.policy.clone()),
            options,
        });
        take_over(&context).await?;
        let preemption = emergency.attach(means).await;
        resume_preemption(&context, &preemption).await;
        let mut background = spawn_background(&context);
        let cordons = cordon::on_notice(Arc::clone(&context), cordon_reasons);
        background.push(tokio::spawn(cordons));
        Ok(Arc::new(Self {
            sessions: SessionsHandle::new(Arc::clone(&context)),
            access: AccessHandle::new(Arc::clone(&context)),
            drain: DrainHandle::new(Arc::clone(&context)),
            preemption,
            status: StatusHandle::new(Arc::clone(&context)),
            context,
            background: Mutex::new(background),
        }))
    }

    /// Starts, stops, shows and restarts sessions.
    #[must_use]
    pub fn sessions(&self) -> &SessionsHandle {
        &self.sessions
    }

    /// Connections, commands, terminals and logs of sessions.
    #[must_use]
    pub fn access(&self) -> &AccessHandle {
        &self.access
    }

    #[must_use]
    pub fn drain(&self) -> &DrainHandle {
        &self.drain
    }

    #[must_use]
    pub fn preemption(&self) -> &PreemptionHandle {
        &self.preemption
    }

    /// The node's state, load and problems.
    #[must_use]
    pub fn status(&self) -> &StatusHandle {
        &self.status
    }

    /// What passes through this node to sessions on other nodes, and how far the node has got with
    /// leaving.
    #[must_use]
    pub fn leave(&self) -> &Arc<Leave> {
        &self.context.leave
    }

    /// Admits no new sessions from now on, while those present stay and are served. It outlives the
    /// daemon.
    pub async fn cordon(&self) {
        cordon::cordon(&self.context, None).await;
    }

    /// Takes a cordon back.
    pub async fn uncordon(&self) -> Result<(), CordonError> {
        cordon::uncordon(&self.context).await
    }

    /// Announces that the daemon stops, and gives load balancers time to notice, unless no client is
    /// connected to a session through this node.
    pub async fn announce_stop(&self) {
        let leave = &self.context.leave;
        leave.announce(LeaveCause::Stop);
        let message = format!(
            "about to stop: clients are served for up to {} s, while load balancers send no new ones",
            leave.delay().as_secs()
        );
        self.context
            .note(NewEvent::of_node(EventKind::NodeLeaving, message));
        let until = Instant::now() + leave.delay();
        while Instant::now() < until {
            let view = self.status.view();
            if view.through + view.connections == 0 {
                return;
            }
            sleep(STOP_POLL_INTERVAL).await;
        }
    }

    /// Closes what passes through this node, as the daemon stops. Returns once nothing does, after
    /// `patience` at the latest.
    pub async fn close_through(&self, patience: Duration) {
        let leave = &self.context.leave;
        let now = Instant::now();
        // Load balancers have had their delay.
        let began = now.checked_sub(leave.delay()).unwrap_or(now);
        leave.close(LeaveCause::Stop, began, now + patience).await;
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
    pub fn policy(&self) -> Arc<SpecPolicy> {
        self.context.policy.get()
    }

    /// Replaces the templates. Sessions that run keep their specs.
    pub fn set_templates(&self, templates: BTreeMap<String, Template>) {
        self.context.policy.set_templates(templates);
        for runtime in self.context.runtimes.values() {
            runtime.drop_pool();
        }
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
        self.context.note(NewEvent::of_node(
            EventKind::NodeStopping,
            message.to_owned(),
        ));
        self.preemption.stop();
        for task in self.take_background() {
            task.abort();
        }
        self.context.journal.close().await;
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
        self.preemption.stop();
        for task in self.take_background() {
            task.abort();
        }
    }
}

/// Takes over the sessions, and the cordon or drain, that an earlier daemon left.
async fn take_over(context: &Arc<Context>) -> Result<(), NodeStartError> {
    let adopted = adoption::adopt(context).await?;
    context.note(NewEvent::of_node(
        EventKind::NodeStarted,
        adopted.to_string(),
    ));
    tracing::info!(instance = %context.options.instance, "{adopted}");
    context.cordon.resume().await;
    drain::resume(context).await;
    Ok(())
}

fn spawn_background(context: &Arc<Context>) -> Vec<JoinHandle<()>> {
    vec![
        tokio::spawn(essential(cleanup::NAME, cleanup::run(Arc::clone(context)))),
        tokio::spawn(essential(
            end_orders::NAME,
            end_orders::run(Arc::clone(context)),
        )),
        tokio::spawn(essential(
            reconcile::NAME,
            reconcile::run(Arc::clone(context)),
        )),
        tokio::spawn(essential(
            disk_watch::NAME,
            disk_watch::run(Arc::clone(context)),
        )),
        tokio::spawn(essential(
            runtime_health::NAME,
            runtime_health::run(Arc::clone(context)),
        )),
        tokio::spawn(essential(
            oom_watch::NAME,
            oom_watch::run(Arc::clone(context)),
        )),
        tokio::spawn(links::sweep(Arc::clone(context))),
    ]
}

/// Continues an earlier daemon's preemption: kills what that daemon left.
async fn resume_preemption(context: &Arc<Context>, preemption: &PreemptionHandle) {
    let state_dir = context.options.state_dir.clone();
    let recall = move || emergency::preemption_file::recall(&state_dir);
    let recalled = tokio::task::spawn_blocking(recall).await;
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
    if let Err(error) = preemption.begin(&request, "restart") {
        tracing::error!(%error, "cannot preempt the sessions of an earlier daemon");
    }
}
