//! A blocking connection to the shim, with notifications.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use conman_linux::{Features, Mount, PidFd};
use conman_shim::{
    Call, CallError, ClientError, ContainerView, ExecSpec, LaunchSpec, Message, Phases, Reply,
    Request, TerminalSize, VERSION, encode, socket,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::attachment::Attachment;

/// Unread notifications that are kept; the oldest is dropped first.
const MAX_NOTIFICATIONS: usize = 65_536;

/// A container that has begun.
#[derive(Debug)]
pub(crate) struct Launched {
    pub(crate) pid: i32,
    /// A pidfd of its init; `None` when it ended before the pidfd was opened.
    pub(crate) process: Option<PidFd>,
    pub(crate) phases: Phases,
}

/// A connection to the shim that blocks, one call at a time. Unlike [`conman_shim::Client`] it sends and
/// receives descriptors, and keeps notifications.
#[derive(Debug)]
pub(crate) struct Client {
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
    pub(crate) fn connect(socket: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let socket = connect(socket)?;
        let mut client = Self {
            socket,
            next_call: 0,
            timeout,
            notifications: VecDeque::new(),
            buffer: Vec::new(),
            features: None,
            shim_pid: 0,
        };
        match client.call(Request::Hello { version: VERSION }, &[])? {
            (Reply::Hello { features, pid, .. }, _) => {
                client.features = features;
                client.shim_pid = pid;
                Ok(client)
            }
            _ => Err(ClientError::Unexpected),
        }
    }

    /// The launcher's features, if it was ready at the time of the hello.
    pub(crate) fn features(&self) -> Option<&Features> {
        self.features.as_ref()
    }

    /// The shim's PID.
    pub(crate) fn shim_pid(&self) -> i32 {
        self.shim_pid
    }

    /// Starts a container.
    pub(crate) fn launch(&mut self, spec: LaunchSpec) -> Result<Launched, ClientError> {
        self.launch_with(spec, &[])
    }

    /// Starts a container that is shown these detached mounts, one for each of the spec's binds.
    pub(crate) fn launch_with(
        &mut self,
        spec: LaunchSpec,
        binds: &[Mount],
    ) -> Result<Launched, ClientError> {
        let fds: Vec<BorrowedFd<'_>> = binds.iter().map(AsFd::as_fd).collect();
        match self.call(Request::Launch(Box::new(spec)), &fds)? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Runs a command in a container on these streams: standard input, output and error.
    pub(crate) fn exec(
        &mut self,
        spec: ExecSpec,
        streams: [BorrowedFd<'_>; 3],
    ) -> Result<Launched, ClientError> {
        match self.call(Request::Exec(Box::new(spec)), &streams)? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Reports that a container that another program starts ([`Request::Guard`]) has started, with its
    /// first process.
    pub(crate) fn appeared(&mut self, name: &str, process: &PidFd) -> Result<(), ClientError> {
        let request = Request::Appeared {
            name: name.to_owned(),
            pid: process.pid(),
        };
        self.call(request, &[process.as_fd()]).map(|_| ())
    }

    /// Runs a command in a container that the shim keeps.
    pub(crate) fn exec_kept(&mut self, spec: ExecSpec) -> Result<Launched, ClientError> {
        match self.call(Request::Exec(Box::new(spec)), &[])? {
            (Reply::Launched { pid, phases }, fds) => Ok(Launched {
                pid,
                process: fds.into_iter().next().map(|fd| PidFd::received(fd, pid)),
                phases,
            }),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Watches and uses the streams of a container or command, from this offset on, or from what is kept.
    pub(crate) fn attach(
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
        match self.call(request, &[])? {
            (Reply::Attached, fds) => {
                let socket = fds.into_iter().next();
                let socket = socket.ok_or(ClientError::Unexpected)?;
                Ok(Attachment::new(socket))
            }
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Lists all containers.
    pub(crate) fn list(&mut self) -> Result<Vec<ContainerView>, ClientError> {
        let mut all: Vec<ContainerView> = Vec::new();
        loop {
            let after = all.last().map(|view| view.name.clone());
            match self.call(Request::List { after }, &[])? {
                (Reply::Containers { containers, more }, _) => {
                    all.extend(containers);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(ClientError::Unexpected),
            }
        }
    }

    /// Kills all containers and commands that live.
    pub(crate) fn kill_all(&mut self) -> Result<(), ClientError> {
        for view in self.list()?.into_iter().filter(|one| one.state.is_alive()) {
            match self.ask(Request::Kill { name: view.name }) {
                // A command ends with its container.
                Err(ClientError::Refused(
                    CallError::Ended { .. } | CallError::NoSuchContainer { .. },
                )) => {}
                outcome => drop(outcome?),
            }
        }
        Ok(())
    }

    /// Sends any other request.
    pub(crate) fn ask(&mut self, request: Request) -> Result<Reply, ClientError> {
        Ok(self.call(request, &[])?.0)
    }

    /// Returns the next notification, after [`Request::Subscribe`].
    pub(crate) fn next_notification(&mut self) -> Result<Message, ClientError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(message) = self.notifications.pop_front() {
                return Ok(message);
            }
            let (message, _) = self.receive(deadline)?;
            self.notifications.push_back(message);
        }
    }

    fn call(
        &mut self,
        request: Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), ClientError> {
        self.next_call += 1;
        let id = self.next_call;
        let bytes = encode(&Call { id, request }).map_err(io::Error::other)?;
        socket::send(&self.socket, &bytes, fds)?;
        let deadline = Instant::now() + self.timeout;
        loop {
            match self.receive(deadline)? {
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

    fn receive(&mut self, deadline: Instant) -> Result<(Message, Vec<OwnedFd>), ClientError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ClientError::TimedOut);
            }
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
            let incoming = socket::receive(&self.socket, &mut self.buffer)?;
            let incoming = incoming.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            let message = incoming.message.map_err(io::Error::other)?;
            return Ok((message, incoming.fds));
        }
    }
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
