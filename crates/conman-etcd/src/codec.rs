//! Keys and values in etcd. Fields that a later conman adds are ignored. Transactions compare whole
//! values, so [`super::store`] compares a value with such fields as it was read.
//!
//! | key, below the prefix | value | |
//! |---|---|---|
//! | `schema` | the format of all others; the same name and value in every format | |
//! | `node/NAME`, `heartbeat/NAME`, `takeover-delay/NAME`, `owner/SESSION`, `floor` | the protocol's | decide |
//! | `lost-node/NAME` | the `node/NAME` of a node that was forgotten, until it comes back | decides likewise |
//! | `holder/NAME` | which installation may use that name | decides which may rejoin |
//! | `fabric/pool`, `fabric/part/NUMBER` | the pool of addresses, and which node holds which part of it | decide which node may give addresses |
//! | `session/ID` | the session's record and its owner | informs |
//! | `talk-name/GROUP/NAME/ID` | empty: a session with this name in the group, whose record decides | informs |
//! | `peer/NAME` | what a node publishes about itself | informs |

use conman_core::ownership::{Key, NodeRecord, Value};
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use conman_registry::{Announcement, SessionRecord};

/// A value that conman did not write.
#[derive(Debug, thiserror::Error)]
#[error(
    "the value of {key} in etcd is not one that this conman writes ({reason}); is the prefix used \
     by something else, or by another version? Run the same conman version on every node."
)]
pub(super) struct BadValue {
    pub(super) key: String,
    reason: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct NodeText {
    #[serde(flatten)]
    record: NodeRecord,
    /// When it was declared dead. Decides only how long the node and its sessions stay listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fenced_at: Option<Timestamp>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FloorText {
    generation: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct TakeoverDelayText {
    takeover_delay_ms: u64,
}

/// The installation that may use a node name. Another state directory, or the same one after a
/// reboot, counts as another installation until it is proven that no other one is live.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holder {
    pub(super) instance: String,
    pub(super) boot_id: String,
}

/// Session data stored next to its ownership.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct SessionDetails {
    pub(super) node: String,
    /// Incarnation of the node when it claimed.
    pub(super) incarnation: u64,
    pub(super) record: SessionRecord,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PeerText {
    pub(super) incarnation: u64,
    pub(super) announcement: Announcement,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SchemaText {
    pub(super) format: u32,
}

/// The keys of one registry.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    prefix: String,
}

impl Keys {
    /// `prefix` ends with `/`.
    pub(super) fn new(prefix: String) -> Self {
        Self { prefix }
    }

    fn below(&self, what: &str, name: &str) -> Vec<u8> {
        format!("{}{what}{name}", self.prefix).into_bytes()
    }

    pub(super) fn all(&self) -> Vec<u8> {
        self.below("", "")
    }

    pub(super) fn of(&self, key: &Key) -> Vec<u8> {
        match key {
            Key::Node(name) => self.below("node/", name),
            Key::Heartbeat(name) => self.below("heartbeat/", name),
            Key::Session(session) => self.below("owner/", session),
            Key::Floor => self.below("floor", ""),
            Key::Silence(name) => self.below("takeover-delay/", name),
            Key::Fabric => self.below("fabric/pool", ""),
            Key::Part(number) => self.below("fabric/part/", &number.to_string()),
        }
    }

    /// Prefix of all ownership keys.
    pub(super) fn owned(&self) -> Vec<u8> {
        self.below("owner/", "")
    }

    pub(super) fn nodes(&self) -> Vec<u8> {
        self.below("node/", "")
    }

    pub(super) fn heartbeats(&self) -> Vec<u8> {
        self.below("heartbeat/", "")
    }

    pub(super) fn takeover_delays(&self) -> Vec<u8> {
        self.below("takeover-delay/", "")
    }

    pub(super) fn parts(&self) -> Vec<u8> {
        self.below("fabric/part/", "")
    }

    pub(super) fn peers(&self) -> Vec<u8> {
        self.below("peer/", "")
    }

    pub(super) fn peer(&self, name: &str) -> Vec<u8> {
        self.below("peer/", name)
    }

    pub(super) fn holder(&self, name: &str) -> Vec<u8> {
        self.below("holder/", name)
    }

    pub(super) fn lost_node(&self, name: &str) -> Vec<u8> {
        self.below("lost-node/", name)
    }

    pub(super) fn details(&self, session: &str) -> Vec<u8> {
        self.below("session/", session)
    }

    pub(super) fn all_details(&self) -> Vec<u8> {
        self.below("session/", "")
    }

    /// Prefix of the keys of sessions with this name in a group.
    pub(super) fn talk_names(&self, name: &str, group: &str) -> Vec<u8> {
        self.below("talk-name/", &format!("{group}/{name}/"))
    }

    pub(super) fn shared_key(&self) -> Vec<u8> {
        self.below("shared-key", "")
    }

    pub(super) fn schema(&self) -> Vec<u8> {
        self.below("schema", "")
    }

