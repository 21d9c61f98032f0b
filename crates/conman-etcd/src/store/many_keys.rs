//! Reads of many keys or of large values, in several calls.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::super::call_error::CallError;
use super::super::wire::{self, RangeRequest, TxnRequest};
use super::{Entry, RECORDS, ReadError, Store, entry, ranges};

/// Small values in one answer: far below what a connection transfers in a moment.
const PAGE: i64 = 512;

/// Reads in one transaction: etcd's default limit is 128 operations.
const MAX_READS: usize = 64;

/// A read of several pages of one revision is restarted so often when the revision is compacted;
/// then it fails.
const MAX_COMPACTED: u32 = 3;

/// No further attempt starts after this time; the next caller's attempts continue with the reduced
/// number.
const TRIES_BOUND: Duration = Duration::from_secs(6);

impl Store {
    /// Reads some of the first records at these keys. Also returns how many keys that covers.
    pub(crate) async fn records_at(
        &self,
        names: &[Vec<u8>],
    ) -> Result<(Vec<Entry>, usize), ReadError> {
        let ends = Instant::now() + TRIES_BOUND;
        loop {
            let most = self.records.load(Ordering::Relaxed).min(MAX_READS);
            let count = names.len().min(most);
            let request = TxnRequest {
                compare: Vec::new(),
                success: names.iter().take(count).cloned().map(wire::get).collect(),
            };
            match self.client.bulk_reads(request).await {
                Ok(answer) => {
                    let ranges = ranges(answer, count)?;
                    self.read_records(count);
                    let kvs = ranges.into_iter().flat_map(|range| range.kvs);
                    return Ok((kvs.map(entry).collect(), count));
                }
                Err(error) => self.read_fewer(error, count, ends)?,
            }
        }
    }

    /// Reads some of the first records below `parent` from `from` on, at most `limit`, and whether
    /// there are more.
    pub(crate) async fn records_below(
        &self,
        from: &[u8],
        parent: &[u8],
        most: usize,
    ) -> Result<(Vec<Entry>, bool), ReadError> {
        let ends = Instant::now() + TRIES_BOUND;
        loop {
            let limit = self.records.load(Ordering::Relaxed).min(most);
            let request = RangeRequest {
                key: from.to_vec(),
                range_end: wire::behind(parent),
                limit: i64::try_from(limit).unwrap_or(1),
                ..RangeRequest::default()
            };
            match self.client.bulk_range(request).await {
                Ok(answer) => {
                    self.read_records(limit);
                    return Ok((answer.kvs.into_iter().map(entry).collect(), answer.more));
                }
                Err(error) => self.read_fewer(error, limit, ends)?,
            }
        }
    }

    fn read_records(&self, count: usize) {
        let next = (2 * count).min(RECORDS);
        self.records.fetch_max(next, Ordering::Relaxed);
    }

    /// Fails when no further attempt is to be made.
    fn read_fewer(&self, error: CallError, count: usize, ends: Instant) -> Result<(), CallError> {
        if !error.is_about_size() || count <= 1 {
            return Err(error);
        }
        self.records.fetch_min(count / 2, Ordering::Relaxed);
        match Instant::now() < ends {
            true => Ok(()),
            false => Err(error),
        }
    }

    /// Every key below one, read in pages of one revision, or of a later one if that is compacted
    /// meanwhile.
    pub(crate) async fn all_below(&self, parent: &[u8]) -> Result<Vec<Entry>, ReadError> {
        let mut tries = 1;
        loop {
            match self.all_below_at_once(parent).await {
                Err(ReadError::Call(error))
                    if error.is_about_compaction() && tries < MAX_COMPACTED =>
                {
                    tries += 1;
                }
                read => return read,
            }
        }
    }

    async fn all_below_at_once(&self, parent: &[u8]) -> Result<Vec<Entry>, ReadError> {
        let (mut entries, mut revision) = (Vec::new(), 0);
        let mut from = parent.to_vec();
        loop {
            let (page, more, at) = self.page(&from, parent, PAGE, revision).await?;
            revision = at;
            if let Some((last, _, _)) = page.last() {
                from.clone_from(last);
                from.push(0);
            }
            entries.extend(page);
            if !more {
                return Ok(entries);
            }
        }
    }

    /// The keys below `parent` from `from` on, at most `limit`; whether there are more, and the
    /// revision. 0 requests the current revision.
    pub(crate) async fn page(
        &self,
        from: &[u8],
        parent: &[u8],
        limit: i64,
        revision: i64,
    ) -> Result<(Vec<Entry>, bool, i64), ReadError> {
        let request = RangeRequest {
            key: from.to_vec(),
            range_end: wire::behind(parent),
            limit,
            revision,
            ..RangeRequest::default()
        };
        let answer = self.client.range(request).await?;
        let at = match revision {
            0 => answer.header.as_ref().map_or(0, |header| header.revision),
            revision => revision,
        };
        let entries = answer.kvs.into_iter().map(entry);
        Ok((entries.collect(), answer.more, at))
    }
}
