//! Clients that stay connected and talk, callers that come for a moment, and what they see.
//!
//! None of them knows anything of what is behind the load balancer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_cluster::overlap::{ClosedEarly, Line, WITHOUT_CODE, visit};
use futures_util::{SinkExt as _, StreamExt as _};
use jiff::Timestamp;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

/// Pause of a client that was refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(500);
/// Between two messages of a connected client.
const TALK_INTERVAL: Duration = Duration::from_secs(1);
/// Between two further connections to one session.
const CALL_INTERVAL: Duration = Duration::from_secs(3);
/// The code of a connection that was closed without one.
const WITHOUT_CLOSE: u16 = 1006;

/// Something that happened at a moment, in seconds from the begin, with its duration in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Timed {
    pub(super) at_s: f64,
    pub(super) ms: f64,
}

/// The end of a handshake.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Handshake {
    pub(super) at_s: f64,
    pub(super) good: bool,
    /// Not of a client that reconnects or tries again.
    pub(super) fresh: bool,
}

/// What clients saw during one step, or all the time.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Seen {
    pub(super) handshakes: Vec<Handshake>,
    /// Failed handshakes by what was seen instead.
    pub(super) failed: BTreeMap<String, usize>,
    /// Closed connections by code.
    pub(super) closes: BTreeMap<u16, usize>,
    /// Connections that ended without a Close frame: which, and how.
    #[serde(skip)]
    pub(super) broken: Vec<String>,
    /// From a close to the next echo.
    pub(super) reconnects: Vec<Timed>,
    /// From the first request for a session that had ended to the first echo of its new container.
    pub(super) boots: Vec<Timed>,
    /// Connected clients at a moment.
    pub(super) connected: Vec<(f64, usize)>,
    /// Closed connections of one client, at most.
    pub(super) most_closes: usize,
}

impl Seen {
    /// With times from a moment on, given in seconds.
    pub(super) fn since(mut self, begun_s: f64) -> Self {
        let timed = self.reconnects.iter_mut().chain(&mut self.boots);
        let times = timed.map(|one| &mut one.at_s);
        let counted = self.handshakes.iter_mut().map(|one| &mut one.at_s);
        let connected = self.connected.iter_mut().map(|(at_s, _)| at_s);
        for at_s in times.chain(counted).chain(connected) {
            *at_s -= begun_s;
        }
        self
    }

    pub(super) fn count(&self, succeeded: bool) -> usize {
        let counted = self.handshakes.iter();
        counted.filter(|one| one.good == succeeded).count()
    }
}

#[derive(Debug, Default)]
struct ClientState {
    seen: Seen,
    /// The greeting on the open connection of each client.
    greeted: BTreeMap<String, Option<Line>>,
    /// Closes of each client in this step.
    closes: BTreeMap<String, usize>,
}

/// All clients. They end when this is dropped.
pub(super) struct Clients {
    front: SocketAddr,
    patience: Duration,
    begun: Instant,
    state: Arc<Mutex<ClientState>>,
    tasks: Mutex<JoinSet<()>>,
}

/// What each task of a client needs.
#[derive(Clone)]
struct Client {
    id: String,
    front: SocketAddr,
    patience: Duration,
    begun: Instant,
    state: Arc<Mutex<ClientState>>,
}

impl Clients {
    /// `patience` bounds a handshake.
    pub(super) fn new(front: SocketAddr, patience: Duration) -> Self {
        Self {
            front,
            patience,
            begun: Instant::now(),
            state: Arc::default(),
            tasks: Mutex::default(),
        }
    }

    /// Connects a client to each session, which stays, and sends callers at moments drawn from `random`.
    pub(super) fn connect(&self, ids: &[String], random: &mut fastrand::Rng) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        for id in ids {
            let client = Client {
                id: id.clone(),
                front: self.front,
                patience: self.patience,
                begun: self.begun,
                state: Arc::clone(&self.state),
            };
            lock(&self.state).greeted.insert(id.clone(), None);
            let first = CALL_INTERVAL.mul_f64(random.f64());
            tasks.spawn(call(client.clone(), first));
            tasks.spawn(stay(client));
        }
        tasks.spawn(count(self.begun, Arc::clone(&self.state)));
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

    /// Seconds since the clients' begin.
    pub(super) fn now_s(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
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

    /// Sessions whose client is not connected.
    pub(super) fn away(&self) -> Vec<String> {
        let state = lock(&self.state);
        let away = state.greeted.iter();
        let away = away.filter(|(_, greeting)| greeting.is_none());
        away.map(|(id, _)| id.clone()).collect()
    }

    /// For an error.
    pub(super) fn state(&self) -> String {
        let mut away = self.away();
        let count = away.len();
        away.truncate(10);
        let failed = lock(&self.state).seen.failed.clone();
        format!("{count} not connected: {away:?}; handshakes failed: {failed:?}")
    }
}

/// No panic can happen while it is held.
fn lock(state: &Mutex<ClientState>) -> MutexGuard<'_, ClientState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    fn now_s(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Connects once. Counts the handshake.
    async fn open(&self, fresh: bool) -> Option<(WebSocketStream<TcpStream>, Line)> {
        let opened = timeout(self.patience, visit(self.front, &self.id)).await;
        let mut state = lock(&self.state);
        let at_s = self.now_s();
        let ended = |good| Handshake { at_s, good, fresh };
        let why = match opened {
            Ok(Ok(opened)) => {
                state.seen.handshakes.push(ended(true));
                return Some(opened);
            }
            Ok(Err(error)) => match error.downcast_ref() {
                Some(ClosedEarly { code }) => {
                    state.seen.handshakes.push(ended(true));
                    *state.seen.closes.entry(*code).or_default() += 1;
                    return None;
                }
                None => format!("{error:#}"),
            },
            Err(_) => format!("no greeting within {:?}", self.patience),
        };
        state.seen.handshakes.push(ended(false));
        *state.seen.failed.entry(why).or_default() += 1;
        None
    }

