use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use http_body::{Body as _, SizeHint};
use hyper::body::Incoming;

/// A deferred body: a request's body until it is decided which node takes it.
///
/// Every node that is tried gets a claim of the body, and the body itself when it requests it
/// (`100 Continue`). Until then, the claim can be revoked and given to another node.
#[derive(Debug)]
pub(crate) struct DeferredBody {
    state: Mutex<State>,
    size: SizeHint,
}

#[derive(Debug)]
struct State {
    body: Option<Incoming>,
    /// Number of the valid claim.
    claim: u64,
    granted: bool,
    waiting: Option<Waker>,
}

/// A right to the body, until it is revoked.
#[derive(Debug)]
pub(crate) struct BodyClaim {
    deferred: Arc<DeferredBody>,
    number: u64,
}

/// The claim was revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Revoked;

impl DeferredBody {
    pub(crate) fn new(body: Incoming) -> Arc<Self> {
        Arc::new(Self {
            size: body.size_hint(),
            state: Mutex::new(State {
                body: Some(body),
                claim: 0,
                granted: false,
                waiting: None,
            }),
        })
    }

    /// A new claim, which revokes all earlier ones; `None` once the body was given away.
    pub(crate) fn claim(self: &Arc<Self>) -> Option<BodyClaim> {
        let mut state = self.lock();
        state.body.as_ref()?;
        state.claim += 1;
        state.granted = false;
        if let Some(waiting) = state.waiting.take() {
            waiting.wake();
        }
        Some(BodyClaim {
            number: state.claim,
            deferred: Arc::clone(self),
        })
    }

    /// Gives the body to the holder of the valid claim.
    pub(crate) fn grant(&self, number: u64) {
        let mut state = self.lock();
        if state.claim == number {
            state.granted = true;
            if let Some(waiting) = state.waiting.take() {
                waiting.wake();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyClaim {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn size(&self) -> SizeHint {
        self.deferred.size
    }

    /// The body, once it is requested.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Incoming, Revoked>> {
        let mut state = self.deferred.lock();
        if state.claim != self.number {
            return Poll::Ready(Err(Revoked));
        }
        if state.granted {
            return Poll::Ready(state.body.take().ok_or(Revoked));
        }
        state.waiting = Some(cx.waker().clone());
        Poll::Pending
    }
}
