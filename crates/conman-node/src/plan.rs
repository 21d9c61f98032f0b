//! Plans a preemption from the kill table.

use std::time::Duration;

use conman_core::preempt::{PreemptCandidate, plan};
use conman_proto::{PreemptPlan, SessionId};

use crate::kill_table::{KillEntry, KillTable, StartStage};

/// A session's grace within the notice's budget.
pub(crate) fn grace(id: &SessionId, entry: &KillEntry, budget_ms: u32) -> Duration {
    let Some(candidate) = candidate(id, entry) else {
        return Duration::ZERO;
    };
    let planned = plan(&[candidate], budget_ms.into());
    Duration::from_millis(planned.last_kill_ms)
}

/// A session whose claim is under way has neither a generation nor a process and is left out.
pub(crate) fn of_table(table: &KillTable, budget_ms: u32) -> PreemptPlan {
    let candidates: Vec<_> = table
        .entries()
        .iter()
        .filter_map(|(id, entry)| candidate(id, entry))
        .collect();
    plan(&candidates, budget_ms.into())
}

fn candidate(id: &SessionId, entry: &KillEntry) -> Option<PreemptCandidate> {
    let paused = entry.pausing.borrow().is_some();
    let (signal, grace) = entry.warning.filter(|_| !paused).unzip();
    Some(PreemptCandidate {
        id: id.clone(),
        generation: entry.stage.generation()?,
        pid: match &entry.stage {
            StartStage::Running(_, process) => Some(process.pid()),
            StartStage::Claiming | StartStage::Reserved(_) | StartStage::Sent(_) => None,
        },
        signal: signal.map(|signal| signal.to_string()),
        grace_ms: grace.map_or(0, |grace| {
            u32::try_from(grace.as_millis()).unwrap_or(u32::MAX)
        }),
    })
}
