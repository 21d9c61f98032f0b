//! Shared waits: all requests that wait for one session wait for the same task.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_proto::{Problem, SessionId};
use conman_proxy::Refusal;
use tokio::sync::watch;

use super::refusals::{TOO_MANY_WAITING, passing};
use super::{Need, Seeker};

/// Most sessions that are waited for at a time.
const MAX_QUESTS: usize = 10_000;

/// How many of the `max_held` waiting requests of a listener may wait for one session: a quarter,
/// so that clients of one session do not exclude all others.
pub(super) const fn share_of_one(max_held: usize) -> usize {
    if max_held < 4 { 1 } else { max_held / 4 }
}

/// A wait that all requests for one session share. `None` until it is over.
#[derive(Debug, Default)]
pub(super) struct SharedWait(watch::Sender<Option<Result<(), Refusal>>>);

impl SharedWait {
    /// Waits with the others, if there is a place.
    pub(super) fn join(
        &self,
        id: &SessionId,
        most: usize,
    ) -> Result<watch::Receiver<Option<Result<(), Refusal>>>, Box<Refusal>> {
        if self.0.receiver_count() < most {
            return Ok(self.0.subscribe());
        }
        Err(Box::new(passing(Problem::new(
            TOO_MANY_WAITING,
            "Too many connections wait for the session",
            503,
            format!(
                "{most} connections wait for session `{id}` already, a quarter of `limits.max_held`; \
                 try again in a moment"
            ),
        ))))
    }
}

impl Seeker {
    /// Waits for `need`, together with all requests for the session.
    pub(super) async fn wait_for(
        self: &Arc<Self>,
        id: &SessionId,
        need: Need,
    ) -> Result<(), Refusal> {
        let mut over = {
            let mut shared_waits = lock(&self.shared_waits);
            match shared_waits.get(id) {
                Some(shared_wait) => shared_wait
                    .join(id, self.most_waiting)
                    .map_err(|refusal| *refusal)?,
                None if shared_waits.len() >= MAX_QUESTS => {
                    return Err(passing(Problem::new(
                        TOO_MANY_WAITING,
                        "Too many sessions are waited for",
                        503,
                        format!(
                            "connections wait for {MAX_QUESTS} sessions already; try again in a \
                             moment"
                        ),
                    )));
                }
                None => {
                    let shared_wait = Arc::<SharedWait>::default();
                    let over = shared_wait.0.subscribe();
                    shared_waits.insert(id.clone(), Arc::clone(&shared_wait));
                    let (seeker, id) = (Arc::clone(self), id.clone());
                    self.main
                        .spawn(async move { seeker.run(&id, need, &shared_wait).await });
                    over
                }
            }
        };
        metrics::gauge!("conman_fleet_session_waits").set(lock(&self.shared_waits).len() as f64);
        let ended = match over.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            // Its task panicked: look the session up again.
            Err(_) => None,
        };
        ended.unwrap_or(Ok(()))
    }

    async fn run(&self, id: &SessionId, need: Need, shared_wait: &Arc<SharedWait>) {
        // Also if the task panics: the requests must not wait for ever.
        let _entry = Entry {
            seeker: self,
            id,
            shared_wait,
        };
        let mut work = std::pin::pin!(self.shared_wait(id, &need));
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

    async fn shared_wait(&self, id: &SessionId, need: &Need) -> Result<(), Refusal> {
        match need {
            Need::Start { may_start, was } => self.start(id, *may_start, was).await,
            // Cancel safe: the request to the node is repeated, and a look-up has no effect.
            Need::Ready { node, may_start } => tokio::select! {
                outcome = self.ready(id, node, *may_start) => outcome,
                () = self.lost(id, node) => Ok(()),
            },
            Need::Reach { node } => {
                self.reach(id, node).await;
                Ok(())
            }
        }
    }
}

/// A wait's entry in the table, until its task ends.
struct Entry<'run> {
    seeker: &'run Seeker,
    id: &'run SessionId,
    shared_wait: &'run Arc<SharedWait>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut shared_waits = lock(&self.seeker.shared_waits);
        if shared_waits
            .get(self.id)
            .is_some_and(|present| Arc::ptr_eq(present, self.shared_wait))
        {
            shared_waits.remove(self.id);
        }
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

/// Every single change leaves the maps valid, so a poisoned lock is fine.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
