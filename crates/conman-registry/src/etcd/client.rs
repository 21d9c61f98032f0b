//! Calls to etcd: one endpoint after the other, each call bounded and sent once.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::uri::PathAndQuery;
use prost::Message;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::call_error::{CallError, is_about_sign_in};
use super::figures;
use super::passed_over::PassedOver;
use super::seen::{Before, Seen};
use super::wire::{
    AuthenticateRequest, AuthenticateResponse, CompactionRequest, CompactionResponse, RangeRequest,
    RangeResponse, ResponseHeader, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest,
    WatchResponse,
};

/// What is called, how long its answer may be, and by which lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Method {
    path: &'static str,
    max_answer_bytes: usize,
    lines: Lines,
}

/// Many large records have lines of their own, so that renewals never queue up behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lines {
    Common,
    Bulk,
}

impl Method {
    const fn new(path: &'static str) -> Self {
        Self {
            path,
            max_answer_bytes: MAX_ANSWER_BYTES,
            lines: Lines::Common,
        }
    }

    /// The same for many records; of a single one any size is taken.
    const fn bulk(self, records: i64) -> Self {
        Self {
            path: self.path,
            max_answer_bytes: match records {
                ..=1 => MAX_ANSWER_BYTES,
                _ => MAX_BULK_BYTES,
            },
            lines: Lines::Bulk,
        }
    }
}

const RANGE: Method = Method::new("/etcdserverpb.KV/Range");
const TXN: Method = Method::new("/etcdserverpb.KV/Txn");
const COMPACT: Method = Method::new("/etcdserverpb.KV/Compact");
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const AUTHENTICATE: Method = Method::new("/etcdserverpb.Auth/Authenticate");

/// Longest answer: a page of small values, or a record, which etcd bounds to 1.5 MiB, is far below.
const MAX_ANSWER_BYTES: usize = 64 * 1_024 * 1_024;

/// Longest answer of many records: no more is taken in at once on the fleet's thread.
pub(super) const MAX_BULK_BYTES: usize = 8 * 1_024 * 1_024;

/// How a certificate begins in PEM (RFC 7468).
const PEM_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

/// While calls are under way an idle line is asked for a sign of life this often: etcd cuts clients
/// off that ask more often than every five seconds.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// A watch learns by this that its etcd has gone without a word.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// How etcd is reached.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdAccess {
    /// `http://HOST:PORT` or `https://HOST:PORT`, at least one.
    pub endpoints: Vec<String>,
    pub credentials: Option<EtcdCredentials>,
    pub tls: Option<EtcdTls>,
}

impl fmt::Debug for EtcdAccess {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EtcdAccess")
            .field("endpoints", &self.endpoints)
            .field("user", &self.credentials.as_ref().map(|one| &one.user))
            .field("tls", &self.tls.is_some())
            .finish_non_exhaustive()
    }
}

/// What etcd knows this node by.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdCredentials {
    pub user: String,
    pub password: String,
}

impl fmt::Debug for EtcdCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EtcdCredentials({})", self.user)
    }
}

/// PEM texts.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdTls {
    /// Whoever signed etcd's certificates.
    pub ca: Vec<u8>,
    /// This node's certificate and key, where etcd asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for EtcdTls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("EtcdTls(…)")
    }
}

/// Why the way to etcd cannot even be tried.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    #[error("there is no endpoint of etcd; name at least one, such as `http://10.0.0.1:2379`")]
    NoEndpoint,
    #[error("`{endpoint}` is no endpoint of etcd; use `http://HOST:PORT` or `https://HOST:PORT`")]
    Endpoint { endpoint: String },
    #[error(
        "the certificates for etcd cannot be used: {reason}; `registry.ca_file`, \
         `registry.cert_file` and `registry.key_file` must be PEM files, the last two of one pair"
    )]
    Tls { reason: String },
    #[error(
        "`registry.ca_file` holds no certificate; it must be a PEM file of whoever signed etcd's"
    )]
    NoAuthority,
}

/// What an answer's header is taken from.
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

#[derive(Debug, Default)]
struct Way {
    endpoints: Vec<Endpoint>,
    /// One connection an endpoint, made when it is first used, replaced when it hangs.
    lines: Vec<Channel>,
    /// The same for [`Lines::Bulk`].
    bulk: Vec<Channel>,
}

impl Way {
    fn new(endpoints: Vec<Endpoint>) -> Self {
        Self {
            endpoints,
            ..Self::default()
        }
    }

    fn lines(&mut self, which: Lines) -> &mut Vec<Channel> {
        let lines = match which {
            Lines::Common => &mut self.lines,
            Lines::Bulk => &mut self.bulk,
        };
        if lines.is_empty() {
            *lines = self.endpoints.iter().map(Endpoint::connect_lazy).collect();
        }
        lines
    }

