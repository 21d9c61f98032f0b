//! Executes the protocol's requests against etcd, together with the writes that accompany them, and
//! reports the result of each.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_core::ownership::{Answer, Key, NodeState, OwnedState, Request, Transaction, Value};

use super::call_error::CallError;
use super::call_queue::CallQueue;
use super::client::Client;
use super::codec::{self, BadValue, Keys};
use super::wire::{
    self, Compare, KeyValue, Operation, Outcome, RangeRequest, RangeResponse, RequestOp,
    TxnRequest, TxnResponse,
};

mod many_keys;

/// Records in one read: most are small, and some as large as etcd allows. A read that is too large or
/// too slow is repeated with half as many; one that succeeds lets the next have twice as many.
const RECORDS: usize = 128;

/// Why a value could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Value(#[from] BadValue),
    #[error("etcd's answer to a transaction does not match the request")]
    Unexpected,
}

/// Accompanies a transaction of the protocol; does not affect its decision.
#[derive(Debug, Clone, Default)]
pub(super) struct Additions {
    pub(super) compare: Vec<Compare>,
    pub(super) write: Vec<RequestOp>,
}

/// The result of a request: why it failed, if it did, and the revision if it committed.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) answer: Answer,
    pub(super) trouble: Option<String>,
    pub(super) revision: i64,
    /// etcd refuses: the same request would be refused again at once.
    pub(super) refused: bool,
}

impl Answered {
    fn fine(answer: Answer, revision: i64) -> Self {
        Self {
            answer,
            trouble: None,
            revision,
            refused: false,
        }
    }

    fn failed(answer: Answer, trouble: String) -> Self {
        Self {
            answer,
            trouble: Some(trouble),
            revision: 0,
            refused: false,
        }
    }
}

/// A key, its value, and the revision that wrote it.
pub(super) type Entry = (Vec<u8>, Vec<u8>, i64);

#[derive(Debug, Clone)]
pub(super) struct Store {
    pub(super) client: Arc<Client>,
    pub(super) keys: Keys,
    /// Records in the next read.
    records: Arc<AtomicUsize>,
    /// Bytes that the keys of the last such read shared.
    shared_bytes: Arc<AtomicUsize>,
    verbatim: Arc<Mutex<Verbatim>>,
    reads: CallQueue,
    writes: CallQueue,
    releases: CallQueue,
}

/// Values with fields that the protocol does not know, and their bytes, by key: as they were read or
/// written last.
type Verbatim = HashMap<Vec<u8>, (Value, Vec<u8>)>;

impl Store {
    pub(super) fn new(client: Client, keys: Keys) -> Self {
        Self {
            records: Arc::new(AtomicUsize::new(RECORDS)),
            shared_bytes: Arc::default(),
            verbatim: Arc::default(),
            reads: CallQueue::of_reads(),
            writes: CallQueue::of_writes(),
            releases: CallQueue::of_releases(),
            client: Arc::new(client),
            keys,
        }
    }

    /// Reads a value that a later transaction may compare.
    pub(super) fn decode(&self, kind: &Key, key: &[u8], bytes: &[u8]) -> Result<Value, BadValue> {
        let value = codec::decode(kind, key, bytes)?;
        let mut verbatim = self.verbatim();
        if codec::encode(&value) == bytes {
            verbatim.remove(key);
        } else {
            verbatim.insert(key.to_owned(), (value.clone(), bytes.to_owned()));
        }
        Ok(value)
    }

    /// The bytes to write. The time at which a node is declared dead is added here: the protocol has
    /// no wall clock.
    fn written(&self, key: &[u8], value: &Value) -> Vec<u8> {
        match value {
            Value::Node(record) if record.state == NodeState::Fenced => {
                let bytes = codec::fenced_now(*record);
                let entry = (value.clone(), bytes.clone());
                self.verbatim().insert(key.to_owned(), entry);
                bytes
            }
            value => codec::encode(value),
        }
    }

    /// Every step leaves the map valid, so a panic elsewhere does no harm.
    fn verbatim(&self) -> MutexGuard<'_, Verbatim> {
        self.verbatim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of a value that was read from this key, or is about to be written there.
    pub(super) fn stored(&self, key: &[u8], value: &Value) -> Vec<u8> {
        match self.verbatim().get(key) {
            Some((known, bytes)) if known == value => bytes.clone(),
            _ => codec::encode(value),
        }
    }

    /// Sends a request once.
    pub(super) async fn execute(&self, request: Request) -> Answered {
        match request {
            Request::Commit(transaction) => self.commit(&transaction, Additions::default()).await,
            Request::Read(keys) => unavailable_unless(self.read(keys).await),
            Request::ReadSessions => unavailable_unless(self.read_sessions().await),
        }
    }

