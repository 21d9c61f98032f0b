use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use http_body::{Body as _, SizeHint};
use hyper::body::Incoming;

use crate::client_io::BodyWatch;

/// A deferred body: a request's body until it is decided which node takes it.
///
/// Every node that is tried gets a promise of the body, and the body itself when it requests it
/// (`100 Continue`). Until then, the promise can be revoked and given to another node.
#[derive(Debug)]
pub(crate) struct Loan {
    state: Mutex<State>,
    size: SizeHint,
}

#[derive(Debug)]
struct State {
    body: Option<(Incoming, BodyWatch)>,
    /// Number of the valid promise.
    promise: u64,
    asked_for: bool,
    waiting: Option<Waker>,
}

/// A right to the body, until it is revoked.
#[derive(Debug)]
pub(crate) struct Promise {
    loan: Arc<Loan>,
    number: u64,
}

/// The promise was revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TakenBack;

impl Loan {
    pub(crate) fn new(body: Incoming, watch: BodyWatch) -> Arc<Self> {
        Arc::new(Self {
            size: body.size_hint(),
            state: Mutex::new(State {
                body: Some((body, watch)),
                promise: 0,
                asked_for: false,
                waiting: None,
            }),
        })
    }

    /// A new promise, which revokes all earlier ones; `None` once the body was given away.
    pub(crate) fn promise(self: &Arc<Self>) -> Option<Promise> {
        let mut state = self.lock();
        state.body.as_ref()?;
        state.promise += 1;
        state.asked_for = false;
        if let Some(waiting) = state.waiting.take() {
            waiting.wake();
        }
        Some(Promise {
            number: state.promise,
            loan: Arc::clone(self),
        })
    }

    /// Gives the body to the holder of the valid promise.
    pub(crate) fn ask_for(&self, number: u64) {
        let mut state = self.lock();
        if state.promise == number {
            state.asked_for = true;
            if let Some(waiting) = state.waiting.take() {
                waiting.wake();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Promise {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn size(&self) -> SizeHint {
        self.loan.size
    }

    /// The body, once it is requested.
    pub(crate) fn poll(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Incoming, BodyWatch), TakenBack>> {
        let mut state = self.loan.lock();
        if state.promise != self.number {
            return Poll::Ready(Err(TakenBack));
        }
        if state.asked_for {
            return Poll::Ready(state.body.take().ok_or(TakenBack));
        }
        state.waiting = Some(cx.waker().clone());
        Poll::Pending
    }
}
