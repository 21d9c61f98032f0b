//! How long sessions take from the order to die to their release, and where their processes wait meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Longest death while nothing else runs.
pub(crate) const ALONE: Duration = Duration::from_millis(300);

/// Longest death next to other probes, on a usual machine.
const TOGETHER: Duration = Duration::from_secs(2);

/// Slowest releases that are reported.
const REPORTED: usize = 3;

/// The time between two looks at a process that takes long to die.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// One session's end.
#[derive(Debug, Clone)]
pub(crate) struct Release {
    id: String,
    pub(crate) took: Duration,
    /// The kernel's function in which most of its processes waited, where it took long.
    pub(crate) place: String,
}

/// The ends of all sessions of the battery.
#[derive(Debug, Default)]
pub(crate) struct Releases(Mutex<Vec<Release>>);

impl Releases {
    /// Measures `removal` of the session `id`. `alive` lists its processes.
    pub(crate) async fn measure(
        &self,
        id: &str,
        alive: impl Fn() -> Vec<i32>,
        removal: impl Future<Output = ()>,
    ) -> Release {
        let begun = Instant::now();
        let mut places: BTreeMap<String, u32> = BTreeMap::new();
        tokio::pin!(removal);
        loop {
            let pause = match begun.elapsed() < ALONE / 2 {
                true => ALONE / 2,
                false => LOOK_INTERVAL,
            };
            // Dropping the sleep loses nothing, and the removal is continued in the next turn.
            tokio::select! {
                () = &mut removal => break,
                () = sleep(pause) => {}
            }
            for place in alive().into_iter().flat_map(waits) {
                *places.entry(place).or_default() += 1;
            }
        }
        let most = places.into_iter().max_by_key(|(_, times)| *times);
        let release = Release {
            id: id.to_owned(),
            took: begun.elapsed(),
            place: most.map_or_else(|| "no process".to_owned(), |(place, _)| place),
        };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(release.clone());
        release
    }

    /// The releases that took too long next to other probes, and a summary.
    pub(crate) fn judge(&self, slowness: u32) -> (Vec<String>, String) {
        let mut all = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        all.sort_unstable_by_key(|release| std::cmp::Reverse(release.took));
        let line = |Release { id, took, place }: &Release| {
            format!("{id} died in {} ms, waiting in {place}", took.as_millis())
        };
        let slow = all
            .iter()
            .filter(|release| release.took > TOGETHER * slowness);
        let slow = slow.map(line).collect();
        let slowest: Vec<String> = all.iter().take(REPORTED).map(line).collect();
        let summary = format!("{} releases\n  {}", all.len(), slowest.join("\n  "));
        (slow, summary)
    }
}

/// The functions of the kernel in which the threads of a process wait.
fn waits(pid: i32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let stack = |task: fs::DirEntry| {
        let text = fs::read_to_string(task.path().join("stack")).ok()?;
        let function = text.lines().next()?.split_whitespace().nth(1)?;
        Some(function.split('+').next()?.to_owned())
    };
    tasks
        .into_iter()
        .flatten()
        .filter_map(|task| stack(task.ok()?))
        .collect()
}
