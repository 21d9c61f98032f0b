//! Forgets lost nodes. Otherwise machines that come with a new name each time would fill the
//! registry.
//!
//! ```text
//!  node/NAME (fenced, owns nothing) ──forget──▶ lost-node/NAME ──recall, before it joins──▶ node/NAME
//! ```
//! Its incarnation must only grow, or a late claim of an earlier life would be mistaken for a
//! current one. So the record is moved aside, and moved back before a node of that name joins; a
//! rejoin commits only while there is none aside. Everything else about the node is deleted, its parts
//! of the fabric's pool included: a node can be forgotten only when another node could claim them.

use std::collections::HashMap;
use std::fmt;

use conman_core::ownership::{Answer, Key, NodeState, OwnedState, PartRecord, Value};

use super::codec::{self, Keys};
use super::notes::unavailable;
use super::shared::Shared;
use super::wire::{self, TxnRequest};
use conman_registry::ForgetError;

/// Parts that one transaction deletes: etcd's default limit is 128 operations.
const MAX_DELETED: usize = 30;

/// A node that cannot claim anything unless it comes back, and its keys.
struct LostNode {
    node: String,
    record: Vec<u8>,
    /// The revision that wrote the record.
    revision: i64,
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
    let Some(Some((name, bytes, revision))) = entries.first() else {
        return Err(ForgetError::Unknown { node });
    };
    let value = codec::decode(&record, name, bytes).map_err(failed)?;
    if !matches!(value, Value::Node(record) if record.state == NodeState::Fenced) {
        return Err(ForgetError::Alive { node });
    }
    let (record, revision) = (bytes.clone(), *revision);
    let revisions = entries.iter().map(|entry| match entry {
        Some((_, _, revision)) => *revision,
        None => 0,
    });
    Ok(LostNode {
        node,
        record,
        revision,
        kept: names.into_iter().zip(revisions).collect(),
    })
}

async fn put_aside(shared: &Shared, gone: LostNode, owners: &Owners) -> Result<(), ForgetError> {
    if let Some((count, first)) = owners.get(&gone.node) {
        return Err(ForgetError::Owns {
            node: gone.node,
            count: *count,
            first: first.clone(),
        });
    }
    delete_parts(shared, &gone).await?;
    let LostNode {
        node, record, kept, ..
    } = gone;
    let mut request = TxnRequest::default();
    let aside = shared.store.keys.lost_node(&node);
    request.success.push(wire::put(aside, record));
    for (key, revision) in kept {
        let unchanged = wire::unchanged_since(key.clone(), revision);
        request.compare.push(unchanged);
        request.success.push(wire::delete(key));
    }
    commit(shared, request, &node).await?;
    shared.hurry.notify_one();
    Ok(())
}

/// Deletes the parts that the node holds. It has no session with an address of them, and gets none while its record is
/// unchanged.
async fn delete_parts(shared: &Shared, gone: &LostNode) -> Result<(), ForgetError> {
    let keys = &shared.store.keys;
    let read = shared.store.all_below(&keys.parts()).await;
    let mut parts = read.map_err(failed)?;
    // A record that cannot be read may be another node's.
    parts.retain(|(key, bytes, _)| {
        codec::parse::<PartRecord>(key, bytes).is_ok_and(|part| *part.holder == *gone.node)
    });
    let record = keys.of(&Key::Node(gone.node.as_str().into()));
    for batch in parts.chunks(MAX_DELETED) {
        let mut request = TxnRequest {
            compare: vec![wire::unchanged_since(record.clone(), gone.revision)],
            success: Vec::new(),
        };
        for (key, _, revision) in batch {
            let unchanged = wire::unchanged_since(key.clone(), *revision);
            request.compare.push(unchanged);
            request.success.push(wire::delete(key.clone()));
        }
        commit(shared, request, &gone.node).await?;
    }
    Ok(())
}

async fn commit(shared: &Shared, request: TxnRequest, node: &str) -> Result<(), ForgetError> {
    let written = shared.store.transact(request).await;
    match (written.answer, written.trouble) {
        (Answer::Committed, _) => Ok(()),
        (_, Some(trouble)) => Err(failed(trouble)),
        (_, None) => Err(failed(format!(
            "node `{node}` is coming back, or another node has claimed a part of it; try again"
        ))),
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
