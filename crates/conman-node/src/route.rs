//! What a connection needs to reach a session's program.

use std::io;
use std::sync::Arc;

use conman_core::{Activity, Closing};
use conman_linux::{NetnsSockets, PidFd};
use conman_proto::{Generation, SessionId};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::netns_connect;

/// The way to a running session, valid as long as its generation lives.
#[derive(Debug, Clone)]
pub struct SessionRoute {
    pub id: SessionId,
    pub generation: Generation,
    pub port: u16,
    /// The container's init.
    pub process: Arc<PidFd>,
    /// To be counted by whoever opens a tunnel or sends a request.
    pub activity: Arc<Activity>,
    /// Set once the session's tunnels must end.
    pub closing: watch::Receiver<Option<Closing>>,
    pub(crate) sockets: Arc<NetnsSockets>,
}

impl SessionRoute {
    /// A connection to the session's port, made inside its network namespace. Bounded by the
    /// caller; cancelling closes what was opened.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        netns_connect::connect(&self.sockets, &self.process, self.port).await
    }
}
