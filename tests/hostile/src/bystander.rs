//! A tenant that has nothing to do with the attacks: ten HTTP requests, a start and a command every
//! second, before the battery and during it.

use std::sync::{Arc, Mutex, PoisonError};
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

/// Rounds next to sessions that only compute, where times are judged. The processor time that their
/// limits allow them explains a part of the battery's times; these are reported and not judged.
const COMPUTING_ROUNDS: usize = 30;

const SESSION: &str = "bystander";

/// Slowest operations of each kind that are reported with the probes that ran.
const REPORTED: usize = 3;

/// Names of the probes that run at the moment.
#[derive(Debug, Default, Clone)]
pub(crate) struct RunningProbes(Arc<Mutex<Vec<&'static str>>>);

impl RunningProbes {
    /// Adds probes until the guard is dropped.
    pub(crate) fn enter(&self, names: Vec<&'static str>) -> RunningGuard {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        running.extend(&names);
        RunningGuard(self.clone(), names)
    }

    fn describe(&self) -> String {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match running.as_slice() {
            [] => "no probe".to_owned(),
            names => names.join(", "),
        }
    }
}

/// Removes its probes from the running ones when it is dropped.
#[derive(Debug)]
pub(crate) struct RunningGuard(RunningProbes, Vec<&'static str>);

impl Drop for RunningGuard {
    fn drop(&mut self) {
        let mut running = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        for name in &self.1 {
            if let Some(at) = running.iter().position(|other| other == name) {
                running.swap_remove(at);
            }
        }
    }
}

/// One operation that succeeded.
#[derive(Debug, Clone)]
struct Sample {
    took: Duration,
    /// The probes that ran when it ended.
    during: String,
}

/// Operations of one kind.
#[derive(Debug, Default, Clone)]
struct Times {
    request: Vec<Sample>,
    start: Vec<Sample>,
    command: Vec<Sample>,
    failures: Vec<String>,
}

/// What the bystander needs for its operations.
#[derive(Debug)]
struct Tenant {
    api: Api,
    sessions: Api,
    probes: RunningProbes,
}

/// The bystander while the battery runs.
#[derive(Debug)]
pub(crate) struct Bystander {
    quiet: Times,
    next_to_computing: Times,
    end: watch::Sender<bool>,
    task: JoinHandle<Times>,
}

impl Bystander {
    /// Measures a quiet run and one next to sessions with the specs `computing`, and continues in the
    /// background.
    pub(crate) async fn start(
        api: Api,
        sessions: Api,
        probes: RunningProbes,
        computing: &[Value],
        strict: bool,
    ) -> Self {
        api.ensure(SESSION, &json!({"template": "web"})).await;
        let tenant = Tenant {
            api,
            sessions,
            probes,
        };
        let period = if strict { PERIOD } else { PERIOD / 16 };
        let quiet = rounds(&tenant, QUIET_ROUNDS, period).await;
        let mut next_to_computing = Times::default();
        if strict {
            for (number, spec) in computing.iter().enumerate() {
                tenant
                    .api
                    .ensure(&format!("computing-{number}"), spec)
                    .await;
            }
            next_to_computing = rounds(&tenant, COMPUTING_ROUNDS, period).await;
            for number in 0..computing.len() {
                let path = format!("/v1/sessions/computing-{number}");
                tenant.api.delete(&path).await;
            }
        }
        let (end, mut ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            let mut times = Times::default();
            while !*ended.borrow() {
                let next = Instant::now() + PERIOD;
                round(&tenant, &mut times, PERIOD).await;
                // The wait may end early: another round is only begun when the battery runs on.
                tokio::select! {
                    () = sleep_until(next) => {}
                    _ = ended.changed() => {}
                }
            }
            times
        });
        Self {
            quiet,
            next_to_computing,
            end,
            task,
        }
    }

    /// Ends it: what is wrong, and a summary.
    pub(crate) async fn finish(self, strict: bool) -> (Vec<String>, String) {
        let _ = self.end.send(true);
        let mut times = self.task.await.expect("the bystander does not panic");
        let mut wrong = std::mem::take(&mut times.failures);
        wrong.extend(self.quiet.failures.clone());
        wrong.extend(self.next_to_computing.failures.clone());
        let floor = if strict { FLOOR } else { BUSY_FLOOR };
        let mut summary = Vec::new();
        let computing = &self.next_to_computing;
        for (what, quiet, computing, hostile) in [
            (
                "HTTP",
                &self.quiet.request,
                &computing.request,
                &times.request,
            ),
            ("start", &self.quiet.start, &computing.start, &times.start),
            (
                "exec",
                &self.quiet.command,
                &computing.command,
                &times.command,
            ),
        ] {
            let (quiet, hostile_p99) = (p99(quiet), p99(hostile));
            summary.push(format!(
                "{what} p99 {:.1} ms quiet, {:.1} next to computing sessions, {:.1} during {} \
                 operations",
                milliseconds(quiet),
                milliseconds(p99(computing)),
                milliseconds(hostile_p99),
                hostile.len()
            ));
            summary.extend(slowest(what, hostile));
            if hostile_p99 > floor.max(quiet * FACTOR) {
                wrong.push(format!("{what} took {hostile_p99:?}, {quiet:?} when quiet"));
            }
        }
        (wrong, summary.join("\n  "))
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

fn slowest(what: &str, samples: &[Sample]) -> Vec<String> {
    let mut sorted: Vec<&Sample> = samples.iter().collect();
    sorted.sort_unstable_by_key(|sample| std::cmp::Reverse(sample.took));
    let line = |sample: &&Sample| {
        let took = sample.took.as_millis();
        format!("{what} took {took} ms during {}", sample.during)
    };
    sorted.iter().take(REPORTED).map(line).collect()
}

fn p99(samples: &[Sample]) -> Duration {
    let mut sorted: Vec<Duration> = samples.iter().map(|sample| sample.took).collect();
    sorted.sort_unstable();
    let at = sorted.len() * 99 / 100;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

async fn rounds(tenant: &Tenant, count: usize, period: Duration) -> Times {
    let mut times = Times::default();
    for _ in 0..count {
        let next = Instant::now() + period;
        round(tenant, &mut times, period).await;
        sleep_until(next).await;
    }
    times
}

async fn round(tenant: &Tenant, times: &mut Times, period: Duration) {
    let mut requested = Times::default();
    let requests = async {
        let path = format!("/s/{SESSION}/");
        for _ in 0..REQUESTS {
            let next = Instant::now() + period / (REQUESTS + 1);
            let get = (Method::GET, path.as_str());
            let taken = tenant.operation(&tenant.sessions, get, None, &mut requested, "hello");
            let taken = taken.await;
            requested.request.extend(taken);
            sleep_until(next).await;
        }
    };
    tokio::join!(requests, manage(tenant, times));
    times.request.append(&mut requested.request);
    times.failures.append(&mut requested.failures);
}

/// A command, a start and its end.
async fn manage(tenant: &Tenant, times: &mut Times) {
    let api = &tenant.api;
    let command = json!({"command": ["echo", "still here"]});
    let path = format!("/v1/sessions/{SESSION}/exec");
    let post = (Method::POST, path.as_str());
    let taken = tenant.operation(api, post, Some(&command), times, "still here");
    let taken = taken.await;
    times.command.extend(taken);
    let spec = json!({"image": ROOT, "command": ["sleep", "1000"], "memory_bytes": 16 << 20});
    let path = format!("/v1/sessions/{SESSION}-short");
    let put = (Method::PUT, path.as_str());
    let taken = tenant.operation(api, put, Some(&spec), times, "running");
    let taken = taken.await;
    times.start.extend(taken);
    let delete = (Method::DELETE, path.as_str());
    let _ = tenant.operation(api, delete, None, times, "").await;
}

impl Tenant {
    /// Returns the operation's sample, or adds its failure to `times`.
    async fn operation(
        &self,
        client: &Api,
        (method, path): (Method, &str),
        body: Option<&Value>,
        times: &mut Times,
        mark: &str,
    ) -> Option<Sample> {
        let begun = Instant::now();
        let what = format!("{method} {path}");
        let failure = match client.try_send(method, path, body).await {
            Ok(answer) if answer.status == StatusCode::OK && answer.text().contains(mark) => {
                return Some(Sample {
                    took: begun.elapsed(),
                    during: self.probes.describe(),
                });
            }
            Ok(answer) => format!("{} {}", answer.status, answer.text()),
            Err(error) => error.to_string(),
        };
        times.failures.push(format!("{what}: {failure}"));
        None
    }
}
