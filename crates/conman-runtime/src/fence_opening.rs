//! Who opens the shim's fence, once it has closed, and how.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_shim::{FenceState, Reply, Request};
use rustix::time::{ClockId, clock_gettime};

use crate::ContainerKey;
use crate::shim_link::{Connection, LinkError, name};

/// Names in one order to thaw: of the longest there are, three quarters of what a message holds.
pub(crate) const NAMES: usize = 1_024;

const NS_IN_MS: u64 = 1_000_000;

/// For how long an order holds that others follow at once.
const MORE_TO_COME_NS: u64 = 60_000 * NS_IN_MS;

/// Of the containers that stay frozen, those that are named.
const MAX_NAMED: usize = 10;

/// Who opens the fence, once it has closed.
#[derive(Debug, Clone)]
pub enum FenceOpener {
    /// Whoever connects: no other node can have taken anything over.
    Anybody,
    /// The registry alone, by [`crate::ShimFence`], once it knows what is still this node's; until
    /// then it is closed.
    Registry,
    /// Whoever connects, for what the records of this node have and for nothing else: it was of a
    /// fleet, whose other nodes may have taken over what ran here.
    Records(Arc<Recorded>),
}

/// What of that which a fleet's fence holds is still this node's.
#[derive(Debug, Default)]
pub struct Recorded(Mutex<Known>);

#[derive(Debug, Clone, Default)]
enum Known {
    /// The records have not been read.
    #[default]
    Nothing,
    /// They have these.
    Own(BTreeSet<String>),
    /// The fence was looked at since. These are not in the records; all others are, or began later.
    Strange(BTreeSet<String>),
}

impl Recorded {
    /// The records have been read, and what runs of them was taken up: these.
    pub fn are(&self, keys: impl IntoIterator<Item = ContainerKey>) {
        *self.known() = Known::Own(keys.into_iter().map(|key| name(&key)).collect());
    }

    /// A panic while the lock is held cannot leave half a change.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FenceOpener {
    /// For a connection that has just been made, or when more is known than then.
    pub(crate) async fn open(
        &self,
        connection: &Connection,
        patience: Duration,
    ) -> Result<(), LinkError> {
        match self {
            Self::Anybody => open_all(connection, patience).await,
            Self::Registry => arm(connection, patience).await,
            Self::Records(recorded) => open_recorded(connection, recorded, patience).await,
        }
    }
}

/// A shim that has lost what it knew keeps everything frozen until it is ordered otherwise. No other
/// node can have taken anything over, so nothing has to be asked before.
async fn open_all(connection: &Connection, patience: Duration) -> Result<(), LinkError> {
    match state(connection, patience).await? {
        FenceState::Unarmed | FenceState::Armed { .. } => Ok(()),
        FenceState::Freezing { .. } | FenceState::Fenced { .. } => {
            tracing::warn!("the shim holds everything frozen; it goes on");
            unfence(connection, None, None, patience).await
        }
    }
}

/// Has what is not in the records stay frozen, for whoever removes it, and the rest go on without a
/// deadline, which nobody would move any more.
async fn open_recorded(
    connection: &Connection,
    recorded: &Recorded,
    patience: Duration,
) -> Result<(), LinkError> {
    let state = state(connection, patience).await?;
    let known = recorded.known().clone();
    if state == FenceState::Unarmed {
        if let Known::Own(own) = known {
            // What begins from here on is this node's as well, should the fence close later.
            let strange = sessions(connection, patience).await?.into_iter();
            let strange = strange.filter(|name| !own.contains(name)).collect();
            *recorded.known() = Known::Strange(strange);
        }
        return Ok(());
    }
    if matches!(known, Known::Nothing) {
        tracing::warn!(
            ?state,
            "the shim's fence is a fleet's, of which this node is none now; it stays as it is until \
             it is known what is still this node's"
        );
        return Ok(());
    }
    if let FenceState::Armed { .. } = state {
        // Or what others will take over at the deadline would go on with the rest.
        connection.call(&Request::FreezeAll, &[], patience).await?;
    }
    let (mut own, mut strange) = (Vec::new(), BTreeSet::new());
    for name in sessions(connection, patience).await? {
        let is_own = match &known {
            Known::Nothing => false,
            Known::Own(names) => names.contains(&name),
            Known::Strange(names) => !names.contains(&name),
        };
        match is_own {
            true => own.push(name),
            false => drop(strange.insert(name)),
        }
    }
    tracing::warn!(
        go_on = own.len(),
        stay_frozen = strange.len(),
        first = ?strange.iter().take(MAX_NAMED).collect::<Vec<_>>(),
        "the shim's fence is a fleet's, of which this node is none now: what this node has records \
         of goes on; the rest may run elsewhere and stays frozen until it is removed"
    );
    *recorded.known() = Known::Strange(strange);
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

/// Names of the sessions' containers that live.
async fn sessions(connection: &Connection, patience: Duration) -> Result<Vec<String>, LinkError> {
    let mut names = Vec::new();
    let mut after = None;
    loop {
        let list = Request::List { after };
        let answer = connection.call(&list, &[], patience).await?;
        let (Reply::Containers { containers, more }, _) = answer else {
            return Err(LinkError::Unexpected);
        };
        after = containers.last().map(|view| view.name.clone());
        let sessions = containers.into_iter();
        let sessions = sessions.filter(|view| view.exec_in.is_none() && view.state.is_alive());
        names.extend(sessions.map(|view| view.name));
        if !more {
            return Ok(names);
        }
    }
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

/// A shim that was never told of a deadline, or has lost it, would start what is ordered of it and
/// let it run for ever, should this process stop before it tells one. So nothing is asked before
/// there is a deadline: one that has passed, where there is no later one yet.
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
