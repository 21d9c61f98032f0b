//! Compaction: etcd keeps every revision until somebody says that it is not needed any more, and each
//! node writes its heartbeat each renewal interval.
//!
//! One of the nodes does it: that of the least name of those that are heard of. Should two of them
//! take themselves for it, the later one finds it done. What was current an interval ago goes: reads
//! of several pages of one moment take seconds, and watches that lag behind are begun anew. The others
//! do the same with what was current a few intervals ago, and find it done unless the first one may
//! not, or fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use conman_core::Sparing;
use tokio::time::sleep;

use super::call_error::CallError;
use super::figures;
use super::membership::Membership;
use super::shared::{Shared, boot_time};

/// Between two compactions, and how old what goes is at least.
pub const COMPACT_EVERY: Duration = Duration::from_mins(5);

/// So many intervals the others leave to the first.
const PATIENCE: usize = 3;
/// Before it is said again that it does not come about.
const SAY_AGAIN_MS: u64 = 3_600_000;

pub(super) async fn run(shared: Arc<Shared>, membership: Arc<Membership>, every: Duration) {
    let client = &shared.store.client;
    let mut said = Sparing::new(SAY_AGAIN_MS);
    let mut revisions = VecDeque::new();
    loop {
        revisions.push_front(client.seen().before().revision());
        revisions.truncate(PATIENCE);
        sleep(every).await;
        let is_first = membership.is_first(&shared.me, shared.timing.fence_ms);
        let intervals = if is_first { 1 } else { PATIENCE };
        let revision = revisions.get(intervals - 1).copied().unwrap_or(0);
        let is_live = *shared.incarnation.borrow() != 0;
        if revision == 0 || !is_live {
            continue;
        }
        match client.compact(revision).await {
            Ok(_) => tracing::debug!(revision, "etcd is compacted"),
            Err(error) if error.is_about_compaction() => {
                tracing::debug!(revision, "somebody else has compacted etcd");
            }
            // The first one may, perhaps; whether it does, it tells itself.
            Err(error) if !is_first => tracing::debug!(%error, "etcd is not compacted"),
            Err(error @ CallError::Refused { .. }) => {
                figures::not_compacted();
                if said.say("", boot_time().0).is_some() {
                    tracing::warn!(
                        %error,
                        "etcd is not compacted, and fills up unless somebody else does so: give its \
                         user the role `root`, or set `registry.compact = false` on every node and \
                         start etcd with --auto-compaction-retention"
                    );
                }
            }
            Err(error) => {
                figures::not_compacted();
                tracing::debug!(%error, "etcd is not compacted");
            }
        }
    }
}
