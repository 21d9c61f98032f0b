//! A steady load of calls beside a fault, to the API or to sessions, and how long they take.
//!
//! Calls begin at fixed times, whether or not earlier ones are answered, and their times count from
//! then: a node that hangs delays what comes after, too. None of them starts a container.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use conman_cluster::overlap::{SERVING, TEMPLATE};
use conman_e2e::{Api, eventually, slowness};
use http::Method;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::fleet::{Fleet, PATIENCE, is_quiet, within};

/// Between two calls of the API: twenty a second.
const PACE: Duration = Duration::from_millis(50);
/// Between two requests to sessions, where their percentile is judged, and where other tests run too: a debug
/// build takes half a processor for the former.
const PACE_OF_REQUESTS_QUIET: Duration = Duration::from_millis(10);
const PACE_OF_REQUESTS: Duration = Duration::from_millis(50);
/// What a fault is compared with.
const BEFORE: Duration = Duration::from_secs(5);
/// A fault may make others' requests slower by a tenth, or than this: all hosts share this machine's
/// processors, on which the new containers of the failed one start.
const UNNOTICED_MS: u64 = 50;
/// A caller's patience: an answer that has not come by then counts as one that took so long.
const ANSWER: Duration = Duration::from_secs(5);
/// On a loaded machine it is so many times as long.
const LOADED_TIMES: u32 = 4;

/// Whom to ask, and for what.
pub(crate) struct Asked {
    pub(crate) nodes: Vec<usize>,
    /// Sessions that are looked at.
    pub(crate) sessions: Vec<String>,
    /// Sessions that are ensured, which run all the time.
    pub(crate) running: Vec<String>,
}

/// Calls under way.
pub(crate) struct Load {
    stop: oneshot::Sender<()>,
    calls: JoinHandle<Vec<Call>>,
}

/// A call that has ended.
struct Call {
    kind: &'static str,
    took: Duration,
    /// `no answer`, or the answer's status.
    answer: String,
}

/// How long calls took.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) calls: usize,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) max: Duration,
    /// Calls that were answered otherwise than by 200, or not.
    pub(crate) refused: usize,
}

/// What is asked next, and of whom.
type Next = (Api, &'static str, Method, String);

impl Load {
    pub(crate) fn begin(fleet: &Fleet, asked: Asked) -> Self {
        let nodes = asked.nodes.iter().map(|&node| fleet.node(node).api());
        let apis: Vec<Api> = nodes.collect();
        Self::of(PACE, move |number| {
            let (kind, method, path) = call(&asked, number);
            (apis[number % apis.len()].clone(), kind, method, path)
        })
    }

    /// Requests to a session, through these nodes in turn.
    fn of_session(fleet: &Fleet, through: &[usize], id: &str) -> Self {
        let nodes = through.iter().map(|&node| fleet.node(node).sessions());
        let apis: Vec<Api> = nodes.collect();
        let path = format!("/s/{id}/");
        Self::of(pace_of_requests(), move |number| {
            let api = apis[number % apis.len()].clone();
            (api, "request", Method::GET, path.clone())
        })
    }

    /// Requests to these sessions in turn, each on a new connection to a load balancer.
    pub(crate) fn of_sessions(front: SocketAddr, ids: &[&str]) -> Self {
        let paths: Vec<String> = ids.iter().map(|id| format!("/s/{id}/")).collect();
        Self::of(pace_of_requests(), move |number| {
            let path = paths[number % paths.len()].clone();
            (Api::tcp(front), "request", Method::GET, path)
        })
    }

    fn of(pace: Duration, next: impl Fn(usize) -> Next + Send + 'static) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let calls = tokio::spawn(async move {
            let mut tick = interval(pace);
            tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut under_way = JoinSet::new();
            let mut number = 0;
            loop {
                // Cancelling a tick loses none: it is due still.
                let due = tokio::select! {
                    due = tick.tick() => due,
                    _ = &mut stopped => break,
                };
                let (api, kind, method, path) = next(number);
                under_way.spawn(carry_out(api, due, kind, method, path));
                number += 1;
            }
            under_way.join_all().await
        });
        Self { stop, calls }
    }

    /// No further ones: tells of each kind and of all, and answers all.
    pub(crate) async fn end(self, what: &str) -> Taken {
        let _ = self.stop.send(());
        let calls = self.calls.await.expect("calls end");
        let mut kinds: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
        let mut answers: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for call in &calls {
            kinds.entry(call.kind).or_default().push(call.took);
            *answers.entry((call.kind, &call.answer)).or_default() += 1;
        }
        for (kind, took) in kinds {
            tell(&format!("{what}, {kind}"), &Taken::of(took));
        }
        let mut all = Taken::of(calls.iter().map(|call| call.took).collect());
        all.refused = calls.iter().filter(|call| call.answer != "200 OK").count();
        tell(&format!("{what}, all calls"), &all);
        for ((kind, answer), times) in answers {
            say(&format!("{kind} was answered {times} times: {answer}"));
        }
        all
    }
}

