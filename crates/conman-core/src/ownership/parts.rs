//! Parts of a fabric's pool: from which addresses a node's sessions get theirs.
//!
//! ```text
//!  absent ──claim──▶ held by a node's name ──the node is fenced and owns no session──▶ another's
//!                      │      ▲
//!                      └──confirm, after each rejoin
//! ```
//! A session that may run has an address of a part that its owner holds. So a part is handed out like a session:
//! on condition that its holder is still fenced. A fenced node may come back and thaw the sessions that it still
//! owns, so it must own none; while it is fenced it can claim none. It must *confirm* its parts after each rejoin
//! before it gives addresses of them to sessions, as they may be another's by then.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::claim::live;
use super::{Key, NodeName, NodeRecord, NodeState, Transaction, Value};

/// Parts that one transaction may delete: it has a bound.
const MAX_DELETED: usize = 32;

/// What all nodes of a fleet must agree on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricRecord {
    /// How packets get from node to node.
    pub kind: String,
    /// The networks from which parts are made.
    pub pool: Vec<String>,
    /// Prefix length of a part in IPv4.
    pub part: u8,
}

/// How a node is reached by the others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Underlay {
    pub v4: Option<Ipv4Addr>,
    pub v6: Option<Ipv6Addr>,
    /// Hardware address from which its sessions' packets arrive.
    pub mac: [u8; 6],
    /// Largest packet of a session that it takes, in bytes.
    pub mtu: u32,
}

/// `fabric/part/<number>`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    pub holder: NodeName,
    /// The latest under which the holder has confirmed it.
    pub incarnation: u64,
    /// The groups in which the sessions with its addresses are.
    pub groups: Vec<String>,
    pub underlay: Underlay,
}

/// What a node wants to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedPart {
    pub fabric: FabricRecord,
    /// Number of parts in the pool.
    pub count: u32,
    pub groups: Vec<String>,
    pub underlay: Underlay,
}

/// One snapshot of the registry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartsSeen {
    pub fabric: Option<FabricRecord>,
    pub parts: BTreeMap<u32, PartRecord>,
    /// Parts with a record that cannot be read: they count as held.
    pub unreadable: BTreeSet<u32>,
    /// A node whose record cannot be read must not be absent here: then it would count as lost.
    pub nodes: BTreeMap<NodeName, NodeRecord>,
}

/// What to do for a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartStep {
    /// The part is held once this is committed.
    Commit { part: u32, transaction: Transaction },
    /// No part is free: read the owners of all sessions, after the snapshot, and decide again.
    ReadOwners,
    /// Nobody uses the fleet's fabric, and it has more parts than one transaction may delete. Once these are
    /// deleted, read a snapshot and decide again.
    DeleteLost(Transaction),
}

/// Why no part can be claimed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartRefusal {
    #[error(
        "the fleet's fabric is `{}` with the pool {} in parts of /{}, which node `{holder}` uses; configure the same in \
         `[net.fabric]` of every node. To change it, end the sessions of all nodes that use it, and stop those first",
        fabric.kind, fabric.pool.join(" and "), fabric.part
    )]
    OtherFabric {
        fabric: FabricRecord,
        holder: NodeName,
    },
    #[error(
        "all {count} parts of the fabric's pool are in use; use a larger `net.fabric.pool`, or smaller parts"
    )]
    Exhausted { count: u32 },
}

impl PartsSeen {
    /// Whether no session of the holder may run, and none can before it rejoins. `owners` are the owners of all
    /// sessions, read after the snapshot: meanwhile a fenced node can only lose sessions.
    fn is_lost(&self, part: &PartRecord, owners: &BTreeSet<NodeName>) -> bool {
        let record = self.nodes.get(&part.holder);
        let fenced = record.is_none_or(|record| record.state == NodeState::Fenced);
        fenced && !owners.contains(&part.holder)
    }

    /// The conditions under which a lost part stays lost.
    fn stays_lost(&self, number: u32, part: &PartRecord) -> [(Key, Option<Value>); 2] {
        let record = self.nodes.get(&part.holder).copied();
        [
            (Key::Part(number), Some(Value::Part(part.clone()))),
            (Key::Node(part.holder.clone()), record.map(Value::Node)),
        ]
    }
}

