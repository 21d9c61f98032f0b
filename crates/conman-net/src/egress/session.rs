//! One session: its sockets, and the places of its connections.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use conman_core::RateLimitedLog;
use conman_core::egress::EgressRules;
use conman_linux::{PidFd, network_namespace};
use conman_traffic::{MeteredStream, Traffic};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::buffers::{Account, Sockets, watch};
use super::shared_stream::SharedStream;
use super::talk::Pace;
use super::{
    EgressService, EgressSockets, MAX_CONNECTIONS, Node, OWN_CONNECTIONS, OnRefusal, dns, http,
    meters, socks,
};

/// Pause before another try when the sockets could not be opened, or a listener failed.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// A connection's place is taken for at least this time. So a session begins at most 64 a second,
/// and connections that linger in TIME_WAIT for a minute leave ports of the node for its other sessions.
const SHORTEST_PLACE: Duration = Duration::from_secs(4);
/// How long a client may take for the first byte after it has connected.
const FIRST_BYTE: Duration = Duration::from_secs(10);
/// The first byte of SOCKS5; no HTTP request begins with it.
const SOCKS5: u8 = 5;
/// Of all refusals of one target, one is reported in this time.
const REPORT_EVERY: Duration = Duration::from_mins(10);
/// Targets that are named in that time; the refusals of all others are reported together.
const NAMED_TARGETS: usize = 16;

/// What a session's connections share.
pub(super) struct Session {
    pub(super) node: Arc<Node>,
    pub(super) rules: EgressRules,
    /// Those of a session that finds others by name, and sends other queries to the node's name servers.
    pub(super) groups: Option<Vec<String>>,
    /// Names of sessions are read at this pace, one at a time.
    pub(super) pace: Mutex<Pace>,
    on_refusal: OnRefusal,
    began: Instant,
    reported: RateLimitedLog,
    /// The session's own places, and how many it can have together with shared ones.
    own: Arc<Semaphore>,
    all: Arc<Semaphore>,
    pub(super) lookups: Arc<Semaphore>,
    buffers: Arc<Account>,
    traffic: Arc<Traffic>,
}

/// A connection's place.
struct Place {
    _all: OwnedSemaphorePermit,
    _own_or_shared: OwnedSemaphorePermit,
}

/// Names that a session looks up at a time; further lookups wait.
const LOOKUPS: usize = 16;

impl Session {
    pub(super) fn new(
        node: Arc<Node>,
        service: EgressService,
        traffic: Arc<Traffic>,
        on_refusal: OnRefusal,
    ) -> Self {
        let (rules, groups) = match service {
            EgressService::Proxy(rules) => (rules, None),
            EgressService::TalkNames { groups } => (EgressRules::default(), Some(groups)),
        };
        Self {
            buffers: node.buffers.account(),
            node,
            rules,
            groups,
            pace: Mutex::new(Pace::of_session()),
            on_refusal,
            began: Instant::now(),
            reported: RateLimitedLog::of_few(REPORT_EVERY, NAMED_TARGETS),
            own: Arc::new(Semaphore::new(OWN_CONNECTIONS)),
            all: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            traffic,
        }
    }

    /// Counts a refusal, and reports it unless one of the same target was reported a short time ago.
    pub(super) fn refused(&self, label: &'static str, target: &str, sentence: &str) {
        meters::refused(label);
        match self.reported.allow(target, self.began.elapsed()) {
            None => {}
            Some(0) => (self.on_refusal)(sentence.to_owned()),
            Some(more) => (self.on_refusal)(format!("{sentence} (and {more} more before it)")),
        }
    }

    /// A client's connection, counted and limited.
    pub(super) fn metered(&self, client: Arc<TcpStream>) -> MeteredStream<SharedStream> {
        MeteredStream::new(SharedStream(client), Arc::clone(&self.traffic))
    }

    /// The session's connections at present.
    pub(super) fn connections(&self) -> usize {
        MAX_CONNECTIONS.saturating_sub(self.all.available_permits())
    }

