//! Calls of many sessions that are sent together, so that a busy node needs few calls of etcd.
//!
//! One call is under way at a time. What is queued meanwhile is sent together next: reads in one snapshot,
//! writes as transactions that commit independently. Reads are not nested like writes, because etcd would put
//! a read inside a nested transaction through its log. Releases are grouped, but never queued. They commit
//! together or not at all, which costs etcd a quarter less than nested ones: they rarely conflict, and the
//! protocol then reads who owns what and releases again.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_watchdog::essential;
use futures_util::future::join_all;
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::time::{Duration, Instant, sleep_until};

use super::call_error::CallError;
use super::client::Client;
use super::wire::{Operation, Outcome, RequestOp, TxnRequest, TxnResponse};

/// etcd's default limit is 128 operations: those of a call and those of a transaction in it together.
const MAX_REQUESTS: usize = 60;

/// etcd's default limit of a call is 1.5 MiB.
const MAX_BYTES: usize = 512 * 1024;

/// Minimum time from the start of a call that carries several requests to the next one. Many sessions start
/// at the same time then, and their requests are milliseconds apart. Of 0, 4, 8 and 15 ms, 4 ms served the
/// clients of a preempted node soonest: longer ones leave the processors idle, shorter ones keep etcd busy.
const PAUSE: Duration = Duration::from_millis(4);

/// How requests are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reads,
    Writes,
    Releases,
}

/// A queue of reads or of writes; or how releases are sent, past any queue. Its length is bounded by its callers: each waits for one answer.
#[derive(Debug, Clone)]
pub(super) struct CallQueue {
    kind: Kind,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Debug, Default)]
struct Queue {
    requests: Vec<Queued>,
    /// Whether a task sends them.
    is_sending: bool,
}

#[derive(Debug)]
struct Queued {
    request: TxnRequest,
    reply: oneshot::Sender<Result<TxnResponse, CallError>>,
}

impl CallQueue {
    /// A queue of requests that only read, and compare nothing.
    pub(super) fn of_reads() -> Self {
        Self::new(Kind::Reads)
    }

    /// A queue of transactions whose operations need no answers.
    pub(super) fn of_writes() -> Self {
        Self::new(Kind::Writes)
    }

    /// Transactions that rarely conflict: all that are sent together commit, or none. For [`Self::send`].
    pub(super) fn of_releases() -> Self {
        Self::new(Kind::Releases)
    }

    fn new(kind: Kind) -> Self {
        let queue = Arc::default();
        Self { kind, queue }
    }

    /// Like [`Client::txn`], but may take twice as long: a call that is under way comes first.
    pub(super) async fn txn(
        &self,
        client: &Arc<Client>,
        request: TxnRequest,
    ) -> Result<TxnResponse, CallError> {
        let (reply, answer) = oneshot::channel();
        if self.push(Queued { request, reply }) {
            let (queue, client) = (self.clone(), Arc::clone(client));
            tokio::spawn(essential("calls of etcd", async move {
                queue.send_all(&client).await;
            }));
        }
        answer.await.unwrap_or_else(|_| {
            let reason = "the task that sends it has ended".to_owned();
            Err(CallError::Unknown { reason })
        })
    }

    /// Returns whether a task that sends is needed.
    fn push(&self, queued: Queued) -> bool {
        let mut queue = self.queue();
        queue.requests.push(queued);
        !std::mem::replace(&mut queue.is_sending, true)
    }

    async fn send_all(&self, client: &Client) {
        while let Some(group) = self.next_group() {
            let began = Instant::now();
            let (requests, replies): (Vec<_>, Vec<_>) = group
                .into_iter()
                .map(|queued| (queued.request, queued.reply))
                .unzip();
            let answers = self.send(client, &requests).await;
            for (reply, answer) in replies.into_iter().zip(answers) {
                let _ = reply.send(answer);
            }
            if requests.len() > 1 {
                sleep_until(began + PAUSE).await;
            }
        }
    }

