//! Shared waits: all requests that wait for one session wait for the same task.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_proto::SessionId;
use tokio::sync::watch;

use super::{Awaited, Locator};
use crate::LocateError;
use crate::node_waits::CutOff;

/// Most sessions that are waited for at a time.
const MAX_SHARED_WAITS: usize = 10_000;

/// How many of the `max_held` waiting requests of a listener may wait for one session: a quarter,
/// so that clients of one session do not exclude all others.
pub(super) const fn share_of_one(max_held: usize) -> usize {
    if max_held < 4 { 1 } else { max_held / 4 }
}

/// A wait that all requests for one session share. `None` until it is over.
#[derive(Debug, Default)]
pub(super) struct SharedWait(watch::Sender<Option<Result<(), LocateError>>>);

impl SharedWait {
    /// Waits with the others, if there is a place.
    pub(super) fn join(
        &self,
        id: &SessionId,
        max: usize,
    ) -> Result<watch::Receiver<Option<Result<(), LocateError>>>, LocateError> {
        if self.0.receiver_count() < max {
            return Ok(self.0.subscribe());
        }
        Err(LocateError::TooManyWaiting {
            id: id.clone(),
            limit: max,
        })
    }
}

impl Locator {
    /// Waits for an event, together with all requests for the session.
    pub(super) async fn wait_for(
        self: &Arc<Self>,
        id: &SessionId,
        awaited: Awaited,
    ) -> Result<(), LocateError> {
        let mut over = {
            let mut shared_waits = lock(&self.shared_waits);
            match shared_waits.get(id) {
                Some(shared_wait) => shared_wait.join(id, self.max_waiting)?,
                None if shared_waits.len() >= MAX_SHARED_WAITS => {
                    let limit = MAX_SHARED_WAITS;
                    return Err(LocateError::TooManySessions { limit });
                }
                None => {
                    let shared_wait = Arc::<SharedWait>::default();
                    let over = shared_wait.0.subscribe();
                    shared_waits.insert(id.clone(), Arc::clone(&shared_wait));
                    measure(shared_waits.len());
                    let (locator, id) = (Arc::clone(self), id.clone());
                    self.main
                        .spawn(async move { locator.run(&id, awaited, &shared_wait).await });
                    over
                }
            }
        };
        let ended = match over.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            // Its task panicked: look the session up again.
            Err(_) => None,
        };
        ended.unwrap_or(Ok(()))
    }

    async fn run(&self, id: &SessionId, awaited: Awaited, shared_wait: &Arc<SharedWait>) {
        // Also if the task panics: the requests must not wait forever.
        let _entry = Entry {
            locator: self,
            id,
            shared_wait,
        };
        let mut work = std::pin::pin!(self.until(id, &awaited));
        loop {
            tokio::select! {
                outcome = &mut work => {
                    // First, so that no request joins a wait that is over.
                    lock(&self.shared_waits).remove(id);
                    shared_wait.0.send_replace(Some(outcome));
                    return;
                }
                // Checked again below, where no request can join meanwhile.
                () = shared_wait.0.closed() => {
                    let mut shared_waits = lock(&self.shared_waits);
                    if shared_wait.0.receiver_count() == 0 {
                        shared_waits.remove(id);
                        return;
                    }
                }
            }
        }
    }

    async fn until(&self, id: &SessionId, awaited: &Awaited) -> Result<(), LocateError> {
        match awaited {
            Awaited::Start { may_start, former } => self.start(id, *may_start, former).await,
            // Cancel safe: the request to the node is repeated, and a look-up has no effect.
            Awaited::Ready { node, may_start } => tokio::select! {
                outcome = self.until_ready(id, node, *may_start) => outcome,
                () = self.until_lost(id, node) => Ok(()),
            },
            Awaited::Reachable { node } => {
                let reached = self.map.until_reachable(id, node).await;
                reached.map_err(|CutOff| LocateError::CutOff {
                    node: node.to_string(),
                })
            }
            Awaited::Registry => {
                self.map.until_registry_answers(id).await;
                Ok(())
            }
        }
    }
}

/// A wait's entry in the table, until its task ends.
struct Entry<'run> {
    locator: &'run Locator,
    id: &'run SessionId,
    shared_wait: &'run Arc<SharedWait>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut shared_waits = lock(&self.locator.shared_waits);
        if shared_waits
            .get(self.id)
            .is_some_and(|present| Arc::ptr_eq(present, self.shared_wait))
        {
            shared_waits.remove(self.id);
        }
        measure(shared_waits.len());
        drop(shared_waits);
        // For requests whose task has panicked.
        self.shared_wait.0.send_if_modified(|outcome| {
            let without = outcome.is_none();
            if without {
                *outcome = Some(Ok(()));
            }
            without
        });
    }
}

/// Under the lock, so that the latest number is the last one that is set.
fn measure(waits: usize) {
    metrics::gauge!("conman_fleet_session_waits").set(waits as f64);
}

/// Every single change leaves the maps valid, so a poisoned lock is fine.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_for_one_session_leave_places_to_others() {
        let shared_wait = SharedWait::default();
        let max = share_of_one(80);
        let id: SessionId = "ann".parse().expect("an id");
        let all: Vec<_> = (0..20).map(|_| shared_wait.join(&id, max)).collect();
        assert!(all.iter().all(Result::is_ok));
        let refused = shared_wait.join(&id, max).expect_err("no place is left");
        assert!(
            matches!(refused, LocateError::TooManyWaiting { limit: 20, .. }),
            "{refused:?}"
        );
        drop(all);
        shared_wait.join(&id, max).expect("there are places again");
        assert_eq!(share_of_one(0), 1, "one request is served");
    }
}
