//! Holds requests until their session can be reached: the one place that bounds them, in number and in time. Why a
//! look-up takes long is its own matter: it waits for a node (`conman-fleet`) or for a start (`conman-node`).

use std::future::Future;
use std::task::Poll;

use conman_proto::SessionId;
use futures_util::poll;
use tokio::time::Instant;

use crate::answer::Unforwarded;
use crate::meters::Refused;
use crate::worker::WorkerContext;
use crate::{Refusal, Route};

/// Returns the route of requests for the session, by a look-up that may take until `until`.
///
/// A held request is one that the directory did not answer at once. Held requests are bounded in
/// number over the whole listener, and in time. hyper drops a held request, and with it its
/// place, when the client closes its connection, or even only its sending side. It cannot see
/// that while the connection has unread bytes: a body that was not requested yet, or a pipelined
/// request. Such a request keeps its place until its session answers or the hold is over.
pub(crate) async fn wait(
    worker: &WorkerContext,
    mut lookup: impl Future<Output = Result<Route, Refusal>> + Unpin,
    session: &SessionId,
    until: Instant,
) -> Result<Route, Unforwarded> {
    if let Poll::Ready(answer) = poll!(&mut lookup) {
        return answer.map_err(refused);
    }
    let Ok(_place) = worker.hold_places.try_acquire() else {
        worker.meters.refused(Refused::HoldFull);
        return Err(Unforwarded::HoldFull {
            session: session.clone(),
        });
    };
    let _held = worker.meters.held();
    match tokio::time::timeout_at(until, lookup).await {
        Ok(answer) => answer.map_err(refused),
        Err(_elapsed) => Err(Unforwarded::HoldTimeout {
            session: session.clone(),
            waited: worker.options.hold_timeout,
        }),
    }
}

fn refused(refusal: Refusal) -> Unforwarded {
    Unforwarded::Refused(Box::new(refusal))
}
