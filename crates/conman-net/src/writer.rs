//! The thread that changes links, addresses and routes.
//!
//! One thread: every change waits for the kernel's rtnl lock, so that more threads would only wait for
//! each other. Requests come through a bounded queue; all messages of one are sent together. Dropping
//! the last handle ends the thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use netlink_packet_route::RouteNetlinkMessage;
use tokio::sync::{mpsc, oneshot};

use crate::link_identity::link_index;
use crate::link_messages::{Link, delete_link};
use crate::netlink::{Change, RouteSocket};

/// Requests that wait for the thread. One takes a fraction of a millisecond; more callers wait.
const QUEUE: usize = 1_024;

/// Exists where the kernel has IPv6.
const IPV6: &str = "/proc/sys/net/ipv6";

/// A handle to the thread.
#[derive(Debug, Clone)]
pub struct Writer {
    requests: mpsc::Sender<(Instant, Request)>,
}

/// A session's network namespace.
#[derive(Debug)]
pub struct Namespace {
    /// `/proc/PID/ns/net`, opened.
    pub file: OwnedFd,
    /// A netlink socket for routing messages that was opened inside.
    pub socket: OwnedFd,
}

#[derive(Debug)]
enum Request {
    Connect {
        link: Link,
        namespace: Namespace,
        answer: oneshot::Sender<io::Result<()>>,
    },
    Change {
        changes: Vec<Change>,
        answer: oneshot::Sender<io::Result<Vec<io::Result<()>>>>,
    },
    Dump {
        request: RouteNetlinkMessage,
        answer: oneshot::Sender<io::Result<Vec<RouteNetlinkMessage>>>,
    },
}

impl Writer {
    /// Starts the thread. The network namespace of the calling thread is the host's.
    pub fn start() -> io::Result<Self> {
        metrics::describe_histogram!(
            "conman_net_request_seconds",
            "Time from a request for a change of links to the kernel's answer"
        );
        metrics::describe_gauge!(
            "conman_net_queue",
            "Requests that wait for the netlink thread"
        );
        let socket = RouteSocket::open()?;
        let (requests, queue) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("conman-netlink".to_owned())
            .spawn(move || serve(socket, queue))?;
        Ok(Self { requests })
    }

    /// Creates a link and configures both of its ends. If it fails, no link is left.
    pub async fn connect(&self, link: Link, namespace: Namespace) -> io::Result<()> {
        let request = |answer| Request::Connect {
            link,
            namespace,
            answer,
        };
        self.call(request).await?
    }

    /// Makes changes in the host's namespace, in this order, and returns an answer for each.
    pub async fn change(&self, changes: Vec<Change>) -> io::Result<Vec<io::Result<()>>> {
        self.call(|answer| Request::Change { changes, answer })
            .await?
    }

    /// Lists links or routes of the host's namespace.
    pub async fn dump(&self, request: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.call(|answer| Request::Dump { request, answer })
            .await?
    }

    async fn call<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> io::Result<T> {
        let (answer, answered) = oneshot::channel();
        let stopped = || io::Error::other("the netlink thread has ended");
        let request = (Instant::now(), request(answer));
        self.requests.send(request).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())
    }
}

pub(crate) fn has_ipv6() -> bool {
    Path::new(IPV6).exists()
}

fn serve(mut socket: RouteSocket, mut queue: mpsc::Receiver<(Instant, Request)>) {
    let ipv6 = has_ipv6();
    while let Some((since, request)) = queue.blocking_recv() {
        metrics::gauge!("conman_net_queue").set(u32::try_from(queue.len()).unwrap_or(u32::MAX));
        // A caller that does not wait any longer drops the answer.
        match request {
            Request::Connect {
                link,
                namespace,
                answer,
            } => {
                let connected = connect(&mut socket, &link, namespace, ipv6);
                let _ = answer.send(connected);
            }
            Request::Change { changes, answer } => {
                let _ = answer.send(socket.change(&changes));
            }
            Request::Dump { request, answer } => {
                let _ = answer.send(socket.dump(&request));
            }
        }
        metrics::histogram!("conman_net_request_seconds").record(since.elapsed());
    }
}

fn connect(
    host: &mut RouteSocket,
    link: &Link,
    namespace: Namespace,
    ipv6: bool,
) -> io::Result<()> {
    let changes = link.host_changes(namespace.file.as_fd(), ipv6);
    let mut answers = host.change(&changes)?.into_iter();
    // If the pair was not created, its name may be another link's.
    answers.next().unwrap_or(Ok(()))?;
    let rest: io::Result<()> = answers.collect();
    let configured = rest.and_then(|()| {
        let mut inside = RouteSocket::from_fd(namespace.socket)?;
        inside.change_all(&link.session_changes(ipv6))
    });
    if configured.is_err()
        && let Err(error) = host.change_all(&[delete_link(link_index(link.addresses.v4))])
    {
        tracing::warn!(link = link.name, %error, "cannot remove a link that was not configured");
    }
    configured
}
