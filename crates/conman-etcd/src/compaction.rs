//! Compaction: etcd keeps every revision until it is compacted, and each node writes its heartbeat
//! each renewal interval.
//!
//! One node compacts: the one with the least name of those that are heard from. If two nodes
//! consider themselves to be that one, the later finds it done. Revisions older than one interval
//! are removed: reading several pages of one revision takes seconds, and watches that lag behind
//! are restarted. The other nodes compact revisions a few intervals older, and find it done unless
//! the first node may not compact or fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use conman_core::RateLimitedLog;
use tokio::time::sleep;

use super::call_error::CallError;
use super::figures;
use super::membership::Membership;
use super::shared::{Shared, boot_time};

/// Interval between compactions, and the minimum age of removed revisions.
pub const COMPACT_EVERY: Duration = Duration::from_mins(5);

/// The other nodes wait for the first node for so many intervals.
const PATIENCE: usize = 3;
/// Interval between repeated warnings about a failed compaction.
const REPEAT_AFTER: Duration = Duration::from_hours(1);

pub(super) async fn run(shared: Arc<Shared>, membership: Arc<Membership>, every: Duration) {
    let client = &shared.store.client;
    let warnings = RateLimitedLog::new(REPEAT_AFTER);
    let mut revisions = VecDeque::new();
    loop {
        revisions.push_front(client.seen().revision());
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
                tracing::debug!(revision, "etcd is already compacted");
            }
            // The first node may have permission; it logs its failures.
            Err(error) if !is_first => tracing::debug!(%error, "etcd is not compacted"),
            Err(error @ CallError::Refused { .. }) => {
                figures::not_compacted();
                if warnings
                    .allow("", Duration::from_millis(boot_time().0))
                    .is_some()
                {
                    tracing::warn!(
                        %error,
                        "etcd is not compacted and fills up: give its user the role `root`, or set \
                         `registry.compact = false` on every node and start etcd with \
                         --auto-compaction-retention"
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