/// Claims another part for this node, which is live under `incarnation`.
///
/// # Errors
/// When the fleet's fabric is another one, or every part is in use.
pub fn claim_part(
    (me, incarnation): (&NodeName, u64),
    wanted: &WantedPart,
    seen: &PartsSeen,
    owners: Option<&BTreeSet<NodeName>>,
) -> Result<PartStep, PartRefusal> {
    let mut compare = vec![
        live(me, incarnation),
        (Key::Fabric, seen.fabric.clone().map(Value::Fabric)),
    ];
    let mut write = Vec::new();
    let mut parts: BTreeMap<u32, &PartRecord> = seen.parts.iter().map(|(n, p)| (*n, p)).collect();
    if seen.fabric.as_ref() != Some(&wanted.fabric) {
        if let Some(fabric) = &seen.fabric
            && !parts.is_empty()
        {
            let Some(owners) = owners else {
                return Ok(PartStep::ReadOwners);
            };
            // This node gives no addresses of another fabric's parts.
            let mine = |part: &PartRecord| part.holder == *me && !owners.contains(me);
            let is_used = |part: &&&PartRecord| !seen.is_lost(part, owners) && !mine(part);
            if let Some(part) = parts.values().find(is_used) {
                return Err(PartRefusal::OtherFabric {
                    fabric: fabric.clone(),
                    holder: part.holder.clone(),
                });
            }
            for (number, part) in parts.iter().take(MAX_DELETED) {
                compare.extend(seen.stays_lost(*number, part));
                write.push((Key::Part(*number), None));
            }
            if parts.len() > MAX_DELETED {
                return Ok(PartStep::DeleteLost(transaction(compare, write)));
            }
            parts.clear();
        }
        write.push((Key::Fabric, Some(Value::Fabric(wanted.fabric.clone()))));
    }
    let (number, conditions) = match free_number(me, wanted.count, &parts, &seen.unreadable) {
        Some(number) => (number, vec![(Key::Part(number), seen_part(seen, number))]),
        None => {
            let Some(owners) = owners else {
                return Ok(PartStep::ReadOwners);
            };
            let lost = |(number, part): (u32, &PartRecord)| {
                (number < wanted.count && part.holder != *me && seen.is_lost(part, owners))
                    .then(|| (number, seen.stays_lost(number, part).to_vec()))
            };
            let lost = parts.into_iter().find_map(lost);
            lost.ok_or(PartRefusal::Exhausted {
                count: wanted.count,
            })?
        }
    };
    compare.extend(conditions);
    write.retain(|(key, _)| *key != Key::Part(number));
    let record = PartRecord {
        holder: me.clone(),
        incarnation,
        groups: wanted.groups.clone(),
        underlay: wanted.underlay.clone(),
    };
    write.push((Key::Part(number), Some(Value::Part(record))));
    Ok(PartStep::Commit {
        part: number,
        transaction: transaction(compare, write),
    })
}

/// A transaction with one condition on each key.
fn transaction(
    mut compare: Vec<(Key, Option<Value>)>,
    write: Vec<(Key, Option<Value>)>,
) -> Transaction {
    let mut compared = BTreeSet::new();
    compare.retain(|(key, _)| compared.insert(key.clone()));
    Transaction { compare, write }
}

fn seen_part(seen: &PartsSeen, number: u32) -> Option<Value> {
    seen.parts.get(&number).cloned().map(Value::Part)
}

/// The first number that is not in use, from one that differs from node to node: nodes that join together conflict
/// less often.
fn free_number(
    me: &NodeName,
    count: u32,
    used: &BTreeMap<u32, &PartRecord>,
    unreadable: &BTreeSet<u32>,
) -> Option<u32> {
    let hash = me.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    let first = hash.checked_rem(count)?;
    (first..count)
        .chain(0..first)
        .find(|number| !used.contains_key(number) && !unreadable.contains(number))
}

