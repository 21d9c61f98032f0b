use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use conman_linux::{Features, Mount, PidFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::attachment::Attachment;
use crate::protocol::{
    Call, CallError, ContainerView, Message, Phases, Reply, Request, VERSION, decode, encode,
};
use crate::seqpacket;
use crate::spec::{ExecSpec, LaunchSpec, TerminalSize};

/// Unread notifications that are kept; the oldest is dropped first.
const MAX_NOTIFICATIONS: usize = 65_536;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the connection to the shim failed during the request to {action}")]
    Io {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    /// It may still carry the request out.
    #[error("the shim did not {action} within {after_ms} ms")]
    TimedOut { action: &'static str, after_ms: u64 },
    #[error("the shim's answer does not match the request to {action}")]
    Unexpected { action: &'static str },
    #[error(transparent)]
    Refused(#[from] CallError),
}

/// A container that has begun.
#[derive(Debug)]
pub struct Launched {
    pub pid: i32,
    /// A pidfd of its init; `None` when it ended before the pidfd was opened.
    pub process: Option<PidFd>,
    pub phases: Phases,
}

/// A connection to the shim that blocks, one call at a time; for tests, benchmarks and the command
/// line.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    next_call: u64,
    timeout: Duration,
    notifications: VecDeque<Message>,
    buffer: Vec<u8>,
    features: Option<Features>,
    shim_pid: i32,
}

impl Client {
    /// Connects and says hello. `timeout` bounds every call.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Io {
            action: "connect",
            source,
        };
        let address = SocketAddrUnix::new(socket).map_err(|errno| failed(errno.into()))?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(|errno| failed(errno.into()))?;
        rustix::net::connect(&socket, &address).map_err(|errno| failed(errno.into()))?;
        let mut client = Self {
            socket,
            next_call: 0,
            timeout,
            notifications: VecDeque::new(),
            buffer: seqpacket::buffer(),
            features: None,
            shim_pid: 0,
        };
        match client.call("say hello", Request::Hello { version: VERSION }, &[])? {
            (Reply::Hello { features, pid, .. }, _) => {
                client.features = features;
                client.shim_pid = pid;
                Ok(client)
            }
            _ => Err(ClientError::Unexpected {
                action: "say hello",
            }),
        }
    }

    /// The launcher's features, if it was ready at the time of the hello.
    #[must_use]
    pub fn features(&self) -> Option<&Features> {
        self.features.as_ref()
    }

    /// The shim's PID.
    #[must_use]
    pub fn shim_pid(&self) -> i32 {
        self.shim_pid
    }

    /// Starts a container.
    pub fn launch(&mut self, spec: LaunchSpec) -> Result<Launched, ClientError> {
        self.launch_with(spec, &[])
    }

    /// Starts a container that is shown these detached mounts, one for each of the spec's binds.
    pub fn launch_with(
        &mut self,
        spec: LaunchSpec,
        binds: &[Mount],
    ) -> Result<Launched, ClientError> {
        let fds: Vec<BorrowedFd<'_>> = binds.iter().map(AsFd::as_fd).collect();
        match self.call("launch", Request::Launch(Box::new(spec)), &fds)? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected { action: "launch" }),
        }
    }

    /// Runs a command in a container on these streams: standard input, output and error.
    pub fn exec(
        &mut self,
        spec: ExecSpec,
        streams: [BorrowedFd<'_>; 3],
    ) -> Result<Launched, ClientError> {
        match self.call("execute", Request::Exec(Box::new(spec)), &streams)? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected { action: "execute" }),
        }
    }

    /// Reports that a container that another program starts ([`Request::Guard`]) has started, with its
    /// first process.
    pub fn appeared(&mut self, name: &str, process: &PidFd) -> Result<(), ClientError> {
        let request = Request::Appeared {
            name: name.to_owned(),
            pid: process.pid(),
        };
        self.call("guard", request, &[process.as_fd()]).map(|_| ())
    }

    /// Runs a command in a container that the shim keeps.
    pub fn exec_kept(&mut self, spec: ExecSpec) -> Result<Launched, ClientError> {
        match self.call("execute", Request::Exec(Box::new(spec)), &[])? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected { action: "execute" }),
        }
    }

    /// Watches and uses the streams of a container or command, from this offset on, or from what is kept.
    pub fn attach(
        &mut self,
        name: &str,
        size: Option<TerminalSize>,
        after: Option<u64>,
    ) -> Result<Attachment, ClientError> {
        let request = Request::Attach {
            name: name.to_owned(),
            size,
            after,
            quiet: false,
        };
        match self.call("attach", request, &[])? {
            (Reply::Attached, fds) => {
                let socket = fds.into_iter().next();
                let socket = socket.ok_or(ClientError::Unexpected { action: "attach" })?;
                Ok(Attachment::new(socket))
            }
            _ => Err(ClientError::Unexpected { action: "attach" }),
        }
    }

    /// Lists all containers.
    pub fn list(&mut self) -> Result<Vec<ContainerView>, ClientError> {
        let mut all: Vec<ContainerView> = Vec::new();
        loop {
            let after = all.last().map(|view| view.name.clone());
            match self.call("list", Request::List { after }, &[])? {
                (Reply::Containers { containers, more }, _) => {
                    all.extend(containers);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(ClientError::Unexpected { action: "list" }),
            }
        }
    }

    /// Sends any other request.
    pub fn ask(&mut self, request: Request) -> Result<Reply, ClientError> {
        Ok(self.call("carry out a request", request, &[])?.0)
    }

    /// Returns the next notification, after [`Request::Subscribe`].
    pub fn next_notification(&mut self) -> Result<Message, ClientError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(message) = self.notifications.pop_front() {
                return Ok(message);
            }
            let (message, _) = self.receive("send a notification", deadline)?;
            self.notifications.push_back(message);
        }
    }

    fn call(
        &mut self,
        action: &'static str,
        request: Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        self.next_call += 1;
        let id = self.next_call;
        let failed = |source| ClientError::Io { action, source };
        let bytes =
            encode(&Call { id, request }).map_err(|error| failed(io::Error::other(error)))?;
        seqpacket::send(&self.socket, &bytes, fds).map_err(failed)?;
        let deadline = Instant::now() + self.timeout;
        loop {
            match self.receive(action, deadline)? {
                (Message::Reply { id: of, reply }, fds) if of == id => {
                    return match reply {
                        Reply::Failed { error } => Err(error.into()),
                        reply => Ok((reply, fds)),
                    };
                }
                // Of a call that timed out.
                (Message::Reply { .. }, _) => {}
                (notification, _) => {
                    if self.notifications.len() >= MAX_NOTIFICATIONS {
                        self.notifications.pop_front();
                    }
                    self.notifications.push_back(notification);
                }
            }
        }
    }

    fn receive(
        &mut self,
        action: &'static str,
        deadline: Instant,
    ) -> Result<(Message, Vec<OwnedFd>), ClientError> {
        let failed = |source| ClientError::Io { action, source };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let after_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(ClientError::TimedOut { action, after_ms });
            }
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
            let received = seqpacket::receive(&self.socket, &mut self.buffer).map_err(failed)?;
            let received = received.ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
            let message =
                decode(received.bytes).map_err(|error| failed(io::Error::other(error)))?;
            return Ok((message, received.fds));
        }
    }
}
