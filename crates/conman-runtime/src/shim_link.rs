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

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::Generation;
use conman_shim_protocol::{CallError, ContainerView, FenceState, Reply, Request, VERSION, socket};
use tokio::time::{Instant, sleep};

use crate::ContainerKey;
use crate::fence_opening::FenceOpener;

mod connection;

pub(crate) use connection::Connection;

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

/// For root only: the shim's messages name containers and paths.
const STDERR_MODE: u32 = 0o600;

/// Remedy for a shim without room.
pub(crate) const REMEDY_FOR_FULL: &str = "stop some sessions, or try again in a moment";

/// Receives the shim's notifications.
pub(crate) trait NotificationHandler: std::fmt::Debug + Send + Sync {
    /// Returns `false` if the shim may forget the end at once.
    fn on_container_end(&self, ended: &ContainerView) -> bool;

    /// The fence has changed its state.
    fn on_fence_state(&self, _state: FenceState) {}

    /// The connection ended; called before any call on it fails.
    fn on_connection_end(&self) {}
}

/// The name of a session's container.
pub(crate) fn name(key: &ContainerKey) -> String {
    format!("{}.{}", key.session, key.generation)
}

/// The inverse of [`name`]; no id contains a dot.
pub(crate) fn key_of(text: &str) -> Option<ContainerKey> {
    let (session, generation) = text.split_once('.')?;
    let key = ContainerKey::new(
        session.parse().ok()?,
        Generation::new(generation.parse().ok()?)?,
    );
    // Numbers have more than one spelling, such as 07 and +7.
    (name(&key) == text).then_some(key)
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
    /// Set while a shim that was started here has not answered yet.
    is_starting: AtomicBool,
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
            is_starting: AtomicBool::new(false),
        }
    }

    /// Returns an open connection, as far as is known.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>, LinkError> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|one| one.is_open()) {
            return Ok(Arc::clone(connection));
        }
        let connected = self.connect().await;
        self.is_starting.store(false, Ordering::Relaxed);
        let connection = Arc::new(connected?);
        tracing::info!(pid = connection.shim_pid, "connected to the shim");
        *current = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Whether a shim was started that has not answered yet; it may take [`CONNECT_TIMEOUT`].
    pub(crate) fn is_starting(&self) -> bool {
        self.is_starting.load(Ordering::Relaxed)
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
                Ok(connection) => connection.ended().await,
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
        let mut connection = Connection::start(connected, self.hearer.clone()).map_err(failed)?;
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
        self.is_starting.store(true, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_what_it_was_made_of_and_nothing_else_is_one() {
        let key = ContainerKey::new(
            "alice-b".parse().expect("a session id"),
            Generation::new(7).expect("not zero"),
        );
        assert_eq!(name(&key), "alice-b.7");
        assert_eq!(key_of("alice-b.7"), Some(key));
        for other in [
            "alice-b",
            "alice-b.07",
            "alice-b.0",
            "alice-b.7.1",
            ".7",
            "a_b.7",
        ] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }
}