/// The transactions that confirm this node's parts under its present incarnation, and publish how it is reached.
/// Those that are confirmed as they are need none. There are none while the fleet's fabric is another one.
#[must_use]
pub fn confirm_parts(
    (me, incarnation): (&NodeName, u64),
    (fabric, underlay): (&FabricRecord, &Underlay),
    seen: &PartsSeen,
) -> Vec<(u32, Option<Transaction>)> {
    let is_same = seen.fabric.as_ref() == Some(fabric);
    let mine = seen
        .parts
        .iter()
        .filter(|(_, part)| is_same && part.holder == *me);
    let confirm = |(number, part): (&u32, &PartRecord)| {
        let confirmed = PartRecord {
            incarnation,
            underlay: underlay.clone(),
            ..part.clone()
        };
        let transaction = (confirmed != *part).then(|| Transaction {
            compare: vec![
                live(me, incarnation),
                (Key::Part(*number), Some(Value::Part(part.clone()))),
            ],
            write: vec![(Key::Part(*number), Some(Value::Part(confirmed)))],
        });
        (*number, transaction)
    };
    mine.map(confirm).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(pool: &str, count: u32) -> WantedPart {
        WantedPart {
            fabric: FabricRecord {
                kind: "host-gw".to_owned(),
                pool: vec![pool.to_owned()],
                part: 24,
            },
            count,
            groups: vec!["team".to_owned()],
            underlay: Underlay::default(),
        }
    }

    fn node(incarnation: u64, state: NodeState) -> NodeRecord {
        NodeRecord { incarnation, state }
    }

    fn commit(seen: &mut PartsSeen, step: PartStep) -> u32 {
        let PartStep::Commit { part, transaction } = step else {
            panic!("{step:?}");
        };
        write(seen, transaction);
        part
    }

    /// Commits a transaction, as the registry would.
    fn write(seen: &mut PartsSeen, transaction: Transaction) {
        for (key, value) in transaction.compare {
            let present = match &key {
                Key::Node(name) => seen.nodes.get(name).copied().map(Value::Node),
                Key::Part(number) => seen_part(seen, *number),
                Key::Fabric => seen.fabric.clone().map(Value::Fabric),
                other => panic!("{other:?}"),
            };
            assert_eq!(present, value, "{key:?}");
        }
        for (key, value) in transaction.write {
            match (key, value) {
                (Key::Part(number), Some(Value::Part(part))) => {
                    seen.parts.insert(number, part);
                }
                (Key::Part(number), None) => {
                    seen.parts.remove(&number);
                }
                (Key::Fabric, Some(Value::Fabric(fabric))) => seen.fabric = Some(fabric),
                other => panic!("{other:?}"),
            }
        }
    }

    fn fleet() -> (PartsSeen, [NodeName; 3]) {
        let names: [NodeName; 3] = ["a".into(), "b".into(), "c".into()];
        let nodes = names
            .iter()
            .map(|name| (name.clone(), node(1, NodeState::Live)));
        let seen = PartsSeen {
            nodes: nodes.collect(),
            ..PartsSeen::default()
        };
        (seen, names)
    }

    #[test]
    fn a_lost_nodes_part_is_anothers_only_once_it_owns_no_session() {
        let (mut seen, [a, b, c]) = fleet();
        let wanted = wanted("10.96.0.0/23", 2);
        for name in [&a, &b] {
            let step = claim_part((name, 1), &wanted, &seen, None).expect("free");
            commit(&mut seen, step);
        }
        let step = claim_part((&c, 1), &wanted, &seen, None);
        assert_eq!(step, Ok(PartStep::ReadOwners));
        let exhausted = Err(PartRefusal::Exhausted { count: 2 });
        let none = BTreeSet::new();
        let step = claim_part((&c, 1), &wanted, &seen, Some(&none));
        assert_eq!(step, exhausted, "both are live");
        seen.nodes.insert(a.clone(), node(1, NodeState::Fenced));
        let owners = [a.clone()].into();
        let step = claim_part((&c, 1), &wanted, &seen, Some(&owners));
        assert_eq!(step, exhausted, "it may come back with its session");
        let step = claim_part((&c, 1), &wanted, &seen, Some(&none)).expect("lost");
        let part = commit(&mut seen, step);
        assert_eq!(seen.parts[&part].holder, c);
        // The former holder is back, and has nothing to confirm.
        seen.nodes.insert(a.clone(), node(2, NodeState::Live));
        let way = (&wanted.fabric, &Underlay::default());
        assert_eq!(confirm_parts((&a, 2), way, &seen), []);
    }

    #[test]
    fn a_part_whose_record_cannot_be_read_is_no_ones_and_hinders_nobody() {
        let (mut seen, [a, b, _]) = fleet();
        let wanted = wanted("10.96.0.0/23", 2);
        seen.unreadable.insert(0);
        let step = claim_part((&a, 1), &wanted, &seen, None).expect("free");
        assert_eq!(commit(&mut seen, step), 1);
        let step = claim_part((&b, 1), &wanted, &seen, Some(&BTreeSet::new()));
        assert_eq!(step, Err(PartRefusal::Exhausted { count: 2 }));
    }

    #[test]
    fn a_part_is_confirmed_after_each_rejoin_and_when_the_node_is_reached_in_another_way() {
        let (mut seen, [a, ..]) = fleet();
        let wanted = wanted("10.96.0.0/23", 2);
        let step = claim_part((&a, 1), &wanted, &seen, None).expect("free");
        let part = commit(&mut seen, step);
        let same = Underlay::default();
        let confirm = |incarnation, underlay: &Underlay, seen: &PartsSeen| {
            confirm_parts((&a, incarnation), (&wanted.fabric, underlay), seen)
        };
        assert_eq!(confirm(1, &same, &seen), [(part, None)]);
        let other = Underlay { mtu: 1_400, ..same };
        for (incarnation, underlay) in [(2, &Underlay::default()), (1, &other)] {
            seen.nodes
                .insert(a.clone(), node(incarnation, NodeState::Live));
            let mut confirmed = confirm(incarnation, underlay, &seen);
            let Some((_, Some(transaction))) = confirmed.pop() else {
                panic!("{confirmed:?}");
            };
            assert_eq!(transaction.compare.len(), 2, "live, and the very part");
        }
    }

    #[test]
    fn another_fabric_is_refused_while_anybody_uses_the_present_one() {
        let (mut seen, [a, b, _]) = fleet();
        let step = claim_part((&a, 1), &wanted("10.96.0.0/23", 2), &seen, None).expect("free");
        commit(&mut seen, step);
        let other = wanted("10.96.0.0/22", 4);
        let none = BTreeSet::new();
        let refusal = claim_part((&b, 1), &other, &seen, Some(&none)).expect_err("in use");
        let text = refusal.to_string();
        assert!(
            text.contains("10.96.0.0/23") && text.contains("node `a`"),
            "{text}"
        );
        seen.nodes.insert(a.clone(), node(1, NodeState::Fenced));
        let step = claim_part((&b, 1), &other, &seen, Some(&none)).expect("nobody uses it");
        commit(&mut seen, step);
        assert_eq!(seen.fabric, Some(other.fabric));
        assert!(seen.parts.values().all(|part| part.holder == b));
        assert_eq!(seen.parts.len(), 1);
    }

    #[test]
    fn a_fabric_with_more_lost_parts_than_a_transaction_may_delete_is_replaced_in_steps() {
        let (mut seen, [a, b, _]) = fleet();
        let old = wanted("10.96.0.0/16", 256);
        for _ in 0..2 * MAX_DELETED + 1 {
            let step = claim_part((&a, 1), &old, &seen, None).expect("free");
            commit(&mut seen, step);
        }
        let other = wanted("10.112.0.0/16", 256);
        let none = BTreeSet::new();
        let claim = |seen: &PartsSeen| claim_part((&b, 1), &other, seen, Some(&none));
        claim(&seen).expect_err("it is used");
        seen.nodes.insert(a, node(1, NodeState::Fenced));
        for left in [MAX_DELETED + 1, 1] {
            let step = claim(&seen).expect("nobody uses it");
            let PartStep::DeleteLost(transaction) = step else {
                panic!("{step:?}");
            };
            write(&mut seen, transaction);
            assert_eq!(seen.parts.len(), left);
            assert_eq!(seen.fabric.as_ref(), Some(&old.fabric));
        }
        let step = claim(&seen).expect("nobody uses it");
        commit(&mut seen, step);
        assert!(seen.parts.values().all(|part| part.holder == b));
        assert_eq!((seen.parts.len(), seen.fabric), (1, Some(other.fabric)));
    }
}