    /// A claim may be sent together with other calls.
    pub(super) async fn commit(&self, transaction: &Transaction, additions: Additions) -> Answered {
        let request = self.request(transaction, additions);
        let answered = match kind(transaction) {
            Kind::Claim => self.transact_queued(request).await,
            Kind::Renewal => answered(self.client.renewal(request).await),
            Kind::Other => self.transact(request).await,
        };
        if answered.answer == Answer::Committed {
            let seen = self.client.seen();
            for (key, value) in &transaction.write {
                if let (Key::Heartbeat(node), Some(Value::Heartbeat(own))) = (key, value) {
                    seen.wrote_heartbeat(own.incarnation, answered.revision);
                    // A write is newer than whatever was known of its key: the answer itself was
                    // checked to be no older.
                    let _ = seen.check_heartbeat(node, 0, answered.revision);
                }
            }
        }
        answered
    }

    /// The request that commits a transaction.
    pub(super) fn request(&self, transaction: &Transaction, additions: Additions) -> TxnRequest {
        let compare = transaction.compare.iter().map(|(key, value)| {
            let key = self.keys.of(key);
            let value = value.as_ref().map(|value| self.stored(&key, value));
            wire::is(key, value)
        });
        let write = transaction.write.iter().map(|(key, value)| {
            let key = self.keys.of(key);
            match value {
                Some(value) => {
                    let bytes = self.written(&key, value);
                    wire::put(key, bytes)
                }
                None => wire::delete(key),
            }
        });
        TxnRequest {
            compare: compare.chain(additions.compare).collect(),
            success: write.chain(additions.write).collect(),
        }
    }

    /// Commits these releases, or none of them, in one call at once, whatever else is under way.
    pub(super) async fn commit_releases(&self, requests: &[TxnRequest]) -> Vec<Answered> {
        let answers = self.releases.send(&self.client, requests).await;
        answers.into_iter().map(answered).collect()
    }

    /// Sends a transaction whose operations need no answers.
    pub(super) async fn transact(&self, request: TxnRequest) -> Answered {
        answered(self.client.txn(request).await)
    }

    /// The same for one that writes only keys of one session; it may be sent together with other calls.
    pub(super) async fn transact_queued(&self, request: TxnRequest) -> Answered {
        answered(self.writes.txn(&self.client, request).await)
    }

    async fn read(&self, keys: Vec<Key>) -> Result<(Answer, i64), ReadError> {
        let names: Vec<Vec<u8>> = keys.iter().map(|key| self.keys.of(key)).collect();
        let seen = self.client.seen();
        let before: Vec<i64> = keys
            .iter()
            .map(|key| match key {
                Key::Heartbeat(node) => seen.heartbeat(node),
                Key::Node(_)
                | Key::Session(_)
                | Key::Floor
                | Key::Silence(_)
                | Key::Fabric
                | Key::Part(_) => 0,
            })
            .collect();
        // What a claim reads may wait for a moment; what decides about nodes may not.
        let of_session = keys.iter().any(|key| matches!(key, Key::Session(_)));
        let (entries, revision) = match of_session {
            true => self.get_queued(&names).await?,
            false => self.get(&names).await?,
        };
        let mut values = Vec::with_capacity(keys.len());
        for ((key, entry), before) in keys.into_iter().zip(entries).zip(before) {
            let value = match entry {
                Some((name, bytes, written)) => {
                    if let Key::Heartbeat(node) = &key {
                        seen.check_heartbeat(node, before, written)
                            .map_err(|reason| CallError::Stale { reason })?;
                    }
                    Some(self.decode(&key, &name, &bytes)?)
                }
                None => None,
            };
            values.push((key, value));
        }
        Ok((Answer::Values(values), revision))
    }

    /// A key, and values of the protocol, in one snapshot.
    pub(super) async fn get_with(
        &self,
        name: Vec<u8>,
        keys: Vec<Key>,
    ) -> Result<(Option<Entry>, Answer), ReadError> {
        let mut names = vec![name];
        names.extend(keys.iter().map(|key| self.keys.of(key)));
        let (entries, _) = self.get(&names).await?;
        let mut entries = entries.into_iter();
        let first = entries.next().flatten();
        let mut values = Vec::with_capacity(keys.len());
        for (key, entry) in keys.into_iter().zip(entries) {
            let value = match entry {
                Some((name, bytes, _)) => Some(self.decode(&key, &name, &bytes)?),
                None => None,
            };
            values.push((key, value));
        }
        Ok((first, Answer::Values(values)))
    }

    /// These keys in one snapshot, and its revision.
    pub(super) async fn get(
        &self,
        names: &[Vec<u8>],
    ) -> Result<(Vec<Option<Entry>>, i64), ReadError> {
        entries(self.client.txn(gets(names)).await?, names)
    }

    /// The same for keys of one session; may be sent together with other reads.
    pub(super) async fn get_queued(
        &self,
        names: &[Vec<u8>],
    ) -> Result<(Vec<Option<Entry>>, i64), ReadError> {
        entries(self.reads.txn(&self.client, gets(names)).await?, names)
    }

