//! Removing several containers at once.

use std::future::Future;

use futures_util::stream::{self, StreamExt};

/// Removed cgroups take the kernel some milliseconds, most of which it waits.
const AT_A_TIME: usize = 8;

/// Some at a time; the results stand in the order of `removals`.
pub(crate) async fn some_at_a_time<F: Future>(removals: Vec<F>) -> Vec<F::Output> {
    stream::iter(removals).buffered(AT_A_TIME).collect().await
}
