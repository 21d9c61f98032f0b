//! How the shim's fence is opened after it has closed, and by which component.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_shim_protocol::{FenceState, Reply, Request};
use rustix::time::{ClockId, clock_gettime};

use crate::ContainerKey;
use crate::shim_link::{Connection, LinkError, name};

/// Most names in one order to thaw: with the longest names, three quarters of a message.
pub(crate) const NAMES: usize = 1_024;

const NS_IN_MS: u64 = 1_000_000;

/// How long an order is valid that others follow at once.
const MORE_TO_COME_NS: u64 = 60_000 * NS_IN_MS;

/// Most frozen containers that a log line names.
const MAX_NAMED: usize = 10;

/// Which component opens the fence after it has closed.
#[derive(Debug, Clone)]
pub enum FenceOpener {
    /// Any connection: no other node can have taken anything over.
    AnyConnection,
    /// Only the registry, by [`crate::ShimFence`], once it knows what this node still owns. Until
    /// then the fence stays closed.
    Registry,
    /// Any connection, for the sessions in this node's records and no others: the node was in a
    /// fleet, whose other nodes may have taken over the rest.
    Records(Arc<Recorded>),
}

/// Which of the containers under a fleet's fence this node still owns.
#[derive(Debug, Default)]
pub struct Recorded(Mutex<KnownContainers>);

#[derive(Debug, Clone, Default)]
enum KnownContainers {
    /// The records have not been read.
    #[default]
    Nothing,
    /// The records name these.
    Own(BTreeSet<String>),
    /// The fence was checked since. These are not in the records; all others are, or started later.
    NotRecorded(BTreeSet<String>),
}

impl Recorded {
    /// Call it once the records have been read. `keys`: the recorded containers that still run.
    pub fn are(&self, keys: impl IntoIterator<Item = ContainerKey>) {
        *self.known() = KnownContainers::Own(keys.into_iter().map(|key| name(&key)).collect());
    }

    /// A panic while the lock is held cannot leave half a change.
    fn known(&self) -> MutexGuard<'_, KnownContainers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FenceOpener {
    /// For a new connection, or when the records have been read since.
    pub(crate) async fn open(
        &self,
        connection: &Connection,
        patience: Duration,
    ) -> Result<(), LinkError> {
        match self {
            Self::AnyConnection => open_all(connection, patience).await,
            Self::Registry => arm(connection, patience).await,
            Self::Records(recorded) => open_recorded(connection, recorded, patience).await,
        }
    }
}

/// A restarted shim keeps everything frozen until it is ordered otherwise. No other node can have
/// taken anything over, so no question needs an answer first.
async fn open_all(connection: &Connection, patience: Duration) -> Result<(), LinkError> {
    match state(connection, patience).await? {
        FenceState::Unarmed | FenceState::Armed { .. } => Ok(()),
        FenceState::Freezing { .. } | FenceState::Fenced { .. } => {
            tracing::warn!("the shim holds everything frozen; thawing it");
            unfence(connection, None, None, patience).await
        }
    }
}

/// Keeps containers that are not in the records frozen, for the code that removes them. Lets the
/// rest run without a deadline, since no task would extend it.
async fn open_recorded(
    connection: &Connection,
    recorded: &Recorded,
    patience: Duration,
) -> Result<(), LinkError> {
    let state = state(connection, patience).await?;
    let known = recorded.known().clone();
    if state == FenceState::Unarmed {
        if let KnownContainers::Own(own) = known {
            // Later containers are this node's as well, should the fence close later.
            let strange = sessions(connection, patience).await?.into_iter();
            let strange = strange.filter(|name| !own.contains(name)).collect();
            *recorded.known() = KnownContainers::NotRecorded(strange);
        }
        return Ok(());
    }
    if matches!(known, KnownContainers::Nothing) {
        tracing::warn!(
            ?state,
            "the shim's fence is a fleet's, but this node is in none; \
             it stays as it is until the records are read"
        );
        return Ok(());
    }
    if let FenceState::Armed { .. } = state {
        // Otherwise containers that others take over at the deadline would continue to run.
        connection.call(&Request::FreezeAll, &[], patience).await?;
    }
    let (mut own, mut strange) = (Vec::new(), BTreeSet::new());
    for name in sessions(connection, patience).await? {
        let is_own = match &known {
            KnownContainers::Nothing => false,
            KnownContainers::Own(names) => names.contains(&name),
            KnownContainers::NotRecorded(names) => !names.contains(&name),
        };
        match is_own {
            true => own.push(name),
            false => drop(strange.insert(name)),
        }
    }
    tracing::warn!(
        thawed = own.len(),
        frozen = strange.len(),
        first = ?strange.iter().take(MAX_NAMED).collect::<Vec<_>>(),
        "the shim's fence is a fleet's, but this node is in none; recorded sessions continue, \
         the rest may run elsewhere and stay frozen until they are removed"
    );
    *recorded.known() = KnownContainers::NotRecorded(strange);
    let mut chunks = own.chunks(NAMES).rev();
    let last = chunks.next().unwrap_or_default();
    let until_ns = boottime_ns().saturating_add(MORE_TO_COME_NS);
    for (chunk, later) in chunks.zip(0..) {
        // Each order needs a later deadline than the one before it.
        let until_ns = until_ns.saturating_add(later * NS_IN_MS);
        unfence(connection, Some(until_ns), Some(chunk), patience).await?;
    }
    unfence(connection, None, Some(last), patience).await
}

/// Names of the sessions' live containers.
async fn sessions(connection: &Connection, patience: Duration) -> Result<Vec<String>, LinkError> {
    let views = connection.containers(patience).await?.into_iter();
    let sessions = views.filter(|view| view.exec_in.is_none() && view.state.is_alive());
    Ok(sessions.map(|view| view.name).collect())
}

async fn state(connection: &Connection, patience: Duration) -> Result<FenceState, LinkError> {
    match connection.call(&Request::Fence, &[], patience).await? {
        (Reply::Fence { state }, _) => Ok(state),
        _ => Err(LinkError::Unexpected),
    }
}

async fn unfence(
    connection: &Connection,
    until_boottime_ns: Option<u64>,
    names: Option<&[String]>,
    patience: Duration,
) -> Result<(), LinkError> {
    let open = Request::Unfence {
        until_boottime_ns,
        names: names.map(<[String]>::to_vec),
    };
    connection.call(&open, &[], patience).await.map(|_| ())
}

/// A shim without a deadline would start what it is ordered to and let it run for ever, should
/// this process stop before it sends one. So a deadline is sent before any other request: one
/// that has passed, if there is no later one yet.
async fn arm(connection: &Connection, patience: Duration) -> Result<(), LinkError> {
    let arm = Request::ExtendDeadline {
        until_boottime_ns: boottime_ns(),
    };
    connection.call(&arm, &[], patience).await.map(|_| ())
}

fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap_or(0)
}
