//! This node's parts of the fabric's pool. Only `conman_core::ownership` decides which part may be claimed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_core::ownership::{
    Answer, FabricRecord, Key, NodeName, NodeRecord, NodeState, OwnedState, PartStep, PartsSeen,
    Request, Transaction, Underlay, Value, WantedPart, claim_part, confirm_parts,
};
use conman_core::{TalkName, TalkingSession};
use conman_registry::{ConfirmedParts, HeldParts, PartError, PartRegistry, RegistryError};
use tokio::sync::watch;
use tokio::time::sleep;

use super::codec::Keys;
use super::notes::unavailable;
use super::shared::Shared;
use super::store::{Additions, Entry, ReadError, Store};
use super::{EtcdRegistry, talk_names};

/// Number of attempts: many nodes may join together, and one of those that conflict succeeds each time. A
/// deletion of parts of an unused fabric counts, too.
const MAX_TRIES: u32 = 64;
/// Greatest pause after a conflict, which differs from node to node.
const MAX_PAUSE_MS: u64 = 40;

/// What counts for a node whose record cannot be read: it may run its sessions.
const UNREADABLE_NODE: NodeRecord = NodeRecord {
    incarnation: 0,
    state: NodeState::Live,
};

#[async_trait]
impl PartRegistry for EtcdRegistry {
    fn incarnation(&self) -> watch::Receiver<u64> {
        self.shared.incarnation.subscribe()
    }

    fn held_parts(&self) -> watch::Receiver<Arc<HeldParts>> {
        self.membership.held_parts()
    }

    async fn confirm_parts(
        &self,
        fabric: &FabricRecord,
        underlay: &Underlay,
    ) -> Result<ConfirmedParts, RegistryError> {
        let (shared, way) = (Arc::clone(&self.shared), (fabric.clone(), underlay.clone()));
        self.run(async move { confirm(&shared, (&way.0, &way.1)).await })
            .await
    }

    async fn named(&self, name: &TalkName) -> Result<Vec<TalkingSession>, RegistryError> {
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        let parts = Arc::clone(&self.membership.held_parts().borrow());
        self.run(async move { talk_names::find(&shared, &parts, &name).await })
            .await
    }

    async fn claim_part(&self, wanted: &WantedPart) -> Result<(), PartError> {
        let (shared, wanted) = (Arc::clone(&self.shared), wanted.clone());
        let claiming = async move { Ok(claim(&shared, &wanted).await) };
        self.run(claiming).await?
    }
}

async fn confirm(
    shared: &Shared,
    way: (&FabricRecord, &Underlay),
) -> Result<ConfirmedParts, RegistryError> {
    for _ in 0..MAX_TRIES {
        let incarnation = live(shared)?;
        let seen = look(&shared.store).await.map_err(failed)?;
        let me = (&shared.me, incarnation);
        let mut confirmed = ConfirmedParts {
            incarnation,
            ..ConfirmedParts::default()
        };
        let mut again = false;
        for (number, transaction) in confirm_parts(me, way, &seen) {
            match transaction {
                None => {
                    let part = seen.parts.get(&number).cloned();
                    confirmed.parts.extend(part.map(|part| (number, part)));
                }
                // The next read shows whether it took effect.
                Some(transaction) => {
                    commit(shared, &transaction).await?;
                    again = true;
                }
            }
        }
        if !again {
            return Ok(confirmed);
        }
    }
    Err(unavailable(
        "this node's parts of the fabric's pool change all the time",
    ))
}

