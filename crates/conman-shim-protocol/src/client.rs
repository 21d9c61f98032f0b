//! A blocking client of the shim, for the command line.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::messages::{Call, CallError, ContainerView, Message, Reply, Request, VERSION, encode};
use crate::socket;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the connection to the shim failed")]
    Io(#[source] io::Error),
    /// It may still carry the request out.
    #[error("the shim did not answer in time")]
    TimedOut,
    #[error("the shim's answer does not match the request")]
    Unexpected,
    #[error(transparent)]
    Refused(#[from] CallError),
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::TimedOut,
            _ => Self::Io(error),
        }
    }
}

/// A connection to the shim that blocks, one call at a time; for the command line.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    next_call: u64,
    buffer: Vec<u8>,
    shim_pid: i32,
}

impl Client {
    /// Connects and says hello. `timeout` bounds every call.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let socket = socket::connect(path).map_err(ClientError::Io)?;
        rustix::io::ioctl_fionbio(&socket, false).map_err(io::Error::from)?;
        for direction in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&socket, direction, Some(timeout)).map_err(io::Error::from)?;
        }
        let mut client = Self {
            socket,
            next_call: 0,
            buffer: Vec::new(),
            shim_pid: 0,
        };
        match client.ask(Request::Hello { version: VERSION })? {
            Reply::Hello { pid, .. } => client.shim_pid = pid,
            _ => return Err(ClientError::Unexpected),
        }
        Ok(client)
    }

    /// The shim's PID.
    #[must_use]
    pub fn shim_pid(&self) -> i32 {
        self.shim_pid
    }

    /// Lists all containers.
    pub fn list(&mut self) -> Result<Vec<ContainerView>, ClientError> {
        let mut all: Vec<ContainerView> = Vec::new();
        loop {
            let after = all.last().map(|view| view.name.clone());
            let Reply::Containers { containers, more } = self.ask(Request::List { after })? else {
                return Err(ClientError::Unexpected);
            };
            all.extend(containers);
            if !more {
                return Ok(all);
            }
        }
    }

    /// Sends a request. Descriptors that come with the answer are closed.
    pub fn ask(&mut self, request: Request) -> Result<Reply, ClientError> {
        self.next_call += 1;
        let id = self.next_call;
        let bytes = encode(&Call { id, request }).map_err(io::Error::other)?;
        socket::send(&self.socket, &bytes, &[])?;
        loop {
            let incoming = socket::receive(&self.socket, &mut self.buffer)?;
            let incoming = incoming.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            match incoming.message.map_err(io::Error::other)? {
                Message::Reply { id: of, reply } if of == id => {
                    return match reply {
                        Reply::Failed { error } => Err(error.into()),
                        reply => Ok(reply),
                    };
                }
                // The answer to a call that timed out, or a notification.
                _ => {}
            }
        }
    }
}