    /// Whatever is still on its way on this one is nothing anybody waits for.
    fn replace(&mut self, which: Lines, index: usize) {
        let Some(endpoint) = self.endpoints.get(index).cloned() else {
            return;
        };
        if let Some(line) = self.lines(which).get_mut(index) {
            *line = endpoint.connect_lazy();
        }
    }
}

#[derive(Debug)]
pub(super) struct Client {
    /// What the endpoints are called in messages.
    names: Vec<String>,
    way: Mutex<Way>,
    /// The endpoint that is used.
    current: AtomicUsize,
    passed_over: PassedOver,
    patience: Duration,
    credentials: Mutex<Option<EtcdCredentials>>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    signing_in: tokio::sync::Mutex<()>,
    seen: Arc<Seen>,
}

impl Client {
    /// Connects to nothing yet. `patience` bounds every call but a watch.
    pub(super) fn new(
        access: &EtcdAccess,
        patience: Duration,
        seen: Arc<Seen>,
    ) -> Result<Self, AccessError> {
        let endpoints = endpoints(access, patience)?;
        let name = |endpoint: &Endpoint| format!("etcd at {}", endpoint.uri());
        Ok(Self {
            names: endpoints.iter().map(name).collect(),
            way: Mutex::new(Way::new(endpoints)),
            current: AtomicUsize::new(0),
            passed_over: PassedOver::default(),
            patience,
            credentials: Mutex::new(access.credentials.clone()),
            token: Mutex::default(),
            signing_in: tokio::sync::Mutex::default(),
            seen,
        })
    }

    /// From now on the same endpoints with these certificates and credentials. Calls under way go on
    /// as they began, and who has signed in needs to again only when etcd wants it: so that a new
    /// password may be here before etcd has it.
    pub(super) fn renew(&self, access: &EtcdAccess) -> Result<(), AccessError> {
        let endpoints = endpoints(access, self.patience)?;
        *self.way() = Way::new(endpoints);
        let credentials = access.credentials.clone();
        *self
            .credentials
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = credentials;
        Ok(())
    }

    /// A panic while the lock is held cannot leave half a change.
    fn way(&self) -> MutexGuard<'_, Way> {
        self.way.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What was overwritten or deleted before this revision cannot be read any more.
    pub(super) async fn compact(&self, revision: i64) -> Result<CompactionResponse, CallError> {
        // It may take as long as much to read does, and no renewal is to wait behind it.
        let method = COMPACT.bulk(i64::MAX);
        self.timed(method, CompactionRequest { revision }).await
    }

    /// Bound on every call but a watch.
    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// At most so many records as the request's limit says.
    pub(super) async fn bulk_range(
        &self,
        request: RangeRequest,
    ) -> Result<RangeResponse, CallError> {
        self.timed(RANGE.bulk(request.limit), request).await
    }

    /// Reads so many records as there are operations.
    pub(super) async fn bulk_reads(&self, request: TxnRequest) -> Result<TxnResponse, CallError> {
        let records = i64::try_from(request.success.len()).unwrap_or(i64::MAX);
        self.timed(TXN.bulk(records), request).await
    }

    pub(super) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, CallError> {
        self.timed(TXN, request).await
    }

    async fn timed<Q, R>(&self, method: Method, request: Q) -> Result<R, CallError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Message + Default + Headed + Send + Sync + 'static,
    {
        let began = Instant::now();
        let answer = self.checked(method, request).await;
        figures::called(method.path, began.elapsed(), answer.is_err());
        answer
    }

    async fn checked<Q, R>(&self, method: Method, request: Q) -> Result<R, CallError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        R: Message + Default + Headed + Send + Sync + 'static,
    {
        let before = self.seen.before();
        let answer: R = match self.once(method, request.clone()).await {
            // The token has expired, or etcd has forgotten it: a new one, and then the same again,
            // as a refusal has no effect.
            Err(CallError::Refused { reason })
                if self.credentials().is_some() && is_about_sign_in(&reason) =>
            {
                self.sign_in().await?;
                self.once(method, request).await?
            }
            other => other?,
        };
        self.check(&before, answer.header())?;
        Ok(answer)
    }

