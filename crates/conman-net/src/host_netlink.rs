//! The connection over which the host's links, addresses and routes are listed and changed.
//!
//! The kernel executes a change while it is sent, and waits for its rtnl lock meanwhile. So the connection has a
//! thread, which drives it and does nothing else that others wait for. Requests of many callers are in flight at
//! once: they are queued, and the kernel takes them in the order in which they were made.
//!
//! It opens with the first request, in the network namespace of the caller's thread, and again after an error that
//! has closed it. The thread ends with the last holder of a [`HostNetlink`].

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::proto::{ConnectionHandle, new_connection_with_codec};
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::sys::{SocketAddr, TokioSocket};
use tokio::runtime::{self, Runtime};
use tokio::sync::Semaphore;

use crate::bandwidth::explained;
use crate::link_identity::link_index;
use crate::link_messages::{FoundLink, Link, delete_link, link_named, link_or_none};
use crate::namespace_thread::{enter_other, on_thread};
use crate::netlink::{Change, DUMP_ATTEMPTS, RouteSocket, interrupted, open_netlink};
use crate::netlink_codec::StrictCodec;

/// Requests in flight. One takes a fraction of a millisecond; more callers wait.
const QUEUE: usize = 1_024;

/// Far longer than others hold the rtnl lock. The kernel answers every request, so that a missing answer is lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Exists where the kernel has IPv6.
const IPV6: &str = "/proc/sys/net/ipv6";

type Message = NetlinkMessage<RouteNetlinkMessage>;
type Handle = ConnectionHandle<RouteNetlinkMessage>;

/// A handle to the host's connection.
#[derive(Debug, Clone, Default)]
pub struct HostNetlink {
    open: Arc<Mutex<Option<Connection>>>,
}

/// A session's network namespace.
#[derive(Debug)]
pub struct Namespace {
    /// `/proc/PID/ns/net`, opened.
    pub file: OwnedFd,
    /// A netlink socket for routing messages that was opened inside.
    pub socket: OwnedFd,
}

impl Namespace {
    /// Opens the socket inside. Refuses conman's own namespace.
    pub async fn open(file: OwnedFd) -> io::Result<Self> {
        on_thread(move || {
            enter_other(file.as_fd())?;
            let socket = open_netlink(None, 0)?;
            Ok(Self { file, socket })
        })
        .await?
    }
}

#[derive(Debug, Clone)]
struct Connection {
    handle: Handle,
    /// The thread's.
    runtime: runtime::Handle,
    thread: Arc<JoinHandle<()>>,
    places: Arc<Semaphore>,
}

impl HostNetlink {
    /// Opens the connection in the network namespace of the calling thread, if it is not open.
    pub(crate) fn open(&self) -> io::Result<()> {
        self.connection().map(drop)
    }

    /// Creates a link and configures both of its ends. If it fails, no link is left, whether the caller still waits
    /// or not.
    pub(crate) async fn connect(&self, link: Link, namespace: Namespace) -> io::Result<()> {
        let connection = self.connection()?;
        let connecting = connection.clone().connect(link, namespace);
        let connected = async {
            // On the connection's thread, because the other end's changes wait for the same lock.
            let connected = connection.runtime.spawn(connecting).await;
            connected.map_err(|_| closed())?
        };
        connection.in_flight(connected).await
    }

    /// Makes a change that names a descriptor by its number, which is open until the kernel has read it, whether
    /// the caller still waits or not.
    pub(crate) async fn change_with(&self, change: Change, named: OwnedFd) -> io::Result<()> {
        let connection = self.connection()?;
        let own = connection.clone();
        let changing = async move {
            let answers = own.change(vec![change]).await?;
            drop(named);
            answers.into_iter().collect::<io::Result<()>>()
        };
        let changed = async {
            let changed = connection.runtime.spawn(changing).await;
            changed.map_err(|_| closed())?
        };
        connection.in_flight(changed).await
    }

