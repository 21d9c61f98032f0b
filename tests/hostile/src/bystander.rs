//! A tenant that has nothing to do with the attacks: ten HTTP requests, a start and a command every
//! second, before the battery and during it.

use std::sync::Arc;
use std::time::Duration;

use conman_e2e::{Api, ROOT};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// From one round of operations to the next.
const PERIOD: Duration = Duration::from_secs(1);

/// HTTP requests in each round: of a hundred in the whole battery, the second slowest would be the
/// slowest hundredth.
const REQUESTS: u32 = 10;

/// Rounds of the quiet run. Where times are judged, it has the battery's pace: a session that is used
/// once a second meets colder caches than one that is used all the time.
const QUIET_ROUNDS: usize = 60;

/// Bound on the slowest hundredth of operations, in multiples of the quiet run's.
const FACTOR: u32 = 3;

/// Times below this are not judged: what a scheduler does on a machine with two processors.
const FLOOR: Duration = Duration::from_millis(100);

/// The same on a machine that does other things meanwhile.
const BUSY_FLOOR: Duration = Duration::from_millis(700);

const SESSION: &str = "bystander";

/// Operations of one kind.
#[derive(Debug, Default, Clone)]
struct Times {
    request: Vec<Duration>,
    start: Vec<Duration>,
    command: Vec<Duration>,
    failures: Vec<String>,
}

/// The bystander while the battery runs.
#[derive(Debug)]
pub(crate) struct Bystander {
    quiet: Times,
    end: watch::Sender<bool>,
    task: JoinHandle<Times>,
}

impl Bystander {
    /// Measures a quiet run, and continues in the background.
    pub(crate) async fn start(api: Api, sessions: Api, strict: bool) -> Self {
        api.ensure(SESSION, &json!({"template": "web"})).await;
        let clients = Arc::new((api, sessions));
        let mut quiet = Times::default();
        let period = if strict { PERIOD } else { PERIOD / 16 };
        for _ in 0..QUIET_ROUNDS {
            let next = Instant::now() + period;
            round(&clients, &mut quiet, period).await;
            sleep_until(next).await;
        }
        let (end, mut ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut times = Times::default();
            while !*ended.borrow() {
                let next = Instant::now() + PERIOD;
                round(&clients, &mut times, PERIOD).await;
                // The wait may end early: another round is only begun when the battery runs on.
                tokio::select! {
                    () = sleep_until(next) => {}
                    _ = ended.changed() => {}
                }
            }
            times
        });
        Self { quiet, end, task }
    }

    /// Ends it: what is wrong, and a summary.
    pub(crate) async fn finish(self, strict: bool) -> (Vec<String>, String) {
        let _ = self.end.send(true);
        let mut times = self.task.await.expect("the bystander does not panic");
        let mut wrong = std::mem::take(&mut times.failures);
        wrong.extend(self.quiet.failures.clone());
        let floor = if strict { FLOOR } else { BUSY_FLOOR };
        let mut summary = Vec::new();
        for (what, quiet, hostile) in [
            ("HTTP", &self.quiet.request, &times.request),
            ("start", &self.quiet.start, &times.start),
            ("exec", &self.quiet.command, &times.command),
        ] {
            let (quiet, hostile_p99) = (p99(quiet), p99(hostile));
            summary.push(format!(
                "{what} p99 {} ms quiet, {} ms during {} operations",
                quiet.as_millis(),
                hostile_p99.as_millis(),
                hostile.len()
            ));
            if hostile_p99 > floor.max(quiet * FACTOR) {
                wrong.push(format!("{what} took {hostile_p99:?}, {quiet:?} when quiet"));
            }
        }
        (wrong, summary.join("; "))
    }
}

fn p99(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = sorted.len() * 99 / 100;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

async fn round(clients: &(Api, Api), times: &mut Times, period: Duration) {
    let (api, sessions) = clients;
    let mut asked = Times::default();
    let asking = async {
        let path = format!("/s/{SESSION}/");
        for _ in 0..REQUESTS {
            let next = Instant::now() + period / (REQUESTS + 1);
            let taken = operation(sessions, Method::GET, &path, None, &mut asked, "hello").await;
            asked.request.extend(taken);
            sleep_until(next).await;
        }
    };
    tokio::join!(asking, manage(api, times));
    times.request.append(&mut asked.request);
    times.failures.append(&mut asked.failures);
}

/// A command, a start and its end.
async fn manage(api: &Api, times: &mut Times) {
    let command = json!({"command": ["echo", "still here"]});
    let path = format!("/v1/sessions/{SESSION}/exec");
    let taken = operation(
        api,
        Method::POST,
        &path,
        Some(&command),
        times,
        "still here",
    )
    .await;
    times.command.extend(taken);
    let spec = json!({"image": ROOT, "command": ["sleep", "1000"], "memory_bytes": 16 << 20});
    let path = format!("/v1/sessions/{SESSION}-short");
    let taken = operation(api, Method::PUT, &path, Some(&spec), times, "running").await;
    times.start.extend(taken);
    let _ = operation(api, Method::DELETE, &path, None, times, "").await;
}

/// The time that an operation took, or its failure in `times`.
async fn operation(
    api: &Api,
    method: Method,
    path: &str,
    body: Option<&Value>,
    times: &mut Times,
    mark: &str,
) -> Option<Duration> {
    let begun = Instant::now();
    let what = format!("{method} {path}");
    match api.try_send(method, path, body).await {
        Ok(answer) if answer.status == StatusCode::OK && answer.text().contains(mark) => {
            Some(begun.elapsed())
        }
        Ok(answer) => {
            times
                .failures
                .push(format!("{what}: {} {}", answer.status, answer.text()));
            None
        }
        Err(error) => {
            times.failures.push(format!("{what}: {error}"));
            None
        }
    }
}
