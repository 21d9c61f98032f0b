//! A thread of the data plane, and the connections on it.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use conman_core::RateLimitedLog;
use conman_listen::{Begun, Place};
use conman_peer::Stream;
use conman_watchdog::TaskProgress;
use http::{HeaderValue, Request};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::TaskTracker;

use crate::client_io::{ClientIo, Exchanges};
use crate::destination::Pool;
use crate::meters::{Counted, Meters};
use crate::{Directory, Gate, PeerFront, ProxyOptions, backend, exchange};

/// Interval between sweeps of idle connections to sessions.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The proxy's life stage, in the order in which it goes through them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProxyStage {
    Serving,
    /// Answers ask clients to connect again.
    Announced,
    /// Tunnels, and connections without a request, are closed; new connections are served.
    Closing,
    /// As [`Self::Closing`], on a machine that is gone soon.
    ClosingQuickly,
    /// No new connections; open ones may finish.
    Draining,
    /// Open connections are closed.
    Stopped,
}

/// The longest that a connection stays open whose request is not answered when the node closes its
/// connections.
const CLOSING_PATIENCE: Duration = Duration::from_secs(30);

/// Minimum interval between warnings about refused connections from one address.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Rate-limited log of connections that do not come from a node of the fleet.
#[derive(Debug)]
pub(crate) struct RefusalLog {
    began: Instant,
    warnings: RateLimitedLog,
}

impl Default for RefusalLog {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            warnings: RateLimitedLog::new(WARN_EVERY),
        }
    }
}

impl RefusalLog {
    fn allow(&self, address: &str) -> Option<u64> {
        self.warnings.allow(address, self.began.elapsed())
    }
}

/// State shared by the tasks of one worker.
pub(crate) struct WorkerContext {
    pub(crate) options: Arc<ProxyOptions>,
    pub(crate) front: Arc<Front>,
    /// A permit for each request that may be held.
    pub(crate) hold_places: Arc<Semaphore>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) refusals: Arc<RefusalLog>,
    /// Connections and tunnels.
    pub(crate) tasks: TaskTracker,
    pub(crate) stage: watch::Receiver<ProxyStage>,
}

/// The clients of a listener.
pub(crate) enum Front {
    Clients {
        directory: Arc<dyn Directory>,
        gate: Arc<dyn Gate>,
    },
    Peers(PeerFront),
}

/// The names of a listener's parts.
pub(crate) struct Names {
    pub(crate) metrics: &'static str,
    pub(crate) thread: &'static str,
    /// Each worker and the acceptor, as watched tasks.
    pub(crate) worker: &'static str,
    pub(crate) acceptor: &'static str,
}

impl Front {
    pub(crate) fn names(&self) -> Names {
        match self {
            Self::Clients { .. } => Names {
                metrics: "sessions",
                thread: "proxy",
                worker: "sessions proxy",
                acceptor: "sessions acceptor",
            },
            Self::Peers(_) => Names {
                metrics: "peers",
                thread: "peers",
                worker: "peers proxy",
                acceptor: "peers acceptor",
            },
        }
    }
}

/// A client's connection and its tunnel, counted against the listener's limit until both are
/// gone.
pub(crate) struct Admission {
    load: Arc<AtomicUsize>,
    pub(crate) place: Place,
    _counted: Counted,
}