    fn check(&self, before: &Before, header: Option<&ResponseHeader>) -> Result<(), CallError> {
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

    /// Tries the endpoints in turn until one is connected to, and sends once.
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
            let call = send(channel, method, request.clone(), token);
            let status = match timeout_at(deadline, call).await {
                Ok(Ok(answer)) => {
                    self.passed_over.serves(index);
                    return Ok(answer);
                }
                Ok(Err(status)) => status,
                Err(_) => {
                    let reason = format!(
                        "{} did not answer within {} ms",
                        self.name(index),
                        self.patience.as_millis()
                    );
                    self.way().replace(method.lines, index);
                    // Much to read takes its time; whether the endpoint hangs, renewals tell.
                    if method.max_answer_bytes == MAX_ANSWER_BYTES {
                        self.turn(index);
                        self.passed_over.failed(index, reason.clone());
                    }
                    // Whatever became of the endpoints before, this one may have been reached.
                    return Err(CallError::Late { reason });
                }
            };
            let error = self.failed(index, method.path, &status);
            let at_fault = !matches!(error, CallError::Refused { .. } | CallError::TooLong { .. });
            if at_fault {
                self.turn(index);
                self.passed_over.failed(index, error.to_string());
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

    /// Hints of what changes under a prefix, from now on.
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
        // The request's side stays open: its end would end the watch.
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

    /// One at a time; whoever waited for another's takes its token.
    fn sign_in(&self) -> BoxFuture<'_, Result<(), CallError>> {
        Box::pin(self.signed_in())
    }

    async fn signed_in(&self) -> Result<(), CallError> {
        let Some(credentials) = self.credentials() else {
            return Ok(());
        };
        let before = self.token();
        let _turn = self.signing_in.lock().await;
        if self.token() != before {
            return Ok(());
        }
        let request = AuthenticateRequest {
            name: credentials.user.clone(),
            password: credentials.password.clone(),
        };
        let answered: Result<AuthenticateResponse, _> = self.once(AUTHENTICATE, request).await;
        let answer = answered.map_err(|error| match error {
            CallError::Refused { reason } => CallError::Refused {
                reason: format!(
                    "user `{}` cannot sign in ({reason}); see `registry.user` and \
                     `registry.password_file`",
                    credentials.user
                ),
            },
            // Signing in has no effect that matters, so that the call itself has none.
            CallError::NotSent { reason }
            | CallError::Unknown { reason }
            | CallError::Late { reason }
            | CallError::TooLong { reason }
            | CallError::Stale { reason } => CallError::NotSent { reason },
        })?;
        let token = answer.token.parse().map_err(|_| CallError::Refused {
            reason: "etcd's token cannot be sent back".to_owned(),
        })?;
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Ok(())
    }

    fn token(&self) -> Option<MetadataValue<Ascii>> {
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }

    /// The endpoint in use and the connection to it.
    fn line(&self, which: Lines) -> (usize, Channel) {
        let index = self.current.load(Ordering::Relaxed) % self.names.len();
        (index, self.way().lines(which)[index].clone())
    }

    /// The next endpoint from now on, unless somebody else has turned already.
    fn turn(&self, from: usize) {
        let next = (from + 1) % self.names.len();
        let _ = self
            .current
            .compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn failed(&self, index: usize, path: &str, status: &Status) -> CallError {
        match CallError::of(&self.name(index), status) {
            // Compaction takes more than a role can have, and its caller says what.
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

fn endpoints(access: &EtcdAccess, patience: Duration) -> Result<Vec<Endpoint>, AccessError> {
    let endpoints: Vec<Endpoint> = access
        .endpoints
        .iter()
        .map(|text| endpoint(text, access.tls.as_ref(), patience))
        .collect::<Result<_, _>>()?;
    match endpoints.is_empty() {
        true => Err(AccessError::NoEndpoint),
        false => Ok(endpoints),
    }
}

fn endpoint(
    text: &str,
    tls: Option<&EtcdTls>,
    patience: Duration,
) -> Result<Endpoint, AccessError> {
    let wrong = || AccessError::Endpoint {
        endpoint: text.to_owned(),
    };
    let secure = text.starts_with("https://");
    if !secure && !text.starts_with("http://") {
        return Err(wrong());
    }
    let endpoint = Endpoint::from_shared(text.to_owned()).map_err(|_| wrong())?;
    if endpoint.uri().host().is_none() {
        return Err(wrong());
    }
    let endpoint = endpoint
        .connect_timeout(patience)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(false);
    if !secure {
        return Ok(endpoint);
    }
    let mut config = ClientTlsConfig::new();
    if let Some(tls) = tls {
        if !String::from_utf8_lossy(&tls.ca).contains(PEM_CERTIFICATE) {
            return Err(AccessError::NoAuthority);
        }
        config = config.ca_certificate(Certificate::from_pem(&tls.ca));
        if let Some((certificate, key)) = &tls.identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
    }
    endpoint
        .tls_config(config)
        .map_err(|error| AccessError::Tls {
            reason: chain(&error),
        })
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

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