    /// Makes changes, in this order, and returns an answer for each. The kernel continues after one that fails.
    /// `Err` means that it is unknown which were made.
    pub(crate) async fn change(&self, changes: Vec<Change>) -> io::Result<Vec<io::Result<()>>> {
        let connection = self.connection()?;
        connection.in_flight(connection.change(changes)).await
    }

    /// Makes changes of which every one must succeed. The error is the first one's.
    pub(crate) async fn change_all(&self, changes: Vec<Change>) -> io::Result<()> {
        self.change(changes).await?.into_iter().collect()
    }

    /// Lists links or routes. If a change interrupts it, it is repeated.
    pub(crate) async fn dump(
        &self,
        request: RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let connection = self.connection()?;
        connection.in_flight(connection.dump(&request)).await
    }

    /// Returns the answer to a request for one thing.
    pub(crate) async fn get(
        &self,
        request: RouteNetlinkMessage,
    ) -> io::Result<RouteNetlinkMessage> {
        let connection = self.connection()?;
        connection.in_flight(connection.get(request)).await
    }

    /// Returns the link with this name.
    pub(crate) async fn find(&self, name: &str) -> io::Result<Option<FoundLink>> {
        link_or_none(self.get(link_named(name)).await)
    }

    /// Blocks until a request is answered.
    pub(crate) fn wait<T: Send>(
        &self,
        request: impl Future<Output = io::Result<T>> + Send,
    ) -> io::Result<T> {
        let runtime = self.connection()?.runtime;
        // The calling thread may belong to a runtime, which cannot wait for another one.
        thread::scope(|scope| {
            let waiting = scope.spawn(|| runtime.block_on(request));
            waiting.join().unwrap_or_else(|_| Err(closed()))
        })
    }

    fn connection(&self) -> io::Result<Connection> {
        // A panic while the lock is held cannot leave half a change: it is one assignment.
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match &*open {
            Some(connection) if !connection.thread.is_finished() => Ok(connection.clone()),
            _ => Ok(open.insert(Connection::open()?).clone()),
        }
    }
}

impl Connection {
    fn open() -> io::Result<Self> {
        metrics::describe_histogram!(
            "conman_net_request_seconds",
            "Time from a request for a change of links to the kernel's answer"
        );
        metrics::describe_gauge!("conman_net_queue", "Requests to netlink in flight");
        let (opened, opening) = std::sync::mpsc::sync_channel(1);
        let open = move || match Self::parts() {
            Ok((connection, handle, runtime)) => {
                // The receiver waits.
                let _ = opened.send(Ok((handle, runtime.handle().clone())));
                runtime.block_on(connection);
            }
            Err(error) => drop(opened.send(Err(error))),
        };
        let thread = thread::Builder::new().name("conman-netlink".to_owned());
        let thread = Arc::new(thread.spawn(open)?);
        let (handle, runtime) = opening.recv().map_err(|_| closed())??;
        Ok(Self {
            handle,
            runtime,
            thread,
            places: Arc::new(Semaphore::new(QUEUE)),
        })
    }

