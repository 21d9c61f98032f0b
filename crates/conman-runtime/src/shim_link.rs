//! The connection to the shim: calls by number, many at a time, and what the shim tells unasked.
//!
//! ```text
//! callers ──send──▶ socket ──▶ shim
//!    ▲ oneshot a call            │
//!    └──── one reader task ◀─────┘──▶ Hearer
//! ```
//! A connection that breaks fails the calls that wait on it; the next call makes another one, and
//! starts a shim where none answers and there is a program to start; so does [`Link::keep`], without
//! any call. Ends that were told meanwhile are told again to a new connection, since the shim keeps
//! them.

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

/// Bound on having a connection, the start of a shim included: it answers after some milliseconds,
/// on a busy machine later.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Bound on an answer that a release waits for.
const FENCED_PATIENCE: Duration = Duration::from_secs(2);

/// How long a shim is waited for that somebody else has started.
const OTHER_SHIM_PATIENCE: Duration = Duration::from_secs(1);

/// Between the end of a connection that is kept, or a failure to make it, and the next try: whatever
/// ends again and again is not started without pause.
const KEEP_PAUSE: Duration = Duration::from_millis(200);

/// Between two tries to connect to a shim that has just been started.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Calls that wait for an answer; beyond, something is wrong with the shim.
const MAX_CALLS: usize = 8_192;

/// Readable by root alone: what a shim complains of names containers and paths.
const STDERR_MODE: u32 = 0o600;

/// What to do where the shim has no room for more.
pub(crate) const REMEDY_FOR_FULL: &str = "stop some sessions, or try again in a moment";

/// The call whose answer is of no interest.
const NOBODYS: u64 = 0;

/// Who hears of ends.
pub(crate) trait Hearer: std::fmt::Debug + Send + Sync {
    /// `false` when the shim may forget it at once.
    fn hear(&self, ended: &ContainerView) -> bool;

    /// The fence has changed its state.
    fn hear_fence(&self, _state: FenceState) {}

    /// The connection is over; told before anybody else notices.
    fn hear_end(&self) {}
}

/// What a session's container is called.
pub(crate) fn name(key: &ContainerKey) -> String {
    format!("{}.{}", key.session, key.generation)
}

/// What becomes the shim when it is run.
#[derive(Debug, Clone)]
pub struct ShimCommand {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Where its standard error is appended.
    pub stderr: PathBuf,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    /// Nothing was sent.
    #[error("{reason}")]
    Unreachable { reason: String },
    /// It was sent, and the connection broke before it was answered.
    #[error("the connection to the shim broke")]
    Lost,
    #[error("no answer within {} ms", after.as_millis())]
    TimedOut { after: Duration },
    #[error(transparent)]
    Refused(CallError),
    #[error("the shim's answer is not one to this request; is it of another version?")]
    Unexpected,
}

type Answer = (Reply, Vec<OwnedFd>);

/// The way to the shim, whichever connection it takes.
#[derive(Debug)]
pub(crate) struct Link {
    socket: PathBuf,
    command: Option<ShimCommand>,
    hearer: Option<Arc<dyn Hearer>>,
    opener: FenceOpener,
    /// Locked while a connection is made, which is bounded.
    current: tokio::sync::Mutex<Option<Arc<Connection>>>,
    /// The shim that was started here, to be reaped should it end.
    started: Mutex<Option<Child>>,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
    reader: AbortHandle,
    pub(crate) shim_pid: i32,
    pub(crate) features: Option<Features>,
    /// How long its fence waits before it kills what is not frozen, as it was when it was connected;
    /// none of a shim that cannot be told another time.
    pub(crate) freeze_ms: Option<u64>,
}

#[derive(Debug)]
struct Shared {
    /// Not a stream: messages are sent and received whole, by [`socket`]. Tokio's type serves to
    /// wait for it.
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
        hearer: Option<Arc<dyn Hearer>>,
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

    /// A connection that is open, as far as is known.
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

