use std::time::Duration;

use conman_vitals::Vitals;
use thiserror::Error;

/// Most header fields that a node adds to a request that it forwards: the caller and the
/// session. The listener for nodes accepts this many more than that for clients, so that it
/// accepts every request that another node has accepted.
pub const HOP_HEADERS: usize = 32;
/// Likewise, in bytes.
pub const HOP_HEAD_BYTES: usize = 4 * 1024;

/// The operator's settings of a [`Proxy`](crate::Proxy), and its watchdog.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// `{id}.<domain>` addresses a session by host name; `None` leaves only `/s/{id}/…`.
    pub domain: Option<String>,
    /// Threads of the data plane, each with its own runtime.
    pub workers: usize,
    /// Most client connections, including tunnels. For one more, the oldest without a completed
    /// request is closed; if there is none, the new one is answered 503 and closed.
    pub max_connections: usize,
    /// Most requests that wait for their session; more are answered 503 with `Retry-After`.
    pub max_held: usize,
    /// Longest wait for a session, longer than the directory's bound.
    pub hold_timeout: Duration,
    /// Time for a request's whole head, from the connection's opening or the head's first byte.
    pub head_timeout: Duration,
    /// How long a connection may stay open between requests.
    pub idle_timeout: Duration,
    /// Most bytes of a request's or response's head; at least 8,192.
    pub max_head_bytes: usize,
    /// Most header fields of a request or response.
    pub max_headers: usize,
    /// Longest wait for the next byte of a request's body while the session would take it.
    pub body_stall_timeout: Duration,
    /// Longest time without progress while data waits to be written, to the client or to the
    /// session, in ordinary exchanges and in tunnels.
    pub write_stall_timeout: Duration,
    /// Time to connect to the session's port.
    pub connect_timeout: Duration,
    /// Time from forwarding a request to the answer's head, including the upload; `None` for no
    /// bound, as long polls need.
    pub response_timeout: Option<Duration>,
    /// Most idle connections to one generation of a session, for each worker.
    pub pool_per_session: usize,
    /// Most idle connections to another node, for each worker.
    pub pool_per_peer: usize,
    /// How long an idle connection to a session or a node is kept.
    pub pool_idle_timeout: Duration,
    /// Time for the peers of a closing tunnel: to take the Close frame, and to close after it.
    pub close_timeout: Duration,
    /// TCP keepalive on both sides.
    pub keepalive: Keepalive,
    /// Whether `X-Forwarded-*` and `Forwarded` of the client are trusted and extended, because all
    /// clients are the operator's proxies.
    pub trust_forwarded: bool,
    /// Whether browsers may use `/s/{id}/…`, where all sessions share one origin.
    pub browser_paths: bool,
    /// Watches the acceptor and the workers.
    pub vitals: Vitals,
}

/// TCP keepalive, which detects dead peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes after which the peer counts as dead.
    pub probes: u32,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(60),
            interval: Duration::from_secs(15),
            probes: 4,
        }
    }
}

impl Default for ProxyOptions {
    fn default() -> Self {
        Self {
            domain: Some("localhost".to_owned()),
            workers: std::thread::available_parallelism().map_or(2, usize::from),
            max_connections: 16_384,
            max_held: 4_096,
            hold_timeout: Duration::from_secs(660),
            head_timeout: Duration::from_secs(15),
            idle_timeout: Duration::from_secs(75),
            max_head_bytes: 64 * 1024,
            max_headers: 100,
            body_stall_timeout: Duration::from_secs(60),
            write_stall_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
            response_timeout: None,
            pool_per_session: 16,
            pool_per_peer: 128,
            pool_idle_timeout: Duration::from_secs(30),
            close_timeout: Duration::from_secs(2),
            keepalive: Keepalive::default(),
            trust_forwarded: false,
            browser_paths: false,
            vitals: Vitals::default(),
        }
    }
}

/// Why options cannot be used; the field is named as in [`ProxyOptions`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{field}` {rule}")]
pub struct InvalidOption {
    /// The field.
    pub field: &'static str,
    /// The rule for it.
    pub rule: &'static str,
}

impl ProxyOptions {
    /// These options with the limits of heads that a listener for nodes needs.
    #[must_use]
    pub fn for_nodes(self) -> Self {
        Self {
            max_head_bytes: self.max_head_bytes + HOP_HEAD_BYTES,
            max_headers: self.max_headers + HOP_HEADERS,
            ..self
        }
    }

    /// Every rule that the options break.
    ///
    /// # Errors
    /// All broken rules, at least one.
    pub fn validate(&self) -> Result<(), Vec<InvalidOption>> {
        let domain_is_host_name = self.domain.as_deref().is_none_or(|domain| {
            !domain.is_empty()
                && domain.len() <= 189
                && domain.split('.').all(|label| {
                    !label.is_empty()
                        && label
                            .bytes()
                            .all(|b| b.is_ascii_alphanumeric() || b == b'-')
                })
        });
        let at_least_one_second = |duration: Duration| duration >= Duration::from_secs(1);
        let rules = [
            (
                domain_is_host_name,
                "domain",
                "must be a host name of at most 189 bytes",
            ),
            (
                (1..=64).contains(&self.workers),
                "workers",
                "must be 1 to 64",
            ),
            (
                self.max_connections >= 1,
                "max_connections",
                "must be at least 1",
            ),
            (
                (8_192..=(1 << 20) + HOP_HEAD_BYTES).contains(&self.max_head_bytes),
                "max_head_bytes",
                "must be 8,192 to 1,048,576",
            ),
            (
                (1..=1_000 + HOP_HEADERS).contains(&self.max_headers),
                "max_headers",
                "must be 1 to 1,000",
            ),
            (
                at_least_one_second(self.keepalive.idle)
                    && at_least_one_second(self.keepalive.interval)
                    && (1..=100).contains(&self.keepalive.probes),
                "keepalive",
                "needs whole seconds of at least 1 and 1 to 100 probes",
            ),
        ];
        let broken: Vec<InvalidOption> = rules
            .into_iter()
            .filter(|(holds, _, _)| !holds)
            .map(|(_, field, rule)| InvalidOption { field, rule })
            .collect();
        if broken.is_empty() {
            Ok(())
        } else {
            Err(broken)
        }
    }
}
