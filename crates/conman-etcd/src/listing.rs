//! Reads of many records. They are fetched on the fleet's thread and parsed on others: parsing a
//! page takes longer than a renewal may be late.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{Key, OwnedState, Slot, Value};
use conman_proto::SessionId;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::client::MAX_BULK_BYTES;
use super::codec::{self, Keys, SessionDetails};
use super::notes::not_read;
use super::records::{OwnRecord, Since};
use super::shared::Shared;
use super::store::Entry;
use conman_registry::{FleetSession, RegistryError, SessionPage, SessionRecord};
use conman_registry::{MAX_SESSION_PAGE, MAX_UNREADABLE};

/// A page is returned early once it has taken this long or is this large.
const ENOUGH_TIME: Duration = Duration::from_secs(5);
const ENOUGH_BYTES: usize = MAX_BULK_BYTES;

/// This node's sessions.
pub(super) struct Listed {
    pub(super) records: Vec<SessionRecord>,
    /// Owned sessions without a usable record: their containers must be ended.
    pub(super) undescribed: Vec<Slot>,
}

/// Reads all records of this node and caches those that it owns. Records of other nodes are not
/// read: there may be a hundred times as many.
pub(super) async fn mine(shared: &Arc<Shared>) -> Result<Listed, RegistryError> {
    let (parent, since) = (shared.store.keys.owned(), shared.since());
    let entries = shared.store.all_below(&parent).await.map_err(not_read)?;
    let reads = Arc::clone(shared);
    let (names, mut owned) = elsewhere(move || own_keys(&reads, &entries)).await?;
    let (mut records, mut unreadable, mut rest) = (Vec::new(), Unreadable::new(), &names[..]);
    while !rest.is_empty() {
        let (entries, count) = shared.store.records_at(rest).await.map_err(not_read)?;
        rest = &rest[count..];
        let parses = Arc::clone(shared);
        let (some, others) = elsewhere(move || take_mine(&parses, entries, since)).await?;
        for record in &some {
            owned.remove(record.id.as_str());
        }
        records.extend(some);
        unreadable.extend(others);
    }
    let mut undescribed = Vec::new();
    for (session, generation) in owned {
        if let Some(record) = remembered(shared, &session, generation) {
            records.push(record);
            continue;
        }
        let slot = Slot {
            session: session.as_str().into(),
            generation,
        };
        let why = unreadable.remove(&session);
        log_undescribed(shared, &slot, why.as_deref());
        undescribed.push(slot);
    }
    records.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(Listed {
        records,
        undescribed,
    })
}

/// Generations by session.
type Owned = BTreeMap<String, u64>;

/// The record keys of the sessions that this node owns or owned last, and of those whose ownership
/// cannot be read; and the sessions that it owns.
fn own_keys(shared: &Shared, owned: &[Entry]) -> (Vec<Vec<u8>>, Owned) {
    let keys = &shared.store.keys;
    let (parent, kind) = (keys.owned(), Key::Session("".into()));
    let (mut names, mut mine) = (Vec::new(), Owned::new());
    for (key, bytes, _) in owned {
        let Some(name) = Keys::name_in(&parent, key) else {
            continue;
        };
        if let Ok(Value::Session(ownership)) = codec::decode(&kind, key, bytes) {
            if ownership.owner != shared.me {
                continue;
            }
            if ownership.state == OwnedState::Owned {
                mine.insert(name.clone(), ownership.generation);
            }
        }
        names.push(keys.details(&name));
    }
    (names, mine)
}

/// The cached record of a session, whatever etcd has.
fn remembered(shared: &Shared, session: &str, generation: u64) -> Option<SessionRecord> {
    let record = shared.mine(&session.parse().ok()?)?.details.record;
    (record.generation.get() == generation).then_some(record)
}

fn log_undescribed(shared: &Shared, slot: &Slot, why: Option<&str>) {
    let key = shared.store.keys.details(&slot.session);
    let key = String::from_utf8_lossy(&key);
    let Slot {
        session,
        generation,
    } = slot;
    match why {
        Some(why) => tracing::error!(
            %session, generation, why,
            "this node owns a session whose record cannot be read: its containers here are ended; \
             other sessions are not affected. {key} is not changed: see `etcdctl get {key}`; then \
             PUT the session again, or run `etcdctl del {key}`"
        ),
        None => tracing::error!(
            %session, generation,
            "this node owns a session, but {key} in etcd is missing or names another node: its \
             containers here are ended; other sessions are not affected. PUT the session again"
        ),
    }
}

/// The sessions whose records cannot be read, and why.
type Unreadable = BTreeMap<String, String>;

