//! Accepts connections, and passes each to the worker with the fewest.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use conman_listen::Places;
use conman_watchdog::TaskProgress;
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};

use crate::ProxyOptions;
use crate::answer;
use crate::meters::{Meters, Refused};
use crate::worker::{Accepted, Admission, Front, ProxyStage};

/// Pause after an accept error that would recur at once, for example `EMFILE`.
const PAUSE: Duration = Duration::from_millis(50);

/// Bytes of a refused client's request that are read, so that closing does not reset the
/// connection before the answer arrives.
const REFUSED_READ_BYTES: usize = 8 * 1024;

/// Most clients and nodes that are refused gracefully at a time; more are refused at once.
const MAX_FAREWELLS: usize = 64;
/// Longest wait for each of these steps.
const FAREWELL: Duration = Duration::from_secs(1);

/// Longest wait for a place, for which another connection may have to be closed.
const PLACE: Duration = Duration::from_secs(1);

/// Accepts connections and hands each to the worker with the fewest.
pub(crate) struct Acceptor {
    listener: TcpListener,
    workers: Vec<WorkerQueue>,
    places: Arc<Places>,
    farewells: Arc<Semaphore>,
    meters: Arc<Meters>,
    no_room: Bytes,
    /// A spare descriptor, closed to accept and close a connection when there are none left.
    reserve: Option<File>,
}

/// The acceptor's end of a worker.
pub(crate) struct WorkerQueue {
    pub(crate) load: Arc<AtomicUsize>,
    pub(crate) queue: mpsc::Sender<Accepted>,
}

impl Acceptor {
    pub(crate) fn new(
        listener: TcpListener,
        workers: Vec<WorkerQueue>,
        options: &ProxyOptions,
        front: &Front,
        meters: Arc<Meters>,
    ) -> Self {
        let to_nodes = matches!(front, Front::Peers(_));
        Self {
            listener,
            workers,
            places: Places::new(front.names().metrics, options.max_connections),
            no_room: answer::no_room(to_nodes),
            farewells: Arc::new(Semaphore::new(MAX_FAREWELLS)),
            meters,
            reserve: reserve(),
        }
    }

    /// Runs until the proxy drains or stops; then the listening socket is closed.
    pub(crate) async fn run(
        mut self,
        mut stage: watch::Receiver<ProxyStage>,
        progress: &TaskProgress,
    ) {
        loop {
            let next = async {
                tokio::select! {
                    // Cancel safe: a connection that is not accepted stays in the kernel's queue.
                    accepted = self.listener.accept() => Some(accepted),
                    // Watch channels keep their value; a dropped sender is the end, too.
                    _ = stage.wait_for(|stage| *stage >= ProxyStage::Draining) => None,
                }
            };
            match progress.idle(next).await {
                Some(Ok((stream, peer))) => self.hand_over(stream, peer, progress).await,
                Some(Err(error)) => self.after_failure(&error).await,
                None => return,
            }
        }
    }

    async fn hand_over(&mut self, stream: TcpStream, peer: SocketAddr, progress: &TaskProgress) {
        let place = progress.wait(PLACE, self.places.take(peer.ip())).await;
        let Some(place) = place else {
            self.refuse(stream, Refused::Connections);
            return;
        };
        let loads = self
            .workers
            .iter()
            .map(|worker| worker.load.load(Ordering::Relaxed));
        let idlest = loads.enumerate().min_by_key(|&(_, load)| load);
        let (Some((number, _)), Ok(stream)) = (idlest, stream.into_std()) else {
            return;
        };
        let worker = &self.workers[number];
        let admission = Admission::new(Arc::clone(&worker.load), place, self.meters.connection());
        let accepted = Accepted {
            stream,
            peer,
            admission,
        };
        // A worker ends before the acceptor only if its thread panicked outside every connection's
        // task.
        if worker.queue.send(accepted).await.is_err() {
            tracing::error!("a proxy worker has ended; the others continue");
            self.workers.remove(number);
        }
    }

    /// Sends a 503 as far as the socket's empty send buffer takes it, and closes.
    fn refuse(&self, stream: TcpStream, why: Refused) {
        self.meters.refused(why);
        if let Ok(place) = Arc::clone(&self.farewells).try_acquire_owned() {
            let no_room = self.no_room.clone();
            tokio::spawn(async move {
                say_farewell(&stream, &no_room).await;
                drop(place);
            });
            return;
        }
        part(&stream, &self.no_room);
    }

    async fn after_failure(&mut self, error: &io::Error) {
        match error.raw_os_error() {
            // The client gave up while it was queued.
            Some(libc::ECONNABORTED | libc::ECONNRESET | libc::EPERM | libc::EPROTO) => return,
            Some(libc::EMFILE | libc::ENFILE) => {
                self.meters.refused(Refused::Descriptors);
                tracing::warn!(%error, "no descriptors left: closing a connection unserved");
                self.reserve = None;
                // Another thread may take the descriptor first; then the client waits.
                let shed = tokio::time::timeout(PAUSE, self.listener.accept()).await;
                drop(shed);
                self.reserve = reserve();
            }
            _ => tracing::warn!(%error, "cannot accept connections"),
        }
        // Not cancelled: draining waits for at most one pause.
        tokio::time::sleep(PAUSE).await;
    }
}

/// Lets a client or a node send its request first, and read the answer before the connection
/// closes: a reset would leave it in doubt whether something was taken.
async fn say_farewell(stream: &TcpStream, no_room: &Bytes) {
    // Checks for actual bytes: a stream that was just accepted counts as readable.
    let arrives = async || {
        let waited = tokio::time::timeout(FAREWELL, stream.peek(&mut [0])).await;
        waited.is_ok_and(|looked| looked.is_ok())
    };
    arrives().await;
    part(stream, no_room);
    // The rest of the request, or the peer's close.
    if arrives().await {
        let _ = stream.try_read(&mut [0; REFUSED_READ_BYTES]);
    }
}

/// Reads available bytes, answers, and ends the sending side. Uses the socket directly, which
/// never blocks: the runtime may not know yet whether it is writable.
fn part(stream: &TcpStream, no_room: &Bytes) {
    let socket = SockRef::from(stream);
    let _ = (&*socket).read(&mut [0; REFUSED_READ_BYTES]);
    let _ = (&*socket).write(no_room);
    let _ = socket.shutdown(Shutdown::Write);
}

fn reserve() -> Option<File> {
    File::open("/dev/null").ok()
}