    /// The connection, as the thread drives it.
    fn parts() -> io::Result<(impl Future<Output = ()>, Handle, Runtime)> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let opened = new_connection_with_codec::<_, TokioSocket, StrictCodec>(NETLINK_ROUTE)?;
        let (mut connection, handle, _unsolicited) = opened;
        drop(entered);
        // An answer differs from the end of the connection, and a list's end says whether it was interrupted.
        connection.set_forward_ack(true);
        connection.set_forward_done(true);
        Ok((connection, handle, runtime))
    }

    async fn in_flight<T>(&self, request: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let since = Instant::now();
        let answered = tokio::time::timeout(ANSWER_TIMEOUT, async {
            let _place = self.places.acquire().await.map_err(|_| closed())?;
            let in_flight = QUEUE - self.places.available_permits();
            metrics::gauge!("conman_net_queue").set(u32::try_from(in_flight).unwrap_or(u32::MAX));
            request.await
        });
        let answered = answered.await;
        metrics::histogram!("conman_net_request_seconds").record(since.elapsed());
        answered.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    fn send(
        &self,
        message: RouteNetlinkMessage,
        flags: u16,
    ) -> io::Result<impl Stream<Item = Message> + use<>> {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | flags;
        let kernel = SocketAddr::new(0, 0);
        let sent = self.handle.request(message, kernel);
        sent.map_err(|_| closed())
    }

    async fn change(&self, changes: Vec<Change>) -> io::Result<Vec<io::Result<()>>> {
        // All are queued before the first answer is awaited.
        let sent = changes.into_iter().map(|change| {
            let (message, flags) = change.into_parts();
            self.send(message, flags | NLM_F_ACK)
        });
        let mut answers = Vec::new();
        for answer in sent.collect::<io::Result<Vec<_>>>()? {
            answers.push(acknowledged(answer).await?);
        }
        Ok(answers)
    }

    async fn dump(&self, request: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_ATTEMPTS {
            if let Some(list) = self.dump_once(request.clone()).await? {
                return Ok(list);
            }
        }
        Err(interrupted())
    }

    /// `None` when it is not consistent.
    async fn dump_once(
        &self,
        request: RouteNetlinkMessage,
    ) -> io::Result<Option<Vec<RouteNetlinkMessage>>> {
        let mut answers = self.send(request, NLM_F_DUMP)?;
        let (mut list, mut consistent) = (Vec::new(), true);
        while let Some(message) = answers.next().await {
            consistent &= message.header.flags & NLM_F_DUMP_INTR == 0;
            match message.payload {
                NetlinkPayload::InnerMessage(message) => list.push(message),
                NetlinkPayload::Done(_) => return Ok(consistent.then_some(list)),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                _ => {}
            }
        }
        Err(closed())
    }

    async fn get(&self, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        match self
            .send(request, 0)?
            .next()
            .await
            .map(|message| message.payload)
        {
            Some(NetlinkPayload::InnerMessage(message)) => Ok(message),
            Some(NetlinkPayload::Error(error)) => Err(error.to_io()),
            _ => Err(closed()),
        }
    }

    async fn connect(self, link: Link, namespace: Namespace) -> io::Result<()> {
        let changes = link.host_changes(namespace.file.as_fd());
        let mut answers = self.change(changes).await?.into_iter();
        // If the pair was not created, its name may be another link's.
        answers.next().unwrap_or(Ok(()))?;
        let rest: io::Result<()> = answers.collect();
        let configured = rest.and_then(|()| {
            let mut inside = RouteSocket::from_fd(namespace.socket)?;
            inside.change_all(&link.session_changes(has_ipv6()))
        });
        let configured = match link.bandwidth.is_unlimited() {
            true => configured,
            false => configured.map_err(explained),
        };
        if configured.is_err() {
            let deleted = vec![delete_link(link_index(link.addresses.v4))];
            let deleted = self.change(deleted).await;
            let deleted =
                deleted.and_then(|answers| answers.into_iter().collect::<io::Result<()>>());
            if let Err(error) = deleted {
                tracing::warn!(link = link.name, %error, "cannot remove a link that was not configured");
            }
        }
        configured
    }
}

/// The answer to a change. What a request returns comes before it.
async fn acknowledged(
    mut answers: impl Stream<Item = Message> + Unpin,
) -> io::Result<io::Result<()>> {
    while let Some(message) = answers.next().await {
        if let NetlinkPayload::Error(error) = message.payload {
            return Ok(error.code.map_or(Ok(()), |_| Err(error.to_io())));
        }
    }
    Err(closed())
}

pub(crate) fn has_ipv6() -> bool {
    Path::new(IPV6).exists()
}

fn closed() -> io::Error {
    io::Error::other("the netlink connection was closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_of_a_runtime_may_wait_for_an_answer() {
        let netlink = HostNetlink::default();
        let found = netlink.wait(netlink.find("lo"));
        assert_eq!(found.expect("an answer").expect("it exists").name, "lo");
    }
}