    /// The name at the end of a key below `parent`.
    pub(super) fn name_in(parent: &[u8], key: &[u8]) -> Option<String> {
        let name = key.strip_prefix(parent)?;
        String::from_utf8(name.to_vec()).ok()
    }
}

pub(super) fn encode(value: &Value) -> Vec<u8> {
    match value {
        Value::Node(record) => text(record),
        Value::Heartbeat(heartbeat) => text(heartbeat),
        Value::Session(ownership) => text(ownership),
        Value::Floor(generation) => text(&FloorText {
            generation: *generation,
        }),
        Value::Silence(takeover_delay_ms) => text(&TakeoverDelayText {
            takeover_delay_ms: *takeover_delay_ms,
        }),
        Value::Fabric(fabric) => text(fabric),
        Value::Part(part) => text(part),
    }
}

/// Encodes a value as JSON. The value must have only string keys, no NaN, and nothing else that
/// JSON cannot hold.
pub(super) fn text<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// The record of a node that is declared dead now.
pub(super) fn fenced_now(record: NodeRecord) -> Vec<u8> {
    text(&NodeText {
        record,
        fenced_at: Some(Timestamp::now()),
    })
}

/// When the node of this record was declared dead.
pub(super) fn fenced_at(bytes: &[u8]) -> Option<Timestamp> {
    serde_json::from_slice::<NodeText>(bytes).ok()?.fenced_at
}

pub(super) fn parse<T: DeserializeOwned>(key: &[u8], bytes: &[u8]) -> Result<T, BadValue> {
    serde_json::from_slice(bytes).map_err(|error| BadValue {
        key: String::from_utf8_lossy(key).into_owned(),
        reason: error.to_string(),
    })
}

pub(super) fn decode(kind: &Key, key: &[u8], bytes: &[u8]) -> Result<Value, BadValue> {
    Ok(match kind {
        Key::Node(_) => Value::Node(parse(key, bytes)?),
        Key::Heartbeat(_) => Value::Heartbeat(parse(key, bytes)?),
        Key::Session(_) => Value::Session(parse(key, bytes)?),
        Key::Floor => Value::Floor(parse::<FloorText>(key, bytes)?.generation),
        Key::Silence(_) => {
            Value::Silence(parse::<TakeoverDelayText>(key, bytes)?.takeover_delay_ms)
        }
        Key::Fabric => Value::Fabric(parse(key, bytes)?),
        Key::Part(_) => Value::Part(parse(key, bytes)?),
    })
}

#[cfg(test)]
mod tests {
    use conman_core::ownership::{
        FabricRecord, Heartbeat, NodeState, OwnedState, Ownership, PartRecord, Underlay,
    };

    use super::*;

    fn values() -> Vec<(Key, Value)> {
        let node = |state| {
            Value::Node(NodeRecord {
                incarnation: 3,
                state,
            })
        };
        let session = |state| {
            Value::Session(Ownership {
                owner: "a".into(),
                incarnation: u64::MAX,
                generation: 9,
                state,
            })
        };
        let heartbeat = Heartbeat {
            incarnation: 3,
            attempt: u64::MAX,
        };
        let fabric = FabricRecord {
            kind: "vxlan".to_owned(),
            pool: vec!["10.96.0.0/12".to_owned()],
            part: 24,
        };
        let part = PartRecord {
            holder: "a".into(),
            incarnation: 3,
            groups: vec!["team".to_owned()],
            underlay: Underlay {
                v4: Some([10, 0, 0, 1].into()),
                v6: None,
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1_450,
            },
        };
        vec![
            (Key::Node("a".into()), node(NodeState::Live)),
            (Key::Node("a".into()), node(NodeState::Fenced)),
            (Key::Heartbeat("a".into()), Value::Heartbeat(heartbeat)),
            (Key::Session("s".into()), session(OwnedState::Owned)),
            (Key::Session("s".into()), session(OwnedState::Released)),
            (Key::Floor, Value::Floor(7)),
            (Key::Silence("a".into()), Value::Silence(9_090)),
            (Key::Fabric, Value::Fabric(fabric)),
            (Key::Part(7), Value::Part(part)),
        ]
    }

    #[test]
    fn what_is_written_is_read_back() {
        for (key, value) in values() {
            let bytes = encode(&value);
            let read = decode(&key, b"k", &bytes).expect("read back");
            assert_eq!(read, value);
        }
    }

    #[test]
    fn the_texts_are_those_of_format_2() {
        let texts: Vec<_> = values()
            .iter()
            .map(|(_, value)| String::from_utf8(encode(value)).expect("JSON"))
            .collect();
        assert_eq!(
            texts,
            [
                r#"{"incarnation":3,"state":"live"}"#,
                r#"{"incarnation":3,"state":"fenced"}"#,
                r#"{"incarnation":3,"attempt":18446744073709551615}"#,
                r#"{"owner":"a","incarnation":18446744073709551615,"generation":9,"state":"owned"}"#,
                r#"{"owner":"a","incarnation":18446744073709551615,"generation":9,"state":"released"}"#,
                r#"{"generation":7}"#,
                r#"{"takeover_delay_ms":9090}"#,
                r#"{"kind":"vxlan","pool":["10.96.0.0/12"],"part":24}"#,
                r#"{"holder":"a","incarnation":3,"groups":["team"],"underlay":{"v4":"10.0.0.1","v6":null,"mac":[2,0,0,0,0,1],"mtu":1450}}"#,
            ],
            "a change of these is another format"
        );
    }

    #[test]
    fn the_record_of_a_dead_node_says_since_when() {
        let record = NodeRecord {
            incarnation: 3,
            state: NodeState::Fenced,
        };
        let bytes = fenced_now(record);
        let read = decode(&Key::Node("a".into()), b"k", &bytes).expect("read back");
        assert_eq!(read, Value::Node(record));
        assert!(fenced_at(&bytes).is_some_and(|at| at <= Timestamp::now()));
        assert_eq!(fenced_at(&encode(&read)), None, "of an earlier build");
    }

    #[test]
    fn fields_of_a_later_version_are_ignored_and_missing_ones_are_refused() {
        for (key, value) in values() {
            let mut later: serde_json::Value =
                serde_json::from_slice(&encode(&value)).expect("JSON");
            later["hibernates"] = true.into();
            let read = decode(&key, b"k", &text(&later)).expect("read");
            assert_eq!(read, value);
        }
        for bytes in [&br#"{"x":7}"#[..], b"7"] {
            decode(&Key::Floor, b"/conman/floor", bytes).expect_err("no value");
        }
    }
}
