//! What every part of a node works with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use conman_core::{SpecPolicy, Template};
use conman_linux::NetnsSockets;
use conman_net::egress::Egress;
use conman_proto::{EventKind, Generation, RuntimeKind, SessionId};
use conman_registry::{Journal, NewEvent, Registry};
use conman_runtime::{ContainerKey, Runtime};
use tokio::sync::{Notify, Semaphore};

use crate::cleanup::CleanupQueue;
use crate::cordon::Cordon;
use crate::drain::Drain;
use crate::end_orders::EndOrders;
use crate::events::session_event;
use crate::host_limits::HostLimits;
use crate::kill_table::KillTable;
use crate::leave::Leave;
use crate::options::NodeOptions;
use crate::revival::Relocate;
use crate::runtime_health::RuntimeHealth;
use crate::session_table::SessionTable;
use crate::start_waits::HeldCount;

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) options: NodeOptions,
    pub(crate) policy: LivePolicy,
    pub(crate) registry: Arc<dyn Registry>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) runtimes: BTreeMap<RuntimeKind, Arc<dyn Runtime>>,
    pub(crate) health: RuntimeHealth,
    pub(crate) table: Arc<KillTable>,
    pub(crate) sockets: Arc<NetnsSockets>,
    pub(crate) egress: Egress,
    pub(crate) sessions: SessionTable,
    /// One permit for each start that the runtime may work on at a time.
    pub(crate) starts: Arc<Semaphore>,
    pub(crate) host_limits: HostLimits,
    /// Places for watches of sessions' files.
    pub(crate) watches: Arc<Semaphore>,
    /// Waiting connections of all sessions.
    pub(crate) held: HeldCount,
    pub(crate) cleanup: CleanupQueue,
    pub(crate) end_orders: EndOrders,
    pub(crate) cordon: Cordon,
    pub(crate) drain: Drain,
    pub(crate) leave: Arc<Leave>,
    pub(crate) relocate: OnceLock<Arc<dyn Relocate>>,
    /// Notified when a container may appear that no task waits for.
    pub(crate) stray_expected: Notify,
}

/// The policy of the options, with the templates that were read last.
#[derive(Debug)]
pub(crate) struct LivePolicy(RwLock<Arc<SpecPolicy>>);

impl LivePolicy {
    pub(crate) fn new(policy: SpecPolicy) -> Self {
        Self(RwLock::new(Arc::new(policy)))
    }

    pub(crate) fn get(&self) -> Arc<SpecPolicy> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_templates(&self, templates: BTreeMap<String, Template>) {
        let mut policy = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Arc::make_mut(&mut policy).templates = templates;
    }
}

impl Context {
    pub(crate) fn runtime(&self, kind: RuntimeKind) -> Option<&Arc<dyn Runtime>> {
        self.runtimes.get(&kind)
    }

    /// Whether nothing of this node may run until its ownership is renewed.
    pub(crate) fn is_fenced(&self) -> bool {
        self.options.standing.borrow().is_frozen()
    }

    pub(crate) fn files_dir(&self, key: &ContainerKey) -> PathBuf {
        self.options
            .state_dir
            .join("files")
            .join(format!("{}.{}", key.session, key.generation))
    }

    pub(crate) fn note(&self, event: NewEvent) {
        self.journal.append(vec![event]);
    }

    pub(crate) fn note_session(
        &self,
        kind: EventKind,
        id: &SessionId,
        generation: Generation,
        message: impl Into<String>,
    ) {
        self.note(session_event(kind, id, generation, message.into()));
    }
}
