//! Creates sockets inside other processes' network namespaces.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{
    LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces,
};
use tokio::sync::{mpsc, oneshot};

use crate::PidFd;

/// Threads that create sockets: more than one, so that one slow request (the namespace lock of a dying
/// namespace) does not delay those of all other sessions.
const WORKERS: usize = 2;

/// Requests that wait for a worker. One takes some ten microseconds, so this is about ten milliseconds of
/// work; more callers wait for a place.
const QUEUE: usize = 1_024;

/// Pause before another try when no thread could be created.
const RESPAWN_PAUSE: Duration = Duration::from_millis(100);

/// Creates sockets inside other processes' network namespaces.
///
/// A socket belongs permanently to the namespace of the thread that creates it, so a few dedicated threads
/// enter a namespace, create a socket, and return to their home namespace; they do nothing else there. A
/// supervising thread, which never leaves home, creates the workers and replaces any that cannot return:
/// such a worker exits without serving another request. Since a new thread begins in the namespace of its
/// creator, only the supervisor creates any.
///
/// Dropping it ends the threads.
#[derive(Debug)]
pub struct NetnsSockets {
    requests: mpsc::Sender<Request>,
}

#[derive(Debug)]
struct Request {
    process: Arc<PidFd>,
    family: AddressFamily,
    kind: SocketType,
    answer: oneshot::Sender<io::Result<OwnedFd>>,
}

/// Why a worker ended.
#[derive(Debug)]
enum End {
    /// No caller is left.
    Finished,
    /// It is in a foreign namespace, or panicked.
    Lost,
}

impl NetnsSockets {
    /// Starts the threads. The calling thread's network namespace is home.
    pub fn start() -> io::Result<Self> {
        let home = Arc::new(Home::here()?);
        let (requests, queue) = mpsc::channel(QUEUE);
        let queue = Arc::new(Mutex::new(queue));
        thread::Builder::new()
            .name("netns-supervisor".to_owned())
            .spawn(move || supervise(&home, &queue))?;
        Ok(Self { requests })
    }

    /// Creates a TCP socket in the network namespace of a process: not connected, non-blocking,
    /// close-on-exec.
    ///
    /// Cancelling is harmless: a socket that is still created is closed.
    ///
    /// Errors: ESRCH when the process is dead, `PermissionDenied` when it is in conman's own
    /// network namespace, where a port is not the session's.
    pub async fn tcp_socket(&self, process: Arc<PidFd>, ipv6: bool) -> io::Result<TcpStream> {
        let family = if ipv6 {
            AddressFamily::INET6
        } else {
            AddressFamily::INET
        };
        let socket = self.socket(process, family, SocketType::STREAM).await?;
        Ok(socket.into())
    }

    /// Like [`Self::tcp_socket`], a blocking netlink socket for routing messages.
    pub async fn netlink_socket(&self, process: Arc<PidFd>) -> io::Result<OwnedFd> {
        let family = AddressFamily::NETLINK;
        let socket = self.socket(process, family, SocketType::RAW).await?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(socket)
    }

    async fn socket(
        &self,
        process: Arc<PidFd>,
        family: AddressFamily,
        kind: SocketType,
    ) -> io::Result<OwnedFd> {
        let (answer, answered) = oneshot::channel();
        let request = Request {
            process,
            family,
            kind,
            answer,
        };
        let stopped = || io::Error::other("the threads that make sockets in namespaces have ended");
        self.requests.send(request).await.map_err(|_| stopped())?;
        answered.await.map_err(|_| stopped())?
    }
}

/// The network namespace to return to.
#[derive(Debug)]
struct Home {
    namespace: OwnedFd,
    inode: u64,
}

impl Home {
    fn here() -> io::Result<Self> {
        let file = File::open("/proc/thread-self/ns/net")?;
        let inode = file.metadata()?.ino();
        Ok(Self {
            namespace: file.into(),
            inode,
        })
    }

    fn is_here(&self) -> io::Result<bool> {
        Ok(std::fs::metadata("/proc/thread-self/ns/net")?.ino() == self.inode)
    }

    fn enter(&self) -> io::Result<()> {
        Ok(move_into_link_name_space(
            self.namespace.as_fd(),
            Some(LinkNameSpaceType::Network),
        )?)
    }
}

type Queue = Arc<Mutex<mpsc::Receiver<Request>>>;

