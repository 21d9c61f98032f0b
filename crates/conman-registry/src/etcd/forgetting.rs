//! Forgetting a node that is gone: machines that come with a new name each time would fill the
//! registry otherwise.
//!
//! ```text
//!  node/NAME (fenced, owns nothing) ──forget──▶ gone/NAME ──recall, before it joins──▶ node/NAME
//! ```
//! Its incarnation must only ever grow, or a claim of an earlier life that arrives late would be
//! taken for one of the present. So the record is put aside, where nobody looks at it, and put back
//! before a node of that name joins; a rejoin is taken only while there is none aside. All else of
//! the node is deleted, but for how long it has been gone, which is of use for as long as records of
//! its sessions are there.

use std::sync::Arc;

use conman_core::ownership::{Answer, Key, NodeState, OwnedState, Value};

use super::codec::{self, Keys};
use super::notes::unavailable;
use super::shared::Shared;
use super::wire::{self, TxnRequest};
use crate::ForgetError;

/// Forgets a node, unless it may be alive or still owns sessions.
pub(super) async fn forget(shared: &Shared, node: &str) -> Result<(), ForgetError> {
    let keys = &shared.store.keys;
    let (record, heartbeat) = (Key::Node(node.into()), Key::Heartbeat(node.into()));
    let names = [
        keys.of(&record),
        keys.of(&heartbeat),
        keys.holder(node),
        keys.peer(node),
        keys.of(&Key::Silence(node.into())),
    ];
    let failed = |reason: String| ForgetError::Registry(unavailable(&reason));
    let read = shared.store.get(&names).await;
    let (entries, _) = read.map_err(|error| failed(error.to_string()))?;
    let Some(Some((name, bytes, _))) = entries.first() else {
        let node = node.to_owned();
        return Err(ForgetError::Unknown { node });
    };
    let value = codec::decode(&record, name, bytes).map_err(|error| failed(error.to_string()))?;
    if !matches!(value, Value::Node(record) if record.state == NodeState::Fenced) {
        let node = node.to_owned();
        return Err(ForgetError::Alive { node });
    }
    // It can claim nothing more while it is fenced; only what it owns by now counts.
    let owned = owned(shared, node).await?;
    if let Some(first) = owned.first() {
        return Err(ForgetError::Owns {
            node: node.to_owned(),
            count: owned.len(),
            first: first.clone(),
        });
    }
    let mut request = TxnRequest::default();
    request
        .success
        .push(wire::put(keys.gone(node), bytes.clone()));
    for (key, entry) in names.into_iter().zip(&entries) {
        let revision = entry.as_ref().map_or(0, |(_, _, revision)| *revision);
        let unchanged = wire::unchanged_since(key.clone(), revision);
        request.compare.push(unchanged);
        request.success.push(wire::delete(key));
    }
    let written = shared.store.transact(request).await;
    match (written.answer, written.trouble) {
        (Answer::Committed, _) => {
            shared.hurry.notify_one();
            Ok(())
        }
        (_, Some(trouble)) => Err(failed(trouble)),
        (_, None) => Err(failed(format!("node `{node}` is just coming back"))),
    }
}

/// The sessions that a node owns.
async fn owned(shared: &Shared, node: &str) -> Result<Vec<String>, ForgetError> {
    let failed = |reason: String| ForgetError::Registry(unavailable(&reason));
    let parent = shared.store.keys.owned();
    let entries = shared.store.all_below(&parent).await;
    let mut owned = Vec::new();
    for (key, bytes, _) in entries.map_err(|error| failed(error.to_string()))? {
        let value = codec::decode(&Key::Session("".into()), &key, &bytes)
            .map_err(|error| failed(error.to_string()))?;
        if let Value::Session(ownership) = value
            && &*ownership.owner == node
            && ownership.state == OwnedState::Owned
        {
            owned.extend(Keys::name_in(&parent, &key));
        }
    }
    Ok(owned)
}

/// Forgets those that have been gone for long; what cannot be forgotten now is tried again later.
pub(super) async fn forget_all(shared: Arc<Shared>, nodes: Vec<String>) {
    for node in nodes {
        match forget(&shared, &node).await {
            Ok(()) => tracing::info!(node, "forgotten: it has been gone for long"),
            Err(error) => tracing::debug!(node, %error, "not forgotten yet"),
        }
    }
}

/// Puts back what was put aside of this node, if it was forgotten.
pub(super) async fn recall(shared: &Shared) -> Result<(), String> {
    let keys = &shared.store.keys;
    let (node, gone) = (
        keys.of(&Key::Node(shared.me.clone())),
        keys.gone(&shared.me),
    );
    let read = shared.store.get(&[node.clone(), gone.clone()]).await;
    let (entries, _) = read.map_err(|error| error.to_string())?;
    let Ok([present, aside]) = <[_; 2]>::try_from(entries) else {
        return Ok(());
    };
    let Some((_, bytes, revision)) = aside else {
        return Ok(());
    };
    let mut request = TxnRequest {
        compare: vec![wire::unchanged_since(gone.clone(), revision)],
        success: vec![wire::delete(gone)],
    };
    if present.is_none() {
        request.compare.push(wire::is(node.clone(), None));
        request.success.push(wire::put(node, bytes));
    }
    let written = shared.store.transact(request).await;
    match written.answer {
        Answer::Committed => Ok(()),
        _ => Err(written
            .trouble
            .unwrap_or_else(|| "another conman recalls this node as well".to_owned())),
    }
}
