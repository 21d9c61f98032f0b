//! Calls to etcd: endpoints are tried in turn; each call has a timeout and is sent once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::RateLimitedLog;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

mod connections;
mod method;
mod sign_in;

use connections::Connections;
pub(super) use method::MAX_BULK_BYTES;
use method::{AUTHENTICATE, COMPACT, Lines, MAX_ANSWER_BYTES, Method, RANGE, RENEWAL, TXN, WATCH};

use super::access::{AccessError, EtcdAccess, EtcdCredentials, endpoints};
use super::call_error::{CallError, is_about_sign_in};
use super::figures;
use super::seen::Seen;
use super::shared::boot_time;
use super::wire::{
    CompactionRequest, CompactionResponse, RangeRequest, RangeResponse, ResponseHeader, TxnRequest,
    TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};

/// A renewal's answer counts until this multiple of the timeout has passed: about F.
const LATE_FACTOR: f64 = 2.5;

/// Interval between repeated warnings about an endpoint.
const REPEAT_AFTER: Duration = Duration::from_mins(10);

/// An answer with etcd's header.
pub(super) trait Headed {
    fn header(&self) -> Option<&ResponseHeader>;
}

impl Headed for RangeResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header.as_ref()
    }
}

impl Headed for CompactionResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header.as_ref()
    }
}

impl Headed for TxnResponse {
    fn header(&self) -> Option<&ResponseHeader> {
        self.header.as_ref()
    }
}

#[derive(Debug)]
pub(super) struct Client {
    /// The endpoints' names in messages.
    names: Vec<String>,
    connections: Mutex<Connections>,
    /// The endpoint in use.
    current: AtomicUsize,
    /// Rate limit of warnings about endpoints that fail.
    warnings: RateLimitedLog,
    patience: Duration,
    credentials: Mutex<Option<EtcdCredentials>>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    /// Why the latest try to sign in failed, and when.
    signing_in: tokio::sync::Mutex<Option<(Instant, CallError)>>,
    answers: Mutex<Answers>,
    seen: Arc<Seen>,
}

/// What is known of etcd's answers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Answers {
    /// When the latest one arrived.
    pub(super) latest: Option<Instant>,
    /// How long the latest renewal took.
    pub(super) renewal: Option<Duration>,
}

impl Client {
    /// Makes no connection yet. `patience` is the timeout of every call except a watch, once it is sent.
    pub(super) fn new(
        access: &EtcdAccess,
        patience: Duration,
        seen: Arc<Seen>,
    ) -> Result<Self, AccessError> {
        let endpoints = endpoints(access, patience)?;
        let name = |endpoint: &Endpoint| format!("etcd at {}", endpoint.uri());
        Ok(Self {
            names: endpoints.iter().map(name).collect(),
            connections: Mutex::new(Connections::new(endpoints)),
            current: AtomicUsize::new(0),
            warnings: RateLimitedLog::new(REPEAT_AFTER),
            patience,
            credentials: Mutex::new(access.credentials.clone()),
            token: Mutex::default(),
            signing_in: tokio::sync::Mutex::default(),
            answers: Mutex::default(),
            seen,
        })
    }

    /// Uses these certificates and credentials from here on, with the same endpoints. Calls under
    /// way continue, and the client signs in again only when etcd requires it, so that a new
    /// password may be configured here before it is set in etcd.
    pub(super) fn renew(&self, access: &EtcdAccess) -> Result<(), AccessError> {
        let endpoints = endpoints(access, self.patience)?;
        *self.connections() = Connections::new(endpoints);
        let credentials = access.credentials.clone();
        *self
            .credentials
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = credentials;
        Ok(())
    }

