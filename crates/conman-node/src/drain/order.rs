//! The parameters of a drain.

use conman_proto::DrainRequest;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::session::SessionHandle;

/// Default number of sessions stopped at a time: enough that one with a long grace does not delay all
/// others, few enough that the other nodes can start them as fast.
const PARALLEL: u32 = 8;

/// Maximum of `parallel`.
pub const MAX_PARALLEL: u32 = 256;

/// Time before SIGKILL where the operator names a signal, and neither they nor the session a time.
const DEFAULT_GRACE_MS: u32 = 10_000;

const DEFAULT_REASON: &str = "the node is being drained";

/// The saved form of a drain.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) reason: String,
    pub(super) started_at: Timestamp,
    pub(super) parallel: u32,
    signal: Option<String>,
    grace_ms: Option<u32>,
}

impl Order {
    pub(super) fn of(request: &DrainRequest) -> Self {
        let reason = request.reason.clone().filter(|reason| !reason.is_empty());
        Self {
            reason: reason.unwrap_or_else(|| DEFAULT_REASON.to_owned()),
            started_at: Timestamp::now(),
            parallel: request.parallel.unwrap_or(PARALLEL).clamp(1, MAX_PARALLEL),
            signal: request.signal.clone(),
            grace_ms: request.grace_ms,
        }
    }

    /// Returns the signal sent first to a session's program, and the time before it is killed; without time
    /// no signal is sent.
    pub(super) fn warning(&self, handle: &SessionHandle) -> (Option<String>, u32) {
        let own = handle.spec().preempt_grace_ms;
        let grace_ms = match (self.grace_ms, &self.signal) {
            (Some(grace_ms), _) => grace_ms,
            (None, Some(_)) if own == 0 => DEFAULT_GRACE_MS,
            (None, _) => own,
        };
        let signal = self.signal.clone().or(handle.spec().preempt_signal.clone());
        (signal.filter(|_| grace_ms > 0), grace_ms)
    }
}
