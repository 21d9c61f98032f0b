//! The connection to the shim: numbered concurrent calls, and the shim's notifications.
//!
//! ```text
//! callers ──send──▶ socket ──▶ shim
//!    ▲ oneshot a call            │
//!    └──── one reader task ◀─────┘──▶ NotificationHandler
//! ```
//! A connection that breaks fails the calls that wait on it. The next call, or [`Link::keep`],
//! connects again, and starts a shim if none answers and a program is configured. The shim keeps
//! ends until they are acknowledged, so it reports ends that were missed meanwhile to the new
//! connection.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_linux::Features;
use conman_shim::{
    Call, CallError, ContainerView, FenceState, Message, Reply, Request, VERSION, encode, socket,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::ContainerKey;
use crate::fence_opening::FenceOpener;

/// Bound on connecting, including the start of a shim: it answers after some milliseconds, on a
/// busy machine later.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for a shim that another program has started.
const OTHER_SHIM_PATIENCE: Duration = Duration::from_secs(1);

/// Pause before the next attempt after the end of a kept connection, or a failure to make one, so
/// that a shim that ends repeatedly is not started in a tight loop.
const KEEP_PAUSE: Duration = Duration::from_millis(200);

/// Pause between two attempts to connect to a shim that has just been started.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Most calls that wait for an answer; more mean that the shim has a problem.
const MAX_CALLS: usize = 8_192;

/// For root only: the shim's messages name containers and paths.
const STDERR_MODE: u32 = 0o600;

/// Remedy for a shim without room.
pub(crate) const REMEDY_FOR_FULL: &str = "stop some sessions, or try again in a moment";

/// The number of calls whose answer is ignored.
const NOBODYS: u64 = 0;

/// Receives the shim's notifications.
pub(crate) trait NotificationHandler: std::fmt::Debug + Send + Sync {
    /// Returns `false` if the shim may forget the end at once.
    fn hear(&self, ended: &ContainerView) -> bool;

    /// The fence has changed its state.
    fn hear_fence(&self, _state: FenceState) {}

    /// The connection ended; called before any call on it fails.
    fn hear_end(&self) {}
}

/// The name of a session's container.
pub(crate) fn name(key: &ContainerKey) -> String {
    format!("{}.{}", key.session, key.generation)
}

/// The program that is run as the shim.
#[derive(Debug, Clone)]
pub struct ShimCommand {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// The file that its standard error is appended to.
    pub stderr: PathBuf,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// Nothing was sent.
    #[error("{reason}")]
    Unreachable { reason: String },
    /// It was sent, and the connection broke before the answer.
    #[error("the connection to the shim broke")]
    Lost,
    #[error("no answer within {} ms", after.as_millis())]
    TimedOut { after: Duration },
    #[error(transparent)]
    Refused(CallError),
    #[error("the shim's answer does not match this request; is it of another version?")]
    Unexpected,
}

type Answer = (Reply, Vec<OwnedFd>);

/// A client of the shim, across connections.
#[derive(Debug)]
pub(crate) struct Link {
    socket: PathBuf,
    command: Option<ShimCommand>,
    hearer: Option<Arc<dyn NotificationHandler>>,
    opener: FenceOpener,
    /// Locked while a connection is made, which is bounded.
    current: tokio::sync::Mutex<Option<Arc<Connection>>>,
    /// The shim that was started here; it is reaped when it ends.
    started: Mutex<Option<Child>>,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
    reader: AbortHandle,
    pub(crate) shim_pid: i32,
    pub(crate) features: Option<Features>,
    /// How long its fence waits before it kills what is not frozen, at the time of connecting; `None`
    /// for a shim whose time cannot be changed.
    pub(crate) freeze_ms: u64,
}

#[derive(Debug)]
struct Shared {
    /// Not a stream: messages are sent and received whole, by [`socket`]. Tokio's type only waits
    /// for readiness.
    socket: UnixStream,
    next_call: AtomicU64,
    waiting: Mutex<Waiting>,
    ended: CancellationToken,
}

#[derive(Debug, Default)]
struct Waiting {
    closed: bool,
    calls: HashMap<u64, oneshot::Sender<Answer>>,
}

impl Link {
    pub(crate) fn new(
        socket: PathBuf,
        command: Option<ShimCommand>,
        hearer: Option<Arc<dyn NotificationHandler>>,
        opener: FenceOpener,
    ) -> Self {
        Self {
            socket,
            command,
            hearer,
            opener,
            current: tokio::sync::Mutex::default(),
            started: Mutex::default(),
        }
    }

    /// Returns an open connection, as far as is known.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>, LinkError> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|one| one.is_open()) {
            return Ok(Arc::clone(connection));
        }
        let connection = Arc::new(self.connect().await?);
        tracing::info!(pid = connection.shim_pid, "connected to the shim");
        *current = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Opens the fence for the sessions recorded for this node.
    pub(crate) async fn open_fence(&self) -> Result<(), LinkError> {
        let connection = self.connection().await?;
        let opened = self.opener.open(&connection, CONNECT_TIMEOUT).await;
        if opened.is_err() {
            // The next connection opens it.
            *self.current.lock().await = None;
        }
        opened
    }

    /// Connects whenever there is no connection, until the future is dropped: a shim that has died
    /// is replaced at once, and not only at the next call.
    pub(crate) async fn keep(&self) {
        loop {
            match self.connection().await {
                Ok(connection) => connection.shared.ended.cancelled().await,
                // The runtime's health check reports it.
                Err(error) => tracing::debug!(%error, "cannot connect to the shim"),
            }
            sleep(KEEP_PAUSE).await;
        }
    }

    /// Returns the existing connection; makes none.
    pub(crate) async fn present(&self) -> Option<Arc<Connection>> {
        let current = self.current.lock().await;
        current.as_ref().filter(|one| one.is_open()).cloned()
    }

    /// Makes an idempotent call: repeats it once if the connection breaks.
    pub(crate) async fn ask(
        &self,
        request: &Request,
        patience: Duration,
    ) -> Result<Reply, LinkError> {
        Ok(self.ask_for_fds(request, patience).await?.0)
    }

    /// Likewise, for an answer with descriptors.
    pub(crate) async fn ask_for_fds(
        &self,
        request: &Request,
        patience: Duration,
    ) -> Result<Answer, LinkError> {
        match self.call(request, &[], patience).await {
            Err(LinkError::Lost) => self.call(request, &[], patience).await,
            answer => answer,
        }
    }

    /// Makes a call once, with descriptors attached.
    pub(crate) async fn call(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<Answer, LinkError> {
        let connection = self.connection().await?;
        connection.call(request, fds, patience).await
    }

    async fn connect(&self) -> Result<Connection, LinkError> {
        let mut deadline = Instant::now() + CONNECT_TIMEOUT;
        let (mut tried, mut ended) = (false, None);
        let connected = loop {
            let error = match socket::connect(&self.socket) {
                Ok(socket) => break socket,
                Err(error) => error,
            };
            let is_absent = matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            );
            if is_absent && !tried {
                tried = self.start_shim(&error).await?;
            } else if is_absent && let Some(status) = self.reap() {
                // Another one, a service manager's, may be about to answer.
                ended = Some(status);
                deadline = deadline.min(Instant::now() + OTHER_SHIM_PATIENCE);
            } else if !is_absent && error.kind() != ErrorKind::WouldBlock {
                return Err(self.unreachable(format!("cannot connect: {error}")));
            }
            if Instant::now() >= deadline {
                let why = match ended {
                    Some(status) => format!("the shim has ended at once, {status}"),
                    None => error.to_string(),
                };
                return Err(self.unreachable(why));
            }
            sleep(CONNECT_INTERVAL).await;
        };
        let failed = |error: io::Error| self.unreachable(format!("cannot use the socket: {error}"));
        let shared = Arc::new(Shared {
            socket: UnixStream::from_std(connected.into()).map_err(failed)?,
            next_call: AtomicU64::new(NOBODYS + 1),
            waiting: Mutex::default(),
            ended: CancellationToken::new(),
        });
        let task = tokio::spawn(read(Arc::clone(&shared), self.hearer.clone()));
        let mut connection = Connection {
            shared,
            reader: task.abort_handle(),
            shim_pid: 0,
            features: None,
            freeze_ms: 0,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let hello = Request::Hello { version: VERSION };
        let answer = connection.call(&hello, &[], left).await?.0;
        let Reply::Hello {
            pid,
            features,
            freeze_ms,
            ..
        } = answer
        else {
            return Err(LinkError::Unexpected);
        };
        connection.shim_pid = pid;
        connection.features = features;
        connection.freeze_ms = freeze_ms;
        if self.hearer.is_some() {
            connection.call(&Request::Subscribe, &[], left).await?;
        }
        self.opener.open(&connection, left).await?;
        Ok(connection)
    }

    /// Runs the shim, which makes a new session for itself and outlives this process. `false` while
    /// one lives that was started before.
    async fn start_shim(&self, error: &io::Error) -> Result<bool, LinkError> {
        let _ = self.reap();
        if self.lock_started().is_some() {
            // An attempt that was given up has started one, which has not answered yet.
            return Ok(false);
        }
        let Some(command) = self.command.clone() else {
            return Err(self.unreachable(format!("{error}; start it with `conman shim`")));
        };
        tracing::info!(socket = %self.socket.display(), "no shim answers; starting one");
        let program = command.program.clone();
        let child = tokio::task::spawn_blocking(move || spawn(&command))
            .await
            .map_err(io::Error::other)
            .and_then(|spawned| spawned)
            .map_err(|error| {
                self.unreachable(format!("{} cannot be run: {error}", program.display()))
            })?;
        *self.lock_started() = Some(child);
        Ok(true)
    }

    /// How the shim that was started here has ended, if it has.
    fn reap(&self) -> Option<String> {
        let mut started = self.lock_started();
        let status = started.as_mut()?.try_wait().ok()??;
        *started = None;
        Some(status.to_string())
    }

    fn lock_started(&self) -> MutexGuard<'_, Option<Child>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unreachable(&self, why: String) -> LinkError {
        let advice = match &self.command {
            Some(command) => format!("; see {}", command.stderr.display()),
            None => String::new(),
        };
        LinkError::Unreachable {
            reason: format!("no shim on {}: {why}{advice}", self.socket.display()),
        }
    }
}

