//! Clients that stay connected, callers that come for a moment, and what they see.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use jiff::Timestamp;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_tungstenite::tungstenite::Message;

use crate::overlap::{ClosedEarly, Line, WITHOUT_CODE, visit};

/// A client's patience with a handshake: longer than any node is replaced.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Pause of a client that was refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);
/// Between two callers.
const CALL_INTERVAL: Duration = Duration::from_millis(50);
/// The code of a connection that was closed without one.
const WITHOUT_CLOSE: u16 = 1006;

/// What clients saw during one step.
#[derive(Debug, Clone, Default)]
pub(super) struct Seen {
    /// Handshakes that succeeded.
    pub(super) handshakes: usize,
    /// Handshakes that failed, by what was seen instead.
    pub(super) failed: BTreeMap<String, usize>,
    /// Closed connections by code.
    pub(super) closes: BTreeMap<u16, usize>,
    /// Connections that ended without a Close frame: which, and how.
    pub(super) broken: Vec<String>,
    /// From a close to the next greeting, in milliseconds.
    pub(super) interruptions_ms: Vec<f64>,
    /// Closed connections of one client, at most.
    pub(super) most_closes: usize,
}

#[derive(Debug, Default)]
struct State {
    seen: Seen,
    /// The greeting on the open connection of each client.
    greeted: BTreeMap<String, Option<Line>>,
    /// Closes of each client in this step.
    closes: BTreeMap<String, usize>,
}

/// All clients. They end when this is dropped.
pub(super) struct Clients {
    front: SocketAddr,
    state: Arc<Mutex<State>>,
    tasks: Mutex<JoinSet<()>>,
}

impl Clients {
    pub(super) fn new(front: SocketAddr) -> Self {
        Self {
            front,
            state: Arc::default(),
            tasks: Mutex::default(),
        }
    }

    /// Connects a client to each session, and begins to send callers.
    pub(super) fn connect(&self, ids: &[String]) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for id in ids {
            lock(&self.state).greeted.insert(id.clone(), None);
            tasks.spawn(stay(id.clone(), self.front, Arc::clone(&self.state)));
        }
        tasks.spawn(call(ids.to_vec(), self.front, Arc::clone(&self.state)));
    }

    pub(super) fn begin_step(&self) {
        let mut state = lock(&self.state);
        state.seen = Seen::default();
        state.closes.clear();
    }

    pub(super) fn end_step(&self) -> Seen {
        let mut state = lock(&self.state);
        state.seen.most_closes = state.closes.values().copied().max().unwrap_or(0);
        state.seen.clone()
    }

    /// Whether all are connected, and none to a session of a generation in `gone`, which has ended.
    pub(super) fn are_served(&self, gone: &BTreeMap<String, u64>) -> bool {
        lock(&self.state).greeted.iter().all(|(id, greeting)| {
            let ended = gone.get(id).copied().unwrap_or_default();
            greeting
                .as_ref()
                .is_some_and(|line| line.generation > ended)
        })
    }

    /// For an error.
    pub(super) fn state(&self) -> String {
        let state = lock(&self.state);
        let away = state
            .greeted
            .iter()
            .filter(|(_, greeting)| greeting.is_none());
        let away: Vec<&String> = away.map(|(id, _)| id).take(10).collect();
        format!(
            "not connected: {away:?}; handshakes failed: {:?}",
            state.seen.failed
        )
    }
}

/// No panic can happen while it is held.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn stay(id: String, front: SocketAddr, state: Arc<Mutex<State>>) {
    let mut closed_at: Option<Instant> = None;
    loop {
        let (mut socket, line) = match timeout(ATTEMPT, visit(front, &id)).await {
            Ok(Ok(opened)) => opened,
            failed => {
                note_failed(&state, failed);
                sleep(REFUSED_PAUSE).await;
                continue;
            }
        };
        {
            let mut state = lock(&state);
            state.seen.handshakes += 1;
            let took = closed_at.map(|at| at.elapsed().as_secs_f64() * 1e3);
            state.seen.interruptions_ms.extend(took);
            state.greeted.insert(id.clone(), Some(line.clone()));
        }
        let greeted_at = Instant::now();
        let closed = loop {
            match socket.next().await {
                Some(Ok(Message::Close(frame))) => {
                    break Ok(frame.map_or(WITHOUT_CODE, |frame| frame.code.into()));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => break Err(error.to_string()),
                None => break Err("end of the stream".to_owned()),
            }
        };
        closed_at = Some(Instant::now());
        {
            let mut state = lock(&state);
            let code = *closed.as_ref().unwrap_or(&WITHOUT_CLOSE);
            *state.seen.closes.entry(code).or_default() += 1;
            if let Err(error) = closed {
                state.seen.broken.push(format!(
                    "{} at {}, generation {} on {}, {:.1} s after its greeting: {error}",
                    id,
                    Timestamp::now(),
                    line.generation,
                    line.host,
                    greeted_at.elapsed().as_secs_f64(),
                ));
            }
            *state.closes.entry(id.clone()).or_default() += 1;
            state.greeted.insert(id.clone(), None);
        }
        // Answers the close, within a moment.
        let _ = timeout(REFUSED_PAUSE, socket.close(None)).await;
    }
}

/// Callers begin at fixed times, whether or not earlier ones were answered.
async fn call(ids: Vec<String>, front: SocketAddr, state: Arc<Mutex<State>>) {
    let mut tick = interval(CALL_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut calls = JoinSet::new();
    for id in ids.iter().cycle() {
        tick.tick().await;
        while calls.try_join_next().is_some() {}
        let (id, state) = (id.clone(), Arc::clone(&state));
        calls.spawn(async move {
            match timeout(ATTEMPT, visit(front, &id)).await {
                Ok(Ok((mut socket, _))) => {
                    lock(&state).seen.handshakes += 1;
                    let _ = timeout(ATTEMPT, socket.close(None)).await;
                }
                failed => note_failed(&state, failed),
            }
        });
    }
}

fn note_failed<T, E>(state: &Mutex<State>, failed: Result<anyhow::Result<T>, E>) {
    if let Ok(Err(error)) = &failed
        && let Some(ClosedEarly { code }) = error.downcast_ref()
    {
        let seen = &mut lock(state).seen;
        seen.handshakes += 1;
        *seen.closes.entry(*code).or_default() += 1;
        return;
    }
    let why = match failed {
        Ok(Err(error)) => format!("{error:#}"),
        Ok(Ok(_)) | Err(_) => format!("no greeting within {ATTEMPT:?}"),
    };
    *lock(state).seen.failed.entry(why).or_default() += 1;
}
