//! What the registry has ordered to end, kept until that is carried out.
//!
//! An order for a life that goes on is carried out at once. Any other waits in the book
//! ([`Condemned`]) ──notify──> one task, which tries each again and again: a life that waits for its
//! generation may turn out to be the one that is meant, a record that cannot be read may be read
//! later, and what no record knows has to be proven dead before the registry forgets it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::{Generation, SessionId};
use conman_registry::{Ending, RegistryError, Release};
use conman_runtime::ContainerKey;
use futures_util::StreamExt;
use futures_util::stream;
use jiff::Timestamp;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::adoption;
use crate::context::Context;
use crate::session::{self, LostStart, SessionHandle};

/// What the task is called when it ends or stands still.
pub(crate) const NAME: &str = "condemned";

/// Between two tries of what could not be carried out.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Orders that are carried out at a time: each may ask the registry and a runtime.
const AT_ONCE: usize = 16;

/// What is told as the reason of an order without a life where nobody gave one.
const HAS_ENDED: &str = "its container has ended while nobody held it";

/// Orders that wait. Bounded by the containers that there are: one order each.
#[derive(Debug, Default)]
pub(crate) struct Condemned {
    /// Why it is to be ended; without a reason it has ended.
    waiting: Mutex<BTreeMap<ContainerKey, Option<String>>>,
    added: Notify,
}

impl Condemned {
    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<ContainerKey, Option<String>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<(ContainerKey, Option<String>)> {
        let waiting = self.waiting();
        let copies = waiting.iter().map(|(key, why)| (key.clone(), why.clone()));
        copies.collect()
    }
}

/// Ends a generation of a session, or, where there is no `why`, sees to it that the end of one is
/// told to the registry.
pub(crate) fn order(
    context: &Context,
    id: &SessionId,
    generation: Generation,
    why: Option<String>,
) {
    if let Some(life) = life_of(context, id, generation) {
        return end(&life, generation, why.as_deref());
    }
    let key = ContainerKey {
        session: id.clone(),
        generation,
    };
    {
        let mut waiting = context.condemned.waiting();
        let known = waiting.entry(key).or_default();
        *known = why.or(known.take());
    }
    context.condemned.added.notify_one();
}

fn life_of(
    context: &Context,
    id: &SessionId,
    generation: Generation,
) -> Option<Arc<SessionHandle>> {
    let life = context.sessions.current(id)?;
    (!life.is_ended() && life.generation() == Some(generation)).then_some(life)
}

/// A life whose process is dead tells by itself how it ended, which nobody knows better.
fn end(life: &SessionHandle, generation: Generation, why: Option<&str>) {
    let process = life.view().process;
    let is_dead = process.is_some_and(|process| process.is_dead().unwrap_or(false));
    if let Some(why) = why.filter(|_| !is_dead) {
        tracing::warn!(session = %life.id, %generation, why, "it is ended");
        life.order_stop(why);
    }
}

/// Carries out what waits, until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let pulse = context.options.vitals.task(NAME);
    loop {
        pulse.beat().await;
        let waiting = context.condemned.all();
        if waiting.is_empty() {
            // Cancel safe: a notification is kept as a permit until it is taken.
            pulse.idle(context.condemned.added.notified()).await;
            continue;
        }
        let tries = stream::iter(waiting).for_each_concurrent(AT_ONCE, async |(key, why)| {
            if carry_out(&context, &key, why.as_deref()).await {
                context.condemned.waiting().remove(&key);
            }
        });
        // A runtime that hangs is none of its own faults.
        pulse.idle(tries).await;
        if !context.condemned.waiting().is_empty() {
            pulse.idle(sleep(RETRY_PAUSE)).await;
        }
    }
}

/// One try. Whether nothing is left to do.
async fn carry_out(context: &Arc<Context>, key: &ContainerKey, why: Option<&str>) -> bool {
    let (id, generation) = (&key.session, key.generation);
    if let Some(life) = context.sessions.current(id).filter(|life| !life.is_ended()) {
        match life.generation() {
            Some(its) if its == generation => {
                end(&life, generation, why);
                return true;
            }
            // The registry says first which one it is.
            None => return false,
            // What is meant is left of another one.
            Some(_) => {}
        }
    }
    // What no life is known of is looked for among the containers as well.
    context.stray_expected.notify_one();
    let bound = context.options.bounds.registry;
    match timeout(bound, context.registry.get(id)).await {
        Ok(Ok(Some(record))) if record.generation == generation && !record.state.is_ended() => {
            let taken = adoption::take_on_unresolved(context, &record);
            if taken {
                let why = why.unwrap_or(HAS_ENDED);
                tracing::warn!(session = %id, %generation, why, "what may be left of it is ended");
            }
            taken
        }
        Ok(Ok(_)) => certify(context, key, why.unwrap_or(HAS_ENDED)).await,
        Ok(Err(error)) => {
            let reason = crate::error_chain(&error);
            tracing::debug!(session = %id, %generation, reason, "its record cannot be read yet");
            false
        }
        Err(_) => false,
    }
}

/// No record of this node's knows it: kills what there may be of it, and tells the registry once
/// nothing of it runs or may appear.
async fn certify(context: &Context, key: &ContainerKey, why: &str) -> bool {
    for runtime in context.runtimes.values() {
        match session::resolve(Arc::clone(runtime), key.clone()).await {
            LostStart::Gone => {}
            LostStart::Found { pid } => {
                tracing::warn!(container = %key, pid, why, "killed what is not this node's");
                return false;
            }
            LostStart::Unknown(reason) => {
                tracing::debug!(container = %key, reason, "it is not proven dead yet");
                return false;
            }
        }
    }
    let release = Release {
        id: key.session.clone(),
        generation: key.generation,
        ending: Ending {
            failed: true,
            reason: why.to_owned(),
            exit_code: None,
            ended_at: Timestamp::now(),
            started_at: None,
            phases: Default::default(),
        },
    };
    let bound = context.options.bounds.registry;
    let released = timeout(bound, context.registry.release(vec![release])).await;
    let released = released.map(|mut results| results.pop());
    let over = matches!(
        released,
        Ok(Some(Ok(()) | Err(RegistryError::Superseded { .. })))
    );
    if over {
        for kind in context.runtimes.keys() {
            context.cleanup.push(*kind, key.clone());
        }
    }
    over
}
