//! Metrics of the fleet.

use std::time::Duration;

use conman_core::ownership::{
    Key, NodeName, NodeState, OwnedState, SessionName, Transaction, Value,
};

use conman_registry::Standing;

const LIVE: &str = "conman_fleet_ownership_valid";
const LAPSES: &str = "conman_fleet_lapses_total";
const RELEASES: &str = "conman_fleet_releases_total";
const TAKEOVERS: &str = "conman_fleet_takeovers_total";
const FENCED: &str = "conman_fleet_nodes_fenced_total";
const LOOKUPS: &str = "conman_fleet_lookups_total";
const CALLS: &str = "conman_etcd_request_duration_seconds";
const FAILURES: &str = "conman_etcd_request_failures_total";
const NOT_COMPACTED: &str = "conman_etcd_compaction_failures_total";

/// Describes the metrics and sets the counters to zero, so that they are exported before the first
/// event.
pub(super) fn describe() {
    metrics::describe_gauge!(LIVE, "1 while this node's ownership is valid, 0 otherwise");
    metrics::describe_counter!(
        LAPSES,
        "How often the renewal of this node's ownership was late, and how often it lapsed"
    );
    metrics::describe_counter!(
        RELEASES,
        "Sessions that this node has given up in the registry"
    );
    metrics::describe_counter!(
        TAKEOVERS,
        "Sessions of lost nodes that this node has claimed"
    );
    metrics::describe_counter!(FENCED, "Silent nodes that this node has declared dead");
    metrics::describe_counter!(
        LOOKUPS,
        "Lookups of the node that owns a session, by whether etcd was read"
    );
    metrics::describe_histogram!(CALLS, "Time until etcd answered, by call");
    metrics::describe_counter!(FAILURES, "Calls to etcd that failed");
    metrics::describe_counter!(
        NOT_COMPACTED,
        "Failed compactions of etcd, which fills up without them"
    );
    for name in [RELEASES, TAKEOVERS, FENCED, NOT_COMPACTED] {
        metrics::counter!(name).absolute(0);
    }
    for from in ["memory", "etcd"] {
        metrics::counter!(LOOKUPS, "from" => from).absolute(0);
    }
    for to in ["late", "fenced"] {
        metrics::counter!(LAPSES, "to" => to).absolute(0);
    }
}

pub(super) fn not_compacted() {
    metrics::counter!(NOT_COMPACTED).increment(1);
}

/// This node's standing has changed.
pub(super) fn stands(standing: &Standing) {
    let (live, lapse) = match standing {
        Standing::Alone | Standing::Live => (1.0, None),
        Standing::Late => (1.0, Some("late")),
        Standing::Fenced => (0.0, Some("fenced")),
        Standing::Joining { .. } => (0.0, None),
    };
    metrics::gauge!(LIVE).set(live);
    if let Some(to) = lapse {
        metrics::counter!(LAPSES, "to" => to).increment(1);
    }
}

/// A caller looks up which node has a session.
pub(super) fn looked_up(from: &'static str) {
    metrics::counter!(LOOKUPS, "from" => from).increment(1);
}

/// A call to etcd has ended; `path` is the gRPC path.
pub(super) fn called(path: &'static str, took: Duration, failed: bool) {
    let call = path.rsplit('/').next().unwrap_or(path);
    if failed {
        metrics::counter!(FAILURES, "call" => call).increment(1);
    } else {
        metrics::histogram!(CALLS, "call" => call).record(took.as_secs_f64());
    }
}

/// What is counted when a transaction of this node commits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tally {
    Release,
    /// Of a session that a lost node owned.
    Takeover {
        session: SessionName,
        generation: u64,
        from: NodeName,
    },
    NodeFenced {
        node: NodeName,
    },
}

impl Tally {
    pub(super) fn of(transaction: &Transaction, me: &NodeName) -> Option<Self> {
        let before = |key: &Key| {
            let mut compared = transaction.compare.iter();
            compared.find_map(|(compared, value)| (compared == key).then_some(value.as_ref())?)
        };
        transaction
            .write
            .iter()
            .find_map(|(key, value)| match value.as_ref()? {
                Value::Session(session) => match (session.state, before(key)) {
                    (OwnedState::Released, _) => Some(Self::Release),
                    (OwnedState::Owned, Some(Value::Session(before))) => {
                        let was_others = before.state == OwnedState::Owned && before.owner != *me;
                        let Key::Session(name) = key else {
                            return None;
                        };
                        was_others.then(|| Self::Takeover {
                            session: name.clone(),
                            generation: session.generation,
                            from: before.owner.clone(),
                        })
                    }
                    (OwnedState::Owned, _) => None,
                },
                Value::Node(record) => match key {
                    Key::Node(node) if node != me && record.state == NodeState::Fenced => {
                        Some(Self::NodeFenced { node: node.clone() })
                    }
                    _ => None,
                },
                _ => None,
            })
    }

    pub(super) fn count(&self) {
        let name = match self {
            Self::Release => RELEASES,
            Self::Takeover { .. } => TAKEOVERS,
            Self::NodeFenced { .. } => FENCED,
        };
        metrics::counter!(name).increment(1);
    }
}

#[cfg(test)]
mod tests {
    use conman_core::ownership::{NodeRecord, Ownership};

    use super::*;

    fn session(owner: &str, state: OwnedState) -> Value {
        Value::Session(Ownership {
            owner: owner.into(),
            incarnation: 1,
            generation: 1,
            state,
        })
    }

    fn tally(before: Option<Value>, after: Value) -> Option<Tally> {
        let key = || Key::Session("alice".into());
        let transaction = Transaction {
            compare: vec![(key(), before)],
            write: vec![(key(), Some(after))],
        };
        Tally::of(&transaction, &"me".into())
    }

    #[test]
    fn a_claim_counts_as_a_takeover_only_where_another_node_still_owned_it() {
        use OwnedState::{Owned, Released};
        let mine = || session("me", Owned);
        assert_eq!(tally(None, mine()), None);
        assert_eq!(tally(Some(session("other", Released)), mine()), None);
        assert_eq!(tally(Some(session("me", Owned)), mine()), None);
        let theirs = session("other", Owned);
        let takeover = Tally::Takeover {
            session: "alice".into(),
            generation: 1,
            from: "other".into(),
        };
        assert_eq!(tally(Some(theirs), mine()), Some(takeover));
        let given_up = session("me", Released);
        assert_eq!(tally(Some(mine()), given_up), Some(Tally::Release));
    }

    #[test]
    fn a_node_counts_as_declared_dead_only_where_it_is_another() {
        let fence = |name: &str| {
            let record = NodeRecord {
                incarnation: 1,
                state: NodeState::Fenced,
            };
            let transaction = Transaction {
                compare: Vec::new(),
                write: vec![(Key::Node(name.into()), Some(Value::Node(record)))],
            };
            Tally::of(&transaction, &"me".into())
        };
        let node = "other".into();
        assert_eq!(fence("other"), Some(Tally::NodeFenced { node }));
        assert_eq!(fence("me"), None);
    }
}
