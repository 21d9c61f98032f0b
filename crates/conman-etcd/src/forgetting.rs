//! Forgets lost nodes. Otherwise machines that come with a new name each time would fill the
//! registry.
//!
//! ```text
//!  node/NAME (fenced, owns nothing) ──forget──▶ lost-node/NAME ──recall, before it joins──▶ node/NAME
//! ```
//! Its incarnation must only grow, or a late claim of an earlier life would be mistaken for a
//! current one. So the record is moved aside, and moved back before a node of that name joins; a
//! rejoin commits only while there is none aside. Everything else about the node is deleted.

use std::collections::HashMap;
use std::fmt;

use conman_core::ownership::{Answer, Key, NodeState, OwnedState, Value};

use super::codec::{self, Keys};
use super::notes::unavailable;
use super::shared::Shared;
use super::wire::{self, TxnRequest};
use conman_registry::ForgetError;

/// A node that cannot claim anything unless it comes back, and its keys.
struct LostNode {
    node: String,
    record: Vec<u8>,
    /// Keys, and the revisions that wrote them: 0 for none.
    kept: Vec<(Vec<u8>, i64)>,
}

/// What each node owns: the number of sessions, and one of them.
type Owners = HashMap<String, (usize, String)>;

/// Forgets a node, unless it may be alive or still owns sessions.
pub(super) async fn forget(shared: &Shared, node: &str) -> Result<(), ForgetError> {
    let gone = look(shared, node).await?;
    // Ownership counts only if it is read after the node was seen to be fenced.
    let owners = owners(shared).await?;
    put_aside(shared, gone, &owners).await
}

/// Reads whether a node is fenced.
async fn look(shared: &Shared, node: &str) -> Result<LostNode, ForgetError> {
    let keys = &shared.store.keys;
    let record = Key::Node(node.into());
    let names = [
        keys.of(&record),
        keys.of(&Key::Heartbeat(node.into())),
        keys.holder(node),
        keys.peer(node),
        keys.of(&Key::Silence(node.into())),
    ];
    let node = node.to_owned();
    let (entries, _) = shared.store.get(&names).await.map_err(failed)?;
    let Some(Some((name, bytes, _))) = entries.first() else {
        return Err(ForgetError::Unknown { node });
    };
    let value = codec::decode(&record, name, bytes).map_err(failed)?;
    if !matches!(value, Value::Node(record) if record.state == NodeState::Fenced) {
        return Err(ForgetError::Alive { node });
    }
    let record = bytes.clone();
    let revisions = entries.iter().map(|entry| match entry {
        Some((_, _, revision)) => *revision,
        None => 0,
    });
    Ok(LostNode {
        node,
        record,
        kept: names.into_iter().zip(revisions).collect(),
    })
}

async fn put_aside(shared: &Shared, gone: LostNode, owners: &Owners) -> Result<(), ForgetError> {
    let LostNode { node, record, kept } = gone;
    if let Some((count, first)) = owners.get(&node) {
        return Err(ForgetError::Owns {
            node,
            count: *count,
            first: first.clone(),
        });
    }
    let mut request = TxnRequest::default();
    let aside = shared.store.keys.lost_node(&node);
    request.success.push(wire::put(aside, record));
    for (key, revision) in kept {
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
        (_, None) => Err(failed(format!("node `{node}` is coming back"))),
    }
}

async fn owners(shared: &Shared) -> Result<Owners, ForgetError> {
    let parent = shared.store.keys.owned();
    let entries = shared.store.all_below(&parent).await.map_err(failed)?;
    let mut owners = Owners::new();
    for (key, bytes, _) in entries {
        let value = codec::decode(&Key::Session("".into()), &key, &bytes).map_err(failed)?;
        if let Value::Session(ownership) = value
            && ownership.state == OwnedState::Owned
            && let Some(session) = Keys::name_in(&parent, &key)
        {
            let owner = owners.entry(ownership.owner.to_string());
            owner.or_insert((0, session)).0 += 1;
        }
    }
    Ok(owners)
}

fn failed(reason: impl fmt::Display) -> ForgetError {
    ForgetError::Registry(unavailable(&reason.to_string()))
}

/// Restores the record of this node, if it was forgotten.
pub(super) async fn recall(shared: &Shared) -> Result<(), String> {
    let keys = &shared.store.keys;
    let (node, gone) = (
        keys.of(&Key::Node(shared.me.clone())),
        keys.lost_node(&shared.me),
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
            .unwrap_or_else(|| "another conman restores this node's record too".to_owned())),
    }
}
