//! What a drain would do, and how long it would take.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::Arc;

use conman_core::drain::{DrainCandidate, plan};
use conman_proto::{DrainPlan, DrainRequest, Generation, OnNodeLoss, SessionId};
use conman_registry::Phase;

use super::order::Order;
use crate::context::Context;
use crate::phases;
use crate::session::SessionHandle;

/// Time over which the listener closes what passes through.
const CLOSE_MS: u64 = 2_000;

/// Returns what a drain would do now.
pub(crate) fn plan_now(context: &Context, request: &DrainRequest) -> DrainPlan {
    let order = Order::of(request);
    let mut plan = plan_for(candidates(context, &order, &Turns::new()), &order);
    let leave = &context.leave;
    let passes_through = leave.through().in_flight() > 0;
    if passes_through || leave.is_probed() {
        let delay = u64::try_from(leave.delay().as_millis()).unwrap_or(u64::MAX);
        plan.predicted_ms = plan.predicted_ms.max(delay);
    }
    if passes_through {
        plan.predicted_ms = plan.predicted_ms.saturating_add(CLOSE_MS);
    }
    plan
}

pub(super) fn plan_for(sessions: Vec<DrainCandidate>, order: &Order) -> DrainPlan {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    plan(sessions, order.parallel, processors)
}

/// The lives that have had their turn.
pub(super) type Turns = BTreeMap<SessionId, Arc<SessionHandle>>;

/// Sessions that have not ended and have not had their turn.
pub(super) fn candidates(context: &Context, order: &Order, had: &Turns) -> Vec<DrainCandidate> {
    let has_had = |handle: &Arc<SessionHandle>| {
        had.get(&handle.id)
            .is_some_and(|life| Arc::ptr_eq(life, handle))
    };
    let live = context.sessions.live();
    live.iter()
        .filter(|handle| !has_had(handle))
        .map(|handle| {
            let (signal, grace_ms) = order.warning(handle);
            let view = handle.view();
            let ms = |phase: &Phase| phase.duration_ms.round() as u64;
            let phases = view.phases.iter();
            let claim = phases.clone().find(|phase| phase.name == phases::CLAIM);
            // Steps are parts of phases.
            let whole = phases.filter(|phase| !phase.name.contains('.'));
            let restarts = handle.spec().on_node_loss == OnNodeLoss::Restart;
            DrainCandidate {
                id: handle.id.clone(),
                // A life that is not claimed yet is stopped before its claim.
                generation: handle.generation().unwrap_or(Generation::FIRST),
                connections: handle.activity.in_flight(),
                memory_bytes: handle.spec().memory_bytes,
                signal: signal.filter(|_| view.process.is_some()),
                grace_ms: grace_ms.into(),
                release_ms: claim.map_or(0, ms),
                start_ms: if restarts { whole.map(ms).sum() } else { 0 },
            }
        })
        .collect()
}