    /// Sends requests that [`take_group`] has returned, in one call at once. Returns an answer for each.
    pub(super) async fn send(
        &self,
        client: &Client,
        requests: &[TxnRequest],
    ) -> Vec<Result<TxnResponse, CallError>> {
        if let [request] = requests {
            return vec![client.txn(request.clone()).await];
        }
        let answered = match client.txn(self.merged(requests)).await {
            Ok(answer) => self.split_answer(answer, requests),
            Err(error) => Err(error),
        };
        match answered {
            Ok(answers) => answers.into_iter().map(Ok).collect(),
            // A group may exceed a limit that each of its requests keeps.
            Err(error) if self.may_send_alone(&error) => {
                let alone = requests.iter().map(|request| client.txn(request.clone()));
                join_all(alone).await
            }
            Err(error) => vec![Err(error); requests.len()],
        }
    }

    /// Whether the requests of a group that failed may be sent once more, each alone: etcd has rejected the
    /// group, or its answer to reads was too long.
    fn may_send_alone(&self, error: &CallError) -> bool {
        match error {
            CallError::Refused { .. } => true,
            CallError::TooLong { .. } => self.kind == Kind::Reads,
            CallError::NotSent { .. }
            | CallError::Full { .. }
            | CallError::Unknown { .. }
            | CallError::Late { .. }
            | CallError::Stale { .. } => false,
        }
    }

    fn merged(&self, requests: &[TxnRequest]) -> TxnRequest {
        let requests = requests.iter().cloned();
        if self.kind == Kind::Writes {
            let nested = requests.map(|one| RequestOp::from(Operation::Txn(one)));
            return TxnRequest {
                compare: Vec::new(),
                success: nested.collect(),
            };
        }
        requests.fold(TxnRequest::default(), |mut merged, one| {
            merged.compare.extend(one.compare);
            merged.success.extend(one.success);
            merged
        })
    }

    /// The answers to requests that were merged.
    fn split_answer(
        &self,
        answer: TxnResponse,
        requests: &[TxnRequest],
    ) -> Result<Vec<TxnResponse>, CallError> {
        let TxnResponse {
            header,
            succeeded,
            responses,
        } = answer;
        let mut responses = responses.into_iter();
        let split = requests.iter().map(|request| match self.kind {
            Kind::Reads | Kind::Releases => Some(TxnResponse {
                header: header.clone(),
                succeeded,
                responses: responses.by_ref().take(request.success.len()).collect(),
            }),
            Kind::Writes => match responses.next()?.response? {
                Outcome::Txn(answer) => Some(TxnResponse {
                    header: header.clone(),
                    ..answer
                }),
                _ => None,
            },
        });
        let answers: Option<Vec<_>> = split.collect();
        answers.ok_or_else(|| CallError::Unknown {
            reason: "etcd's answer does not match the request".to_owned(),
        })
    }

    /// The requests to send together next; `None` if there are none, and the task is to end.
    fn next_group(&self) -> Option<Vec<Queued>> {
        let mut queue = self.queue();
        // The callers of the others have given up before they were sent.
        queue.requests.retain(|queued| !queued.reply.is_closed());
        let requests = take_group(&mut queue.requests, |queued| &queued.request);
        queue.is_sending = !requests.is_empty();
        queue.is_sending.then_some(requests)
    }

