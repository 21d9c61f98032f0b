use std::future::Future;
use std::sync::Arc;
use std::task::Poll;

use conman_proto::SessionId;
use futures_util::poll;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::answer::Unforwarded;
use crate::meters::{Meters, Refused};
use crate::{ProxyOptions, Refusal, Route};

/// Holds requests while their sessions start.
///
/// A held request is one that the directory did not answer at once. Held requests are bounded in
/// number over the whole listener, and in time. hyper drops a held request, and with it its
/// place, when the client closes its connection, or even only its sending side. It cannot see
/// that while the connection has unread bytes: a body that was not requested yet, or a pipelined
/// request. Such a request keeps its place until its session answers or the hold is over.
#[derive(Debug)]
pub(crate) struct Hold {
    places: Arc<Semaphore>,
}

impl Hold {
    pub(crate) fn new(max_held: usize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(max_held.min(Semaphore::MAX_PERMITS))),
        }
    }

    /// The route of requests for the session, by a look-up that may take until `until`.
    pub(crate) async fn wait(
        &self,
        mut lookup: impl Future<Output = Result<Route, Refusal>> + Unpin,
        session: &SessionId,
        until: Instant,
        options: &ProxyOptions,
        meters: &Meters,
    ) -> Result<Route, Unforwarded> {
        if let Poll::Ready(answer) = poll!(&mut lookup) {
            return answer.map_err(refused);
        }
        let Ok(_place) = self.places.try_acquire() else {
            meters.refused(Refused::HoldFull);
            return Err(Unforwarded::HoldFull {
                session: session.clone(),
            });
        };
        let _held = meters.hold();
        match tokio::time::timeout_at(until, lookup).await {
            Ok(answer) => answer.map_err(refused),
            Err(_elapsed) => Err(Unforwarded::HoldTimeout {
                session: session.clone(),
                waited: options.hold_timeout,
            }),
        }
    }
}

fn refused(refusal: Refusal) -> Unforwarded {
    Unforwarded::Refused(Box::new(refusal))
}
