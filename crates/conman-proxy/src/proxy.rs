//! A running listener: its threads, and how it ends.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread;
use std::time::Duration;

use conman_core::Departure;
use conman_watchdog::essential;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::task::TaskTracker;

use crate::destination;
use crate::listener::{Acceptor, WorkerQueue};
use crate::meters::Meters;
use crate::worker::{self, Front, ProxyStage, RefusalLog, WorkerContext};
use crate::{Directory, Gate, PeerFront, ProxyOptions};

/// Connections queued for one worker. They are taken at once, so a few suffice. If a worker is
/// stuck, the acceptor waits, which both heartbeats show, and the kernel's queue fills.
const WORKER_QUEUE: usize = 128;

/// A running sessions listener. Dropping it closes everything that is open.
#[derive(Debug)]
pub struct Proxy {
    local_addr: SocketAddr,
    stage: Arc<watch::Sender<ProxyStage>>,
    /// Every thread holds a sender until it ends; nothing is ever sent.
    ended: mpsc::Receiver<()>,
    meters: Arc<Meters>,
}

/// Current numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProxyStats {
    /// Open client connections, including tunnels.
    pub connections: u64,
    /// Open tunnels.
    pub tunnels: u64,
    /// Requests that wait for their session.
    pub held: u64,
}

impl Proxy {
    /// Serves `listener` on new threads: an acceptor and `options.workers` workers.
    ///
    /// Metrics go to the recorder that is installed at this moment.
    ///
    /// # Errors
    /// Options out of range (`InvalidInput`), or threads and runtimes that cannot be made.
    pub fn start(
        listener: TcpListener,
        options: ProxyOptions,
        directory: Arc<dyn Directory>,
        gate: Arc<dyn Gate>,
    ) -> io::Result<Self> {
        Self::launch(listener, options, Front::Clients { directory, gate })
    }

    /// Serves the listener for the other nodes of the fleet. Their requests name a session and a
    /// generation, and are never forwarded to a third node.
    ///
    /// # Errors
    /// As for [`Proxy::start`].
    pub fn start_peers(
        listener: TcpListener,
        options: ProxyOptions,
        front: PeerFront,
    ) -> io::Result<Self> {
        Self::launch(listener, options, Front::Peers(front))
    }

    fn launch(listener: TcpListener, options: ProxyOptions, front: Front) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let local_addr = listener.local_addr()?;
        let options = Arc::new(options);
        let front = Arc::new(front);
        let names = front.names();
        let meters = Arc::new(Meters::new(names.metrics));
        let refusals = Arc::new(RefusalLog::default());
        let max_held = options.max_held.min(Semaphore::MAX_PERMITS);
        let hold_places = Arc::new(Semaphore::new(max_held));
        let (stage, stage_seen) = watch::channel(ProxyStage::Serving);
        // Only its end is used.
        let (alive, ended) = mpsc::channel(1);
        let mut workers = Vec::with_capacity(options.workers);
        for number in 0..options.workers {
            let context = Arc::new(WorkerContext {
                options: Arc::clone(&options),
                front: Arc::clone(&front),
                hold_places: Arc::clone(&hold_places),
                meters: Arc::clone(&meters),
                pool: destination::pool(options.pool_idle_timeout),
                refusals: Arc::clone(&refusals),
                tasks: TaskTracker::new(),
                stage: stage_seen.clone(),
            });
            let (queue, accepted) = mpsc::channel(WORKER_QUEUE);
            let progress = options.watchdog.task(names.worker);
            run_thread(
                format!("conman-{}-{number}", names.thread),
                alive.clone(),
                move |runtime| {
                    let running = worker::run(context, accepted, &progress);
                    runtime.block_on(essential(progress.name(), running));
                },
            )?;
            workers.push(WorkerQueue {
                load: Arc::new(AtomicUsize::new(0)),
                queue,
            });
        }
        let acceptor_meters = Arc::clone(&meters);
        let progress = options.watchdog.task(names.acceptor);
        run_thread("conman-accept".to_owned(), alive, move |runtime| {
            runtime.block_on(essential(progress.name(), async {
                match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => {
                        Acceptor::new(listener, workers, &options, &front, acceptor_meters)
                            .run(stage_seen, &progress)
                            .await;
                    }
                    Err(error) => tracing::error!(%error, "cannot serve the listener"),
                }
            }));
        })?;
        Ok(Self {
            local_addr,
            stage: Arc::new(stage),
            ended,
            meters,
        })
    }

    /// The listen address.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Numbers of what is open.
    #[must_use]
    pub fn stats(&self) -> ProxyStats {
        self.meters.stats()
    }

    /// Makes the listener follow its node's departure until the proxy stops. Must be called within a
    /// runtime.
    pub fn follow(&self, mut departure: watch::Receiver<Departure>) {
        let stage = Arc::clone(&self.stage);
        tokio::spawn(async move {
            loop {
                let follows = match *departure.borrow_and_update() {
                    Departure::Staying => ProxyStage::Serving,
                    Departure::Announced => ProxyStage::Announced,
                    Departure::Closing => ProxyStage::Closing,
                    Departure::ClosingQuickly => ProxyStage::ClosingQuickly,
                };
                stage.send_if_modified(|present| {
                    let changes = *present < ProxyStage::Draining && *present != follows;
                    if changes {
                        *present = follows;
                    }
                    changes
                });
                tokio::select! {
                    // Cancel safe: the value is read again. A dropped sender is the end.
                    changed = departure.changed() => if changed.is_err() {
                        return;
                    },
                    // Cancel safe: it only waits.
                    () = stage.closed() => return,
                }
            }
        });
    }

    /// Stops accepting, closes the tunnels with 1012, lets open requests end for at most `patience`,
    /// and then closes the rest.
    pub async fn shutdown(mut self, patience: Duration) {
        self.stage.send_replace(ProxyStage::Draining);
        if tokio::time::timeout(patience, self.ended.recv())
            .await
            .is_err()
        {
            self.stage.send_replace(ProxyStage::Stopped);
            self.ended.recv().await;
        }
    }
}

/// Runs `main` on a thread with a separate runtime, dropped with all its tasks at the end.
fn run_thread(
    name: String,
    alive: mpsc::Sender<()>,
    main: impl FnOnce(&Runtime) + Send + 'static,
) -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name(name).spawn(move || {
        main(&runtime);
        drop(runtime);
        drop(alive);
    })?;
    Ok(())
}
