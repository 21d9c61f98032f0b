//! A request's body until it is decided which node takes it.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http_body::{Body as _, SizeHint};
use hyper::body::Incoming;
use tokio::sync::oneshot;

/// A deferred body: a request's body until it is decided which node takes it.
///
/// Every node that is tried gets a claim of the body, and the body itself when it requests it
/// (`100 Continue`). Until then, the claim can be revoked and given to another node.
#[derive(Debug)]
pub(crate) struct DeferredBody {
    state: Mutex<ClaimState>,
    size: SizeHint,
}

#[derive(Debug)]
struct ClaimState {
    body: Option<Incoming>,
    /// Number of the valid claim.
    claim: u64,
    /// Its holder, until the body is granted; dropped when the claim is revoked.
    holder: Option<oneshot::Sender<Incoming>>,
}

/// A right to the body, until it is revoked.
#[derive(Debug)]
pub(crate) struct BodyClaim {
    pub(crate) number: u64,
    pub(crate) size: SizeHint,
    body: oneshot::Receiver<Incoming>,
}

/// The claim was revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Revoked;

impl DeferredBody {
    pub(crate) fn new(body: Incoming) -> Arc<Self> {
        Arc::new(Self {
            size: body.size_hint(),
            state: Mutex::new(ClaimState {
                body: Some(body),
                claim: 0,
                holder: None,
            }),
        })
    }

    /// A new claim, which revokes all earlier ones; `None` once the body was given away.
    pub(crate) fn claim(&self) -> Option<BodyClaim> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.body.as_ref()?;
        let (holder, body) = oneshot::channel();
        state.claim += 1;
        state.holder = Some(holder);
        Some(BodyClaim {
            number: state.claim,
            size: self.size,
            body,
        })
    }

    /// Gives the body to the holder of the valid claim.
    pub(crate) fn grant(&self, number: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.claim == number
            && let Some(holder) = state.holder.take()
            && let Some(body) = state.body.take()
        {
            // A holder that has given up leaves it to the next one.
            state.body = holder.send(body).err();
        }
    }
}

impl BodyClaim {
    /// The body, once it is requested. Not to be called again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Incoming, Revoked>> {
        Pin::new(&mut self.body).poll(cx).map_err(|_| Revoked)
    }
}
