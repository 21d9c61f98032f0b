//! At most one runnable container per session in a fleet: the protocol, as pure decisions.
//!
//! The registry offers only linearizable compare-and-swap ([`Transaction`]) and linearizable reads;
//! expiring leases, locks and watches prove nothing. The daemon drives [`NodeProtocol`]. The shim
//! drives [`Fence`] in a separate process, whether the daemon is alive or not.
//!
//! ```text
//!  renewal ── deadline = send instant of the attempt read back + F ──▶ fence (shim): freeze, kill
//!  observer ─ T, or what the node requires if that is more, since the first answer with this
//!             heartbeat ─▶ CAS fenced ─▶ claim ─▶ start
//!  rejoin ─── frozen ─▶ CAS live, new incarnation ─▶ read all records ─▶ kill lost, thaw the rest
//! ```
//!
//! No clock, no randomness, no I/O: the caller passes its node's `CLOCK_BOOTTIME` as [`BootTime`].
//!
//! # Obligations of the drivers
//! The proof and the simulation rely on these:
//! - The clock is read before a request is sent, and a request is sent once.
//! - Two sends of one node never use the same attempt number, whatever crashes or is restored.
//! - The shim saves [`Fence::kept`] before it executes any action, and creates a slot's cgroup
//!   before it reports the slot as open; what starts is created in it, not moved into it.
//! - [`FenceEvent::FreezeVerified`] is the state of the cgroup after the last order to freeze it;
//!   [`FenceEvent::Died`] and [`FenceEvent::StartOver`] mean that nothing can appear or run any
//!   more.
//! - [`Event::StartSent`] comes before the slot is opened, and only while
//!   [`NodeProtocol::may_start`].
//! - Between daemon and shim, orders and events keep their order, or are lost with the connection:
//!   then [`Event::ShimConnected`] reports the state. A restarted shim reads every slot's cgroup;
//!   the orders of a dead daemon are executed, or dropped, before the first order of the next one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

mod claim;
mod fence;
mod fence_report;
mod node;
mod observer;
mod parts;
mod rejoin;
mod renewal;
mod timing;

pub use claim::{Refusal, claim, collect, release};
pub use fence::{Fence, FenceAction, FenceEvent, Kept, SlotView};
pub use fence_report::{FenceHolds, FenceLinkError, FenceNews};
pub use node::{Action, Event, NodeProtocol, Stake};
pub use observer::{Observer, Verdict};
pub use parts::{
    FabricRecord, PartRecord, PartRefusal, PartStep, PartsSeen, Underlay, WantedPart, claim_part,
    confirm_parts,
};
pub use rejoin::{Rejoin, Step};
pub use renewal::{Renewal, Renewed, Renewing};
pub use timing::{KILLS_PER_MS, Timing, UnsafeTiming};

/// A node's name in the registry.
pub type NodeName = Arc<str>;
/// A session's name.
pub type SessionName = Arc<str>;

/// Milliseconds on one node's `CLOCK_BOOTTIME`; two nodes' values are never compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct BootTime(pub u64);

impl BootTime {
    /// This instant plus `ms`.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds since `earlier`, 0 if that is in the future.
    #[must_use]
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// `node/<id>`: written only at a rejoin, a drain and a takeover. It is never deleted while claims
/// of an earlier incarnation may still arrive, because its incarnation must only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub incarnation: u64,
    pub state: NodeState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    Live,
    /// Declared dead by an observer: its sessions may be claimed until it rejoins.
    Fenced,
}

/// `hb/<id>`: two sends of one node never have the same attempt number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    pub incarnation: u64,
    pub attempt: u64,
}

/// The ownership part of `session/<id>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ownership {
    pub owner: NodeName,
    pub incarnation: u64,
    pub generation: u64,
    pub state: OwnedState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnedState {
    /// Recorded before the create is sent: a container may exist or still appear. Whether it
    /// starts, runs or is stuck is information for people and decides nothing here.
    Owned,
    /// Proven dead and given up.
    Released,
}

/// A generation of a session on a node, which names its cgroup.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    pub session: SessionName,
    pub generation: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    Node(NodeName),
    Heartbeat(NodeName),
    Session(SessionName),
    /// No session starts at or below this generation after its record was deleted.
    Floor,
    Silence(NodeName),
    /// What all nodes agree on about the fabric.
    Fabric,
    /// A part of the fabric's pool, by its number.
    Part(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Node(NodeRecord),
    Heartbeat(Heartbeat),
    Session(Ownership),
    Floor(u64),
    /// `silence/<id>`: for how many true milliseconds the node's heartbeat has to stay unchanged
    /// before the node may be declared dead. The nodes' settings may differ, so an observer needs
    /// the node's value.
    Silence(u64),
    Fabric(FabricRecord),
    Part(PartRecord),
}

/// Writes all or nothing, and only if every key has exactly the expected value (`None`: absent).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Transaction {
    pub compare: Vec<(Key, Option<Value>)>,
    pub write: Vec<(Key, Option<Value>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    Commit(Transaction),
    /// A linearizable read.
    Read(Vec<Key>),
    /// A linearizable read of every session's record.
    ReadSessions,
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Committed,
    Conflict,
    /// It may have taken effect, and may still do so later.
    Ambiguous,
    /// It has not taken effect and never will.
    Unavailable,
    Values(Vec<(Key, Option<Value>)>),
}

impl Answer {
    /// The value of `key` in a read's answer.
    #[must_use]
    pub fn value(&self, key: &Key) -> Option<&Value> {
        let Self::Values(values) = self else {
            return None;
        };
        values
            .iter()
            .find(|(k, _)| k == key)
            .and_then(|(_, value)| value.as_ref())
    }

    /// The node's record and heartbeat in a read's answer.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> (Option<NodeRecord>, Option<Heartbeat>) {
        let record = match self.value(&Key::Node(name.clone())) {
            Some(Value::Node(record)) => Some(*record),
            _ => None,
        };
        let heartbeat = match self.value(&Key::Heartbeat(name.clone())) {
            Some(Value::Heartbeat(heartbeat)) => Some(*heartbeat),
            _ => None,
        };
        (record, heartbeat)
    }

    /// How long the node's silence has to last, in a read's answer, if it has stated it.
    #[must_use]
    pub fn silence_ms(&self, name: &NodeName) -> Option<u64> {
        match self.value(&Key::Silence(name.clone())) {
            Some(Value::Silence(silence_ms)) => Some(*silence_ms),
            _ => None,
        }
    }
}