fn spawn(command: &ShimCommand) -> io::Result<Child> {
    let stderr: File = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(STDERR_MODE)
        .open(&command.stderr)?;
    Command::new(&command.program)
        .args(&command.arguments)
        .current_dir(Path::new("/"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
}

impl Connection {
    fn is_open(&self) -> bool {
        !self.shared.lock().closed
    }

    pub(crate) async fn call(
        &self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<Answer, LinkError> {
        let shared = &*self.shared;
        let id = shared.next_call.fetch_add(1, Ordering::Relaxed);
        let call = Call {
            id,
            request: request.clone(),
        };
        let bytes = encode(&call).map_err(|error| LinkError::Unreachable {
            reason: error.to_string(),
        })?;
        let (sender, answer) = oneshot::channel();
        // However this call ends, its answer has no receiver then.
        let _entry = shared.enter(id, sender)?;
        let exchange = async {
            let sent = shared
                .socket
                .async_io(Interest::WRITABLE, || {
                    socket::send(&shared.socket, &bytes, fds)
                })
                .await;
            if sent.is_err() {
                shared.close();
                return Err(LinkError::Lost);
            }
            if patience.is_zero() {
                // Whether the answer had arrived depends on scheduling.
                return Err(LinkError::TimedOut { after: patience });
            }
            answer.await.map_err(|_| LinkError::Lost)
        };
        let answered = timeout(patience, exchange).await;
        match answered.unwrap_or(Err(LinkError::TimedOut { after: patience }))? {
            (Reply::Failed { error }, _) => Err(LinkError::Refused(error)),
            answer => Ok(answer),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// A call's place among the waiting ones.
struct Entry<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.shared.lock().calls.remove(&self.id);
    }
}

impl Shared {
    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, id: u64, sender: oneshot::Sender<Answer>) -> Result<Entry<'_>, LinkError> {
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(LinkError::Lost);
        }
        if waiting.calls.len() >= MAX_CALLS {
            return Err(LinkError::Unreachable {
                reason: format!("{MAX_CALLS} calls wait for the shim already"),
            });
        }
        waiting.calls.insert(id, sender);
        Ok(Entry { shared: self, id })
    }

    fn close(&self) {
        let mut waiting = self.lock();
        waiting.closed = true;
        // Dropping the senders fails the callers.
        waiting.calls.clear();
        self.ended.cancel();
    }

    fn take(&self, incoming: socket::Incoming, hearer: Option<&dyn NotificationHandler>) {
        match incoming.message {
            Ok(Message::Reply { id, reply }) => {
                if let Some(caller) = self.lock().calls.remove(&id) {
                    let _ = caller.send((reply, incoming.fds));
                }
            }
            Ok(Message::Ended { container }) => {
                if hearer.is_some_and(|hearer| !hearer.hear(&container)) {
                    self.acknowledge(container.name);
                }
            }
            Ok(Message::Fence { state }) => {
                tracing::debug!(?state, "the shim's fence");
                if let Some(hearer) = hearer {
                    hearer.hear_fence(state);
                }
            }
            Err(error) => tracing::warn!(%error, "invalid message from the shim"),
        }
    }

    /// Lets the shim forget an end. If this cannot be sent at once, the next connection reports the
    /// end again.
    fn acknowledge(&self, name: String) {
        let request = Request::Acknowledge { names: vec![name] };
        let call = Call {
            id: NOBODYS,
            request,
        };
        if let Ok(bytes) = encode(&call) {
            let _ = socket::send(&self.socket, &bytes, &[]);
        }
    }
}

/// Reads until the connection ends.
async fn read(shared: Arc<Shared>, hearer: Option<Arc<dyn NotificationHandler>>) {
    let mut buffer = Vec::new();
    loop {
        let receive = || socket::receive(&shared.socket, &mut buffer);
        let incoming = shared.socket.async_io(Interest::READABLE, receive).await;
        match incoming {
            Ok(Some(incoming)) => shared.take(incoming, hearer.as_deref()),
            Ok(None) => {
                tracing::warn!("the shim has closed the connection");
                break;
            }
            Err(error) => {
                tracing::warn!(%error, "the connection to the shim broke");
                break;
            }
        }
    }
    if let Some(hearer) = hearer {
        hearer.hear_end();
    }
    shared.close();
}
