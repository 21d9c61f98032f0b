//! The transactions on a session's record: claim, release, collect.
//!
//! ```text
//!  absent ──claim──▶ Owned ──certificate──▶ Released ──collect (floor rises)──▶ absent
//!    Released, or the owner fenced ──claim, generation + 1──▶ Owned
//! ```

use super::{Key, NodeName, NodeRecord, NodeState, OwnedState, Ownership, SessionName};
use super::{Transaction, Value};

/// Why a session cannot be claimed now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Its owner, possibly this node, is not known to be fenced.
    Owned(NodeName),
    /// No generation is left above the used ones and the floor.
    NoGenerationLeft,
}

/// The condition that this node is live under this incarnation.
pub(super) fn live(me: &NodeName, incarnation: u64) -> (Key, Option<Value>) {
    let record = NodeRecord {
        incarnation,
        state: NodeState::Live,
    };
    (Key::Node(me.clone()), Some(Value::Node(record)))
}

/// Makes this node the owner with a greater generation, if this node's incarnation is live and the
/// previous owner is still fenced, the session is released, or its record is absent above the
/// floor.
///
/// # Errors
/// When a node may own it, or no generation is left for it.
pub fn claim(
    me: &NodeName,
    incarnation: u64,
    session: &SessionName,
    current: Option<&Ownership>,
    owner: Option<NodeRecord>,
    floor: Option<u64>,
) -> Result<(Ownership, Transaction), Refusal> {
    let key = Key::Session(session.clone());
    let mut compare = vec![
        live(me, incarnation),
        (key.clone(), current.cloned().map(Value::Session)),
    ];
    let below = match current {
        None => {
            // A delayed claim of an earlier life fails here, because collecting raised the floor.
            compare.push((Key::Floor, floor.map(Value::Floor)));
            floor.unwrap_or(0)
        }
        Some(record) => {
            if record.state != OwnedState::Released {
                match owner {
                    Some(owner) if owner.state == NodeState::Fenced => {
                        let theirs = Key::Node(record.owner.clone());
                        compare.push((theirs, Some(Value::Node(owner))));
                    }
                    _ => return Err(Refusal::Owned(record.owner.clone())),
                }
            }
            // After records were lost, an operator may have set the floor higher.
            record.generation.max(floor.unwrap_or(0))
        }
    };
    let generation = below.checked_add(1).ok_or(Refusal::NoGenerationLeft)?;
    let mine = Ownership {
        owner: me.clone(),
        incarnation,
        generation,
        state: OwnedState::Owned,
    };
    let write = vec![(key, Some(Value::Session(mine.clone())))];
    Ok((mine, Transaction { compare, write }))
}

/// Gives up `current`, after a certificate has proved that nothing of it runs or may appear.
#[must_use]
pub fn release(session: &SessionName, current: &Ownership) -> Transaction {
    let key = Key::Session(session.clone());
    let released = Ownership {
        state: OwnedState::Released,
        ..current.clone()
    };
    Transaction {
        compare: vec![(key.clone(), Some(Value::Session(current.clone())))],
        write: vec![(key, Some(Value::Session(released)))],
    }
}

/// Deletes a released record and raises the floor to its generation.
#[must_use]
pub fn collect(session: &SessionName, released: &Ownership, floor: Option<u64>) -> Transaction {
    let key = Key::Session(session.clone());
    let raised = floor.unwrap_or(0).max(released.generation);
    Transaction {
        compare: vec![
            (key.clone(), Some(Value::Session(released.clone()))),
            (Key::Floor, floor.map(Value::Floor)),
        ],
        write: vec![(key, None), (Key::Floor, Some(Value::Floor(raised)))],
    }
}
