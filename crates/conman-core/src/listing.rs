//! Selects the sessions of a listing and divides them into pages.
//!
//! A page ends with the id of its last session, and the next page begins after that id. So sessions
//! that appear or disappear between two pages neither shift nor repeat others.

use std::collections::BTreeMap;

use conman_proto::{FieldError, SessionId, SessionState};

use crate::nearest::nearest;
use crate::resolve::{MAX_LABEL_VALUE_BYTES, is_label_key};

/// Default number of sessions in a page.
pub const DEFAULT_LIMIT: usize = 100;
/// Maximum number of sessions in a page.
pub const MAX_LIMIT: usize = 1_000;
/// Maximum number of label filters in a query.
const MAX_LABEL_FILTERS: usize = 16;

const PARAMETERS: [&str; 5] = ["state", "node", "label", "limit", "cursor"];

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
    /// Parses the decoded parameters of a URL's query. `state` may be repeated or contain commas,
    /// `label` may be repeated, as `key` or `key=value`; all mistakes are reported.
    pub fn parse<'a>(
        parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, Vec<FieldError>> {
        let mut query = Self::default();
        let mut mistakes = Vec::new();
        for (name, value) in parameters {
            if let Err(message) = query.take(name, value) {
                let field = name.chars().take(64).flat_map(char::escape_debug).collect();
                mistakes.push(FieldError { field, message });
            }
        }
        if mistakes.is_empty() {
            Ok(query)
        } else {
            Err(mistakes)
        }
    }

    fn take(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "state" => {
                for state in value.split(',').map(|text| parse_state(text.trim())) {
                    let state = state?;
                    if !self.states.contains(&state) {
                        self.states.push(state);
                    }
                }
            }
            "node" => self.node = Some(value.to_owned()),
            "label" => {
                if self.labels.len() == MAX_LABEL_FILTERS {
                    return Err(format!("at most {MAX_LABEL_FILTERS} labels are allowed"));
                }
                self.labels.push(parse_label(value)?);
            }
            "limit" => {
                self.limit = value
                    .parse()
                    .ok()
                    .filter(|limit| (1..=MAX_LIMIT).contains(limit))
                    .ok_or_else(|| format!("must be a number from 1 to {MAX_LIMIT}"))?;
            }
            "cursor" => {
                let cursor = value
                    .parse()
                    .map_err(|_| "must be the `next` of an earlier page")?;
                self.after = Some(cursor);
            }
            unknown => {
                let hint = nearest(unknown, PARAMETERS)
                    .map(|near| format!("; did you mean `{near}`?"))
                    .unwrap_or_default();
                let known = PARAMETERS.join(", ");
                return Err(format!("is not a parameter of a listing ({known}){hint}"));
            }
        }
        Ok(())
    }

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

fn parse_state(text: &str) -> Result<SessionState, String> {
    text.parse().map_err(|_| {
        let known = SessionState::ALL.map(SessionState::as_str);
        let hint = nearest(text, known)
            .map(|near| format!("; did you mean `{near}`?"))
            .unwrap_or_default();
        format!("must be one of {}{hint}", known.join(", "))
    })
}

fn parse_label(text: &str) -> Result<LabelFilter, String> {
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (text, None),
    };
    if !is_label_key(key) || value.is_some_and(|value| value.len() > MAX_LABEL_VALUE_BYTES) {
        return Err("must be `key` or `key=value` of a label that a session can have".to_owned());
    }
    Ok(LabelFilter {
        key: key.to_owned(),
        value: value.map(str::to_owned),
    })
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

    #[test]
    fn a_query_is_read_whole() {
        let query = ListQuery::parse([
            ("state", "running,stuck"),
            ("state", "running"),
            ("label", "team=blue=ish"),
            ("label", "gpu"),
            ("node", "n1"),
            ("limit", "1000"),
            ("cursor", "abc"),
        ])
        .expect("a query");
        assert_eq!(query.states, [SessionState::Running, SessionState::Stuck]);
        assert_eq!(
            query.labels,
            [
                LabelFilter {
                    key: "team".to_owned(),
                    value: Some("blue=ish".to_owned())
                },
                LabelFilter {
                    key: "gpu".to_owned(),
                    value: None
                },
            ]
        );
        assert_eq!((query.limit, query.node.as_deref()), (1_000, Some("n1")));
    }

    #[test]
    fn every_mistake_of_a_query_is_told_with_what_is_allowed() {
        let mistakes = ListQuery::parse([
            ("state", "runing"),
            ("limit", "0"),
            ("limit", "1001"),
            ("limit", "-1"),
            ("cursor", "../x"),
            ("label", "UPPER"),
            ("lable", "x"),
        ])
        .expect_err("seven mistakes");
        assert_eq!(mistakes.len(), 7);
        assert!(
            mistakes[0].message.contains("did you mean `running`?"),
            "{mistakes:?}"
        );
        assert!(mistakes[1].message.contains("1 to 1000"), "{mistakes:?}");
        assert!(
            mistakes[6].message.contains("did you mean `label`?"),
            "{mistakes:?}"
        );
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
                let limit = query.limit.to_string();
                let parsed = ListQuery::parse([("cursor", next.as_str()), ("limit", &limit)])
                    .expect("a cursor reads back");
                prop_assert!(parsed.after > query.after);
                query.after = parsed.after;
            }
            prop_assert_eq!(paged, whole);
        }

        #[test]
        fn no_query_panics(parameters in proptest::collection::vec(("\\PC{0,8}", "\\PC{0,8}"), 0..5)) {
            let pairs = parameters.iter().map(|(name, value)| (name.as_str(), value.as_str()));
            let _ = ListQuery::parse(pairs);
        }
    }
}