    /// Waits for a place. The session's own places are used first.
    async fn place(&self) -> Option<Place> {
        self.buffers.running().await;
        let all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        let own = Arc::clone(&self.own);
        let shared = Arc::clone(&self.node.shared);
        let own_or_shared = tokio::select! {
            biased;
            // Cancel safe, both: a permit that was granted and not taken is given back.
            permit = own.acquire_owned() => permit,
            permit = shared.acquire_owned() => permit,
        };
        Some(Place {
            _all: all,
            _own_or_shared: own_or_shared.ok()?,
        })
    }
}

/// Serves a session until the task is aborted.
pub(super) async fn run(session: Session, process: Arc<PidFd>, sockets: Option<EgressSockets>) {
    let session = Arc::new(session);
    let sockets = match sockets {
        Some(sockets) => sockets,
        None => open(&process, session.groups.is_none()).await,
    };
    let (proxy, resolver, datagrams) = match registered(sockets) {
        Ok(sockets) => sockets,
        Err(error) => {
            tracing::error!(pid = process.pid(), %error, "cannot serve egress");
            meters::refused("no_sockets");
            return;
        }
    };
    let serve_proxy = async {
        if let Some(proxy) = proxy {
            accept(&session, &proxy, |session, client| {
                Box::pin(proxy_client(session, client))
            })
            .await;
        }
    };
    let serve_names = accept(&session, &resolver, |session, client| {
        Box::pin(async move { dns::stream(session, SharedStream(client.stream)).await })
    });
    let serve_datagrams = dns::datagrams(&session, datagrams);
    tokio::join!(serve_proxy, serve_names, serve_datagrams);
}

/// Opens the sockets of a session that runs already.
async fn open(process: &PidFd, with_proxy: bool) -> EgressSockets {
    loop {
        let opened = match network_namespace(process) {
            Ok(namespace) => EgressSockets::open(namespace, with_proxy).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(sockets) => return sockets,
            Err(error) => {
                // The process may be dead; its guard is dropped soon.
                tracing::debug!(pid = process.pid(), %error, "cannot open egress sockets; retrying");
                meters::refused("no_sockets");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Registers the sockets with the runtime of the calling task.
fn registered(sockets: EgressSockets) -> io::Result<(Option<TcpListener>, TcpListener, UdpSocket)> {
    Ok((
        sockets.proxy.map(TcpListener::from_std).transpose()?,
        TcpListener::from_std(sockets.resolver)?,
        UdpSocket::from_std(sockets.datagrams)?,
    ))
}

/// Accepts connections while there are places, each in a task that ends with this future.
async fn accept<F>(session: &Arc<Session>, listener: &TcpListener, serve: F)
where
    F: Fn(Arc<Session>, Client) -> Pin<Box<dyn Future<Output = ()> + Send>>,
{
    let mut clients = JoinSet::new();
    loop {
        let Some(place) = session.place().await else {
            return;
        };
        while clients.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                let sockets = Arc::new(Sockets::default());
                let client = Client {
                    stream: sockets.add(stream, session.connections()),
                    sockets: Arc::clone(&sockets),
                };
                let serving = serve(Arc::clone(session), client);
                let buffers = Arc::clone(&session.buffers);
                let counted = meters::connection();
                clients.spawn(async move {
                    let served = async {
                        tokio::select! {
                            // Both are dropped at the end of the connection, whichever ends first.
                            () = serving => {}
                            () = watch(&buffers, &sockets) => {}
                        }
                    };
                    tokio::join!(served, sleep(SHORTEST_PLACE));
                    drop((counted, place));
                });
            }
            // No descriptors are left, or the client has disconnected.
            Err(error) => {
                tracing::debug!(%error, "cannot accept a session's connection");
                meters::refused("accept_failed");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// A client's connection, with the sockets that are opened for it.
pub(super) struct Client {
    pub(super) stream: Arc<TcpStream>,
    pub(super) sockets: Arc<Sockets>,
}

async fn proxy_client(session: Arc<Session>, client: Client) {
    let mut first = [0];
    match timeout(FIRST_BYTE, client.stream.peek(&mut first)).await {
        Ok(Ok(1)) if first[0] == SOCKS5 => socks::serve(&session, client).await,
        Ok(Ok(1)) => http::serve(&session, client).await,
        // It has disconnected, or sent nothing.
        _ => {}
    }
}
