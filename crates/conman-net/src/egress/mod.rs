//! A proxy and a resolver inside the network namespaces of sessions that have only their loopback
//! interface. Programs find them by `http_proxy` and by resolv.conf. Sessions that talk to others have the resolver
//! alone.
//!
//! ```text
//!  session's namespace              conman's namespace
//!  127.0.0.1:3128 ─┬─ HTTP ──┐
//!                  └─ SOCKS5 ─┴─> check name ─> resolve ─> check addresses ─> connect, copy
//!  127.0.0.1:53   ─── DNS ──────> check name ─> resolve
//!
//!  127.0.0.1:53   ─── DNS ─┬────> name of a session ─> registry
//!                          └────> any other ─> the node's name servers, as it is
//! ```
//!
//! * The sockets inside are the daemon's. A session's program that connects to them is served by tasks of
//!   this module's runtime, whose threads serve nothing else.
//! * An address is connected to only after it was checked; a name is resolved once for each connection.
//! * [`Egress::serve`] starts one task for a session, which owns its sockets, its connections and their
//!   tasks. Dropping the [`EgressGuard`] aborts all of them and closes the sockets, which would
//!   otherwise keep the network namespace alive.
//! * Descriptors: 3 for an idle session, 2 more for each connection. Each session has
//!   [`OWN_CONNECTIONS`], and up to [`MAX_CONNECTIONS`] while the [`SHARED_CONNECTIONS`] of the node
//!   last. Further connections wait in the listener's queue.
//! * The bytes of a session's connections are counted and limited by its [`Traffic`]; lookups of names are not.
//! * Kernel memory: `buffers` bounds what a session's connections hold, and what all of them hold together.
//! * Every wait for a client's request, a name or a connection is bounded in time. An idle tunnel may
//!   last as long as its session.

mod buffers;
mod dial;
mod dns;
mod forward;
mod http;
mod meters;
mod resolver;
mod session;
mod shared_stream;
mod sockets;
mod socks;
mod talk;
mod tunnel;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use conman_core::egress::{EgressRules, SpecialAddresses};
use conman_linux::PidFd;
use conman_traffic::Traffic;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use buffers::Budget;
use resolver::Names;
use session::Session;
use talk::TalkNames;

use crate::host_netlink::HostNetlink;

pub use sockets::EgressSockets;
pub use talk::TalkDirectory;

/// Descriptors of an idle session: two listeners and a UDP socket. One without the proxy has one less.
pub const IDLE_DESCRIPTORS: u32 = 3;
/// Connections that every session can have, whatever others do.
pub const OWN_CONNECTIONS: usize = 16;
/// Maximum number of connections of one session.
pub const MAX_CONNECTIONS: usize = 256;
/// Connections of all sessions beyond their [`OWN_CONNECTIONS`].
pub const SHARED_CONNECTIONS: usize = 4_096;

/// The node's settings.
#[derive(Debug, Clone)]
pub struct EgressOptions {
    /// Name servers; those of resolv.conf if empty.
    pub dns: Vec<SocketAddr>,
    pub special: SpecialAddresses,
    /// Kernel memory that the connections of all sessions may hold, in bytes.
    pub buffer_bytes: u64,
    /// Finds sessions by name; without it no name of a session exists.
    pub talk: Option<Arc<dyn TalkDirectory>>,
}

/// What a session is served.
#[derive(Debug, Clone)]
pub enum EgressService {
    /// The proxy, and a resolver of the names that these rules list.
    Proxy(EgressRules),
    /// A resolver of the sessions in these groups, and of all other names by the node's name servers.
    TalkNames { groups: Vec<String> },
}

impl Default for EgressOptions {
    fn default() -> Self {
        Self {
            dns: Vec::new(),
            special: SpecialAddresses::default(),
            buffer_bytes: 256 << 20,
            talk: None,
        }
    }
}

/// Serves sessions, on threads of its own.
#[derive(Debug)]
pub struct Egress {
    node: Arc<Node>,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

/// What all sessions share.
#[derive(Debug)]
struct Node {
    names: Names,
    talk: TalkNames,
    /// Of `net.dns`.
    servers: Vec<SocketAddr>,
    special: SpecialAddresses,
    shared: Arc<Semaphore>,
    buffers: Arc<Budget>,
    /// For lookups of routes, which never wait for the lock that changes of links hold.
    netlink: HostNetlink,
}

/// One session that is served, until dropped.
#[derive(Debug)]
pub struct EgressGuard(AbortHandle);

/// Receives the refusals of one session, as sentences.
pub type OnRefusal = Box<dyn Fn(String) + Send + Sync>;

impl Egress {
    /// Starts the threads. Nothing is served yet.
    pub fn start(options: EgressOptions) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .enable_all()
            .thread_name("conman-egress")
            .build()?;
        let names = {
            let _entered = runtime.enter();
            Names::new(&options.dns)
        };
        meters::describe();
        Ok(Self {
            node: Arc::new(Node {
                names,
                talk: TalkNames::new(options.talk),
                servers: options.dns,
                special: options.special,
                shared: Arc::new(Semaphore::new(SHARED_CONNECTIONS)),
                buffers: Budget::new(options.buffer_bytes),
                netlink: HostNetlink::default(),
            }),
            runtime: Some(runtime),
        })
    }

    /// Serves the network namespace of a process until the guard is dropped. Without `sockets`, they are opened
    /// first.
    #[must_use]
    pub fn serve(
        &self,
        process: Arc<PidFd>,
        sockets: Option<EgressSockets>,
        service: EgressService,
        traffic: Arc<Traffic>,
        on_refusal: OnRefusal,
    ) -> EgressGuard {
        let session = Session::new(Arc::clone(&self.node), service, traffic, on_refusal);
        let serving = session::run(session, process, sockets);
        let runtime = self.runtime.as_ref().expect("present until dropped");
        EgressGuard(runtime.spawn(serving).abort_handle())
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        // Dropping a runtime waits for its threads, which is not allowed in asynchronous code.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for EgressGuard {
    fn drop(&mut self) {
        self.0.abort();
    }
}
