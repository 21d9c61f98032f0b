//! A listener's counters and gauges.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use conman_peer::PeerRefusal;
use http::StatusCode;
use metrics::{Counter, Gauge, counter, describe_counter, describe_gauge, gauge};

use crate::ProxyStats;

/// Counters of the listener, for [`ProxyStats`] and for the metrics recorder that is installed
/// when the proxy starts. There are no labels for sessions: labels must stay few.
pub(crate) struct Meters {
    connections: Level,
    tunnels: Level,
    held: Level,
    peer_refusals: [Counter; 4],
    requests: [Counter; 5],
    refused: [Counter; 3],
    panics: Counter,
    pub(crate) to_session_bytes: Counter,
    pub(crate) to_client_bytes: Counter,
}

impl fmt::Debug for Meters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.stats().fmt(formatter)
    }
}

/// Why a connection or request was refused for lack of room.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Refused {
    /// The limit of connections is met.
    Connections = 0,
    /// No descriptors left.
    Descriptors = 1,
    /// The limit of held requests is met.
    HoldFull = 2,
}

/// A number that rises and falls, and its gauge.
struct Level {
    count: AtomicU64,
    gauge: Gauge,
}

/// One unit of a [`Level`], until dropped.
pub(crate) struct Counted {
    meters: Arc<Meters>,
    level: fn(&Meters) -> &Level,
}

impl Meters {
    /// `listener` distinguishes the proxies of one process.
    pub(crate) fn new(listener: &'static str) -> Self {
        describe_gauge!(
            "conman_proxy_connections",
            "Client connections, including tunnels"
        );
        describe_gauge!("conman_proxy_tunnels", "Upgraded connections");
        describe_gauge!("conman_proxy_held", "Requests that wait for their session");
        describe_counter!(
            "conman_proxy_requests_total",
            "Requests answered, by class of status"
        );
        describe_counter!("conman_proxy_refused_total", "Refused for lack of room");
        describe_counter!("conman_proxy_tunnel_bytes_total", "Bytes through tunnels");
        describe_counter!(
            "conman_proxy_panics_total",
            "Connection tasks that panicked"
        );
        describe_counter!(
            "conman_proxy_peer_refusals_total",
            "Requests that another node refused as misdirected, by reason, to be sent again"
        );
        let requests = |class| counter!("conman_proxy_requests_total", "listener" => listener, "class" => class);
        let refused =
            |why| counter!("conman_proxy_refused_total", "listener" => listener, "reason" => why);
        let bytes =
            |to| counter!("conman_proxy_tunnel_bytes_total", "listener" => listener, "to" => to);
        let refusal = |why| counter!("conman_proxy_peer_refusals_total", "reason" => why);
        Self {
            connections: Level::new(gauge!("conman_proxy_connections", "listener" => listener)),
            tunnels: Level::new(gauge!("conman_proxy_tunnels", "listener" => listener)),
            held: Level::new(gauge!("conman_proxy_held", "listener" => listener)),
            peer_refusals: ["not-owner", "not-ready", "unreachable", "refused"].map(refusal),
            requests: ["1xx", "2xx", "3xx", "4xx", "5xx"].map(requests),
            refused: ["connections", "descriptors", "held"].map(refused),
            panics: counter!("conman_proxy_panics_total", "listener" => listener),
            to_session_bytes: bytes("session"),
            to_client_bytes: bytes("client"),
        }
    }

    pub(crate) fn stats(&self) -> ProxyStats {
        ProxyStats {
            connections: self.connections.get(),
            tunnels: self.tunnels.get(),
            held: self.held.get(),
        }
    }

    pub(crate) fn answered(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, self.requests.len()) - 1;
        self.requests[class].increment(1);
    }

    pub(crate) fn refused(&self, why: Refused) {
        self.refused[why as usize].increment(1);
    }

    pub(crate) fn peer_refusal(&self, why: &PeerRefusal) {
        let index = match why {
            PeerRefusal::NotOwner => 0,
            PeerRefusal::NotReady => 1,
            PeerRefusal::Unreachable(_) => 2,
            PeerRefusal::Refused => 3,
        };
        self.peer_refusals[index].increment(1);
    }

    pub(crate) fn panicked(&self) {
        self.panics.increment(1);
    }

    pub(crate) fn held(self: &Arc<Self>) -> Counted {
        Counted::new(self, |meters| &meters.held)
    }

    pub(crate) fn connection(self: &Arc<Self>) -> Counted {
        Counted::new(self, |meters| &meters.connections)
    }

    /// Divides tunnels evenly: the group of the one that was opened last.
    pub(crate) fn group(&self, groups: u32) -> u32 {
        let count = self.tunnels.get() % u64::from(groups);
        u32::try_from(count).unwrap_or_default()
    }

    pub(crate) fn tunnel(self: &Arc<Self>) -> Counted {
        Counted::new(self, |meters| &meters.tunnels)
    }
}

impl Level {
    fn new(gauge: Gauge) -> Self {
        gauge.set(0.0);
        Self {
            count: AtomicU64::new(0),
            gauge,
        }
    }

    fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn rise(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.gauge.increment(1.0);
    }

    fn fall(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.gauge.decrement(1.0);
    }
}

impl Counted {
    fn new(meters: &Arc<Meters>, level: fn(&Meters) -> &Level) -> Self {
        level(meters).rise();
        Self {
            meters: Arc::clone(meters),
            level,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.level)(&self.meters).fall();
    }
}
