//! Calls that are made while an earlier one is under way are sent together once it is answered, so that a
//! busy node needs one call for many sessions. A call waits for nothing else, unless several were just sent
//! together: then more come within milliseconds.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prost::Message as _;
use tokio::sync::oneshot;
use tokio::time::{Duration, Instant, sleep_until};

use super::call_error::CallError;
use super::client::Client;
use super::wire::{Operation, Outcome, RequestOp, TxnRequest, TxnResponse};

/// etcd's default limit is 128 operations for a call and for each transaction in it together.
const MAX_CALLS: usize = 60;

/// etcd's default limit is 1.5 MiB for a call.
const MAX_BYTES: usize = 512 * 1024;

/// From one call that was for several to the next.
const PAUSE: Duration = Duration::from_millis(15);

/// How calls are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Reads, in one snapshot.
    Reads,
    /// Transactions of which each commits or fails by itself.
    Writes,
}

/// Reads, or writes, that are sent together.
#[derive(Debug, Clone)]
pub(super) struct Grouped {
    kind: Kind,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Debug, Default)]
struct Waiting {
    calls: VecDeque<Call>,
    /// Whether a task sends them.
    is_sending: bool,
}

#[derive(Debug)]
struct Call {
    request: TxnRequest,
    reply: oneshot::Sender<Result<TxnResponse, CallError>>,
}

impl Grouped {
    /// Of requests that only read, and compare nothing.
    pub(super) fn reads() -> Self {
        Self::new(Kind::Reads)
    }

    /// Of transactions whose operations need no answers.
    pub(super) fn writes() -> Self {
        Self::new(Kind::Writes)
    }

    fn new(kind: Kind) -> Self {
        let waiting = Arc::default();
        Self { kind, waiting }
    }

    /// As [`Client::txn`] does.
    pub(super) async fn txn(
        &self,
        client: &Arc<Client>,
        request: TxnRequest,
    ) -> Result<TxnResponse, CallError> {
        let (reply, answer) = oneshot::channel();
        if self.push(Call { request, reply }) {
            let (grouped, client) = (self.clone(), Arc::clone(client));
            tokio::spawn(async move { grouped.send_all(&client).await });
        }
        answer.await.unwrap_or_else(|_| {
            let reason = "the task that sends it has ended".to_owned();
            Err(CallError::Unknown { reason })
        })
    }

    /// Returns whether a task that sends is needed.
    fn push(&self, call: Call) -> bool {
        let mut waiting = self.waiting();
        waiting.calls.push_back(call);
        !std::mem::replace(&mut waiting.is_sending, true)
    }

    async fn send_all(&self, client: &Client) {
        while let Some(calls) = self.take() {
            let (requests, replies): (Vec<_>, Vec<_>) = calls
                .into_iter()
                .map(|call| (call.request, call.reply))
                .unzip();
            let next = match requests.len() {
                1 => Instant::now(),
                _ => Instant::now() + PAUSE,
            };
            let answers = self.send(client, requests).await;
            for (reply, answer) in replies.into_iter().zip(answers) {
                let _ = reply.send(answer);
            }
            sleep_until(next).await;
        }
    }

    /// An answer for each request.
    async fn send(
        &self,
        client: &Client,
        requests: Vec<TxnRequest>,
    ) -> Vec<Result<TxnResponse, CallError>> {
        let count = requests.len();
        let answered = match <[TxnRequest; 1]>::try_from(requests) {
            Ok([request]) => return vec![client.txn(request).await],
            Err(requests) => {
                let together = self.together(&requests);
                let sizes: Vec<_> = requests.iter().map(|one| one.success.len()).collect();
                match client.txn(together).await {
                    Ok(answer) => self.apart(answer, &sizes),
                    // What is refused, or too long, together may not be so alone.
                    Err(CallError::Refused { .. } | CallError::TooLong { .. }) => {
                        let mut answers = Vec::with_capacity(count);
                        for request in requests {
                            answers.push(client.txn(request).await);
                        }
                        return answers;
                    }
                    Err(error) => Err(error),
                }
            }
        };
        answered.unwrap_or_else(|error| vec![Err(error); count])
    }

    fn together(&self, requests: &[TxnRequest]) -> TxnRequest {
        let requests = requests.iter().cloned();
        let success = match self.kind {
            Kind::Reads => requests.flat_map(|one| one.success).collect(),
            Kind::Writes => requests
                .map(|one| RequestOp::from(Operation::Txn(one)))
                .collect(),
        };
        TxnRequest {
            compare: Vec::new(),
            success,
        }
    }

