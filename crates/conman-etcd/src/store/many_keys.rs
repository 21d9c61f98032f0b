//! Reads of many keys or of large values, in several calls.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::super::call_error::CallError;
use super::super::key_walk::KeyWalk;
use super::super::wire::{self, RangeRequest, RangeResponse, TxnRequest};
use super::{Entry, RECORDS, ReadError, Store, entry, ranges};

/// Small values in one answer: far below what a connection transfers in a moment.
const PAGE: usize = 512;

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

    /// Reads the next records of a walk, at most `most`; none: there are no more.
    pub(crate) async fn records_below(
        &self,
        walk: &mut KeyWalk,
        most: usize,
    ) -> Result<Vec<Entry>, ReadError> {
        let ends = Instant::now() + TRIES_BOUND;
        while let Some((key, range_end)) = walk.range() {
            let limit = self.records.load(Ordering::Relaxed).min(most);
            let request = RangeRequest {
                key,
                range_end,
                limit: i64::try_from(limit).unwrap_or(1),
                ..RangeRequest::default()
            };
            match self.client.bulk_range(request).await {
                Ok(answer) => {
                    self.read_records(answer.kvs.len());
                    advance(walk, &answer, limit);
                    self.shared_bytes
                        .store(walk.shared_bytes(), Ordering::Relaxed);
                    if !answer.kvs.is_empty() {
                        return Ok(answer.kvs.into_iter().map(entry).collect());
                    }
                }
                Err(error) => self.read_fewer(error, limit, ends)?,
            }
        }
        Ok(Vec::new())
    }

    /// The reads of the keys below `parent` from `from` on.
    pub(crate) fn walk(&self, from: Vec<u8>, parent: &[u8]) -> KeyWalk {
        KeyWalk::new(from, parent, self.shared_bytes.load(Ordering::Relaxed))
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
        let mut walk = KeyWalk::new(parent.to_vec(), parent, 0);
        while let Some(range) = walk.range() {
            let answer = self.page(range, PAGE, revision).await?;
            if let (0, Some(header)) = (revision, &answer.header) {
                revision = header.revision;
            }
            advance(&mut walk, &answer, PAGE);
            entries.extend(answer.kvs.into_iter().map(entry));
        }
        Ok(entries)
    }

    /// The first key below `parent`.
    pub(crate) async fn first_below(&self, parent: &[u8]) -> Result<Option<Vec<u8>>, ReadError> {
        let range = (parent.to_vec(), wire::behind(parent));
        let answer = self.page(range, 1, 0).await?;
        Ok(answer.kvs.into_iter().next().map(|first| first.key))
    }

    /// At most `limit` keys of a range at a revision; 0: the current one.
    async fn page(
        &self,
        (key, range_end): (Vec<u8>, Vec<u8>),
        limit: usize,
        revision: i64,
    ) -> Result<RangeResponse, ReadError> {
        let request = RangeRequest {
            key,
            range_end,
            limit: i64::try_from(limit).unwrap_or(1),
            revision,
            ..RangeRequest::default()
        };
        Ok(self.client.range(request).await?)
    }
}

fn advance(walk: &mut KeyWalk, answer: &RangeResponse, limit: usize) {
    let ends = answer.kvs.first().zip(answer.kvs.last());
    let ends = ends.map(|(first, last)| (first.key.as_slice(), last.key.as_slice()));
    let returned = answer.kvs.len();
    let counted = usize::try_from(answer.count).unwrap_or(0);
    let counted = counted.max(returned + usize::from(answer.more));
    walk.advance(ends, returned, counted, limit);
}
