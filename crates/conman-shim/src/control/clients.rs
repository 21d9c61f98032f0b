//! Connected clients: accepting them, answering them, notifying subscribers.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::Control;
use crate::connection::Connection;
use crate::protocol::{Call, CallError, Message, Reply, Request, VERSION, decode};
use crate::seqpacket;

/// Concurrent clients: the daemon, its successor during an upgrade, the command line.
const MAX_CLIENTS: usize = 32;

/// Messages of one client that are answered before the next client's turn.
const MESSAGES_A_TURN: usize = 64;

impl Control {
    pub(super) fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(Errno::MFILE | Errno::NFILE) => {
                // Otherwise epoll would report it repeatedly, and it would wait for ever.
                self.spare = None;
                drop(rustix::net::accept_with(&self.listener, flags));
                self.spare = spare();
                tracing::error!("refused a client: no file descriptor is left (see nofile)");
                return;
            }
            // A client that has closed already is not an error.
            Err(_) => return,
        };
        let own = rustix::process::geteuid();
        let allowed = rustix::net::sockopt::socket_peercred(&socket)
            .is_ok_and(|peer| peer.uid == own || peer.uid.is_root());
        if !allowed || self.clients.len() >= MAX_CLIENTS {
            tracing::warn!(allowed, "refused a client");
            return;
        }
        let token = self.next_client;
        let data = EventData::new_u64(token);
        if let Err(error) = epoll::add(&self.epoll, &socket, data, EventFlags::IN) {
            tracing::error!(%error, "cannot poll a client's socket");
            return;
        }
        self.next_client += 1;
        self.clients.insert(token, Connection::new(socket));
    }

    pub(super) fn serve(&mut self, client: u64, flags: EventFlags) {
        if flags.contains(EventFlags::OUT)
            && let Some(connection) = self.clients.get_mut(&client)
            && connection.flush().is_err()
        {
            self.clients.remove(&client);
        }
        for _ in 0..MESSAGES_A_TURN {
            let Some(connection) = self.clients.get(&client) else {
                return;
            };
            let mut buffer = std::mem::take(&mut self.buffer);
            let call = match seqpacket::receive(connection, &mut buffer) {
                Ok(Some(received)) => decode::<Call>(received.bytes)
                    .map(|call| (call, received.fds))
                    .map_err(io::Error::other),
                Ok(None) => Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => Err(error),
            };
            self.buffer = buffer;
            match call {
                Ok((call, fds)) => self.answer(client, call, fds),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    if error.kind() != io::ErrorKind::UnexpectedEof {
                        tracing::warn!(%error, "dropped a client");
                    }
                    self.clients.remove(&client);
                    return;
                }
            }
        }
        self.launching.flush();
        self.update_interest(client);
    }

    /// Descriptors that the request does not use are closed.
    fn answer(&mut self, client: u64, call: Call, fds: Vec<OwnedFd>) {
        let greeted = self.clients.get(&client).is_some_and(|one| one.greeted);
        let outcome = match call.request {
            Request::Hello { version } => self.greet(client, version),
            _ if !greeted => Err(CallError::NoHello),
            Request::Launch(spec) => match self.begin_launch(client, call.id, *spec, fds) {
                // Answered when it has begun.
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Exec(spec) => match self.begin_exec(client, call.id, *spec, fds) {
                // Answered when it has begun.
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Hold { name } => match self.hold(&name) {
                Ok((pid, fd)) => {
                    self.reply(client, call.id, Reply::Held { pid }, Some(fd));
                    return;
                }
                Err(error) => Err(error),
            },
            Request::Attach { name, size, quiet } => match self.attach(&name, size, quiet) {
                Ok(fd) => {
                    self.reply(client, call.id, Reply::Attached, Some(fd));
                    return;
                }
                Err(error) => Err(error),
            },
            Request::Appeared { name, pid } => self.appeared(&name, pid, fds),
            Request::Replace { program } => {
                match self.begin_replacing(Some((client, call.id)), program) {
                    // Answered by the new program.
                    Ok(()) => return,
                    Err(error) => Err(error),
                }
            }
            Request::Subscribe => {
                self.subscribe(client, call.id);
                return;
            }
            other => self.carry_out(other),
        };
        let reply = outcome.unwrap_or_else(|error| Reply::Failed { error });
        self.reply(client, call.id, reply, None);
    }

    fn greet(&mut self, client: u64, version: u32) -> Result<Reply, CallError> {
        if version != VERSION {
            return Err(CallError::Version {
                ours: VERSION,
                theirs: version,
            });
        }
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.greeted = true;
        }
        Ok(Reply::Hello {
            version: VERSION,
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            features: self.launching.features.clone(),
            replacements: self.replacements,
            unprotected: self.unprotected.clone(),
            freeze_ms: self.fence.freeze_ms(),
        })
    }

    fn carry_out(&mut self, request: Request) -> Result<Reply, CallError> {
        match request {
            Request::List { after } => {
                let (containers, more) = self.containers.page(after.as_deref());
                Ok(Reply::Containers { containers, more })
            }
            Request::Find { name } => Ok(self.find(&name)),
            Request::Acknowledge { names } => self.acknowledge(&names),
            Request::Kill { name } => self.kill_one(name),
            Request::KillAll => self.kill_all(),
            Request::Signal { name, signal } => self.signal(&name, signal),
            Request::Freeze { name } => self.freeze(&name),
            Request::Thaw { name } => self.thaw(&name),
            Request::ExtendDeadline { until_boottime_ns } => {
                Ok(self.extend_deadline(until_boottime_ns))
            }
            Request::FreezePatience { freeze_ms } => Ok(self.set_freeze_patience(freeze_ms)),
            Request::Disarm => self.disarm(),
            Request::FreezeAll => Ok(self.freeze_all()),
            Request::Unfence {
                until_boottime_ns,
                names,
            } => self.unfence(until_boottime_ns, names.as_deref()),
            Request::Resize { name, size } => self.resize(&name, size),
            Request::Guard { name, cgroup } => self.guard(&name, &cgroup),
            Request::NotStarted { name } => self.not_started(&name),
            Request::Fence => Ok(self.fence_reply()),
            // Answered elsewhere.
            Request::Hello { .. }
            | Request::Launch(_)
            | Request::Exec(_)
            | Request::Hold { .. }
            | Request::Appeared { .. }
            | Request::Attach { .. }
            | Request::Replace { .. }
            | Request::Subscribe => Err(CallError::NoHello),
        }
    }

    pub(super) fn reply(&mut self, client: u64, id: u64, reply: Reply, fd: Option<OwnedFd>) {
        self.tell(client, &Message::Reply { id, reply }, fd);
    }

    fn tell(&mut self, client: u64, message: &Message, fd: Option<OwnedFd>) {
        let Some(connection) = self.clients.get_mut(&client) else {
            return;
        };
        if let Err(error) = connection.send(message, fd) {
            tracing::warn!(%error, "dropped a client");
            self.clients.remove(&client);
            return;
        }
        self.update_interest(client);
    }

    pub(super) fn tell_subscribers(&mut self, message: &Message) {
        let subscribed = |(token, one): (&u64, &Connection)| one.subscribed.then_some(*token);
        let tokens: Vec<u64> = self.clients.iter().filter_map(subscribed).collect();
        for token in tokens {
            self.tell(token, message, None);
        }
    }

    fn subscribe(&mut self, client: u64, id: u64) {
        if let Some(connection) = self.clients.get_mut(&client) {
            connection.subscribed = true;
        }
        self.reply(client, id, Reply::Done, None);
        let ended: Vec<Message> = self
            .containers
            .iter()
            .filter(|(_, container)| !container.is_alive())
            .map(|(name, container)| Message::Ended {
                container: container.view(name),
            })
            .collect();
        for message in ended {
            self.tell(client, &message, None);
        }
    }
}

/// A descriptor that is closed when none is left for a client.
pub(super) fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}
