//! Sessions that talk to others, by name.
//!
//! A session's name in a group is a key from the record of its container on until its release. It is a hint at
//! the records to read: a session of a lost node keeps it.

use std::collections::BTreeSet;

use conman_core::{MAX_NAMED, TalkName, TalkingSession, names_in_groups};
use conman_proto::SessionId;
use conman_registry::{HeldParts, RegistryError, SessionRecord};
use futures_util::future::join_all;

use super::codec::{Keys, SessionDetails};
use super::notes::{self, not_read};
use super::shared::Shared;
use super::store::ReadError;
use super::wire::{self, RequestOp};

/// Keys of one name that are read at a time: more than an answer has, as some may be of sessions of lost nodes.
const PAGE: usize = 2 * MAX_NAMED;
/// Pages that are read for one answer: sessions of lost nodes may fill several.
const MAX_PAGES: usize = 8;

/// The keys of a session's names.
fn keys_of(keys: &Keys, record: &SessionRecord) -> BTreeSet<Vec<u8>> {
    let names = names_in_groups(&record.spec);
    let key =
        |(name, group)| [&keys.talk_names(name, group), record.id.as_str().as_bytes()].concat();
    names.map(key).collect()
}

/// What a change of a session's record changes of its names.
pub(super) fn changes(
    keys: &Keys,
    before: &SessionRecord,
    after: &SessionRecord,
) -> Vec<RequestOp> {
    let names = |record: &SessionRecord| match record.container {
        Some(_) => keys_of(keys, record),
        None => BTreeSet::new(),
    };
    let (before, after) = (names(before), names(after));
    let gone = before.difference(&after).cloned().map(wire::delete);
    let new = after.difference(&before).cloned();
    gone.chain(new.map(|key| wire::put(key, Vec::new())))
        .collect()
}

/// Removes the names of a session that is released.
pub(super) fn removal(keys: &Keys, record: &SessionRecord) -> impl Iterator<Item = RequestOp> {
    keys_of(keys, record).into_iter().map(wire::delete)
}

/// The sessions of a name.
pub(super) async fn find(
    shared: &Shared,
    parts: &HeldParts,
    name: &TalkName,
) -> Result<Vec<TalkingSession>, RegistryError> {
    let (label, group) = match name {
        TalkName::Session(id) => return talking_of(shared, parts, std::slice::from_ref(id)).await,
        TalkName::Label { name, group } => (name, group),
    };
    let parent = shared.store.keys.talk_names(label, group);
    let (mut found, mut from) = (Vec::new(), parent.clone());
    for _ in 0..MAX_PAGES {
        let keys = shared.store.keys_below(from, &parent, PAGE).await;
        let keys = keys.map_err(not_read)?;
        let id = |key: &Vec<u8>| Keys::name_in(&parent, key)?.parse().ok();
        let ids: Vec<SessionId> = keys.iter().filter_map(id).collect();
        let mut sessions = talking_of(shared, parts, &ids).await?;
        // A session of a lost node may have been started on another node without the name.
        sessions.retain(|session| {
            session.name.as_ref() == Some(label) && session.groups.contains(group)
        });
        found.extend(sessions);
        match keys.last() {
            Some(last) if keys.len() == PAGE && found.len() < MAX_NAMED => {
                from = [&last[..], &[0]].concat();
            }
            _ => break,
        }
    }
    Ok(found)
}

/// Those of these sessions that can be reached.
async fn talking_of(
    shared: &Shared,
    parts: &HeldParts,
    ids: &[SessionId],
) -> Result<Vec<TalkingSession>, RegistryError> {
    let mut found = Vec::new();
    for details in join_all(ids.iter().map(|id| details(shared, id))).await {
        match details {
            Ok(details) => {
                found.extend(details.and_then(|details| talking(shared, parts, &details)))
            }
            // A record that cannot be read hides itself alone; lists of sessions report it.
            Err(ReadError::Value(_)) => {}
            Err(error) => return Err(not_read(error)),
        }
    }
    Ok(found)
}

/// A session's record, this node's from memory.
async fn details(shared: &Shared, id: &SessionId) -> Result<Option<SessionDetails>, ReadError> {
    let found = match shared.mine(id) {
        Some(mine) => Some(mine),
        None => notes::read(shared, id).await?,
    };
    Ok(found.map(|found| found.details))
}

/// A session that can be reached: a node that has lost its parts runs none.
fn talking(shared: &Shared, parts: &HeldParts, details: &SessionDetails) -> Option<TalkingSession> {
    let record = &details.record;
    let container = record.container.as_ref()?;
    let holds = |node: &str| {
        let mut parts = parts.values();
        parts.any(|part| !part.lost && *part.record.holder == *node)
    };
    let is_reached = *shared.me == details.node || holds(&details.node);
    (is_reached && !record.state.is_ended())
        .then(|| TalkingSession::new(&record.spec, &container.addresses))
}

#[cfg(test)]
mod tests {
    use conman_registry::{ContainerIdentity, RecordState};
    use conman_testkit::registry_conformance::spec;
    use jiff::Timestamp;

    use super::super::wire::Operation;
    use super::*;

    fn record(name: &str, is_made: bool) -> SessionRecord {
        let mut spec = spec("idle");
        spec.talk = vec!["blue".to_owned(), "red".to_owned()];
        spec.labels = [("name".to_owned(), name.to_owned())].into();
        let container = ContainerIdentity {
            container_id: "c".to_owned(),
            pid: 7,
            start_time_ticks: 7,
            boot_id: "b".to_owned(),
            addresses: vec![[10, 96, 0, 1].into()],
        };
        SessionRecord {
            id: "alice".parse().expect("an id"),
            generation: conman_proto::Generation::new(1).expect("not zero"),
            state: RecordState::Starting,
            spec,
            container: is_made.then_some(container),
            created_at: Timestamp::UNIX_EPOCH,
        }
    }

    fn text(operations: Vec<RequestOp>) -> Vec<String> {
        let text = |operation: RequestOp| match operation.request {
            Some(Operation::Put(put)) => format!("+{}", String::from_utf8_lossy(&put.key)),
            Some(Operation::Delete(delete)) => format!("-{}", String::from_utf8_lossy(&delete.key)),
            other => panic!("{other:?}"),
        };
        operations.into_iter().map(text).collect()
    }

    #[test]
    fn a_session_has_its_names_from_its_container_on_until_its_release() {
        let keys = Keys::new("/c/".to_owned());
        let changed =
            |before: &SessionRecord, after: &SessionRecord| text(changes(&keys, before, after));
        let (claimed, made, renamed) =
            (record("db", false), record("db", true), record("web", true));
        let added = ["+/c/talk-name/blue/db/alice", "+/c/talk-name/red/db/alice"];
        assert_eq!(changed(&claimed, &made), added);
        assert_eq!(changed(&made, &made), [""; 0]);
        let moved = [
            "-/c/talk-name/blue/db/alice",
            "-/c/talk-name/red/db/alice",
            "+/c/talk-name/blue/web/alice",
            "+/c/talk-name/red/web/alice",
        ];
        assert_eq!(changed(&made, &renamed), moved);
        let removed = ["-/c/talk-name/blue/db/alice", "-/c/talk-name/red/db/alice"];
        assert_eq!(text(removal(&keys, &made).collect()), removed);
        assert_eq!(changed(&claimed, &record("Not A Name", true)), [""; 0]);
    }
}
