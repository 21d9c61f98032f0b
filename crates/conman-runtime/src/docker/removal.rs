//! Removes dead containers in batches, with everything that was made for them.
//!
//! The order is: the container's link and files, dockerd's record of it (which says where the files are),
//! its cgroups. So the next removal finds whatever an interrupted one left.
//!
//! dockerd notices a death later than conman. Until then it refuses to remove the container, and has not written the end
//! of its log. So the removal waits for that until the time for the batch is over.

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

/// Pause after the first round of a batch; each later one is twice as long, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(30);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Result of one attempt.
enum Attempt {
    Done,
    /// dockerd has not noticed the death.
    Unnoticed,
    /// dockerd is not ready for it, for this reason.
    NotYet(Failure),
}

/// The containers of this instance, by their keys.
type Containers = HashMap<ContainerKey, Listed>;

pub(super) async fn remove(
    shared: &Arc<Shared>,
    keys: &[ContainerKey],
) -> Vec<Result<(), RuntimeError>> {
    let deadline = Instant::now() + shared.timeouts.remove;
    // A list shows which containers exist and belong to this instance; no other is touched.
    let mut listed = match list(shared).await {
        Ok(listed) => listed,
        Err(failure) => {
            return keys
                .iter()
                .map(|key| Err(failure.clone().about(ACTION, &key.to_string())))
                .collect();
        }
    };
    let mut results: Vec<Option<Result<(), RuntimeError>>> = keys.iter().map(|_| None).collect();
    let mut logs_kept = vec![false; keys.len()];
    let mut pause = FIRST_PAUSE;
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
        let attempts = stream::iter(pending).map(|index| {
            let key = &keys[index];
            let listed = listed.get(key);
            let attempt = remove_one(shared, key, listed, deadline, over, logs_kept[index]);
            async move { (index, attempt.await) }
        });
        // The lane bounds the calls to dockerd; this bounds the calls that wait for it.
        let mut attempts = attempts.buffer_unordered(shared.max_removals);
        let mut tried = Vec::new();
        while let Some((index, attempt)) = attempts.next().await {
            results[index] = match attempt {
                Ok(Attempt::Done) => Some(Ok(())),
                Ok(Attempt::Unnoticed) => None,
                Ok(Attempt::NotYet(failure)) if over => {
                    Some(Err(failure.about(ACTION, &keys[index].to_string())))
                }
                Ok(Attempt::NotYet(_)) => {
                    tried.push(index);
                    None
                }
                Err(error) => Some(Err(error)),
            };
        }
        drop(attempts);
        for index in tried {
            logs_kept[index] = true;
        }
        if results.iter().any(Option::is_none) {
            let next = (Instant::now() + pause).min(deadline);
            tokio::time::sleep_until(next).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            // Without an answer the former list has to do.
            listed = list(shared).await.unwrap_or(listed);
        }
    }
    results
        .into_iter()
        .map(|result| result.expect("every round ends or is repeated"))
        .collect()
}

async fn list(shared: &Arc<Shared>) -> Result<Containers, Failure> {
    let listed = shared.list().await?;
    let by_key = listed.into_iter().map(|each| (each.key.clone(), each));
    Ok(by_key.collect())
}

/// `over`: the batch's time is; this is the last attempt.
async fn remove_one(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    listed: Option<&Listed>,
    deadline: Instant,
    over: bool,
    log_is_kept: bool,
) -> Result<Attempt, RuntimeError> {
    let files_dir = shared.files_dir(key).or_else(|| listed?.files_dir.clone());
    prepare(shared, key, files_dir).await?;
    shared.links.leave(key).await;
    if let Some(listed) = listed {
        if listed.is_believed_running && !over {
            return Ok(Attempt::Unnoticed);
        }
        if !log_is_kept {
            logs::keep_end(shared, listed).await;
            shared.followers.finish(key).await;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        // The last round runs after the deadline, for containers that became ready meanwhile.
        let limit = left.max(LONGEST_PAUSE);
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
