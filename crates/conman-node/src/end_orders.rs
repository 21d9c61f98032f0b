//! Sessions that the registry has ordered to end, kept until the order is carried out.
//!
//! An order for a life that is known here is carried out at once. Any other waits in [`EndOrders`]
//! ──notify──> one task, which retries each independently: a life that waits for its generation may
//! turn out to be the one that is meant, an unreadable record may become readable later, and a container
//! without a record has to be proven dead before the registry forgets it.
//!
//! No record says which runtime has such a container, so every runtime is asked. The first that had it
//! answers for all; where the host shows that no runtime can start it, no answer is needed. So a runtime
//! that hangs delays only containers that may be its own.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::EndCause;
use conman_proto::{Generation, RuntimeKind, SessionId};
use conman_registry::{Ending, RegistryError, Release};
use conman_runtime::{ContainerKey, Runtime};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use crate::adoption;
use crate::context::Context;
use crate::session::{self, SessionHandle, StartOutcome};

/// The task's name for the watchdog.
pub(crate) const NAME: &str = "end orders";

/// Pause between two tries of an order that could not be carried out.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Concurrent requests to the registry, and to each runtime. While a request to a runtime waits, the
/// kernel is polled.
const AT_ONCE: usize = 16;

/// Reason of an order that has no life and gives no reason.
const HAS_ENDED: &str = "its container ended unobserved";

/// Pending orders. Bounded by the containers that exist: one order each.
#[derive(Debug, Default)]
pub(crate) struct EndOrders {
    waiting: Mutex<BTreeMap<ContainerKey, Waiting>>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Why it is to be ended; `None` if it has ended already.
    why: Option<String>,
    /// A task is carrying it out.
    is_pursued: bool,
}

impl EndOrders {
    /// A panic cannot leave a partial change: each change is one map operation.
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<ContainerKey, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the orders that no task works on, and marks them as taken.
    fn begin(&self) -> Vec<ContainerKey> {
        let mut waiting = self.waiting();
        let new = waiting.iter_mut().filter(|(_, one)| !one.is_pursued);
        let begun = new.map(|(key, one)| {
            one.is_pursued = true;
            key.clone()
        });
        begun.collect()
    }

    fn why(&self, key: &ContainerKey) -> Option<String> {
        self.waiting().get(key)?.why.clone()
    }
}

/// Permits for requests.
struct Turns {
    registry: Semaphore,
    runtimes: BTreeMap<RuntimeKind, Semaphore>,
}

impl Turns {
    fn of(context: &Context) -> Self {
        let kinds = context.runtimes.keys();
        Self {
            registry: Semaphore::new(AT_ONCE),
            runtimes: kinds.map(|kind| (*kind, Semaphore::new(AT_ONCE))).collect(),
        }
    }
}

/// Ends a generation of a session or, without a `why`, makes sure that its end is reported to the
/// registry.
pub(crate) fn order(
    context: &Context,
    id: &SessionId,
    generation: Generation,
    why: Option<String>,
) {
    if let Some(life) = life_of(context, id, generation) {
        return end(&life, generation, why.as_deref());
    }
    let key = ContainerKey::new(id.clone(), generation);
    let is_new = {
        let mut waiting = context.end_orders.waiting();
        let known = waiting.entry(key).or_default();
        known.why = why.or(known.why.take());
        !known.is_pursued
    };
    if is_new {
        // An order without a known life is also checked against the containers that exist.
        context.stray_expected.notify_one();
    }
    context.end_orders.added.notify_one();
}

fn life_of(
    context: &Context,
    id: &SessionId,
    generation: Generation,
) -> Option<Arc<SessionHandle>> {
    let life = context.sessions.current(id)?;
    (!life.is_ended() && life.generation() == Some(generation)).then_some(life)
}

/// A life whose process is dead reports how it ended, and knows best.
fn end(life: &SessionHandle, generation: Generation, why: Option<&str>) {
    let process = life.view().process;
    let is_dead = process.is_some_and(|process| process.is_dead().unwrap_or(false));
    if let Some(why) = why.filter(|_| !is_dead) {
        tracing::warn!(
            session = %life.id,
            %generation,
            why,
            "ending a session by the registry's order"
        );
        life.order_stop(EndCause::Disowned, why);
    }
}

/// Carries out pending orders until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let progress = context.options.watchdog.task(NAME);
    let turns = Turns::of(&context);
    let mut pursued = FuturesUnordered::new();
    loop {
        progress.beat().await;
        for key in context.end_orders.begin() {
            pursued.push(pursue(&context, &turns, key));
        }
        let next = async {
            tokio::select! {
                // Cancel safe: a notification is kept as a permit until it is taken.
                () = context.end_orders.added.notified() => {}
                // Cancel safe: an order that is carried out has left the book.
                Some(()) = pursued.next() => {}
            }
        };
        // A runtime that hangs must not trip this task's watchdog.
        progress.idle(next).await;
    }
}