    /// The answers to requests with so many operations each.
    fn apart(
        &self,
        answer: TxnResponse,
        sizes: &[usize],
    ) -> Result<Vec<Result<TxnResponse, CallError>>, CallError> {
        let TxnResponse {
            header, responses, ..
        } = answer;
        let mut responses = responses.into_iter();
        let mut answers = Vec::with_capacity(sizes.len());
        for size in sizes {
            let one = match self.kind {
                Kind::Reads => TxnResponse {
                    succeeded: true,
                    responses: responses.by_ref().take(*size).collect(),
                    ..TxnResponse::default()
                },
                Kind::Writes => match responses.next().and_then(|one| one.response) {
                    Some(Outcome::Txn(answer)) => answer,
                    _ => {
                        let reason = "etcd's answer does not match the request".to_owned();
                        return Err(CallError::Unknown { reason });
                    }
                },
            };
            answers.push(Ok(TxnResponse {
                header: header.clone(),
                ..one
            }));
        }
        Ok(answers)
    }

    /// The next calls to send together; `None`: there are none, and nobody sends any more.
    fn take(&self) -> Option<Vec<Call>> {
        let mut waiting = self.waiting();
        let mut group = Group::default();
        let mut calls = Vec::new();
        while let Some(call) = waiting.calls.pop_front() {
            // Its caller has given up before it was sent.
            if call.reply.is_closed() {
                continue;
            }
            if !group.takes(&call.request) {
                waiting.calls.push_front(call);
                break;
            }
            calls.push(call);
        }
        waiting.is_sending = !calls.is_empty();
        waiting.is_sending.then_some(calls)
    }

    /// Every step leaves the queue valid, so a panic elsewhere does no harm.
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bounds what is sent together, and keeps apart what touches the same key: etcd compares everything in
/// a call before it writes anything of it.
#[derive(Debug, Default)]
struct Group {
    calls: usize,
    operations: usize,
    bytes: usize,
    compared: HashSet<Vec<u8>>,
    written: HashSet<Vec<u8>>,
}

impl Group {
    /// Whether the request belongs to it. The first one always does.
    fn takes(&mut self, request: &TxnRequest) -> bool {
        let bytes = self.bytes + request.encoded_len();
        let operations = self.operations + request.success.len();
        let compared = || request.compare.iter().map(|one| &one.key);
        let written = || request.success.iter().filter_map(written_key);
        let is_apart = compared().all(|key| !self.written.contains(key))
            && written().all(|key| !self.written.contains(key) && !self.compared.contains(key));
        let fits = self.calls < MAX_CALLS && operations <= 2 * MAX_CALLS && bytes <= MAX_BYTES;
        if self.calls > 0 && !(is_apart && fits) {
            return false;
        }
        self.calls += 1;
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
    fn what_touches_the_same_key_is_kept_apart() {
        for (compared, written, goes_along) in [
            ("other", "another", true),
            ("compared", "another", true),
            ("written", "another", false),
            ("other", "compared", false),
            ("other", "written", false),
        ] {
            let mut group = Group::default();
            assert!(group.takes(&change("compared", "written")));
            let takes = group.takes(&change(compared, written));
            assert_eq!(takes, goes_along, "{compared} {written}");
        }
    }

    #[test]
    fn a_group_is_bounded_in_number_and_in_bytes() {
        let mut group = Group::default();
        let names = (0..=MAX_CALLS).map(|number| number.to_string());
        let taken = names.filter(|name| group.takes(&change(name, name)));
        assert_eq!(taken.count(), MAX_CALLS);
        let large = |key: &str| TxnRequest {
            compare: Vec::new(),
            success: vec![wire::put(key.into(), vec![0; MAX_BYTES])],
        };
        let mut group = Group::default();
        assert!(group.takes(&large("alone")));
        assert!(!group.takes(&large("another")));
    }

    #[test]
    fn reads_are_answered_in_their_order() {
        let reads = Grouped::reads();
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
        let answers = reads.apart(answer, &[1, 2]).expect("answers");
        let counts: Vec<_> = answers
            .into_iter()
            .map(|one| one.expect("read").responses)
            .collect();
        assert_eq!(counts, [vec![range(true)], vec![range(false), range(true)]]);
    }
}
