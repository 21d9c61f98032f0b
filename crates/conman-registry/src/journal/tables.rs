//! Content of `journal.redb`.
//!
//! `event` (position to JSON), `by_session` (id and position; the id is empty for events of the node
//! that concern its sessions), `dropped` (id to the greatest position of it that was dropped) and
//! `meta` (`format`, `last_seq`, `dropped_through`, `began_after`, `closed_at`).

use std::ops::RangeInclusive;
use std::sync::Arc;

use conman_linux::FORMAT;
use conman_proto::{Event, EventKind, SessionId};
use redb::{
    Database, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    TableDefinition, WriteTransaction,
};
use serde::Deserialize;

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const EVENTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("event");
const BY_SESSION: TableDefinition<'_, (&str, u64), ()> = TableDefinition::new("by_session");
const DROPPED: TableDefinition<'_, &str, u64> = TableDefinition::new("dropped");

const FORMAT_KEY: &str = "format";
const LAST_SEQ_KEY: &str = "last_seq";
const DROPPED_THROUGH_KEY: &str = "dropped_through";
/// Where the file begins; above 0 when it replaces one that was lost.
const BEGAN_AFTER_KEY: &str = "began_after";
/// The mark of the positions file at the latest orderly close. Every daemon that tries to write an event
/// raises that mark first.
const CLOSED_AT_KEY: &str = "closed_at";

/// Stands for a session's id in the index of the node's events that concern sessions.
const NODE: &str = "";

/// Maximum number of old events that one commit drops, so that a lowered limit does not make one
/// commit long.
const MAX_TRIM: u64 = 4096;

/// A read that failed.
#[derive(Debug)]
pub(super) enum ReadFailure {
    Store(redb::Error),
    Unreadable { seq: u64, source: serde_json::Error },
}

impl<E: Into<redb::Error>> From<E> for ReadFailure {
    fn from(error: E) -> Self {
        Self::Store(error.into())
    }
}

/// How far the journal reaches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Extent {
    /// Greatest position written.
    pub(super) last_seq: u64,
    /// Every event up to it was dropped.
    pub(super) dropped_through: u64,
}

/// Fills a new file that begins after `after`.
pub(super) fn fill(transaction: &WriteTransaction, after: u64) -> Result<(), redb::Error> {
    transaction.open_table(EVENTS)?;
    transaction.open_table(BY_SESSION)?;
    transaction.open_table(DROPPED)?;
    let mut meta = transaction.open_table(META)?;
    meta.insert(FORMAT_KEY, u64::from(FORMAT))?;
    meta.insert(LAST_SEQ_KEY, after)?;
    meta.insert(DROPPED_THROUGH_KEY, after)?;
    meta.insert(BEGAN_AFTER_KEY, after)?;
    Ok(())
}

/// The format of an opened file; `None` when it has none.
pub(super) fn format(database: &Database) -> Result<Option<u32>, redb::Error> {
    let meta = database.begin_read()?.open_table(META)?;
    let format = meta.get(FORMAT_KEY)?.map(|value| value.value());
    Ok(format.map(|format| u32::try_from(format).unwrap_or(u32::MAX)))
}

pub(super) fn extent(database: &Database) -> Result<Extent, redb::Error> {
    extent_in(&database.begin_read()?)
}

fn extent_in(transaction: &ReadTransaction) -> Result<Extent, redb::Error> {
    let meta = transaction.open_table(META)?;
    let number = |key| Ok::<_, redb::Error>(meta.get(key)?.map_or(0, |value| value.value()));
    Ok(Extent {
        last_seq: number(LAST_SEQ_KEY)?,
        dropped_through: number(DROPPED_THROUGH_KEY)?,
    })
}

/// Records that everything was written, with the mark of the positions file.
pub(super) fn close(database: &Database, mark: u64) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(META)?.insert(CLOSED_AT_KEY, mark)?;
    transaction.commit()?;
    Ok(())
}

/// The mark of the latest orderly close.
pub(super) fn closed_at(database: &Database) -> Result<Option<u64>, redb::Error> {
    let meta = database.begin_read()?.open_table(META)?;
    Ok(meta.get(CLOSED_AT_KEY)?.map(|value| value.value()))
}

