//! One connection to the shim: its calls under way, and the task that reads answers and
//! notifications.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_linux::Features;
use conman_shim_protocol::{Call, Message, Reply, Request, encode, socket};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{Answer, LinkError, NotificationHandler};

/// Most calls that wait for an answer; more mean that the shim has a problem.
const MAX_CALLS: usize = 8_192;

/// The number of calls whose answer is ignored.
const NOBODYS: u64 = 0;

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

impl Connection {
    /// Starts to read from a connected socket. The caller greets the shim and fills in what it
    /// answers.
    pub(super) fn start(
        socket: OwnedFd,
        hearer: Option<Arc<dyn NotificationHandler>>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            socket: UnixStream::from_std(socket.into())?,
            next_call: AtomicU64::new(NOBODYS + 1),
            waiting: Mutex::default(),
            ended: CancellationToken::new(),
        });
        let task = tokio::spawn(read(Arc::clone(&shared), hearer));
        Ok(Self {
            shared,
            reader: task.abort_handle(),
            shim_pid: 0,
            features: None,
            freeze_ms: 0,
        })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.shared.lock().closed
    }

    /// Completes when the connection is closed.
    pub(super) async fn ended(&self) {
        self.shared.ended.cancelled().await;
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
                if hearer.is_some_and(|hearer| !hearer.on_container_end(&container)) {
                    self.acknowledge(container.name);
                }
            }
            Ok(Message::Fence { state }) => {
                tracing::debug!(?state, "the shim's fence");
                if let Some(hearer) = hearer {
                    hearer.on_fence_state(state);
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
        hearer.on_connection_end();
    }
    shared.close();
}