    /// Opens the fence for what is known to be this node's by now.
    pub(crate) async fn open_fence(&self) -> Result<(), LinkError> {
        let connection = self.connection().await?;
        let opened = self.opener.open(&connection, CONNECT_TIMEOUT).await;
        if opened.is_err() {
            // The next connection does it.
            *self.current.lock().await = None;
        }
        opened
    }

    /// Makes another connection whenever there is none, until it is dropped: a shim that has died is
    /// succeeded at once, and not only when somebody needs it.
    pub(crate) async fn keep(&self) {
        loop {
            match self.connection().await {
                Ok(connection) => connection.shared.ended.cancelled().await,
                // Whoever looks at the runtime's health tells it.
                Err(error) => tracing::debug!(%error, "no connection to the shim is to be had"),
            }
            sleep(KEEP_PAUSE).await;
        }
    }

    /// The connection that is there already; none is made.
    pub(crate) async fn present(&self) -> Option<Arc<Connection>> {
        let current = self.current.lock().await;
        current.as_ref().filter(|one| one.is_open()).cloned()
    }

    /// Asks for something that may be asked twice: once more when the connection breaks.
    pub(crate) async fn ask(
        &self,
        request: &Request,
        patience: Duration,
    ) -> Result<Reply, LinkError> {
        match self.call(request, &[], patience).await {
            Err(LinkError::Lost) => Ok(self.call(request, &[], patience).await?.0),
            other => Ok(other?.0),
        }
    }

    /// Whether the fence killed a container by itself, as far as the shim tells.
    pub(crate) async fn was_fenced(&self, key: &ContainerKey) -> bool {
        let find = Request::Find { name: name(key) };
        let found = tokio::time::timeout(FENCED_PATIENCE, self.ask(&find, FENCED_PATIENCE));
        match found.await {
            Ok(Ok(Reply::Found { container, .. })) => container.is_some_and(|view| view.fenced),
            Ok(Ok(_)) => false,
            Ok(Err(error)) => {
                tracing::warn!(container = %key, %error, "whether the fence killed it is not known");
                false
            }
            Err(_) => {
                tracing::warn!(container = %key, "the shim does not say whether the fence killed it");
                false
            }
        }
    }

    /// Asks once, with descriptors beside the request.
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
            let nobody = matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            );
            if nobody && !tried {
                tried = self.start_shim(&error).await?;
            } else if nobody && let Some(status) = self.reap() {
                // Perhaps since another one, a service manager's, is about to answer.
                ended = Some(status);
                deadline = deadline.min(Instant::now() + OTHER_SHIM_PATIENCE);
            } else if !nobody && error.kind() != ErrorKind::WouldBlock {
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
            freeze_ms: None,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let hello = Request::Hello { version: VERSION };
        match connection.call(&hello, &[], left).await? {
            (
                Reply::Hello {
                    pid,
                    features,
                    freeze_ms,
                    ..
                },
                _,
            ) => {
                connection.shim_pid = pid;
                connection.features = features;
                connection.freeze_ms = freeze_ms;
            }
            _ => return Err(LinkError::Unexpected),
        }
        if self.hearer.is_some() {
            connection.call(&Request::Subscribe, &[], left).await?;
        }
        self.opener.open(&connection, left).await?;
        Ok(connection)
    }

    /// Runs the shim in a session of its own, which it makes itself; it outlives this process.
    /// `false` while one lives that was started before.
    async fn start_shim(&self, error: &io::Error) -> Result<bool, LinkError> {
        let _ = self.reap();
        if self.lock_started().is_some() {
            // A try that was given up has started one, which has not answered yet.
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
        // Whatever ends this call, nobody waits for its answer then.
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
                // Whether the answer would have been there by now is a matter of scheduling.
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

/// A call's place among those that wait.
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
        // Dropped senders tell the callers.
        waiting.calls.clear();
        self.ended.cancel();
    }

    fn take(&self, incoming: socket::Incoming, hearer: Option<&dyn Hearer>) {
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
            Err(error) => tracing::warn!(%error, "the shim is not understood"),
        }
    }

    /// Has an end forgotten. Where that cannot be sent at once, the next connection hears of it
    /// again.
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
async fn read(shared: Arc<Shared>, hearer: Option<Arc<dyn Hearer>>) {
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
