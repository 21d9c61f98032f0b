//! Removing several containers at once.

use std::future::Future;

use futures_util::stream::{self, StreamExt};

/// Most concurrent removals. The kernel needs some milliseconds for each, mostly waiting.
const AT_A_TIME: usize = 8;

/// Runs some at a time; returns the results in the order of `removals`.
pub async fn some_at_a_time<F: Future>(removals: Vec<F>) -> Vec<F::Output> {
    stream::iter(removals).buffered(AT_A_TIME).collect().await
}