    /// A panic while the lock is held cannot leave a partial change.
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn credentials(&self) -> Option<EtcdCredentials> {
        let credentials = self.credentials.lock();
        credentials.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn seen(&self) -> &Seen {
        &self.seen
    }

    pub(super) async fn range(&self, request: RangeRequest) -> Result<RangeResponse, CallError> {
        self.timed(RANGE, request).await
    }

    /// After this, values that were overwritten or deleted before this revision cannot be read.
    pub(super) async fn compact(&self, revision: i64) -> Result<CompactionResponse, CallError> {
        // It may take as long as a large read, and must not delay a renewal.
        let method = COMPACT.bulk(i64::MAX);
        self.timed(method, CompactionRequest { revision }).await
    }

    /// Reads at most as many records as the request's limit.
    pub(super) async fn bulk_range(
        &self,
        request: RangeRequest,
    ) -> Result<RangeResponse, CallError> {
        self.timed(RANGE.bulk(request.limit), request).await
    }

    /// Reads one record per operation.
    pub(super) async fn bulk_reads(&self, request: TxnRequest) -> Result<TxnResponse, CallError> {
        let records = i64::try_from(request.success.len()).unwrap_or(i64::MAX);
        self.timed(TXN.bulk(records), request).await
    }

    pub(super) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, CallError> {
        self.timed(TXN, request).await
    }

    /// The same for a renewal, whose answer is awaited for as long as it may count.
    pub(super) async fn renewal(&self, request: TxnRequest) -> Result<TxnResponse, CallError> {
        self.timed(RENEWAL, request).await
    }

    /// The timeout of a call.
    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    async fn timed<Q, R>(&self, method: Method, request: Q) -> Result<R, CallError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Message + Default + Headed + Send + Sync + 'static,
    {
        let began = Instant::now();
        let answer = self.checked(method, request).await;
        figures::called(method.path, began.elapsed(), answer.is_err());
        self.note_answer(method, began, answer.as_ref().err());
        answer
    }

    fn note_answer(&self, method: Method, began: Instant, error: Option<&CallError>) {
        let is_answer = match error {
            None => true,
            Some(error) => error.is_refusal(),
        };
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if is_answer {
            answers.latest = Some(Instant::now());
        }
        // Of one that is not answered in time, the time is a lower bound.
        let is_measured = matches!(error, None | Some(CallError::Late { .. }));
        if method == RENEWAL && is_measured {
            answers.renewal = Some(began.elapsed());
        }
    }

    /// What is known of etcd's answers.
    pub(super) fn answers(&self) -> Answers {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn checked<Q, R>(&self, method: Method, request: Q) -> Result<R, CallError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Message + Default + Headed + Send + Sync + 'static,
    {
        let before = self.seen.revision();
        let answer: R = match self.once(method, request.clone()).await {
            // The token has expired, or etcd has dropped it: sign in and send the call again. A
            // refusal has no effect.
            Err(CallError::Refused { reason })
                if self.credentials().is_some() && is_about_sign_in(&reason) =>
            {
                self.sign_in().await?;
                self.once(method, request).await?
            }
            other => other?,
        };
        self.check(before, answer.header())?;
        Ok(answer)
    }

    fn check(&self, before: i64, header: Option<&ResponseHeader>) -> Result<(), CallError> {
        let Some(header) = header else {
            let reason = "etcd's answer has no header; is it etcd 3.4 or later?".to_owned();
            return Err(CallError::Stale { reason });
        };
        self.seen
            .check(before, header.cluster_id, header.revision)
            .map_err(|reason| {
                self.turn(self.current.load(Ordering::Relaxed));
                CallError::Stale { reason }
            })
    }

    /// Tries the endpoints in turn until one is connected, and sends once.
    async fn once<Q, R>(&self, method: Method, request: Q) -> Result<R, CallError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Message + Default + Send + Sync + 'static,
    {
        if self.credentials().is_some() && self.token().is_none() && method != AUTHENTICATE {
            self.sign_in().await?;
        }
        let deadline = Instant::now() + self.patience;
        let mut failure = None;
        for _ in 0..self.names.len() {
            let (index, channel) = self.line(method.lines);
            let token = (method != AUTHENTICATE).then(|| self.token()).flatten();
            let mut call = std::pin::pin!(send(channel, method, request.clone(), token));
            let answered = match timeout_at(deadline, &mut call).await {
                Ok(answered) => answered,
                Err(_) => {
                    let error = self.late(index, method);
                    if !method.counts_late {
                        return Err(error);
                    }
                    let last = deadline + self.patience.mul_f64(LATE_FACTOR - 1.0);
                    match timeout_at(last, &mut call).await {
                        Ok(answered) => answered,
                        Err(_) => return Err(error),
                    }
                }
            };
            let status = match answered {
                Ok(answer) => return Ok(answer),
                Err(status) => status,
            };
            let error = self.failed(index, method.path, &status);
            let at_fault = !error.is_refusal() && !matches!(error, CallError::TooLong { .. });
            if at_fault {
                self.pass_over(index, &error.to_string());
            }
            if !matches!(error, CallError::NotSent { .. }) {
                return Err(error);
            }
            failure = Some(error);
        }
        Err(failure.unwrap_or_else(|| CallError::NotSent {
            reason: "no endpoint of etcd".to_owned(),
        }))
    }

    /// The next calls use another connection, and another endpoint. Whatever happened at earlier
    /// endpoints, this one may have received the call.
    fn late(&self, index: usize, method: Method) -> CallError {
        let reason = format!(
            "{} did not answer within {} ms",
            self.name(index),
            self.patience.as_millis()
        );
        self.connections().replace(method.lines, index);
        // A large read may be slow; renewals detect an endpoint that hangs.
        if method.max_answer_bytes == MAX_ANSWER_BYTES {
            self.pass_over(index, &reason);
        }
        CallError::Late { reason }
    }

    /// Watches changes under a prefix from here on.
    pub(super) async fn watch(
        &self,
        key: Vec<u8>,
        range_end: Vec<u8>,
    ) -> Result<Streaming<WatchResponse>, CallError> {
        if self.credentials().is_some() && self.token().is_none() {
            self.sign_in().await?;
        }
        let (index, channel) = self.line(Lines::Common);
        let create = WatchRequest {
            create: Some(WatchCreateRequest { key, range_end }),
        };
        // The request stream stays open: closing it would end the watch.
        let requests = futures_util::StreamExt::chain(
            futures_util::stream::iter([create]),
            futures_util::stream::pending(),
        );
        let mut grpc = Grpc::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
        let mut request = Request::new(requests);
        attach(&mut request, self.token());
        let open = async {
            grpc.ready()
                .await
                .map_err(|error| Status::from_error(error.into()))?;
            let codec = ProstCodec::<WatchRequest, WatchResponse>::new();
            grpc.streaming(request, PathAndQuery::from_static(WATCH), codec)
                .await
        };
        match timeout(self.patience, open).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.failed(index, WATCH, &status)),
            Err(_) => Err(CallError::Unknown {
                reason: format!("{} did not begin a watch in time", self.name(index)),
            }),
        }
    }

