//! Selects the sessions of a listing and divides them into pages.
//!
//! A page ends with the id of its last session, and the next page begins after that id. So sessions
//! that appear or disappear between two pages neither shift nor repeat others.

use std::collections::BTreeMap;
use std::str::FromStr;

use conman_proto::{SessionId, SessionState};

use crate::nearest::nearest;
use crate::resolve::{MAX_LABEL_VALUE_BYTES, is_label_key};

/// Default number of sessions in a page.
pub const DEFAULT_LIMIT: usize = 100;
/// Maximum number of sessions in a page.
pub const MAX_LIMIT: usize = 1_000;
/// Maximum number of label filters in a query.
pub const MAX_LABEL_FILTERS: usize = 16;

/// A condition on a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelFilter {
    pub key: String,
    /// Any value if absent.
    pub value: Option<String>,
}

/// The conditions of a query; all that are given must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListQuery {
    /// Any of these; all states if empty.
    pub states: Vec<SessionState>,
    pub node: Option<String>,
    /// All of these.
    pub labels: Vec<LabelFilter>,
    pub limit: usize,
    /// Only sessions whose id is greater.
    pub after: Option<SessionId>,
}

impl Default for ListQuery {
    fn default() -> Self {
        Self {
            states: Vec::new(),
            node: None,
            labels: Vec::new(),
            limit: DEFAULT_LIMIT,
            after: None,
        }
    }
}

impl ListQuery {
    /// Whether a session fulfils every condition, regardless of its page.
    #[must_use]
    pub fn matches(&self, session: &impl Listed) -> bool {
        (self.states.is_empty() || self.states.contains(&session.state()))
            && self
                .node
                .as_deref()
                .is_none_or(|node| node == session.node())
            && self.labels.iter().all(|filter| {
                let value = session.labels().get(&filter.key);
                match &filter.value {
                    Some(wanted) => value == Some(wanted),
                    None => value.is_some(),
                }
            })
    }

    /// The page of `sessions`, which must be ordered by id, that this query selects.
    pub fn page<T: Listed>(&self, sessions: impl IntoIterator<Item = T>) -> Page<T> {
        let mut wanted = sessions
            .into_iter()
            .filter(|session| self.after.as_ref().is_none_or(|after| session.id() > after))
            .filter(|session| self.matches(session));
        let items: Vec<T> = wanted.by_ref().take(self.limit).collect();
        let more = wanted.next().is_some();
        let next = items
            .last()
            .filter(|_| more)
            .map(|last| last.id().to_string());
        Page { items, next }
    }
}

/// The properties of a session that a listing uses.
pub trait Listed {
    fn id(&self) -> &SessionId;
    fn state(&self) -> SessionState;
    fn node(&self) -> &str;
    fn labels(&self) -> &BTreeMap<String, String>;
}

impl Listed for conman_proto::Session {
    fn id(&self) -> &SessionId {
        &self.id
    }

    fn state(&self) -> SessionState {
        self.state
    }

    fn node(&self) -> &str {
        &self.node
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        &self.spec.labels
    }
}

impl<T: Listed> Listed for &T {
    fn id(&self) -> &SessionId {
        (**self).id()
    }

    fn state(&self) -> SessionState {
        (**self).state()
    }

    fn node(&self) -> &str {
        (**self).node()
    }

    fn labels(&self) -> &BTreeMap<String, String> {
        (**self).labels()
    }
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// The next page's `cursor`; `None` on the last page.
    pub next: Option<String>,
}

/// A state by its name.
///
/// # Errors
/// Names the known states, and the one that was probably meant.
pub fn parse_state(text: &str) -> Result<SessionState, String> {
    text.parse().map_err(|_| {
        let known = SessionState::ALL.map(SessionState::as_str);
        let hint = nearest(text, known)
            .map(|near| format!("; did you mean `{near}`?"))
            .unwrap_or_default();
        format!("must be one of {}{hint}", known.join(", "))
    })
}

impl FromStr for LabelFilter {
    type Err = &'static str;

    /// Reads `key=value`, or `key` for any value.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (text, None),
        };
        if !is_label_key(key) || value.is_some_and(|value| value.len() > MAX_LABEL_VALUE_BYTES) {
            return Err("must be `key` or `key=value` of a label that a session can have");
        }
        Ok(Self {
            key: key.to_owned(),
            value: value.map(str::to_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Item {
        id: SessionId,
        state: SessionState,
        node: &'static str,
        labels: BTreeMap<String, String>,
    }

    impl Listed for Item {
        fn id(&self) -> &SessionId {
            &self.id
        }

        fn state(&self) -> SessionState {
            self.state
        }

        fn node(&self) -> &str {
            self.node
        }

        fn labels(&self) -> &BTreeMap<String, String> {
            &self.labels
        }
    }

    fn items() -> impl Strategy<Value = Vec<Item>> {
        let one = (
            proptest::sample::select(SessionState::ALL.to_vec()),
            proptest::sample::select(vec!["one", "two"]),
            proptest::collection::btree_map("[ab]", "[xy]", 0..2),
        );
        proptest::collection::btree_map("[a-c]{1,4}", one, 0..40).prop_map(|map| {
            map.into_iter()
                .map(|(id, (state, node, labels))| Item {
                    id: id.parse().expect("a session id"),
                    state,
                    node,
                    labels,
                })
                .collect()
        })
    }

    fn queries() -> impl Strategy<Value = ListQuery> {
        (
            proptest::collection::vec(proptest::sample::select(SessionState::ALL.to_vec()), 0..3),
            proptest::option::of(proptest::sample::select(vec!["one", "two", "none"])),
            proptest::collection::vec(("[ab]", proptest::option::of("[xy]")), 0..2),
            1_usize..8,
        )
            .prop_map(|(states, node, labels, limit)| ListQuery {
                states,
                node: node.map(str::to_owned),
                labels: labels
                    .into_iter()
                    .map(|(key, value)| LabelFilter { key, value })
                    .collect(),
                limit,
                after: None,
            })
    }

    proptest! {
        #[test]
        fn pages_put_together_are_the_whole_filtered_list(all in items(), query in queries()) {
            let whole: Vec<&Item> = all.iter().filter(|item| query.matches(item)).collect();
            let mut query = query;
            let mut paged = Vec::new();
            loop {
                let page = query.page(&all);
                prop_assert!(page.items.len() <= query.limit);
                paged.extend(page.items);
                let Some(next) = page.next else { break };
                let after = Some(next.parse::<SessionId>().expect("a cursor reads back"));
                prop_assert!(after > query.after);
                query.after = after;
            }
            prop_assert_eq!(paged, whole);
        }
    }
}