    /// The first keys below `parent` from `from` on; may be read together with others.
    pub(super) async fn keys_below(
        &self,
        from: Vec<u8>,
        parent: &[u8],
        most: usize,
    ) -> Result<Vec<Vec<u8>>, ReadError> {
        let range = RangeRequest {
            key: from,
            range_end: wire::behind(parent),
            limit: i64::try_from(most).unwrap_or(1),
            keys_only: true,
            ..RangeRequest::default()
        };
        let request = TxnRequest {
            compare: Vec::new(),
            success: vec![Operation::Range(range).into()],
        };
        let found = ranges(self.reads.txn(&self.client, request).await?, 1)?;
        let keys = found.into_iter().flat_map(|range| range.kvs);
        Ok(keys.map(|kv| kv.key).collect())
    }

    /// All keys below these, which must be few, in one snapshot.
    pub(super) async fn get_below(
        &self,
        parents: &[Vec<u8>],
    ) -> Result<Vec<Vec<Entry>>, ReadError> {
        let range = |parent: &Vec<u8>| -> RequestOp {
            let range = RangeRequest {
                key: parent.clone(),
                range_end: wire::behind(parent),
                ..RangeRequest::default()
            };
            Operation::Range(range).into()
        };
        let request = TxnRequest {
            compare: Vec::new(),
            success: parents.iter().map(range).collect(),
        };
        let answer = self.client.txn(request).await?;
        let ranges = ranges(answer, parents.len())?;
        let entries = |range: RangeResponse| range.kvs.into_iter().map(entry).collect();
        Ok(ranges.into_iter().map(entries).collect())
    }

    async fn read_sessions(&self) -> Result<(Answer, i64), ReadError> {
        let parent = self.keys.owned();
        let mut values = Vec::new();
        for (name, bytes, _) in self.all_below(&parent).await? {
            if let Some(session) = Keys::name_in(&parent, &name) {
                let key = Key::Session(session.into());
                match self.decode(&key, &name, &bytes) {
                    Ok(value) => values.push((key, Some(value))),
                    // The other sessions are not affected. This session's containers here are ended
                    // as lost, and no node can claim it, because a claim has to read the value
                    // first.
                    Err(error) => tracing::error!(
                        %error,
                        "cannot read the ownership of a session: no node serves it until the key \
                         is deleted, and then as a new session"
                    ),
                }
            }
        }
        Ok((Answer::Values(values), 0))
    }
}

fn entry(kv: KeyValue) -> Entry {
    (kv.key, kv.value, kv.mod_revision)
}

/// How a transaction is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Claim,
    Renewal,
    Other,
}

pub(super) fn kind(transaction: &Transaction) -> Kind {
    match &transaction.write[..] {
        [(Key::Session(_), Some(Value::Session(ownership)))]
            if ownership.state == OwnedState::Owned =>
        {
            Kind::Claim
        }
        [(Key::Heartbeat(_), Some(_))] => Kind::Renewal,
        _ => Kind::Other,
    }
}

fn gets(names: &[Vec<u8>]) -> TxnRequest {
    TxnRequest {
        compare: Vec::new(),
        success: names.iter().cloned().map(wire::get).collect(),
    }
}

/// The answer to [`gets`], and its revision.
fn entries(answer: TxnResponse, names: &[Vec<u8>]) -> Result<(Vec<Option<Entry>>, i64), ReadError> {
    let revision = answer.header.as_ref().map_or(0, |header| header.revision);
    let ranges = ranges(answer, names.len())?;
    let first = |range: RangeResponse| range.kvs.into_iter().next().map(entry);
    Ok((ranges.into_iter().map(first).collect(), revision))
}

fn answered(answer: Result<TxnResponse, CallError>) -> Answered {
    match answer {
        Ok(answer) => {
            let revision = answer.header.as_ref().map_or(0, |header| header.revision);
            let outcome = match answer.succeeded {
                true => Answer::Committed,
                false => Answer::Conflict,
            };
            Answered::fine(outcome, revision)
        }
        Err(error) => {
            let answer = match error.is_without_effect() {
                true => Answer::Unavailable,
                false => Answer::Ambiguous,
            };
            Answered {
                refused: error.is_refusal(),
                ..Answered::failed(answer, error.to_string())
            }
        }
    }
}

fn ranges(answer: TxnResponse, expected: usize) -> Result<Vec<RangeResponse>, ReadError> {
    let range = |response: wire::ResponseOp| match response.response {
        Some(Outcome::Range(range)) => Ok(range),
        _ => Err(ReadError::Unexpected),
    };
    let ranges: Vec<RangeResponse> = answer
        .responses
        .into_iter()
        .map(range)
        .collect::<Result<_, _>>()?;
    match ranges.len() == expected {
        true => Ok(ranges),
        false => Err(ReadError::Unexpected),
    }
}

fn unavailable_unless(read: Result<(Answer, i64), ReadError>) -> Answered {
    match read {
        Ok((answer, revision)) => Answered::fine(answer, revision),
        Err(error) => Answered::failed(Answer::Unavailable, error.to_string()),
    }
}
