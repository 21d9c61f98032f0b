//! Follows the pages of the list of sessions.

use std::collections::BTreeSet;

use conman_proto::{SessionList, SessionState};
use http::Method;
use serde_json::Value;

use super::Context;
use crate::client::{ClientError, PROMPT, encode};
use crate::human::printable;

/// Sessions per request: the most that the API returns.
const PAGE: u32 = 1_000;

/// Bound on the pages that are followed: a million sessions, far more than a node can hold.
const MAX_PAGES: usize = 1_000;

/// A filter of sessions.
#[derive(Debug, Clone, Default)]
pub(super) struct Filter {
    pub(super) states: Vec<SessionState>,
    pub(super) labels: Vec<String>,
    /// Only of this node, or `self`.
    pub(super) node: Option<String>,
}

impl Filter {
    /// Sessions that may still have a process.
    pub(super) fn not_ended() -> Self {
        let states = SessionState::ALL
            .into_iter()
            .filter(|state| !state.is_ended())
            .collect();
        Self {
            states,
            ..Self::default()
        }
    }
}

/// All sessions that pass the filter, typed and as the daemon wrote them.
pub(super) async fn all(
    context: &Context,
    filter: &Filter,
) -> Result<(Vec<conman_proto::Session>, Vec<Value>), ClientError> {
    let mut base = format!("/v1/sessions?limit={PAGE}");
    for state in &filter.states {
        base.push_str(&format!("&state={state}"));
    }
    for label in &filter.labels {
        base.push_str(&format!("&label={}", encode(label)));
    }
    if let Some(node) = &filter.node {
        base.push_str(&format!("&node={}", encode(node)));
    }
    let (mut sessions, mut raw) = (Vec::new(), Vec::new());
    let mut warned = BTreeSet::new();
    let mut path = base.clone();
    for _ in 0..MAX_PAGES {
        let mut page = context
            .client
            .answer::<SessionList>(Method::GET, &path, None::<&()>, PROMPT)
            .await?;
        sessions.append(&mut page.value.sessions);
        for warning in std::mem::take(&mut page.value.warnings) {
            if warned.insert(warning.clone()) {
                context.output.warning(&printable(&warning));
            }
        }
        if let Some(Value::Array(values)) = page.raw.get_mut("sessions") {
            raw.append(values);
        }
        match page.value.next {
            Some(cursor) => path = format!("{base}&cursor={}", encode(&cursor)),
            None => return Ok((sessions, raw)),
        }
    }
    Err(ClientError::NotUnderstood {
        peer: "the list of sessions".to_owned(),
        reason: format!("it does not end after {MAX_PAGES} pages"),
    })
}