fn pace_of_requests() -> Duration {
    match is_quiet() {
        true => PACE_OF_REQUESTS_QUIET,
        false => PACE_OF_REQUESTS,
    }
}

/// A session of a node that nothing befalls, whose clients are to notice no fault of others.
pub(crate) struct Bystander {
    before: Taken,
    load: Load,
}

impl Bystander {
    /// Has one run on a node, and asks for it through these, for a while until the fault may begin.
    pub(crate) async fn begin(fleet: &Fleet, node: usize, through: &[usize]) -> Self {
        let (id, name) = ("bystander", fleet.node(node).name());
        let path = format!("/v1/sessions/{id}?node_label=host%3D{name}");
        let body = json!({"template": SERVING});
        eventually("the bystander runs", PATIENCE, async || {
            let answer = fleet.ask(node, Method::PUT, &path, Some(&body)).await;
            answer.is_some_and(|answer| answer.status.is_success())
        })
        .await;
        let load = Load::of_session(fleet, through, id);
        sleep(BEFORE).await;
        Self {
            before: load.end("another node's session before the fault").await,
            load: Load::of_session(fleet, through, id),
        }
    }

    /// The fault is over: what its clients have seen of it.
    pub(crate) async fn saw_nothing(self) {
        let what = "another node's session during the fault";
        let during = self.load.end(what).await;
        let ms = |time: Duration| u64::try_from(time.as_millis()).expect("a short time");
        let bound_ms = UNNOTICED_MS.max(ms(self.before.p99 * 11 / 10));
        let p99_ns = u64::try_from(during.p99.as_nanos()).expect("a short time");
        within(bound_ms, &format!("{what}, p99"), 0, p99_ns);
        assert_eq!(during.refused, 0, "of {} requests", during.calls);
    }
}

/// The calls in turn. Each kind comes to every node: there is one kind more than divides them.
fn call(asked: &Asked, number: usize) -> (&'static str, Method, String) {
    let turn = number / asked.nodes.len();
    let one = |ids: &[String]| format!("/v1/sessions/{}", ids[turn % ids.len()]);
    match (number + turn) % 4 {
        0 => (
            "list of sessions",
            Method::GET,
            "/v1/sessions?limit=100".to_owned(),
        ),
        1 => ("list of nodes", Method::GET, "/v1/nodes".to_owned()),
        2 => ("look at a session", Method::GET, one(&asked.sessions)),
        _ => ("ensure what runs", Method::PUT, one(&asked.running)),
    }
}

async fn carry_out(
    api: Api,
    due: Instant,
    kind: &'static str,
    method: Method,
    path: String,
) -> Call {
    let body = (method == Method::PUT).then(|| json!({"template": TEMPLATE}));
    let patience = match is_quiet() {
        true => ANSWER,
        false => ANSWER * LOADED_TIMES * slowness(),
    };
    let answer = timeout(patience, api.try_send(method, &path, body.as_ref())).await;
    Call {
        kind,
        took: due.elapsed(),
        answer: match answer {
            Ok(Ok(answer)) => answer.status.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        },
    }
}

impl Taken {
    fn of(mut took: Vec<Duration>) -> Self {
        took.sort_unstable();
        // The nearest rank, so that few calls do not hide the slowest.
        let at = |percent: usize| took[(took.len() * percent).div_ceil(100).max(1) - 1];
        Self {
            calls: took.len(),
            p50: at(50),
            p99: at(99),
            max: at(100),
            refused: 0,
        }
    }
}

fn tell(what: &str, taken: &Taken) {
    let Taken {
        calls,
        p50,
        p99,
        max,
        ..
    } = taken;
    let [p50, p99, max] = [p50, p99, max].map(Duration::as_millis);
    say(&format!(
        "{what}: {calls} calls, p50 {p50} ms, p99 {p99} ms, max {max} ms"
    ));
}

fn say(what: &str) {
    use std::io::Write as _;
    // Not by `println!`, which the test harness keeps to itself where a test passes.
    let _ = writeln!(std::io::stderr(), "measured: {what}");
}
