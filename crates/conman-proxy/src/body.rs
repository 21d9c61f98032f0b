//! The bodies of requests and answers on their way through the proxy.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use conman_core::{ActivityGuard, Closing};
use conman_peer::Watchdog;
use conman_peer::headers::strip_forged;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::ProxyOptions;
use crate::client_io::Ticket;
use crate::confine::strip_server_orders;
use crate::deferred_body::BodyClaim;
use crate::destination::Lease;

/// How long a session may take to send `100 Continue` before it gets the body anyway. A client may
/// wait for it for ever, and some programs never send it (RFC 9110, section 10.1.1).
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a body ended early.
#[derive(Debug, Error)]
pub(crate) enum BodyError {
    #[error("no byte of the request's body arrived for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("the body could not be read")]
    Read(#[source] hyper::Error),
    #[error("the session ended during its answer")]
    SessionEnded,
    #[error("the body goes to another node")]
    Revoked,
}

/// An error of a request's body, passed from the body to the task that waits for the answer.
#[derive(Debug, Default)]
pub(crate) struct Fault(OnceLock<FaultKind>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// No byte arrived for this long.
    Stalled(Duration),
    Broken,
}

impl Fault {
    pub(crate) fn kind(&self) -> Option<FaultKind> {
        self.0.get().copied()
    }

    /// Only the first fault is kept.
    fn set(&self, kind: FaultKind) {
        let _ = self.0.set(kind);
    }
}

/// A request's body on its way to the session.
pub(crate) struct RequestBody {
    inner: Option<Incoming>,
    /// Leads to the body until it is requested.
    claim: Option<BodyClaim>,
    /// Set while the session has not requested the body of an `Expect: 100-continue`.
    wait: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    stall: Watchdog,
    stall_timeout: Duration,
    trust_forwarded: bool,
    fault: Arc<Fault>,
}

impl RequestBody {
    pub(crate) fn new(
        inner: Incoming,
        stall_timeout: Duration,
        trust_forwarded: bool,
        fault: Arc<Fault>,
    ) -> Self {
        Self {
            inner: Some(inner),
            stall_timeout,
            trust_forwarded,
            fault,
            ..Self::empty()
        }
    }

    /// A body that is sent once it is requested.
    pub(crate) fn claimed(claim: BodyClaim, options: &ProxyOptions, fault: Arc<Fault>) -> Self {
        Self {
            claim: Some(claim),
            stall_timeout: options.body_stall_timeout,
            trust_forwarded: options.trust_forwarded,
            fault,
            ..Self::empty()
        }
    }

    /// No body.
    pub(crate) fn empty() -> Self {
        Self {
            inner: None,
            claim: None,
            wait: None,
            stall: Watchdog::default(),
            stall_timeout: Duration::ZERO,
            trust_forwarded: false,
            fault: Arc::default(),
        }
    }

    /// Holds the body back until the returned sender is used or the time is up.
    pub(crate) fn await_continue(&mut self) -> oneshot::Sender<()> {
        let (sender, signal) = oneshot::channel();
        let until = Instant::now() + CONTINUE_TIMEOUT;
        self.wait = Some(Box::pin(async move {
            // A dropped sender means a final answer. Whether the session still wants a body shows in
            // whether it closes the connection.
            if let Ok(Err(_)) = timeout_at(until, signal).await {
                sleep_until(until).await;
            }
        }));
        sender
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Some(wait) = &mut this.wait {
            ready!(wait.as_mut().poll(cx));
            this.wait = None;
        }
        if let Some(claim) = &mut this.claim {
            let inner = ready!(claim.poll(cx));
            this.claim = None;
            let Ok(inner) = inner else {
                return Poll::Ready(Some(Err(BodyError::Revoked)));
            };
            this.inner = Some(inner);
        }
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        match Pin::new(inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(mut frame))) => {
                this.stall.calm();
                if let Some(trailers) = frame.trailers_mut() {
                    strip_forged(trailers, this.trust_forwarded);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.fault.set(FaultKind::Broken);
                Poll::Ready(Some(Err(BodyError::Read(error))))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => {
                ready!(this.stall.poll(cx, this.stall_timeout));
                this.fault.set(FaultKind::Stalled(this.stall_timeout));
                Poll::Ready(Some(Err(BodyError::Stalled(this.stall_timeout))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.claim.is_none() && self.inner.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        if let Some(claim) = &self.claim {
            return claim.size;
        }
        self.inner
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

/// An answer's body on its way to the client.
pub(crate) struct ResponseBody {
    source: Source,
    /// Ends the exchange on the client's connection when dropped.
    ticket: Option<Ticket>,
}

enum Source {
    Own(Option<Bytes>),
    Session(Box<SessionBody>),
}

/// A body that a session sends.
pub(crate) struct SessionBody {
    pub(crate) inner: Incoming,
    /// Its connection, to be reused once the body has ended.
    pub(crate) lease: Option<Lease>,
    /// Counts the answer as activity until it is dropped.
    pub(crate) _activity: ActivityGuard,
    /// For a body that ends with the connection: distinguishes a session's death from the end.
    pub(crate) ends_with_connection: Option<watch::Receiver<Option<Closing>>>,
    pub(crate) trust_forwarded: bool,
}

impl ResponseBody {
    /// A body made by the proxy.
    pub(crate) fn own(bytes: Bytes) -> Self {
        let bytes = (!bytes.is_empty()).then_some(bytes);
        Self {
            source: Source::Own(bytes),
            ticket: None,
        }
    }

    pub(crate) fn session(body: SessionBody) -> Self {
        let mut body = Box::new(body);
        body.settle();
        Self {
            source: Source::Session(body),
            ticket: None,
        }
    }

    pub(crate) fn with_ticket(mut self, ticket: Ticket) -> Self {
        self.ticket = Some(ticket);
        self
    }
}

impl SessionBody {
    /// Gives the connection back once this body is complete.
    fn settle(&mut self) {
        if self.inner.is_end_stream()
            && let Some(lease) = self.lease.take()
        {
            lease.give_back();
        }
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut frame = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => {
                self.lease = None;
                return Poll::Ready(Some(Err(BodyError::Read(error))));
            }
            None => {
                let closing = self.ends_with_connection.as_ref();
                if closing.is_some_and(|closing| closing.borrow().is_some()) {
                    return Poll::Ready(Some(Err(BodyError::SessionEnded)));
                }
                self.settle();
                return Poll::Ready(None);
            }
        };
        if let Some(trailers) = frame.trailers_mut() {
            strip_forged(trailers, self.trust_forwarded);
            strip_server_orders(trailers, &[]);
        }
        self.settle();
        Poll::Ready(Some(Ok(frame)))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        match &mut this.source {
            Source::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Source::Session(body) => {
                let polled = body.poll_frame(cx);
                if let (Poll::Ready(Some(Err(_))), Some(ticket)) = (&polled, &this.ticket) {
                    ticket.cut();
                }
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            Source::Own(bytes) => bytes.is_none(),
            Source::Session(body) => body.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Own(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Source::Session(body) => body.inner.size_hint(),
        }
    }
}
