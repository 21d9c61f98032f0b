//! For how long nodes have been lost, across restarts of the daemons that observe it: all daemons
//! of a fleet may be young, and the remains of lost nodes must be deleted nevertheless.
//!
//! `lost-for/NAME` holds the longest time that any daemon has counted, on a monotonic clock,
//! starting from the stored value when it began. Each daemon counts for itself and writes its time
//! once it exceeds the stored one by a step. So no leader is needed, and no period is counted
//! twice. The value is valid for one incarnation of the node; a write that is late or lost delays
//! the deletion.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use conman_core::ownership::{Key, NodeState, Value};
use conman_core::retention::Age;

use super::codec::{self, Keys, LostForText};
use super::membership::Membership;
use super::notes::unavailable;
use super::shared::{Shared, boot_time};
use super::store::ReadError;
use super::wire::{self, TxnRequest};
use conman_registry::RegistryError;

/// Keys per transaction: etcd's default limit is 128 operations.
const MAX_AT_ONCE: usize = 60;

/// The stored age of a node.
#[derive(Debug, Clone, Copy)]
struct Kept {
    /// `None` for a value that cannot be read.
    age: Option<Age>,
    revision: i64,
}

/// State of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Fenced, or forgotten, after its life of this incarnation.
    Gone(u64),
    /// Not declared dead.
    There,
    /// Its record cannot be read.
    Odd,
}

/// [`conman_registry::Fleet::count_gone`].
pub(super) async fn count(
    shared: &Shared,
    membership: &Membership,
    seen: BTreeMap<String, Option<Age>>,
) -> Result<BTreeMap<String, Age>, RegistryError> {
    let failed = |error: ReadError| unavailable(&error.to_string());
    // Read before the nodes: the stored age is valid for a node that is lost by then with the same
    // incarnation.
    let kept = kept(shared).await.map_err(failed)?;
    let found = found(shared, seen.keys()).await.map_err(failed)?;
    let now = boot_time();
    let listed = membership.ages(now);
    let mut names: BTreeSet<&String> = seen.keys().collect();
    names.extend(kept.keys());
    names.extend(listed.keys());
    let (mut ages, mut writes) = (BTreeMap::new(), Vec::new());
    for name in names {
        let (found, kept) = (found.get(name), kept.get(name));
        let incarnation = match found {
            Some(Found::Gone(incarnation)) => *incarnation,
            Some(Found::Odd) => continue,
            Some(Found::There) | None => {
                writes.extend(kept.map(|kept| (name.clone(), kept.revision, None)));
                continue;
            }
        };
        let kept_age = kept.and_then(|kept| kept.age);
        let seen = [seen.get(name).copied().flatten(), listed.get(name).copied()];
        let age = Age::new(incarnation).or_longer(seen.into_iter().flatten().chain(kept_age));
        if age.is_news_to(kept_age) {
            let revision = kept.map_or(0, |kept| kept.revision);
            writes.push((name.clone(), revision, Some(age)));
        } else if let Some(kept) = kept
            && kept.age.is_none_or(|kept| kept.incarnation != incarnation)
        {
            writes.push((name.clone(), kept.revision, None));
        }
        ages.insert(name.clone(), age);
    }
    membership.learn(&ages, now);
    write(shared, &writes).await?;
    Ok(ages)
}

async fn kept(shared: &Shared) -> Result<HashMap<String, Kept>, ReadError> {
    let parent = shared.store.keys.lost_for();
    let mut kept = HashMap::new();
    for (key, bytes, revision) in shared.store.all_below(&parent).await? {
        let text = codec::parse::<LostForText>(&key, &bytes).ok();
        let age = text.map(|text| Age {
            incarnation: text.incarnation,
            gone_for: Duration::from_millis(text.lost_ms),
        });
        if let Some(name) = Keys::name_in(&parent, &key) {
            kept.insert(name, Kept { age, revision });
        }
    }
    Ok(kept)
}

/// All listed nodes, and those of `names` that were forgotten.
async fn found(
    shared: &Shared,
    names: impl Iterator<Item = &String>,
) -> Result<HashMap<String, Found>, ReadError> {
    let keys = &shared.store.keys;
    let parent = keys.nodes();
    let mut found = HashMap::new();
    for (key, bytes, _) in shared.store.all_below(&parent).await? {
        if let Some(name) = Keys::name_in(&parent, &key) {
            found.insert(name, what(&key, &bytes));
        }
    }
    let unlisted: Vec<&String> = names.filter(|name| !found.contains_key(*name)).collect();
    for names in unlisted.chunks(MAX_AT_ONCE) {
        let aside: Vec<_> = names.iter().map(|name| keys.lost_node(name)).collect();
        let (entries, _) = shared.store.get(&aside).await?;
        for (name, entry) in names.iter().zip(entries) {
            if let Some((key, bytes, _)) = entry {
                found.insert((*name).clone(), what(&key, &bytes));
            }
        }
    }
    Ok(found)
}

fn what(key: &[u8], bytes: &[u8]) -> Found {
    match codec::decode(&Key::Node("".into()), key, bytes) {
        Ok(Value::Node(record)) => match record.state {
            NodeState::Fenced => Found::Gone(record.incarnation),
            NodeState::Live => Found::There,
        },
        _ => Found::Odd,
    }
}

/// Writes each key unless it was changed since that revision; `None` deletes it.
async fn write(
    shared: &Shared,
    writes: &[(String, i64, Option<Age>)],
) -> Result<(), RegistryError> {
    let parent = shared.store.keys.lost_for();
    for some in writes.chunks(MAX_AT_ONCE) {
        let mut request = TxnRequest::default();
        for (name, revision, age) in some {
            let key = [&*parent, name.as_bytes()].concat();
            let unchanged = wire::unchanged_since(key.clone(), *revision);
            request.compare.push(unchanged);
            request.success.push(match age {
                Some(age) => wire::put(
                    key,
                    codec::text(&LostForText {
                        incarnation: age.incarnation,
                        lost_ms: codec::whole_ms(age.gone_for),
                    }),
                ),
                None => wire::delete(key),
            });
        }
        // Where another node wrote first, it wrote an equal value.
        if let Some(trouble) = shared.store.transact(request).await.trouble {
            return Err(unavailable(&trouble));
        }
    }
    Ok(())
}