/// Retries until nothing is left to do.
async fn pursue(context: &Arc<Context>, turns: &Turns, key: ContainerKey) {
    loop {
        let why = context.end_orders.why(&key);
        if carry_out(context, turns, &key, why.as_deref()).await {
            break;
        }
        sleep(RETRY_PAUSE).await;
    }
    context.end_orders.waiting().remove(&key);
}

/// One try. Returns whether nothing is left to do.
async fn carry_out(
    context: &Arc<Context>,
    turns: &Turns,
    key: &ContainerKey,
    why: Option<&str>,
) -> bool {
    let (id, generation) = (&key.session, key.generation);
    if let Some(life) = context.sessions.current(id).filter(|life| !life.is_ended()) {
        match life.generation() {
            Some(its) if its == generation => {
                end(&life, generation, why);
                return true;
            }
            // The life has no generation until the registry answers.
            None => return false,
            // The order is for another generation.
            Some(_) => {}
        }
    }
    let bound = context.options.bounds.registry;
    let read = async {
        // The semaphore is never closed.
        let _turn = turns.registry.acquire().await;
        timeout(bound, context.registry.get(id)).await
    };
    match read.await {
        Ok(Ok(Some(record))) if record.generation == generation && !record.state.is_ended() => {
            let taken = adoption::take_on_unresolved(context, &record);
            if taken {
                let why = why.unwrap_or(HAS_ENDED);
                tracing::warn!(session = %id, %generation, why, "ending the remains of a session");
            }
            taken
        }
        // An unreadable record names no life either.
        Ok(Ok(_) | Err(RegistryError::Unreadable { .. })) => {
            certify(context, turns, key, why.unwrap_or(HAS_ENDED)).await
        }
        Ok(Err(error)) => {
            let reason = conman_core::error_chain(&error);
            tracing::debug!(
                session = %id,
                %generation,
                reason,
                "cannot read the session's record yet"
            );
            false
        }
        Err(_) => false,
    }
}

/// For an order that no record of this node matches: kills what remains of it, and reports its end to
/// the registry once nothing of it runs or can start.
async fn certify(context: &Context, turns: &Turns, key: &ContainerKey, why: &str) -> bool {
    let Some(owners) = proven_dead(context, turns, key, why).await else {
        return false;
    };
    let release = Release {
        id: key.session.clone(),
        generation: key.generation,
        ending: Ending::now(true, EndCause::Disowned, why),
    };
    let bound = context.options.bounds.registry;
    let released = timeout(bound, context.registry.release(vec![release])).await;
    let released = released.map(|mut results| results.pop());
    let over = matches!(
        released,
        Ok(Some(Ok(()) | Err(RegistryError::Superseded { .. })))
    );
    if over {
        for kind in owners {
            context.cleanup.push(kind, key.clone());
        }
    }
    over
}

/// Returns the runtimes that may have something to remove of a life that is proven dead; `None` while
/// it is not. Kills what the kernel shows of it.
async fn proven_dead(
    context: &Context,
    turns: &Turns,
    key: &ContainerKey,
    why: &str,
) -> Option<Vec<RuntimeKind>> {
    let all = || context.runtimes.keys().copied().collect();
    if cannot_start(context, key).await {
        return Some(all());
    }
    let ask = async |kind: RuntimeKind, runtime: &Arc<dyn Runtime>| {
        let _turn = match turns.runtimes.get(&kind) {
            Some(turns) => turns.acquire().await.ok(),
            None => None,
        };
        let answer = session::resolve(Arc::clone(runtime), key.clone()).await;
        (kind, answer)
    };
    let runtimes = context.runtimes.iter();
    let mut answers: FuturesUnordered<_> = runtimes.map(|(kind, one)| ask(*kind, one)).collect();
    let mut is_proven = true;
    while let Some((kind, answer)) = answers.next().await {
        match answer {
            // A life has one runtime, so no other has to answer.
            StartOutcome::Ended => return Some(vec![kind]),
            StartOutcome::Gone => {}
            StartOutcome::Found { pid } => {
                tracing::warn!(
                    container = %key,
                    pid,
                    why,
                    "killed a container that is not this node's"
                );
                return None;
            }
            StartOutcome::Unknown(reason) => {
                tracing::debug!(
                    container = %key,
                    reason,
                    "cannot prove that the container is dead yet"
                );
                is_proven = false;
            }
        }
    }
    is_proven.then(all)
}

/// Whether the host shows that no runtime can start it any more and nothing of it runs. The directory
/// for a container's small files is made before the container, no container starts without it, and it is
/// removed only once the container is dead. Whatever began while it existed is in the container's cgroup.
async fn cannot_start(context: &Context, key: &ContainerKey) -> bool {
    let files = tokio::fs::symlink_metadata(context.files_dir(key)).await;
    let absent = files.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    let mut runtimes = context.runtimes.values();
    absent && runtimes.all(|runtime| matches!(runtime.pids(key).as_deref(), Ok([])))
}
