//! Reads all nodes from etcd.

use std::collections::HashMap;

use conman_core::ownership::{Heartbeat, Key, NodeRecord, NodeState, PartRecord, Value};
use conman_registry::{HeldPart, HeldParts};
use jiff::Timestamp;

use super::super::codec::{self, Keys, PeerText};
use super::super::parts::part_number;
use super::super::shared::Shared;
use super::super::store::{Entry, ReadError};

pub(super) type Read = HashMap<String, OneRead>;

/// What one read has found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) nodes: Read,
    pub(super) parts: HeldParts,
    /// Unreadable values, by key: one of them must not hide all the others.
    pub(super) oddities: Vec<(String, String)>,
}

/// The state of one node in a read.
#[derive(Debug)]
pub(super) struct OneRead {
    pub(super) record: NodeRecord,
    pub(super) fenced_at: Option<Timestamp>,
    pub(super) heartbeat: Option<Heartbeat>,
    /// Whether there is an announcement, which may be unreadable.
    pub(super) is_announced: bool,
    /// With the revision that wrote it.
    pub(super) text: Option<(PeerText, i64)>,
    pub(super) odd: bool,
    pub(super) patience_ms: u64,
}

impl OneRead {
    pub(super) fn of(record: NodeRecord) -> Self {
        Self {
            record,
            fenced_at: None,
            heartbeat: None,
            is_announced: false,
            text: None,
            odd: false,
            patience_ms: 0,
        }
    }
}

pub(super) async fn look(shared: &Shared) -> Result<Found, ReadError> {
    let keys = &shared.store.keys;
    let parents = [
        keys.nodes(),
        keys.heartbeats(),
        keys.peers(),
        keys.takeover_delays(),
        keys.parts(),
    ];
    let entries = shared.store.get_below(&parents).await?;
    let [nodes, heartbeats, peers, delays, parts] =
        <[Vec<Entry>; 5]>::try_from(entries).map_err(|_| ReadError::Unexpected)?;
    let mut read = Read::new();
    let mut oddities = Vec::new();
    let mut decode = |kind: &Key, key: &[u8], bytes: &[u8]| {
        let decoded = codec::decode(kind, key, bytes);
        decoded
            .map_err(|error| {
                let what = format!("{error} Its sessions are not taken over until it is repaired");
                oddities.push((error.key, what));
            })
            .ok()
    };
    for (key, bytes, _) in nodes {
        if let Some(name) = Keys::name_in(&parents[0], &key)
            && let Some(Value::Node(record)) = decode(&Key::Node("".into()), &key, &bytes)
        {
            let fenced_at = codec::fenced_at(&bytes);
            let one = OneRead {
                fenced_at,
                ..OneRead::of(record)
            };
            read.insert(name, one);
        }
    }
    for (key, bytes, _) in heartbeats {
        if let Some(one) = Keys::name_in(&parents[1], &key).and_then(|name| read.get_mut(&name)) {
            match decode(&Key::Heartbeat("".into()), &key, &bytes) {
                Some(Value::Heartbeat(heartbeat)) => one.heartbeat = Some(heartbeat),
                _ => one.odd = true,
            }
        }
    }
    let unreachable = add_announcements(&mut read, &parents[2], peers);
    for (key, bytes, _) in delays {
        let Some(name) = Keys::name_in(&parents[3], &key) else {
            continue;
        };
        let Some(one) = read.get_mut(&name) else {
            continue;
        };
        let Some(Value::Silence(delay_ms)) = decode(&Key::Silence("".into()), &key, &bytes) else {
            one.odd = true;
            continue;
        };
        one.patience_ms = shared.timing.patience_ms(Some(delay_ms));
    }
    oddities.extend(unreachable);
    let parts = held_parts(&read, &parents[4], parts, &mut oddities);
    Ok(Found {
        nodes: read,
        parts,
        oddities,
    })
}

fn held_parts(
    nodes: &Read,
    parent: &[u8],
    entries: Vec<Entry>,
    oddities: &mut Vec<(String, String)>,
) -> HeldParts {
    let mut held = HeldParts::new();
    for (key, bytes, _) in entries {
        let Some(number) = part_number(parent, &key) else {
            continue;
        };
        match codec::parse::<PartRecord>(&key, &bytes) {
            Ok(record) => {
                let holder = nodes.get(&*record.holder);
                let lost = holder.is_none_or(|node| node.record.state == NodeState::Fenced);
                held.insert(number, HeldPart { record, lost });
            }
            Err(error) => {
                let what = format!("{error} Sessions with its addresses are not reached from here");
                oddities.push((error.key, what));
            }
        }
    }
    held
}

/// Adds what the nodes announce to their states. Returns the unreadable announcements, by key.
fn add_announcements(read: &mut Read, parent: &[u8], entries: Vec<Entry>) -> Vec<(String, String)> {
    let mut unreadable = Vec::new();
    for (key, bytes, revision) in entries {
        let Some(name) = Keys::name_in(parent, &key) else {
            continue;
        };
        let Some(one) = read.get_mut(&name) else {
            continue;
        };
        one.is_announced = true;
        // A newer version may publish more than this one can read.
        match codec::parse::<PeerText>(&key, &bytes) {
            Ok(text) => one.text = Some((text, revision)),
            Err(error) => {
                let what = format!("{error} The node is not reachable until it is repaired");
                unreadable.push((error.key, what));
            }
        }
    }
    unreadable
}