/// Writes events, which continue the positions, and drops what exceeds `max_events`, in one
/// durable transaction.
pub(super) fn write(
    database: &Database,
    events: &[Arc<Event>],
    max_events: u64,
) -> Result<Extent, redb::Error> {
    let mut extent = extent(database)?;
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(EVENTS)?;
        let mut by_session = transaction.open_table(BY_SESSION)?;
        for event in events {
            let json = serde_json::to_vec(&**event).map_err(std::io::Error::other)?;
            table.insert(event.seq, json.as_slice())?;
            if let Some(id) = &event.session {
                by_session.insert((id.as_str(), event.seq), ())?;
            } else if event.kind.concerns_sessions() {
                by_session.insert((NODE, event.seq), ())?;
            }
            extent.last_seq = event.seq;
        }
        let mut dropped = transaction.open_table(DROPPED)?;
        let excess = table.len()?.saturating_sub(max_events);
        for _ in 0..excess.min(MAX_TRIM) {
            let Some((seq, json)) = table.pop_first()? else {
                break;
            };
            extent.dropped_through = seq.value();
            match session_of(json.value()) {
                Some(id) => {
                    by_session.remove((id.as_str(), seq.value()))?;
                    dropped.insert(id.as_str(), seq.value())?;
                }
                None => drop(by_session.remove((NODE, seq.value()))?),
            }
        }
        if dropped.len()? > max_events.saturating_mul(2) {
            let absent = oldest_absent(&dropped, &by_session)?;
            for id in absent {
                dropped.remove(id.as_str())?;
            }
        }
        let mut meta = transaction.open_table(META)?;
        meta.insert(LAST_SEQ_KEY, extent.last_seq)?;
        meta.insert(DROPPED_THROUGH_KEY, extent.dropped_through)?;
    }
    transaction.commit()?;
    Ok(extent)
}

fn session_of(json: &[u8]) -> Option<SessionId> {
    #[derive(Deserialize)]
    struct Head {
        session: Option<SessionId>,
    }
    serde_json::from_slice::<Head>(json).ok()?.session
}

/// The older half of the sessions without events.
fn oldest_absent(
    dropped: &impl ReadableTable<&'static str, u64>,
    by_session: &impl ReadableTable<(&'static str, u64), ()>,
) -> Result<Vec<String>, redb::Error> {
    let mut absent = Vec::new();
    for entry in dropped.iter()? {
        let (id, seq) = entry?;
        if by_session
            .range((id.value(), 0)..=(id.value(), u64::MAX))?
            .next()
            .is_none()
        {
            absent.push((seq.value(), id.value().to_owned()));
        }
    }
    absent.sort_unstable();
    let half = absent.len().div_ceil(2);
    Ok(absent.into_iter().take(half).map(|(_, id)| id).collect())
}

/// Up to `limit` events after a position, oldest first, and the extent in the same snapshot.
pub(super) fn read_after(
    database: &Database,
    after: u64,
    limit: usize,
) -> Result<(Vec<Event>, Extent), ReadFailure> {
    let transaction = database.begin_read()?;
    let extent = extent_in(&transaction)?;
    let table = transaction.open_table(EVENTS)?;
    let mut events = Vec::new();
    for entry in table.range(after.saturating_add(1)..)?.take(limit) {
        let (seq, json) = entry?;
        events.push(decode(seq.value(), json.value())?);
    }
    Ok((events, extent))
}

/// The newest events of one session and, from its first one to its end, those of the node that concern
/// sessions; oldest first. Also returns whether older ones of the session were dropped.
pub(super) fn read_session(
    database: &Database,
    id: &SessionId,
    limit: usize,
) -> Result<(Vec<Event>, bool), ReadFailure> {
    let transaction = database.begin_read()?;
    let table = transaction.open_table(EVENTS)?;
    let by_session = transaction.open_table(BY_SESSION)?;
    let dropped = transaction.open_table(DROPPED)?;
    // After the loss of a whole journal it is unknown which sessions it had events of. Until this
    // one is full, any session may have lost events.
    let began_after = transaction
        .open_table(META)?
        .get(BEGAN_AFTER_KEY)?
        .map_or(0, |v| v.value());
    let follows_a_loss = began_after > 0 && extent_in(&transaction)?.dropped_through == began_after;
    let newest = |id: &str, range: RangeInclusive<u64>| -> Result<Vec<Event>, ReadFailure> {
        let mut events = Vec::new();
        let found = by_session.range((id, *range.start())..=(id, *range.end()))?;
        for entry in found.rev().take(limit + 1) {
            let seq = entry?.0.value().1;
            if let Some(json) = table.get(seq)? {
                events.push(decode(seq, json.value())?);
            }
        }
        events.reverse();
        Ok(events)
    };
    let mut events = newest(id.as_str(), 0..=u64::MAX)?;
    let excess = events.len().saturating_sub(limit);
    events.drain(..excess);
    let truncated = follows_a_loss || excess > 0 || dropped.get(id.as_str())?.is_some();
    if let (Some(first), Some(last)) = (events.first(), events.last()) {
        let has_ended = events.iter().rev().find_map(|event| match event.kind {
            EventKind::SessionReleased => Some(true),
            EventKind::SessionClaimed | EventKind::SessionAdopted => Some(false),
            _ => None,
        });
        let end = match has_ended {
            Some(true) => last.seq,
            Some(false) | None => u64::MAX,
        };
        events.extend(newest(NODE, first.seq..=end)?);
        events.sort_by_key(|event| event.seq);
    }
    Ok((events, truncated))
}

fn decode(seq: u64, json: &[u8]) -> Result<Event, ReadFailure> {
    serde_json::from_slice(json).map_err(|source| ReadFailure::Unreadable { seq, source })
}