    /// The endpoint in use and the connection to it.
    fn line(&self, which: Lines) -> (usize, Channel) {
        let index = self.current.load(Ordering::Relaxed) % self.names.len();
        (index, self.connections().lines(which)[index].clone())
    }

    /// Selects the next endpoint, and logs why. Otherwise a wrong certificate or a dead member would
    /// go unnoticed until the last endpoint fails.
    fn pass_over(&self, from: usize, why: &str) {
        self.turn(from);
        let now = Duration::from_millis(boot_time().0);
        if self.names.len() > 1 && self.warnings.allow(why, now).is_some() {
            tracing::warn!(
                why,
                "etcd endpoint failed; using another one of `registry.endpoints`"
            );
        }
    }

    /// Selects the next endpoint, unless another caller already has.
    fn turn(&self, from: usize) {
        let next = (from + 1) % self.names.len();
        let _ = self
            .current
            .compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn failed(&self, index: usize, path: &str, status: &Status) -> CallError {
        match CallError::of(&self.name(index), status) {
            // Compaction needs more than a role can grant; its caller reports what.
            CallError::Refused { reason }
                if status.code() == Code::PermissionDenied && path != COMPACT.path =>
            {
                let user = match self.credentials() {
                    Some(credentials) => format!("user `{}`", credentials.user),
                    None => "the user that this node's certificate names".to_owned(),
                };
                CallError::Refused {
                    reason: format!(
                        "{reason}: {user} needs a role that reads and writes all below \
                         `registry.prefix` (`etcdctl role grant-permission --prefix`)"
                    ),
                }
            }
            error => error,
        }
    }

    fn name(&self, index: usize) -> String {
        self.names[index].clone()
    }
}

async fn send<Q, R>(
    channel: Channel,
    method: Method,
    request: Q,
    token: Option<MetadataValue<Ascii>>,
) -> Result<R, Status>
where
    Q: Message + Send + Sync + 'static,
    R: Message + Default + Send + Sync + 'static,
{
    let mut grpc = Grpc::new(channel).max_decoding_message_size(method.max_answer_bytes);
    let mut request = Request::new(request);
    attach(&mut request, token);
    grpc.ready()
        .await
        .map_err(|error| Status::from_error(error.into()))?;
    let codec = ProstCodec::<Q, R>::new();
    let answer = grpc
        .unary(request, PathAndQuery::from_static(method.path), codec)
        .await?;
    Ok(answer.into_inner())
}

fn attach<T>(request: &mut Request<T>, token: Option<MetadataValue<Ascii>>) {
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
}
