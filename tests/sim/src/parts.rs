//! The parts of a fabric's pool: each node claims one, and its containers get their addresses of it.

use std::collections::BTreeSet;

use conman_core::ownership::{
    Answer, Event, FabricRecord, Key, NodeName, NodeProtocol, OwnedState, PartStep, PartsSeen,
    Request, Slot, Underlay, Value, WantedPart, claim_part, confirm_parts,
};

use crate::world::World;

/// From this seed on, nodes claim parts. There are fewer parts than nodes.
pub(crate) const PARTS_FROM: u64 = 5_000_000;

/// Requests for parts have numbers from this on, so that no protocol takes their answers for its own.
const FIRST_OP: u64 = 1 << 60;

/// Ticks between two attempts.
const PAUSE_TICKS: u32 = 5;

/// What a daemon knows of its part.
#[derive(Debug, Default)]
pub(crate) struct PartHolder {
    /// The part, and the incarnation under which it was confirmed.
    held: Option<(u32, u64)>,
    asked: Option<Asked>,
    pause: u32,
    ops: u64,
}

#[derive(Debug)]
enum Asked {
    Snapshot { incarnation: u64 },
    Owners { incarnation: u64, seen: PartsSeen },
    Commit { part: u32, incarnation: u64 },
}

impl World {
    /// Reads, claims or confirms, whatever is next.
    pub(crate) fn work_on_parts(&mut self, node: usize) {
        let machine = &mut self.machines[node];
        if self.parts == 0 || !machine.is_awake() || machine.part.asked.is_some() {
            return;
        }
        let daemon = machine.daemon.as_ref();
        let Some(daemon) = daemon.filter(|daemon| daemon.is_live()) else {
            return;
        };
        let incarnation = daemon.incarnation();
        if machine
            .part
            .held
            .is_some_and(|(_, confirmed)| confirmed == incarnation)
        {
            return;
        }
        if machine.part.pause > 0 {
            machine.part.pause -= 1;
            return;
        }
        let parts = (0..self.parts).map(Key::Part);
        let nodes = self.names.iter().cloned().map(Key::Node);
        let keys = parts.chain(nodes).chain([Key::Fabric]).collect();
        self.ask_for_part(node, Asked::Snapshot { incarnation }, Request::Read(keys));
    }

    fn ask_for_part(&mut self, node: usize, asked: Asked, request: Request) {
        let now = self.clock(node);
        let part = &mut self.machines[node].part;
        part.asked = Some(asked);
        part.ops += 1;
        let op = FIRST_OP + part.ops;
        self.request(node, now, op, request);
    }

    /// Handles the answer to a request for a part; returns every other event.
    pub(crate) fn part_answered(&mut self, node: usize, event: Event) -> Option<Event> {
        let (op, answer) = match event {
            // The number of deletions of records is greater than all others.
            Event::StoreAnswer { op, answer } if (FIRST_OP..u64::MAX).contains(&op) => (op, answer),
            event => return Some(event),
        };
        let part = &mut self.machines[node].part;
        if op != FIRST_OP + part.ops {
            return None;
        }
        let asked = part.asked.take()?;
        part.pause = PAUSE_TICKS;
        match (asked, answer) {
            (Asked::Snapshot { incarnation }, Answer::Values(values)) => {
                self.decide(node, incarnation, seen(values), None);
            }
            (Asked::Owners { incarnation, seen }, Answer::Values(values)) => {
                let owners = values.into_iter().filter_map(|(_, value)| match value {
                    Some(Value::Session(record)) if record.state == OwnedState::Owned => {
                        Some(record.owner)
                    }
                    _ => None,
                });
                self.decide(node, incarnation, seen, Some(owners.collect()));
            }
            (Asked::Commit { part, incarnation }, Answer::Committed) => {
                self.note(|| format!("n{node} holds part {part}"));
                self.machines[node].part.held = Some((part, incarnation));
            }
            // It is read again.
            _ => {}
        }
        None
    }

    fn decide(
        &mut self,
        node: usize,
        incarnation: u64,
        seen: PartsSeen,
        owners: Option<BTreeSet<NodeName>>,
    ) {
        let me = &self.names[node];
        let wanted = wanted(self.parts);
        let way = (&wanted.fabric, &wanted.underlay);
        let mine = confirm_parts((me, incarnation), way, &seen);
        let step = match mine.into_iter().next() {
            Some((part, None)) => {
                self.machines[node].part.held = Some((part, incarnation));
                return;
            }
            Some((part, Some(transaction))) => Ok(PartStep::Commit { part, transaction }),
            None => claim_part((me, incarnation), &wanted, &seen, owners.as_ref()),
        };
        match step {
            Ok(PartStep::Commit { part, transaction }) => {
                let asked = Asked::Commit { part, incarnation };
                self.ask_for_part(node, asked, Request::Commit(transaction));
            }
            Ok(PartStep::ReadOwners) => {
                let asked = Asked::Owners { incarnation, seen };
                self.ask_for_part(node, asked, Request::ReadSessions);
            }
            // Others have all of them; the fabric is never replaced.
            Err(_) | Ok(PartStep::DeleteLost(_)) => {}
        }
    }

    /// A container that is about to be started gets an address, if the node has confirmed its part since it
    /// rejoined.
    pub(crate) fn take_address(&mut self, node: usize, slot: &Slot) {
        let machine = &self.machines[node];
        let incarnation = machine.daemon.as_ref().map(NodeProtocol::incarnation);
        if let Some((part, confirmed)) = machine.part.held
            && incarnation == Some(confirmed)
        {
            self.checker.has_address((node, slot.clone()), part);
        }
    }
}

fn wanted(count: u32) -> WantedPart {
    WantedPart {
        fabric: FabricRecord {
            kind: "host-gw".to_owned(),
            pool: vec!["10.96.0.0/16".to_owned()],
            part: 24,
        },
        count,
        groups: Vec::new(),
        underlay: Underlay::default(),
    }
}

fn seen(values: Vec<(Key, Option<Value>)>) -> PartsSeen {
    let mut seen = PartsSeen::default();
    for (key, value) in values {
        match (key, value) {
            (Key::Node(name), Some(Value::Node(record))) => {
                seen.nodes.insert(name, record);
            }
            (Key::Part(number), Some(Value::Part(part))) => {
                seen.parts.insert(number, part);
            }
            (Key::Fabric, Some(Value::Fabric(fabric))) => seen.fabric = Some(fabric),
            _ => {}
        }
    }
    seen
}