fn take_mine(
    shared: &Shared,
    entries: Vec<Entry>,
    since: Since,
) -> (Vec<SessionRecord>, Unreadable) {
    let parent = shared.store.keys.all_details();
    let (mut records, mut unreadable) = (Vec::new(), Unreadable::new());
    for (key, bytes, revision) in entries {
        let details = match details_of(shared, &key, &bytes) {
            Ok(details) if details.node == *shared.me => details,
            Ok(_) => continue,
            Err(why) => {
                unreadable.extend(Keys::name_in(&parent, &key).map(|name| (name, why)));
                continue;
            }
        };
        records.push(details.record.clone());
        if !details.record.state.is_ended() {
            let mine = OwnRecord {
                details,
                mod_revision: Some(revision),
            };
            shared.note_read(mine, since);
        }
    }
    (records, unreadable)
}

/// A page of all sessions.
pub(super) async fn page(
    shared: &Arc<Shared>,
    after: Option<SessionId>,
    limit: usize,
) -> Result<SessionPage, RegistryError> {
    let parent = shared.store.keys.all_details();
    let mut from = parent.clone();
    if let Some(after) = after {
        from = shared.store.keys.details(after.as_str());
        from.push(0);
    }
    let limit = limit.clamp(1, MAX_SESSION_PAGE);
    let ends = Instant::now() + ENOUGH_TIME;
    let mut walk = shared.store.walk(from, &parent);
    let mut page = SessionPage::default();
    let (mut entries, mut bytes) = (Vec::new(), 0);
    loop {
        // One more than the page has shows that there is another one.
        let most = limit + 1 - entries.len();
        let some = shared.store.records_below(&mut walk, most).await;
        let some = some.map_err(not_read)?;
        bytes += some.iter().map(|(_, value, _)| value.len()).sum::<usize>();
        entries.extend(some);
        let is_full = entries.len() > limit;
        if !walk.is_done() && !is_full && bytes < ENOUGH_BYTES && Instant::now() < ends {
            continue;
        }
        let more = is_full || !walk.is_done();
        let beyond = entries.split_off(limit.min(entries.len()));
        if more {
            // A page ends with a valid session name; the rest starts the next page.
            let end = entries.iter().rposition(|(key, _, _)| {
                let name = Keys::name_in(&parent, key);
                page.next = name.and_then(|name| name.parse().ok());
                page.next.is_some()
            });
            entries.truncate(end.map_or(entries.len(), |end| end + 1));
        }
        let whole = std::mem::replace(&mut entries, beyond);
        let parses = Arc::clone(shared);
        page = elsewhere(move || with(page, &parses, &whole)).await?;
        // Otherwise none of these is a session.
        if !more || page.next.is_some() {
            return Ok(page);
        }
        bytes = 0;
    }
}

fn with(mut page: SessionPage, shared: &Shared, entries: &[Entry]) -> SessionPage {
    for (key, bytes, _) in entries {
        match details_of(shared, key, bytes) {
            Ok(details) => page.sessions.push(FleetSession {
                node: details.node,
                record: details.record,
            }),
            Err(unreadable) if page.unreadable.len() < MAX_UNREADABLE => {
                page.unreadable.push(unreadable);
            }
            Err(_) => {}
        }
    }
    page
}

/// Parses on a thread of the runtime that only this caller waits for.
async fn elsewhere<T: Send + 'static>(
    parse: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RegistryError> {
    let parsed = spawn_blocking(parse).await;
    parsed.map_err(|error| RegistryError::Closed {
        reason: error.to_string(),
    })
}

/// Parses a record, or returns why it cannot be used, which is logged once.
fn details_of(shared: &Shared, key: &[u8], bytes: &[u8]) -> Result<SessionDetails, String> {
    let parsed: Result<SessionDetails, _> = codec::parse(key, bytes);
    let name = Keys::name_in(&shared.store.keys.all_details(), key);
    let why = match parsed {
        Ok(details) if name.as_deref() == Some(details.record.id.as_str()) => return Ok(details),
        Ok(details) => format!("it describes session {}", details.record.id),
        Err(error) => error.to_string(),
    };
    let key = String::from_utf8_lossy(key).into_owned();
    let unreadable = format!(
        "the record at {key} in etcd cannot be read, and its session is omitted: {why}. See \
         `etcdctl get {key}`; PUT the session again, or run `etcdctl del {key}`: its ownership is \
         stored under another key"
    );
    if shared.is_news(&key) {
        tracing::error!("{unreadable}");
    }
    Err(unreadable)
}