    /// Counts the end of the connection that stays.
    fn closed(&self, closed: Result<u16, String>, line: &Line, greeted_at: Instant) {
        let mut state = lock(&self.state);
        let code = *closed.as_ref().unwrap_or(&WITHOUT_CLOSE);
        *state.seen.closes.entry(code).or_default() += 1;
        if let Err(error) = closed {
            state.seen.broken.push(format!(
                "{} at {}, generation {} on {}, {:.1} s after its greeting: {error}",
                self.id,
                Timestamp::now(),
                line.generation,
                line.host,
                greeted_at.elapsed().as_secs_f64(),
            ));
        }
        *state.closes.entry(self.id.clone()).or_default() += 1;
        state.greeted.insert(self.id.clone(), None);
    }
}

async fn stay(client: Client) {
    let mut closed_at: Option<Instant> = None;
    let mut asked_at = Instant::now();
    let mut life = String::new();
    loop {
        let opened = match client.open(false).await {
            Some(opened) => greet(opened, client.patience).await,
            None => None,
        };
        let Some((mut socket, line)) = opened else {
            sleep(REFUSED_PAUSE).await;
            continue;
        };
        {
            let mut state = lock(&client.state);
            let at_s = client.now_s();
            let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
            let reconnect = closed_at.map(|closed_at| Timed {
                at_s,
                ms: ms(closed_at),
            });
            state.seen.reconnects.extend(reconnect);
            if line.life != life {
                let ms = ms(asked_at);
                state.seen.boots.push(Timed { at_s, ms });
            }
            state.greeted.insert(client.id.clone(), Some(line.clone()));
        }
        life.clone_from(&line.life);
        let greeted_at = Instant::now();
        let closed = talk(&mut socket).await;
        closed_at = Some(Instant::now());
        asked_at = Instant::now();
        client.closed(closed, &line, greeted_at);
        // Answers the close, within a moment.
        let _ = timeout(REFUSED_PAUSE, socket.close(None)).await;
    }
}

/// The first echo; `None` if the connection ends instead.
async fn greet(
    (mut socket, line): (WebSocketStream<TcpStream>, Line),
    patience: Duration,
) -> Option<(WebSocketStream<TcpStream>, Line)> {
    let echoed = async {
        socket.send(Message::text("hello")).await.ok()?;
        socket.next().await?.ok()?.is_text().then_some(())
    };
    timeout(patience, echoed).await.ok()??;
    Some((socket, line))
}

/// Sends a message now and then until the connection ends. Returns how it did.
async fn talk(socket: &mut WebSocketStream<TcpStream>) -> Result<u16, String> {
    let mut next = Instant::now() + TALK_INTERVAL;
    loop {
        // Cancelling the read of a message loses nothing of it: it stays in the socket's buffer.
        tokio::select! {
            message = socket.next() => match message {
                Some(Ok(Message::Close(frame))) => {
                    return Ok(frame.map_or(WITHOUT_CODE, |frame| frame.code.into()));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.to_string()),
                None => return Err("end of the stream".to_owned()),
            },
            () = sleep_until(next) => {
                next += TALK_INTERVAL;
                if let Err(error) = socket.send(Message::text("still here")).await {
                    return Err(error.to_string());
                }
            }
        }
    }
}

/// Callers begin at fixed times, whether or not earlier ones were answered.
async fn call(client: Client, first: Duration) {
    let mut next = Instant::now() + first;
    let mut calls = JoinSet::new();
    loop {
        sleep_until(next).await;
        next += CALL_INTERVAL;
        while calls.try_join_next().is_some() {}
        let client = client.clone();
        calls.spawn(async move {
            if let Some((mut socket, _)) = client.open(true).await {
                let _ = timeout(client.patience, socket.close(None)).await;
            }
        });
    }
}

/// Writes down every second how many are connected.
async fn count(begun: Instant, state: Arc<Mutex<ClientState>>) {
    loop {
        sleep(Duration::from_secs(1)).await;
        let mut state = lock(&state);
        let connected = state.greeted.values().flatten().count();
        let now_s = begun.elapsed().as_secs_f64();
        state.seen.connected.push((now_s, connected));
    }
}

/// Waits until all are connected.
pub(super) async fn all_connected(clients: &Clients, bound: Duration) -> Result<()> {
    let wait = async {
        while !clients.are_served(&BTreeMap::new()) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(bound, wait)
        .await
        .with_context(|| format!("after {bound:?}: {}", clients.state()))
}