fn supervise(home: &Arc<Home>, queue: &Queue) {
    // One message for each worker at most, and the supervisor always reads.
    let (ended, ends) = std::sync::mpsc::sync_channel(WORKERS);
    let mut running = 0;
    let mut finished = false;
    while !(finished && running == 0) {
        while !finished && running < WORKERS {
            match spawn_worker(Arc::clone(home), Arc::clone(queue), ended.clone()) {
                Ok(()) => running += 1,
                Err(error) => {
                    tracing::error!(%error, "cannot start a thread for sockets in namespaces");
                    break;
                }
            }
        }
        match ends.recv_timeout(if running < WORKERS {
            RESPAWN_PAUSE
        } else {
            Duration::MAX
        }) {
            Ok(End::Finished) => {
                running -= 1;
                finished = true;
            }
            Ok(End::Lost) => running -= 1,
            Err(_) => finished |= running == 0 && is_closed(queue),
        }
    }
}

fn is_closed(queue: &Queue) -> bool {
    queue
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .is_closed()
}

fn spawn_worker(
    home: Arc<Home>,
    queue: Queue,
    ended: std::sync::mpsc::SyncSender<End>,
) -> io::Result<()> {
    thread::Builder::new()
        .name("netns-socket".to_owned())
        .spawn(move || {
            let mut report = Report {
                ended,
                end: End::Lost,
            };
            report.end = work(&home, &queue);
        })?;
    Ok(())
}

/// Reports a worker's end to the supervisor, including a panic.
struct Report {
    ended: std::sync::mpsc::SyncSender<End>,
    end: End,
}

impl Drop for Report {
    fn drop(&mut self) {
        let end = std::mem::replace(&mut self.end, End::Lost);
        // The supervisor ends only with the process.
        let _ = self.ended.send(end);
    }
}

fn work(home: &Home, queue: &Queue) -> End {
    loop {
        // The lock is held while waiting: the other idle worker waits for the lock instead of the
        // queue, with the same effect.
        let request = queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .blocking_recv();
        let Some(request) = request else {
            return End::Finished;
        };
        if request.answer.is_closed() {
            continue;
        }
        let made =
            enter(&request.process).and_then(|()| make_socket(home, request.family, request.kind));
        let returned = home.enter();
        // If the caller was cancelled, the socket is dropped with the answer.
        let _ = request.answer.send(made);
        if let Err(error) = returned {
            tracing::error!(%error, "cannot leave a session's network namespace; the thread ends");
            return End::Lost;
        }
    }
}

/// Opens a process's network namespace.
///
/// Errors: ESRCH when the process is dead.
pub fn network_namespace(process: &PidFd) -> io::Result<OwnedFd> {
    let namespace = File::open(format!("/proc/{}/ns/net", process.pid()))?;
    // Alive after the open, so the PID was not reused.
    if process.is_dead()? {
        return Err(Errno::SRCH.into());
    }
    Ok(namespace.into())
}

fn enter(process: &PidFd) -> io::Result<()> {
    match move_into_thread_name_spaces(process.as_fd(), ThreadNameSpaceType::NETWORK) {
        Err(Errno::INVAL) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel cannot enter namespaces by pidfd; conman needs Linux 5.10 or later",
        )),
        entered => Ok(entered?),
    }
}

fn make_socket(home: &Home, family: AddressFamily, kind: SocketType) -> io::Result<OwnedFd> {
    if home.is_here()? {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the process shares conman's own network namespace",
        ));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, kind, flags, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_with(home: Home) -> NetnsSockets {
        let (requests, queue) = mpsc::channel(QUEUE);
        let queue = Arc::new(Mutex::new(queue));
        thread::spawn(move || supervise(&Arc::new(home), &queue));
        NetnsSockets { requests }
    }

    fn own_process() -> Arc<PidFd> {
        let pid = i32::try_from(std::process::id()).expect("a pid");
        Arc::new(PidFd::open(pid).expect("it lives"))
    }

    #[tokio::test]
    async fn threads_that_cannot_get_home_are_replaced() {
        // There is no way home, and home is nowhere, so every request is served.
        let nowhere = File::open("/dev/null").expect("readable");
        let sockets = start_with(Home {
            namespace: nowhere.into(),
            inode: 0,
        });
        for _ in 0..5 * WORKERS {
            let socket = sockets.tcp_socket(own_process(), false);
            let answer = tokio::time::timeout(Duration::from_secs(20), socket).await;
            answer.expect("a thread is left").expect("a socket");
        }
    }

    #[tokio::test]
    async fn the_threads_end_when_nobody_can_ask_any_more() {
        let home = Home::here().expect("a namespace");
        let (requests, queue) = mpsc::channel(QUEUE);
        let queue = Arc::new(Mutex::new(queue));
        let threads = thread::spawn(move || supervise(&Arc::new(home), &queue));
        drop(requests);
        threads.join().expect("no panic");
    }
}