async fn claim(shared: &Shared, wanted: &WantedPart) -> Result<(), PartError> {
    for _ in 0..MAX_TRIES {
        let me = (&shared.me, live(shared)?);
        let seen = look(&shared.store).await.map_err(failed)?;
        let mut step = claim_part(me, wanted, &seen, None)?;
        if step == PartStep::ReadOwners {
            let owners = owners(shared).await?;
            step = claim_part(me, wanted, &seen, Some(&owners))?;
        }
        let (transaction, is_claim) = match step {
            PartStep::Commit { transaction, .. } => (transaction, true),
            PartStep::DeleteLost(transaction) => (transaction, false),
            PartStep::ReadOwners => break,
        };
        if commit(shared, &transaction).await? {
            if !is_claim {
                continue;
            }
            shared.hurry.notify_one();
            return Ok(());
        }
        let random = getrandom::u64().unwrap_or_default();
        sleep(Duration::from_millis(random % MAX_PAUSE_MS)).await;
    }
    let why = "other nodes claim parts of the fabric's pool all the time; try again";
    Err(unavailable(why).into())
}

fn live(shared: &Shared) -> Result<u64, RegistryError> {
    match *shared.incarnation.borrow() {
        0 => Err(unavailable("this node is not live in its fleet")),
        incarnation => Ok(incarnation),
    }
}

/// Whether it was committed; a conflict is not an error.
async fn commit(shared: &Shared, transaction: &Transaction) -> Result<bool, RegistryError> {
    let written = shared.store.commit(transaction, Additions::default()).await;
    match (written.answer, written.trouble) {
        (Answer::Committed, _) => Ok(true),
        (_, Some(trouble)) => Err(unavailable(&trouble)),
        _ => Ok(false),
    }
}

async fn owners(shared: &Shared) -> Result<BTreeSet<NodeName>, RegistryError> {
    let read = shared.store.execute(Request::ReadSessions).await;
    let Answer::Values(values) = read.answer else {
        return Err(unavailable(&read.trouble.unwrap_or_default()));
    };
    let owners = values.into_iter().filter_map(|(_, value)| match value {
        Some(Value::Session(record)) if record.state == OwnedState::Owned => Some(record.owner),
        _ => None,
    });
    Ok(owners.collect())
}

fn failed(error: ReadError) -> RegistryError {
    unavailable(&error.to_string())
}

/// One snapshot of the fabric, its parts, and the nodes.
async fn look(store: &Store) -> Result<PartsSeen, ReadError> {
    let (fabric, parts, nodes) = (
        store.keys.of(&Key::Fabric),
        store.keys.parts(),
        store.keys.nodes(),
    );
    let parents = [fabric, parts, nodes];
    let entries = store.get_below(&parents).await?;
    let [fabric, parts, nodes] =
        <[Vec<Entry>; 3]>::try_from(entries).map_err(|_| ReadError::Unexpected)?;
    let mut seen = PartsSeen::default();
    for (key, bytes, _) in fabric {
        if let Value::Fabric(fabric) = store.decode(&Key::Fabric, &key, &bytes)? {
            seen.fabric = Some(fabric);
        }
    }
    for (key, bytes, _) in parts {
        let Some(number) = part_number(&parents[1], &key) else {
            continue;
        };
        // One that cannot be read concerns nobody else. Reads of all nodes report it.
        match store.decode(&Key::Part(number), &key, &bytes) {
            Ok(Value::Part(part)) => {
                seen.parts.insert(number, part);
            }
            _ => {
                seen.unreadable.insert(number);
            }
        }
    }
    for (key, bytes, _) in nodes {
        if let Some(name) = Keys::name_in(&parents[2], &key) {
            let name: NodeName = name.into();
            let record = match store.decode(&Key::Node(name.clone()), &key, &bytes) {
                Ok(Value::Node(record)) => record,
                _ => UNREADABLE_NODE,
            };
            seen.nodes.insert(name, record);
        }
    }
    Ok(seen)
}

/// The number of the part with this key, as conman writes it.
pub(super) fn part_number(parent: &[u8], key: &[u8]) -> Option<u32> {
    let name = Keys::name_in(parent, key)?;
    let number: u32 = name.parse().ok()?;
    (number.to_string() == name).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_one_key() {
        let of = |key: &str| part_number(b"/c/part/", key.as_bytes());
        assert_eq!(of("/c/part/7"), Some(7));
        for other in [
            "/c/part/+7",
            "/c/part/007",
            "/c/part/",
            "/c/part/7/8",
            "/c/pool",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
