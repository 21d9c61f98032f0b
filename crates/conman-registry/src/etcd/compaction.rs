//! Compaction: etcd keeps every revision until somebody says that it is not needed any more, and each
//! node writes its heartbeat each renewal interval.
//!
//! One of the nodes does it: that of the least name of those that are heard of. Should two of them
//! take themselves for it, the later one finds it done. What was current an interval ago goes: reads
//! of several pages of one moment take seconds, and watches that lag behind are begun anew.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::call_error::CallError;
use super::membership::Membership;
use super::shared::Shared;

/// Between two compactions, and how old what goes is at least.
pub const COMPACT_EVERY: Duration = Duration::from_mins(5);

pub(super) async fn run(shared: Arc<Shared>, membership: Arc<Membership>, every: Duration) {
    let client = &shared.store.client;
    let mut said = false;
    loop {
        let revision = client.seen().before().revision();
        sleep(every).await;
        let is_live = *shared.incarnation.borrow() != 0;
        if revision == 0 || !is_live || !membership.is_first(&shared.me, shared.timing.fence_ms) {
            continue;
        }
        match client.compact(revision).await {
            Ok(_) => tracing::debug!(revision, "etcd is compacted"),
            Err(error) if error.is_about_compaction() => {
                tracing::debug!(revision, "somebody else has compacted etcd");
            }
            Err(error @ CallError::Refused { .. }) if !said => {
                said = true;
                tracing::warn!(
                    %error,
                    "etcd is not compacted, and fills up unless somebody else does so: give its user \
                     the role `root`, or set `registry.compact = false` on every node and start etcd \
                     with --auto-compaction-retention"
                );
            }
            Err(error) => tracing::debug!(%error, "etcd is not compacted"),
        }
    }
}