    /// Every step leaves the queue valid, so a panic elsewhere does no harm.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the first items whose requests may be sent together, in their order: none only if there are none.
pub(super) fn take_group<T>(items: &mut Vec<T>, request: impl Fn(&T) -> &TxnRequest) -> Vec<T> {
    let mut group = Group::default();
    let fits = |item: &&T| group.try_add(request(item));
    let count = items.iter().take_while(fits).count();
    items.drain(..count).collect()
}

/// Bounds what is sent together, and keeps requests for the same key apart: etcd compares everything in a call
/// before it writes anything of it.
#[derive(Debug, Default)]
struct Group {
    requests: usize,
    operations: usize,
    bytes: usize,
    compared: HashSet<Vec<u8>>,
    written: HashSet<Vec<u8>>,
}

impl Group {
    /// Returns whether the request belongs to the group. The first one always does.
    fn try_add(&mut self, request: &TxnRequest) -> bool {
        let bytes = self.bytes + request.encoded_len();
        let operations = self.operations + request.success.len();
        let compared = || request.compare.iter().map(|one| &one.key);
        let written = || request.success.iter().filter_map(written_key);
        let is_apart = compared().all(|key| !self.written.contains(key))
            && written().all(|key| !self.written.contains(key) && !self.compared.contains(key));
        let fits =
            self.requests < MAX_REQUESTS && operations <= 2 * MAX_REQUESTS && bytes <= MAX_BYTES;
        if self.requests > 0 && !(is_apart && fits) {
            return false;
        }
        self.requests += 1;
        (self.operations, self.bytes) = (operations, bytes);
        self.compared.extend(compared().cloned());
        self.written.extend(written().cloned());
        true
    }
}

fn written_key(operation: &RequestOp) -> Option<&Vec<u8>> {
    match operation.request.as_ref()? {
        Operation::Put(put) => Some(&put.key),
        Operation::Delete(delete) => Some(&delete.key),
        Operation::Range(_) | Operation::Txn(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire;
    use super::*;

    fn change(compared: &str, written: &str) -> TxnRequest {
        TxnRequest {
            compare: vec![wire::is(compared.into(), None)],
            success: vec![wire::put(written.into(), b"value".to_vec())],
        }
    }

    #[test]
    fn requests_for_the_same_key_are_kept_apart() {
        for (compared, written, is_added) in [
            ("other", "another", true),
            ("compared", "another", true),
            ("written", "another", false),
            ("other", "compared", false),
            ("other", "written", false),
        ] {
            let mut group = Group::default();
            assert!(group.try_add(&change("compared", "written")));
            let added = group.try_add(&change(compared, written));
            assert_eq!(added, is_added, "{compared} {written}");
        }
    }

    #[test]
    fn a_group_is_bounded_in_number_and_in_bytes() {
        let mut group = Group::default();
        let names = (0..=MAX_REQUESTS).map(|number| number.to_string());
        let added = names.filter(|name| group.try_add(&change(name, name)));
        assert_eq!(added.count(), MAX_REQUESTS);
        let large = |key: &str| TxnRequest {
            compare: Vec::new(),
            success: vec![wire::put(key.into(), vec![0; MAX_BYTES])],
        };
        let mut group = Group::default();
        assert!(group.try_add(&large("alone")));
        assert!(!group.try_add(&large("another")));
    }

    #[test]
    fn groups_keep_the_order_and_what_is_too_large_by_itself_goes_alone() {
        let put = |key: u8, bytes| TxnRequest {
            compare: Vec::new(),
            success: vec![wire::put(vec![key], vec![0; bytes])],
        };
        let quarter = MAX_BYTES / 4;
        let sizes = [quarter, quarter, quarter, quarter, MAX_BYTES, quarter];
        let mut requests: Vec<_> = (0..).zip(sizes).map(|(key, size)| put(key, size)).collect();
        let mut groups: Vec<Vec<u8>> = Vec::new();
        while !requests.is_empty() {
            let group = take_group(&mut requests, |request| request);
            let operations = group.iter().flat_map(|request| &request.success);
            let keys = operations.filter_map(written_key);
            groups.push(keys.flatten().copied().collect());
        }
        assert_eq!(groups, [vec![0, 1, 2], vec![3], vec![4], vec![5]]);
    }

    #[test]
    fn each_read_gets_its_own_answers() {
        let range = |more| wire::ResponseOp {
            response: Some(Outcome::Range(wire::RangeResponse {
                more,
                ..wire::RangeResponse::default()
            })),
        };
        let answer = TxnResponse {
            responses: vec![range(true), range(false), range(true)],
            succeeded: true,
            ..TxnResponse::default()
        };
        let reads = |count: usize| TxnRequest {
            compare: Vec::new(),
            success: vec![wire::get(b"key".to_vec()); count],
        };
        let queue = CallQueue::of_reads();
        let answers = queue.split_answer(answer, &[reads(1), reads(2)]);
        let answers = answers.expect("answers").into_iter();
        let responses: Vec<_> = answers.map(|one| one.responses).collect();
        assert_eq!(
            responses,
            [vec![range(true)], vec![range(false), range(true)]]
        );
    }
}
