//! Removes dead containers in batches, with everything that was made for them.
//!
//! The order is: the container's link and files, dockerd's record of it (which says where the files are),
//! its cgroups. So the next removal finds whatever an interrupted one left.
//!
//! A busy dockerd notices a death late and refuses to remove a container that it takes for
//! running. The removal is repeated until the time for the batch is over.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bollard::query_parameters::RemoveContainerOptionsBuilder;
use futures_util::stream::{self, StreamExt};
use tokio::time::Instant;

use super::Shared;
use super::daemon::Lane;
use super::descriptions::Listed;
use super::failure::Failure;
use super::logs;
use crate::shared::container_files::ContainerFiles;
use crate::{ContainerKey, RuntimeError};

const ACTION: &str = "remove";

/// Pause between two rounds of a batch.
const ROUND_INTERVAL: Duration = Duration::from_millis(250);

/// Result of one attempt.
enum Attempt {
    Done,
    /// dockerd is not ready for it, for this reason.
    NotYet(Failure),
}

pub(super) async fn remove(
    shared: &Arc<Shared>,
    keys: &[ContainerKey],
) -> Vec<Result<(), RuntimeError>> {
    let deadline = Instant::now() + shared.timeouts.remove;
    // One list shows which containers exist and belong to this instance; no other is touched.
    let listed: HashMap<ContainerKey, Listed> = match shared.list().await {
        Ok(listed) => listed
            .into_iter()
            .map(|each| (each.key.clone(), each))
            .collect(),
        Err(failure) => {
            return keys
                .iter()
                .map(|key| Err(failure.clone().about(ACTION, &key.to_string())))
                .collect();
        }
    };
    let mut results: Vec<Option<Result<(), RuntimeError>>> = keys.iter().map(|_| None).collect();
    let mut rounds = 0_u32;
    loop {
        let pending = results
            .iter()
            .enumerate()
            .filter(|(_, result)| result.is_none());
        let pending: Vec<usize> = pending.map(|(index, _)| index).collect();
        if pending.is_empty() {
            break;
        }
        let over = Instant::now() >= deadline;
        let is_first = rounds == 0;
        rounds += 1;
        let attempts = stream::iter(pending).map(|index| {
            let key = &keys[index];
            let listed = listed.get(key);
            async move {
                (
                    index,
                    remove_one(shared, key, listed, deadline, is_first).await,
                )
            }
        });
        // The lane bounds the calls to dockerd; this bounds the calls that wait for it.
        let mut attempts = attempts.buffer_unordered(shared.max_removals);
        while let Some((index, attempt)) = attempts.next().await {
            results[index] = match attempt {
                Ok(Attempt::Done) => Some(Ok(())),
                Ok(Attempt::NotYet(failure)) if over => {
                    Some(Err(failure.about(ACTION, &keys[index].to_string())))
                }
                Ok(Attempt::NotYet(_)) => None,
                Err(error) => Some(Err(error)),
            };
        }
        drop(attempts);
        if results.iter().any(Option::is_none) {
            let next = (Instant::now() + ROUND_INTERVAL).min(deadline);
            tokio::time::sleep_until(next).await;
        }
    }
    results
        .into_iter()
        .map(|result| result.expect("every round ends or is repeated"))
        .collect()
}

async fn remove_one(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    listed: Option<&Listed>,
    deadline: Instant,
    is_first: bool,
) -> Result<Attempt, RuntimeError> {
    let files_dir = shared.files_dir(key).or_else(|| listed?.files_dir.clone());
    prepare(shared, key, files_dir).await?;
    shared.links.leave(key).await;
    if let Some(listed) = listed {
        if is_first {
            logs::keep_end(shared, listed).await;
            shared.followers.finish(key).await;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // The last round runs after the deadline, for containers that became ready meanwhile.
        let limit = left.max(ROUND_INTERVAL);
        let options = RemoveContainerOptionsBuilder::default()
            .v(true)
            .force(false)
            .build();
        let removed = shared
            .daemon
            .call(Lane::Removals, limit, |facts| async move {
                facts
                    .client
                    .remove_container(&listed.container_id, Some(options))
                    .await
            });
        match removed.await {
            Ok(()) => {}
            Err(failure) if failure.is_not_found() => {}
            Err(failure @ Failure::Answered { .. }) => return Ok(Attempt::NotYet(failure)),
            Err(failure) => return Err(failure.about(ACTION, &key.to_string())),
        }
    }
    let (shared_too, owned) = (Arc::clone(shared), key.clone());
    shared
        .on_blocking_thread(ACTION, move || shared_too.kernel.remove_cgroups(&owned))
        .await?;
    shared.unguard(key).await?;
    shared.forget_files_dir(key);
    Ok(Attempt::Done)
}

/// The steps that need no daemon and must precede its call.
async fn prepare(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    files_dir: Option<PathBuf>,
) -> Result<(), RuntimeError> {
    let (shared_too, owned) = (Arc::clone(shared), key.clone());
    shared
        .on_blocking_thread(ACTION, move || {
            shared_too.kernel.check_dead(&owned)?;
            shared_too.links.forget(&owned)?;
            files_dir.map_or(Ok(()), |dir| ContainerFiles::at(&dir).remove())
        })
        .await
}