impl Admission {
    /// Counts towards the load of a worker.
    pub(crate) fn new(load: Arc<AtomicUsize>, place: Place, counted: Counted) -> Self {
        load.fetch_add(1, Ordering::Relaxed);
        Self {
            load,
            place,
            _counted: counted,
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.load.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection on its way from the acceptor to a worker.
pub(crate) struct Accepted {
    pub(crate) stream: std::net::TcpStream,
    pub(crate) peer: SocketAddr,
    pub(crate) admission: Admission,
}

/// One client's connection, for the requests on it.
pub(crate) struct ClientConnection {
    pub(crate) worker: Arc<WorkerContext>,
    /// The client's address, without its port.
    pub(crate) peer: HeaderValue,
    pub(crate) exchanges: Arc<Exchanges>,
    pub(crate) admission: Arc<Admission>,
}

/// A worker's main task: runs until the proxy is stopped, or drained and idle. It only waits for
/// events, so that its heartbeat stops only if something blocks the thread.
pub(crate) async fn run(
    context: Arc<WorkerContext>,
    mut accepted: mpsc::Receiver<Accepted>,
    progress: &TaskProgress,
) {
    let mut stage = context.stage.clone();
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut accepting = true;
    loop {
        let turn = async {
            tokio::select! {
                // Cancel safe: a received connection is spawned at once.
                next = accepted.recv(), if accepting => match next {
                    Some(next) => {
                        let context = Arc::clone(&context);
                        context.clone().tasks.spawn(serve(context, next));
                    }
                    // The acceptor has ended, and every connection that it passed on is served.
                    None => {
                        accepting = false;
                        context.tasks.close();
                    }
                },
                // Cancel safe: a missed tick comes with the next turn.
                _ = sweep.tick() => context.pool.sweep(),
                // Cancel safe: watch channels keep their value.
                _ = stage.wait_for(|stage| *stage == ProxyStage::Stopped) => {
                    return ControlFlow::Break(());
                }
                // Cancel safe: it stays ready once the tracker is closed and empty.
                () = context.tasks.wait(), if !accepting => return ControlFlow::Break(()),
            }
            ControlFlow::Continue(())
        };
        // One turn at a time, each of which sends a heartbeat: a steady crowd of connections leaves
        // a task no time for its timers.
        if progress.idle(turn).await.is_break() {
            return;
        }
    }
}

/// Serves one connection until it is closed or becomes a tunnel.
async fn serve(worker: Arc<WorkerContext>, accepted: Accepted) {
    let _guard = PanicGuard::new(&worker.meters);
    let evicted = accepted.admission.place.evicted();
    let served = serve_accepted(Arc::clone(&worker), accepted);
    tokio::select! {
        // First, so that a request that has arrived is read, which keeps the connection if its
        // caller is known.
        biased;
        served = served => if let Err(error) = served {
            let error = conman_core::error_chain(&error);
            tracing::debug!(error, "a client's connection ended early");
        },
        // Closes the connection, on which no caller is known.
        () = evicted => {}
    }
}

async fn serve_accepted(worker: Arc<WorkerContext>, accepted: Accepted) -> Result<(), ServeError> {
    let Accepted {
        stream,
        peer,
        admission,
    } = accepted;
    let stream = TcpStream::from_std(stream)?;
    backend::tune(&stream);
    let stream = match &*worker.front {
        Front::Clients { .. } => Stream::Tcp(stream),
        Front::Peers(front) => {
            let accepting = front.accept.accept(stream);
            let accepted = tokio::time::timeout(worker.options.head_timeout, accepting).await?;
            accepted.inspect_err(|error| {
                let address = peer.ip().to_canonical().to_string();
                // A client that only checks for a listener is not logged.
                if error.kind() == io::ErrorKind::InvalidData
                    && let Some(withheld) = worker.refusals.allow(&address)
                {
                    tracing::warn!(
                        address, reason = %error, withheld,
                        "refused a connection to the listener for nodes"
                    );
                }
            })?
        }
    };
    let begun = begin(&worker, stream).await?;
    let Some(begun) = begun else {
        return Ok(());
    };
    // On the heap, so that an idle connection needs no room for it.
    Box::pin(serve_http(worker, begun, peer, admission)).await
}

/// Waits for the first request.
async fn begin(worker: &WorkerContext, stream: Stream) -> io::Result<Option<Begun<Stream>>> {
    let mut stage = worker.stage.clone();
    let draining = async {
        // Watch channels keep their value; a dropped sender is the end, too.
        let _ = stage.wait_for(|stage| *stage >= ProxyStage::Draining).await;
    };
    let options = &worker.options;
    conman_listen::begin(
        stream,
        options.max_head_bytes,
        options.head_timeout,
        draining,
    )
    .await
}

async fn serve_http(
    worker: Arc<WorkerContext>,
    begun: Begun<Stream>,
    peer: SocketAddr,
    admission: Admission,
) -> Result<(), ServeError> {
    let exchanges = Arc::<Exchanges>::default();
    let io = ClientIo::new(begun, Arc::clone(&exchanges), &worker.options);
    let mut stage = worker.stage.clone();
    // Its answers ask the client to connect again, which may know no other node.
    let is_late = *stage.borrow() >= ProxyStage::Closing;
    let mut http = Builder::new();
    // `ClientIo` bounds the time, and distinguishes an idle connection from a slow head.
    http.header_read_timeout(None)
        .max_buf_size(worker.options.max_head_bytes)
        .max_headers(worker.options.max_headers)
        .half_close(false);
    let peer = HeaderValue::from_str(&peer.ip().to_canonical().to_string())
        .unwrap_or_else(|_| HeaderValue::from_static("unknown"));
    let client = Arc::new(ClientConnection {
        worker,
        peer,
        exchanges,
        admission: Arc::new(admission),
    });
    let service = service_fn(move |request: Request<Incoming>| {
        let client = Arc::clone(&client);
        // Before the first poll, so that the connection knows that the head is complete.
        let ticket = client.exchanges.begin(request.version());
        async move { Ok::<_, Infallible>(exchange::serve(client, ticket, request).await) }
    });
    let mut connection = pin!(
        http.serve_connection(TokioIo::new(io), service)
            .with_upgrades()
    );
    if !is_late {
        tokio::select! {
            // First, so that no answer after the shutdown promises another request.
            biased;
            // Watch channels keep their value; a dropped sender is the end, too.
            _ = stage.wait_for(|stage| *stage >= ProxyStage::Closing) => {}
            // Polled again below if the other arm is first.
            ended = connection.as_mut() => return Ok(ended?),
        }
        connection.as_mut().graceful_shutdown();
    }
    Ok(tokio::time::timeout(CLOSING_PATIENCE, connection).await??)
}

/// Why a client's connection ended early.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the socket could not be registered, or its peer is not a node")]
    Begin(#[from] io::Error),
    #[error("a node did not authenticate, or the last request took too long")]
    Slow(#[from] tokio::time::error::Elapsed),
    #[error("HTTP failed")]
    Http(#[from] hyper::Error),
}

/// Counts a connection task that does not reach its end. The worker's other tasks continue: the
/// runtime catches a task's panic, and their shared state is valid after every step.
pub(crate) struct PanicGuard(Arc<Meters>);

impl PanicGuard {
    pub(crate) fn new(meters: &Arc<Meters>) -> Self {
        Self(Arc::clone(meters))
    }
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.panicked();
            tracing::error!("a connection task panicked; its connection is closed");
        }
    }
}
